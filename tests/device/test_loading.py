"""Loading: values compared with NumPy, errors that list all faults, and host memory."""

import time
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from specjax.checkpoint.division import divide, grouped
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import open_checkpoint
from specjax.checkpoint.safetensors_file import write
from specjax.checkpoint.spec import projection, stored
from specjax.device import loading
from specjax.device.loading import load_params
from specjax.device.placement import Placement

SPECS = {
    "embedding": stored(["embed.weight"], (6, 4)),
    "blocks": tuple(
        {
            "qkv": projection([f"{i}.{n}.weight" for n in "qkv"], 4, [4, 2, 2]),
            "norm": stored([f"{i}.norm"], (4,)),
        }
        for i in range(2)
    ),
    "head": None,
}


FLOAT32 = np.dtype(np.float32)


def file_tensors(dtype=np.float32, specs=SPECS):
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(shape).astype(dtype)
        for spec in jax.tree.leaves(specs)
        for name, shape in zip(spec.names, spec.file_shapes, strict=True)
    }


def saved(folder, tensors):
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


def loaded(folder, tensors, **options):
    """Load a file of float32 tensors, and return the parameters."""
    return load_params(saved(folder, tensors), SPECS, np.dtype(np.float32), **options)


@pytest.mark.parametrize("file_dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("joins_here", [True, False])
def test_arrays_are_merged_transposed_and_cast(
    tmp_path, monkeypatch, file_dtype, dtype, joins_here
):
    if not joins_here:
        monkeypatch.setattr(loading, "MAX_JOINED_HERE", -1)
    tensors = file_tensors(file_dtype)
    params = load_params(saved(tmp_path, tensors), SPECS, np.dtype(dtype))
    assert jax.tree.structure(params) == jax.tree.structure(SPECS)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    np.testing.assert_array_equal(params["embedding"], tensors["embed.weight"].astype(dtype))
    for i, block in enumerate(params["blocks"]):
        parts = [tensors[f"{i}.{n}.weight"] for n in "qkv"]
        np.testing.assert_array_equal(block["qkv"], np.concatenate(parts).T.astype(dtype))
        np.testing.assert_array_equal(block["norm"], tensors[f"{i}.norm"].astype(dtype))
        assert block["qkv"].dtype == block["norm"].dtype == dtype


def test_tensors_may_have_other_names_go_unused_and_be_read_apart(tmp_path):
    tensors, d2t = file_tensors(), np.arange(3, dtype=np.int64) + 2**40
    files = saved(tmp_path, {f"model.{name}": x for name, x in tensors.items()} | {"d2t": d2t})
    own = {"rename": lambda name: f"model.{name}", "ignore": lambda name: name == "d2t"}
    params = load_params(files, SPECS, np.dtype(np.float32), **own)
    np.testing.assert_array_equal(params["embedding"], tensors["embed.weight"])
    np.testing.assert_array_equal(files.read("d2t"), d2t)


def test_all_faults_are_in_one_error_and_long_lists_are_capped(tmp_path):
    tensors = file_tensors() | {f"extra.{i:02}": np.ones(1) for i in range(25)}
    del tensors["0.q.weight"], tensors["1.norm"]
    tensors["embed.weight"] = np.ones((4, 6))
    tensors["0.norm"] = np.ones((4, 1))
    with pytest.raises(CheckpointError) as error:
        loaded(tmp_path, tensors)
    lines = str(error.value).splitlines()
    assert str(tmp_path) in lines[0]
    assert lines[1:3] == [
        "  missing: 0.q.weight, 1.norm",
        "  wrong shape: 0.norm (expected [4], found [4, 1]), "
        "embed.weight (expected [6, 4], found [4, 6])",
    ]
    assert lines[3].startswith("  unexpected: extra.00, extra.01")
    assert lines[3].endswith("extra.19 and 5 more") and "config.json" in lines[4]


@pytest.mark.parametrize("keeps_host", [True, False])
def test_host_memory_is_the_arrays_and_little_more(tmp_path, monkeypatch, keeps_host):
    """At most the arrays that are being read take host memory, in addition to the results.

    On a CPU, the results are in host memory, so they are counted, too.
    """
    num, side = 20, 512
    specs = [projection([f"{i}.a", f"{i}.b"], side, [side // 2, side // 2]) for i in range(num)]
    files, most = saved(tmp_path, file_tensors(np.float32, specs)), num + 2
    if not keeps_host:
        monkeypatch.setattr(loading, "lay_out", lambda parts, *_: parts[0][0, 0])
        most = loading.NUM_READERS + 1
    tracemalloc.start()
    params = load_params(files, specs, np.dtype(np.float32))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(params) == num and peak < most * 4 * side * side


def test_a_fault_ends_the_reading(tmp_path, monkeypatch):
    tried, specs = [], [stored([f"{i}"], (1,)) for i in range(100)]

    def fail(*_):
        tried.append(time.sleep(0.05))
        raise OSError("gone")

    monkeypatch.setattr(loading, "lay_out", fail)
    with pytest.raises(OSError, match="gone"):
        load_params(saved(tmp_path, file_tensors(specs=specs)), specs, np.dtype(np.float32))
    assert len(tried) < 100


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_tensors_that_are_not_finite_are_named(tmp_path, bad):
    tensors = file_tensors()
    tensors["0.k.weight"][1, 2] = tensors["1.norm"][3] = bad
    with pytest.raises(CheckpointError) as error:
        loaded(tmp_path, tensors)
    assert f"{tmp_path} has NaN or infinity in 0.k.weight, 1.norm; download" in str(error.value)


@pytest.mark.parametrize(
    "dtype, value, remedy",
    [
        ("float16", 1e5, "load it with dtype='float32'"),
        ("bfloat16", 3.4e38, "load it with dtype='float32'"),
        *((dtype, 1e300, "export") for dtype in ("bfloat16", "float16", "float32")),
    ],
)
def test_values_that_the_dtype_does_not_hold(tmp_path, dtype, value, remedy):
    tensors = file_tensors(np.float64)
    tensors["embed.weight"][0, 0] = value
    files = saved(tmp_path, tensors)
    match = f"embed.*too large for {dtype}; {remedy}"
    with np.errstate(over="ignore"), pytest.raises(CheckpointError, match=match):
        load_params(files, SPECS, np.dtype(dtype))


@pytest.mark.parametrize("dtype", ["int8", "int32", "float8_e4m3fn"])
def test_what_is_quantised_is_no_weight(tmp_path, dtype):
    """A quantised tensor must not be loaded as a plain weight, without its scales."""
    tensors = file_tensors()
    tensors["0.k.weight"] = tensors["0.k.weight"].astype(dtype)
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    write(tmp_path / "model.safetensors", layout, tensors.items())
    with pytest.raises(CheckpointError, match=rf"scales: 0\.k\.weight \({dtype}\)\n"):
        load_params(open_checkpoint(tmp_path), SPECS, np.dtype(np.float32))


@pytest.mark.parametrize("joins_here", [True, False])
def test_each_device_has_its_heads(tmp_path, monkeypatch, joins_here):
    """Of three key heads on two devices, the second device has one, and a head of zeros."""
    if not joins_here:
        monkeypatch.setattr(loading, "MAX_JOINED_HERE", -1)
    heads, keys = grouped(6, 3, 2)

    def specs(num_heads, num_keys):
        columns = ("heads", 2 * num_heads), ("keys", num_keys), (None, 1)
        return {
            "into": projection(["a", "b"], 4, [2 * num_heads, num_keys + 1], columns=columns),
            "out": projection(["c"], 2 * num_heads, [4], rows="heads"),
            "norm": stored(["e"], (4,)),
        }

    whole = specs(6, 3)
    tensors = file_tensors(specs=whole)
    divided = divide(whole, specs(heads.size, keys.size), {"heads": heads, "keys": keys}, 2)
    placement = Placement.on(*jax.devices()[:2])
    found = load_params(saved(tmp_path, tensors), divided, FLOAT32, placement=placement)
    into = np.concatenate([tensors["a"], tensors["b"]]).T
    zeros = np.zeros((4, 4), np.float32)
    expected = [
        np.hstack([into[:, :8], into[:, 12:14], into[:, 15:]]),
        np.hstack([into[:, 8:12], zeros, into[:, 14:15], zeros[:, :1], into[:, 15:]]),
    ]
    np.testing.assert_array_equal(found["into"], expected)
    out = tensors["c"].T
    np.testing.assert_array_equal(found["out"], [out[:8], np.vstack([out[8:], zeros])])
    assert [shard.data.shape[0] for shard in found["into"].addressable_shards] == [1, 1]
    assert found["norm"].sharding.is_fully_replicated
    for spec, array in zip(jax.tree.leaves(divided), jax.tree.leaves(found), strict=True):
        for name, tensor in spec.split(np.asarray(array)).items():
            np.testing.assert_array_equal(tensor, tensors[name])
