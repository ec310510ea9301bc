"""The reader of torch pickles, compared with torch.save: layouts, damage, and malicious code."""

import io
import os
import pickle
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
from support.refusals import refusal

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import open_checkpoint
from specjax.checkpoint.torch_pickle import locate

torch = pytest.importorskip("torch")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pytorch_model.bin"


def save_pickle(path, stream, byte_order=b"little"):
    """Write a torch archive that has a hand-made pickle, and one storage of four floats."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", stream)
        archive.writestr("archive/byteorder", byte_order)
        archive.writestr("archive/data/0", np.arange(4, dtype=np.float32).tobytes())


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


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("function", [os.system, eval, getattr])
def test_code_is_refused_by_name_and_not_run(path, function, protocol):
    marker = path.parent / "ran"
    code = f"touch {marker}" if function is os.system else f"open({str(marker)!r}, 'w').close()"

    class Call:
        def __reduce__(self):
            return function, (code,)

    call = Call()
    nested = OrderedDict(state_dict={"a": {"b": call}})
    for saved in call, {"a": call}, {"a": torch.ones(2), "b": [1, (call,)]}, nested:
        torch.save(saved, path, pickle_protocol=protocol)
        refusal(lambda: open_checkpoint(path.parent), f".{function.__name__} to load")
    assert not marker.exists()


OTHERS = [
    *((value, "only tensors") for value in (torch.nn.Linear(2, 2), np.ones(2), {"a": torch.int8})),
    *((value, "save") for value in ([torch.ones(1)], {"a": 1}, {3: torch.ones(1)}, torch.ones(1))),
]


def test_what_is_not_a_state_dict_is_refused(path):
    for value, word in OTHERS:
        torch.save(value, path)
        refusal(lambda: locate(path), word)
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    refusal(lambda: locate(path), "torch before 1.6")


STORAGE = b"(Vstorage\nctorch\nFloatStorage\nV%s\nVcpu\nI%d\ntQ"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(%s%s\x89Nt R".replace(b" ", b"")
SOUND = b"I0\n(I3\nt(I1\nt"


def one_tensor(layout=SOUND, storage=STORAGE % (b"0", 4)):
    """Return a pickle of {"a": tensor}; `layout` is the pickled offset, shape and strides."""
    return b"\x80\x02}Va\n" + TENSOR % (storage, layout) + b"s."


def test_a_hand_made_tensor_is_read(path):
    save_pickle(path, one_tensor(b"I1\n(I3\nt(I1\nt"))
    assert locate(path)["a"].read().tolist() == [1, 2, 3]
    save_pickle(path, one_tensor(), byte_order=b"big")
    refusal(lambda: locate(path), "big-endian")


UNSOUND = [
    # Layouts that reach past the end, or are none.
    *map(one_tensor, (b"I2\n(I3\nt(I1\nt", b"I0\n(I3\nt(I2\nt", b"I-1\n(I3\nt(I1\nt")),
    *map(one_tensor, (b"I3\n(I3\nt(I-1\nt", b"I0\n(I-3\nt(I1\nt", b"I0\n(I3\nt(t")),
    *map(one_tensor, (b"F0.0\n(I3\nt(I1\nt", b"I0\nV3\nV1\n", b"I0\nI3\nI1\n")),
    # Storages that are not there, or of another size or type.
    *(one_tensor(SOUND, STORAGE % x) for x in ((b"0", 400), (b"1", 4), (b"../data.pkl", 4))),
    *(one_tensor(SOUND, storage) for storage in (b"(Vstorage\nVObject\nV0\nVcpu\nI4\ntQ", b"}")),
    *(b"", b".", b"\x80\x02}Va\n", b"\x80\xff.", b"(" * 100),
    b"\x80\x02}p4000000000\n.",  # would allocate a memo of 64 GB
    b"\x80\x02}r\xff\xff\xff\xff.",
    b"\x80\x05\x96" + b"\xff" * 7 + b"\x00.",  # and a bytearray of more
    # BUILD with a slot state sets attributes of whatever find_class and Q returned.
    *(
        b"\x80\x02" + target + b"(N}V__defaults__\n)stb."
        for target in (
            *(b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n"),
            STORAGE % (b"0", 4),
        )
    ),
    # An attribute of an instance that would take the place of a method.
    b"\x80\x02ccollections\nOrderedDict\n)R}Vitems\nV\nsVget\nV\nsb.",
]


@pytest.mark.parametrize("stream", UNSOUND)
def test_an_unsound_pickle_is_refused(path, stream):
    save_pickle(path, stream)
    refusal(lambda: locate(path), "is damaged")


def test_what_is_not_an_archive_of_torch_is_refused(path):
    for content in b"", b"PK", b"\x80\x02}.", pickle.dumps({"a": 1}), b"0" * 99:
        path.write_bytes(content)
        refusal(lambda: locate(path), "is damaged: it is not a file of torch.save")
    for name, compression, word in (
        ("a/data.pkl", zipfile.ZIP_DEFLATED, "compressed"),
        ("notes.txt", zipfile.ZIP_STORED, "without the data.pkl"),
    ):
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr(name, b"\x80\x02}.")
        refusal(lambda: locate(path), word)


@pytest.mark.slow
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
