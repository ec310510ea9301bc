"""Folders of weights, whole and damaged, written by torch and safetensors."""

import json
import tracemalloc
from functools import partial

import pytest
from support.refusals import refusal

from specjax.checkpoint.files import open_checkpoint

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

SAFE, TORCH, INDEX = "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"
WRITERS = {
    SAFE: safetensors_torch.save_file,
    TORCH: partial(torch.save, pickle_protocol=2),
    "protocol-4/pytorch_model.bin": partial(torch.save, pickle_protocol=4),
}
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


def bits(tensor):
    """The bytes of a torch tensor, in order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("file", WRITERS)
def test_every_dtype_and_shape_is_read_bit_for_bit(tmp_path, file):
    dtypes = DTYPES if file == SAFE else [x for x in DTYPES if x is not torch.float8_e4m3fn]
    tensors = {str(dtype): (torch.arange(12).reshape(3, 4) - 5).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "row": torch.ones(7)}
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    WRITERS[file](tensors, path)
    files = open_checkpoint(path.parent)
    assert files.names() == tensors.keys()
    for name, tensor in tensors.items():
        array = files.read(name)
        assert str(array.dtype) == str(tensor.dtype).removeprefix("torch.")
        assert array.shape == files.shape(name) == tuple(tensor.shape)
        assert array.tobytes() == bits(tensor)
        assert array.flags.writeable and array.flags.c_contiguous
    refusal(lambda: files.read("lm_head.weight"), "no tensor lm_head.weight")


def test_sources_are_taken_in_order(tmp_path):
    for value, name in enumerate([TORCH, "other.safetensors", SAFE, "a.safetensors"]):
        save = WRITERS[TORCH] if name == TORCH else WRITERS[SAFE]
        save({"a": torch.tensor([float(value)])}, tmp_path / name)
        if name == "a.safetensors":
            write_index(tmp_path, {"a": name})
        assert open_checkpoint(tmp_path).read("a") == value
    (tmp_path / INDEX).unlink()
    (tmp_path / SAFE).unlink()
    refusal(lambda: open_checkpoint(tmp_path), "a.safetensors, other.safetensors")


@pytest.mark.parametrize("file", [SAFE, TORCH])
def test_shards_form_one_checkpoint(tmp_path, file):
    suffix = file.partition(".")[2]
    halves = {f"a.{suffix}": {"x": torch.ones(2)}, f"b.{suffix}": {"y": torch.zeros(3)}}
    for name, tensors in halves.items():
        WRITERS[file](tensors, tmp_path / name)
    index = {name: half for half, tensors in halves.items() for name in tensors}
    (tmp_path / f"{file}.index.json").write_text(json.dumps({"weight_map": index}))
    files = open_checkpoint(tmp_path)
    assert files.read("x").tolist() == [1, 1] and files.read("y").tolist() == [0, 0, 0]


def test_an_index_that_does_not_hold(tmp_path):
    def opened():
        return open_checkpoint(tmp_path)

    refusal(lambda: open_checkpoint(tmp_path / "absent"), "no such folder")
    refusal(opened, "no weights", INDEX, TORCH)
    WRITERS[SAFE]({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    write_index(tmp_path, {"x": "a.safetensors", "y": "gone.safetensors"})
    refusal(opened, "lacks gone.safetensors")
    write_index(tmp_path, {"x": "a.safetensors", "y": "a.safetensors"})
    refusal(opened, "a.safetensors is damaged", "puts y in it")
    for shard in f"../{SAFE}", "/etc/passwd", "a/b.safetensors", "x.bin", 3, None:
        write_index(tmp_path, {"x": shard})
        refusal(opened, INDEX, f"puts x in {shard!r}")
    for text in "", "{", "[]", "{}", '{"weight_map": []}', "\udcff":
        (tmp_path / INDEX).write_bytes(text.encode(errors="surrogateescape"))
        refusal(opened, f"{INDEX} is damaged")


@pytest.mark.parametrize("file, step", [(SAFE, 1), (TORCH, 7)])
def test_every_truncation_is_noticed(tmp_path, file, step):
    path = tmp_path / file
    WRITERS[file]({"a": torch.arange(8.0), "b": torch.ones(3, 5)}, path)
    whole = path.read_bytes()
    for size in range(0, len(whole), step):
        path.write_bytes(whole[:size])
        refusal(lambda: open_checkpoint(tmp_path), f"{file} is damaged")
    if file == SAFE:
        path.write_bytes(whole + b"\0")
        refusal(lambda: open_checkpoint(tmp_path), "is damaged")


def test_a_file_that_shrinks_after_opening_is_noticed(tmp_path):
    path = tmp_path / SAFE
    safetensors_torch.save_file({"a": torch.ones(64)}, path)
    files = open_checkpoint(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    refusal(lambda: files.read("a"), "shorter")
    path.unlink()
    refusal(lambda: files.read("a"), "cannot be read")


def test_a_bit_flip_in_the_table_never_changes_a_size_or_place(tmp_path):
    """A flipped bit is an error, or changes only a name, or a dtype or shape of the same size."""
    path = tmp_path / SAFE
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(3, 5, generator=generator) for i in range(2)}
    safetensors_torch.save_file(tensors, path)
    whole = path.read_bytes()
    contents = sorted(bits(tensor) for tensor in tensors.values())
    table_bytes = 8 + int.from_bytes(whole[:8], "little")
    num_refused = 0
    for bit in range(8 * table_bytes):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            files = open_checkpoint(tmp_path)
        except ValueError:
            num_refused += 1
        else:
            assert sorted(files.read(name).tobytes() for name in files.names()) == contents
    assert num_refused > 4 * table_bytes


def entry(shape, offsets, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "table, words",
    [
        *(({"a": one}, ["is damaged"]) for one in (None, [], {"dtype": "F32", "shape": [2]})),
        ({"a": entry([2], [0, 8], 4)}, ["is damaged"]),
        *(({"a": entry([x], [0, 8])}, ["is damaged"]) for x in (-2, 2.0)),
        ({"a": entry([-1, -2], [0, 8])}, ["is damaged"]),
        *(({"a": entry([2], x)}, ["is damaged"]) for x in ([8, 16], [-8, 0])),
        ({"a": entry([2**62], [0, 2**64])}, ["is damaged"]),
        ({"a": entry([2], [0, 8]), "b": entry([2], [0, 8])}, ["overlap"]),
        ({"a": entry([16], [0, 8], "F4")}, ["a has dtype F4"]),
    ],
)
def test_an_unsound_table_is_refused(tmp_path, table, words):
    text = json.dumps(table).encode()
    (tmp_path / SAFE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    refusal(lambda: open_checkpoint(tmp_path), *words)


@pytest.mark.parametrize("file", [SAFE, TORCH])
def test_reading_holds_one_tensor_at_a_time(tmp_path, file):
    num, size = 20, 1 << 20
    WRITERS[file](
        {f"t{i}": torch.full((size // 4,), float(i)) for i in range(num)}, tmp_path / file
    )
    tracemalloc.start()
    files = open_checkpoint(tmp_path)
    for i in range(num):
        assert files.read(f"t{i}")[-1] == i
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size <= peak < 1.5 * size
