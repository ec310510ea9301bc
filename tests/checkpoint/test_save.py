"""Saved tensors have the same bits in our reader and in safetensors. No partial files remain."""

import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from support.refusals import refusal

from specjax.checkpoint import safetensors_file
from specjax.checkpoint.config_json import read_json
from specjax.checkpoint.files import open_checkpoint
from specjax.checkpoint.save import save_checkpoint
from specjax.checkpoint.spec import projection, stored
from specjax.device.loading import load_params

SPECS = {
    "embedding": stored(["embed.weight"], (6, 4)),
    "qkv": projection([f"{n}.weight" for n in "qkv"], 4, [4, 2, 2]),
    "bias": stored(["q.bias", "k.bias"], (4,), (3,)),
    "head": None,
}
FLOAT32 = np.dtype(np.float32)
CONFIG = {"model_type": "llama", "hidden_size": 4}
EXTRA = {
    "d2t": np.arange(5, dtype=np.int64) * 2**40,
    "t2d": np.array([True, False, True]),
    "scalar": np.array(0.5, np.float16),
}


def random_params(dtype):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda spec: jnp.asarray(rng.normal(size=spec.shape).astype(dtype)), SPECS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_reload_is_bit_identical(tmp_path, dtype):
    params, dtype, folder = random_params(dtype), np.dtype(dtype), tmp_path / "new" / "folder"
    save_checkpoint(folder, SPECS, params, CONFIG, dtype=dtype, extra=EXTRA)
    files = open_checkpoint(folder)
    again = load_params(files, SPECS, dtype, ignore=EXTRA.__contains__)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    for new, old in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        assert new.dtype == old.dtype and np.asarray(new).tobytes() == np.asarray(old).tobytes()
    for name, tensor in EXTRA.items():
        assert files.read(name).dtype == tensor.dtype
        np.testing.assert_array_equal(files.read(name), tensor)
    assert read_json(folder, "config.json") == CONFIG
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    for tensor in safetensors_file.locate(folder / "model.safetensors").values():
        assert tensor.offset % tensor.dtype.itemsize == 0, "not aligned to its elements"


def test_safetensors_reads_what_we_write(tmp_path):
    params = random_params(np.float32)
    save_checkpoint(tmp_path, SPECS, params, CONFIG, dtype=FLOAT32, extra=EXTRA)
    tensors = load_file(tmp_path / "model.safetensors")
    qkv = np.asarray(params["qkv"])
    assert tensors["k.weight"].tobytes() == qkv[:, 4:6].T.tobytes()
    assert tensors["q.bias"].tobytes() == np.asarray(params["bias"])[:4].tobytes()
    assert tensors.keys() == open_checkpoint(tmp_path).names()
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_export_casts(tmp_path):
    params, dtype = random_params(np.float32), np.dtype(ml_dtypes.bfloat16)
    save_checkpoint(tmp_path, SPECS, params, CONFIG, dtype=dtype)
    embedding = open_checkpoint(tmp_path).read("embed.weight")
    assert embedding.dtype == dtype
    np.testing.assert_array_equal(embedding, np.asarray(params["embedding"]).astype(dtype))


def test_bad_arguments_are_refused_before_writing(tmp_path):
    params, folder = random_params(np.float32), tmp_path / "out"

    def save(*, config=CONFIG, extra=EXTRA, **changed):
        save_checkpoint(folder, SPECS, params | changed, config, dtype=FLOAT32, extra=extra)

    refusal(lambda: save(head=params["qkv"]), "structure")
    refusal(lambda: save(qkv=params["qkv"].T), "q.weight", "[8, 4]", "[4, 8")
    refusal(lambda: save(extra={"k.bias": np.ones(1)}), "k.bias", "twice")
    with pytest.raises(TypeError, match="JSON"):
        save(config={"dtype": FLOAT32})
    assert not folder.exists()
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    refusal(save, "another folder")  # as the index would hide the file


def test_host_memory_is_a_few_arrays(tmp_path):
    num, side = 20, 512
    specs = [projection([f"{i}.a", f"{i}.b"], side, [side // 2, side // 2]) for i in range(num)]
    params = [jnp.ones((side, side), jnp.float32) for _ in range(num)]
    tracemalloc.start()
    save_checkpoint(tmp_path, specs, params, CONFIG, dtype=FLOAT32)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * 4 * side * side
