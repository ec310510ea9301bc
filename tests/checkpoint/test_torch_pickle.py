"""The torch reader against torch.save: layouts, damage, and pickles that try to run code."""

import io
import os
import pickle
import zipfile
from collections import OrderedDict

import numpy as np
import pytest

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import open_checkpoint
from specjax.checkpoint.torch_pickle import locate

torch = pytest.importorskip("torch")

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pytorch_model.bin"


def save_pickle(path, stream):
    """A torch archive around a hand-made pickle, with one storage of four floats."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", stream)
        archive.writestr("archive/data/0", np.arange(4, dtype=np.float32).tobytes())


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("protocol", [2, 4])
def test_reads_every_dtype_bit_for_bit(path, dtype, protocol):
    tensors = {"a": (torch.arange(12).reshape(3, 4) - 5).to(dtype), "b": torch.tensor(2).to(dtype)}
    torch.save(tensors, path, pickle_protocol=protocol)
    files = open_checkpoint(path.parent)
    assert files.names() == frozenset(tensors)
    for name, tensor in tensors.items():
        array = files.read(name)
        assert str(array.dtype) == str(dtype).removeprefix("torch.")
        assert array.shape == files.shape(name) == tuple(tensor.shape)
        assert array.tobytes() == bits(tensor)
        assert array.flags.writeable and array.flags.c_contiguous


def test_reads_strided_tensors_of_one_storage(path):
    base = torch.arange(60.0).reshape(3, 4, 5)
    tensors = {
        "base": base,
        "transposed": base.permute(2, 0, 1),
        "offset": base[1:, 2:, ::2],
        "row": base[2, 3],
        "expanded": base[1, 1, :1].expand(6),
        "empty": base[:0],
        "parameter": torch.nn.Parameter(base[0].t()),
        "last": base.reshape(-1)[-1],
    }
    torch.save(tensors, path)
    files = open_checkpoint(path.parent)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(files.read(name), tensor.detach().numpy())


def test_reads_a_module_and_nested_state_dicts(path):
    state = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).state_dict()
    for saved in (state, {"state_dict": state, "epoch": 3}, {"model": dict(state)}):
        torch.save(saved, path)
        files = open_checkpoint(path.parent)
        assert files.names() == frozenset(state)
        np.testing.assert_array_equal(files.read("0.weight"), state["0.weight"].numpy())


def test_reads_torch_shards(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.zeros(2)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        '{"weight_map": {"a": "pytorch_model-00001-of-00002.bin", '
        '"b": "pytorch_model-00002-of-00002.bin"}}'
    )
    files = open_checkpoint(tmp_path)
    assert files.read("a").tolist() == [1, 1] and files.read("b").tolist() == [0, 0]


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function, *args):
        self._call = function, args

    def __reduce__(self):
        return self._call


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda call: call,
        lambda call: {"a": call},
        lambda call: {"a": torch.ones(2), "b": [1, (call,)]},
        lambda call: OrderedDict(state_dict={"a": {"b": call}}),
    ],
)
@pytest.mark.parametrize(
    ("function", "name"), [(os.system, "system"), (eval, "eval"), (getattr, "getattr")]
)
def test_code_is_refused_by_name_and_not_run(path, function, name, wrap, protocol):
    marker = path.parent / "ran"
    argument = f"touch {marker}" if function is os.system else f"open({str(marker)!r}, 'w').close()"
    torch.save(wrap(Call(function, argument)), path, pickle_protocol=protocol)
    with pytest.raises(CheckpointError, match=rf"needs \S+\.{name} to load.*safetensors"):
        open_checkpoint(path.parent)
    assert not marker.exists()


@pytest.mark.parametrize("value", [torch.nn.Linear(2, 2), np.ones(2), {"a": torch.float32}])
def test_other_objects_are_refused(path, value):
    torch.save(value, path)
    with pytest.raises(CheckpointError, match="only tensors are loaded from a pickle"):
        locate(path)


@pytest.mark.parametrize("value", [[torch.ones(1)], {"a": 1}, {3: torch.ones(1)}, torch.ones(1)])
def test_what_is_not_a_state_dict_is_refused(path, value):
    torch.save(value, path)
    with pytest.raises(CheckpointError, match="save"):
        locate(path)


STORAGE = b"(Vstorage\nctorch\nFloatStorage\nV%s\nVcpu\nI%d\ntQ"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(%s%s\x89Nt R".replace(b" ", b"")


def one_tensor(layout, storage=STORAGE % (b"0", 4)):
    """A pickle of {"a": tensor}; `layout` is the pickled offset, shape and strides."""
    return b"\x80\x02}Va\n" + TENSOR % (storage, layout) + b"s."


def test_a_hand_made_tensor_is_read(path):
    save_pickle(path, one_tensor(b"I1\n(I3\nt(I1\nt"))
    assert locate(path)["a"].read().tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "stream",
    [
        one_tensor(b"I2\n(I3\nt(I1\nt"),  # reaches past the end
        one_tensor(b"I0\n(I3\nt(I2\nt"),
        one_tensor(b"I-1\n(I3\nt(I1\nt"),
        one_tensor(b"I3\n(I3\nt(I-1\nt"),
        one_tensor(b"I0\n(I-3\nt(I1\nt"),
        one_tensor(b"I0\n(I3\nt(t"),
        one_tensor(b"F0.0\n(I3\nt(I1\nt"),
        one_tensor(b"I0\nV3\nV1\n"),
        one_tensor(b"I0\nI3\nI1\n"),
        one_tensor(b"I0\n(I3\nt(I1\nt", STORAGE % (b"0", 400)),
        one_tensor(b"I0\n(I3\nt(I1\nt", STORAGE % (b"1", 4)),
        one_tensor(b"I0\n(I3\nt(I1\nt", STORAGE % (b"../data.pkl", 4)),
        one_tensor(b"I0\n(I3\nt(I1\nt", b"(Vstorage\nVObject\nV0\nVcpu\nI4\ntQ"),
        one_tensor(b"I0\n(I3\nt(I1\nt", b"}"),
        b"",
        b".",
        b"\x80\x02}Va\n",
        b"\x80\xff.",
        b"(" * 100,
        b"\x80\x02}p4000000000\n.",  # would allocate a memo of 64 GB
        b"\x80\x02}r\xff\xff\xff\xff.",
        b"\x80\x05\x96" + b"\xff" * 7 + b"\x00.",  # and a bytearray of more
    ],
)
def test_an_unsound_pickle_is_refused(path, stream):
    save_pickle(path, stream)
    with pytest.raises(CheckpointError, match="is damaged"):
        locate(path)


@pytest.mark.parametrize(
    "target",
    [b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n", STORAGE % (b"0", 4)],
)
def test_a_pickle_cannot_set_attributes(path, target):
    """BUILD with a slot state sets attributes of whatever find_class and Q returned."""
    save_pickle(path, b"\x80\x02" + target + b"(N}V__defaults__\n)stb.")
    with pytest.raises(CheckpointError, match="is damaged"):
        locate(path)


def test_an_instance_attribute_cannot_take_the_place_of_a_method(path):
    ordered_dict = b"ccollections\nOrderedDict\n)R}Vitems\nV\nsVget\nV\ns"
    save_pickle(path, b"\x80\x02" + ordered_dict + b"b.")
    with pytest.raises(CheckpointError, match="is damaged"):
        locate(path)


def test_the_legacy_format_is_named(path):
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="torch before 1.6.*safetensors"):
        locate(path)


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x02}.", pickle.dumps({"a": 1}), b"0" * 99])
def test_what_is_not_an_archive_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged: it is not a file of torch.save"):
        locate(path)


def test_compressed_and_foreign_archives_are_refused(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
    with pytest.raises(CheckpointError, match="compressed"):
        locate(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", b"")
    with pytest.raises(CheckpointError, match=r"without the data\.pkl"):
        locate(path)


def test_a_big_endian_file_is_refused(path):
    save_pickle(path, one_tensor(b"I0\n(I3\nt(I1\nt"))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/byteorder", b"big")
    with pytest.raises(CheckpointError, match="big-endian"):
        locate(path)


def test_every_truncation_is_noticed(path):
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(8.0)}, buffer)
    whole = buffer.getvalue()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="is damaged"):
            locate(path)


def test_random_damage_raises_only_checkpoint_errors(path):
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(8.0), "b": torch.ones(2, 2).t()}, buffer)
    rng = np.random.default_rng(0)
    for _ in range(400):
        content = np.frombuffer(buffer.getvalue(), np.uint8).copy()
        places = rng.integers(len(content), size=rng.integers(1, 5))
        content[places] ^= rng.integers(1, 256, size=len(places), dtype=np.uint8)
        path.write_bytes(content.tobytes())
        try:
            for tensor in locate(path).values():
                tensor.read()
        except CheckpointError:
            pass
