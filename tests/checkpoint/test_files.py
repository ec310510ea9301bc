"""Safetensors folders against torch and safetensors as writers, whole and damaged."""

import json
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import open_checkpoint

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

DTYPES = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float64: np.float64,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}


def bits(tensor):
    """The bytes of a torch tensor, in order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_tensors(num=4):
    generator = torch.Generator().manual_seed(0)
    return {f"layers.{i}.weight": torch.randn(3, 5, generator=generator) for i in range(num)}


def save_shards(folder, shards):
    """A sharded checkpoint of `shards`, {file name: {tensor name: tensor}}, with its index."""
    for file_name, tensors in shards.items():
        safetensors_torch.save_file(tensors, folder / file_name)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    write_index(folder, weight_map)


def write_index(folder, weight_map):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reads_every_dtype_bit_for_bit(tmp_path, dtype):
    tensor = (torch.arange(12).reshape(3, 4) - 5).to(dtype)
    safetensors_torch.save_file({"a": tensor, "pad": torch.ones(1)}, tmp_path / "model.safetensors")
    array = open_checkpoint(tmp_path).read("a")
    assert array.dtype == DTYPES[dtype]
    assert array.tobytes() == bits(tensor)
    assert array.flags.writeable and array.flags.c_contiguous


def test_names_and_shapes_of_scalars_and_empty_tensors(tmp_path):
    tensors = {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "row": torch.ones(7)}
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    files = open_checkpoint(tmp_path)
    assert files.names() == frozenset(tensors)
    assert {name: files.shape(name) for name in tensors} == {
        "scalar": (),
        "empty": (0, 3),
        "row": (7,),
    }
    assert files.read("scalar") == 1.5
    assert files.read("empty").shape == (0, 3)


def test_an_absent_tensor_is_named(tmp_path):
    safetensors_torch.save_file(random_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no tensor lm_head.weight"):
        open_checkpoint(tmp_path).read("lm_head.weight")


def test_sources_are_taken_in_order(tmp_path):
    names = ["pytorch_model.bin", "other.safetensors", "model.safetensors"]
    for value, name in enumerate(names):
        save = torch.save if name.endswith(".bin") else safetensors_torch.save_file
        save({"a": torch.tensor([float(value)])}, tmp_path / name)
        assert open_checkpoint(tmp_path).read("a") == value
    save_shards(tmp_path, {"model-00001-of-00001.safetensors": {"a": torch.tensor([9.0])}})
    assert open_checkpoint(tmp_path).read("a") == 9


def test_shards_form_one_checkpoint(tmp_path):
    tensors = random_tensors()
    names = list(tensors)
    first, second = ({n: tensors[n] for n in half} for half in (names[:2], names[2:]))
    save_shards(tmp_path, {"a.safetensors": first, "b.safetensors": second})
    files = open_checkpoint(tmp_path)
    assert files.names() == frozenset(names)
    for name in names:
        np.testing.assert_array_equal(files.read(name), tensors[name].numpy())


def test_a_missing_shard_is_named(tmp_path):
    save_shards(tmp_path, {"a.safetensors": {"x": torch.ones(2)}})
    write_index(tmp_path, {"x": "a.safetensors", "y": "gone.safetensors"})
    with pytest.raises(CheckpointError, match="lacks gone.safetensors.*download"):
        open_checkpoint(tmp_path)


def test_an_index_that_promises_too_much_is_refused(tmp_path):
    save_shards(tmp_path, {"a.safetensors": {"x": torch.ones(2)}})
    write_index(tmp_path, {"x": "a.safetensors", "y": "a.safetensors"})
    with pytest.raises(CheckpointError, match="a.safetensors is damaged: the index puts y in it"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", 3, None]
)
def test_an_index_cannot_reach_outside_its_folder(tmp_path, shard):
    write_index(tmp_path, {"x": shard})
    with pytest.raises(CheckpointError, match="its weight_map puts x in"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', "\udcff"])
def test_a_damaged_index_is_not_passed_over(tmp_path, text):
    safetensors_torch.save_file(random_tensors(), tmp_path / "model.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match="index.json is damaged"):
        open_checkpoint(tmp_path)


def test_two_unnamed_files_are_ambiguous(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        safetensors_torch.save_file({"x": torch.ones(2)}, tmp_path / name)
    with pytest.raises(CheckpointError, match="a.safetensors, b.safetensors"):
        open_checkpoint(tmp_path)


def test_no_folder_and_no_weights(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="looked for model.safetensors.index.json, .*bin"):
        open_checkpoint(tmp_path)


def test_a_git_lfs_pointer_is_recognised(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        open_checkpoint(tmp_path)


def test_every_truncation_is_noticed(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors_torch.save_file(random_tensors(2), path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="model.safetensors is damaged.*again"):
            open_checkpoint(tmp_path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="is damaged"):
        open_checkpoint(tmp_path)


def test_a_file_that_shrinks_after_opening_is_noticed(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors_torch.save_file({"a": torch.ones(64)}, path)
    files = open_checkpoint(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="shorter"):
        files.read("a")
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        files.read("a")


def test_a_bit_flip_in_the_table_never_changes_a_size_or_place(tmp_path):
    """A flip is refused, or leaves the same bytes under a name, dtype or shape of equal size."""
    path = tmp_path / "model.safetensors"
    tensors = random_tensors(2)
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
        except CheckpointError:
            num_refused += 1
        else:
            assert sorted(files.read(name).tobytes() for name in files.names()) == contents
    assert num_refused > 4 * table_bytes


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {"dtype": "F32", "shape": [2]},
        {"dtype": 4, "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 2**64]},
    ],
)
def test_an_unsound_table_is_refused(tmp_path, entry):
    table = json.dumps({"a": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(table).to_bytes(8, "little") + table + bytes(8))
    with pytest.raises(CheckpointError, match="is damaged"):
        open_checkpoint(tmp_path)


def test_overlapping_tensors_are_refused(tmp_path):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    table = json.dumps({"a": entry, "b": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(table).to_bytes(8, "little") + table + bytes(8))
    with pytest.raises(CheckpointError, match="overlap"):
        open_checkpoint(tmp_path)


def test_an_unsupported_dtype_names_the_tensor(tmp_path):
    table = json.dumps({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(table).to_bytes(8, "little") + table + bytes(1))
    with pytest.raises(CheckpointError, match="a has dtype F4.*bfloat16"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("file_name", ["model.safetensors", "pytorch_model.bin"])
def test_reading_holds_one_tensor_at_a_time(tmp_path, file_name):
    save = torch.save if file_name.endswith(".bin") else safetensors_torch.save_file
    num, size = 20, 1 << 20
    save({f"t{i}": torch.full((size // 4,), float(i)) for i in range(num)}, tmp_path / file_name)
    tracemalloc.start()
    files = open_checkpoint(tmp_path)
    for i in range(num):
        assert files.read(f"t{i}")[-1] == i
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size <= peak < 1.5 * size
