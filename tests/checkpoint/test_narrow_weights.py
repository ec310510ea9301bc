"""Weights of few bits: float8 with scales of blocks, and MXFP4, against torch's rule for each."""

import jax
import numpy as np
import pytest
from support.refusals import refusal

from specjax.checkpoint.mxfp4 import mxfp4_experts
from specjax.config import SpeculativeConfig
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.registry import load_model

torch = pytest.importorskip("torch")
FLOAT32 = np.dtype(np.float32)
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
BLOCK = (8, 12)  # divides some of the sizes and not others
QUANTISATION = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "fmt": "e4m3"}


def quantised(weight):
    """(float8 tensor, scales) of a matrix's shape; the numbers are others."""
    rows, columns = (-(-n // side) for n, side in zip(weight.shape, BLOCK, strict=True))
    return weight.to(torch.float8_e4m3fn), torch.linspace(0.5, 2, rows * columns).view(rows, -1)


def dequantised(stored, scales):
    """The matrix that they stand for."""
    rows, columns = (torch.arange(n) // side for n, side in zip(stored.shape, BLOCK, strict=True))
    return stored.float() * scales[rows[:, None], columns]


@pytest.fixture(scope="module")
def folders(checkpoints, rewrite_tensors):
    """(a folder in float8, one with the weights that these stand for)."""
    files = checkpoints.mtp(checkpoints.target("deepseek_v3"), layout="single")
    narrow, plain = (checkpoints.copy(files.folder) for _ in range(2))
    made = {}

    def quantise(tensors):
        kept = dict(tensors)
        for name, tensor in tensors.items():
            if name.endswith("_proj.weight") and "layers." in name:
                made[name] = kept[name], kept[f"{name}_scale_inv"] = quantised(tensor)
        return kept

    rewrite_tensors(narrow / "model.safetensors", quantise)
    rewrite_tensors(
        plain / "model.safetensors",
        lambda tensors: tensors | {name: dequantised(*pair) for name, pair in made.items()},
    )
    assert len(made) > 50
    return checkpoints.copy(narrow, quantization_config=QUANTISATION), plain


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_they_load_as_what_they_stand_for(folders, dtype):
    config = SpeculativeConfig(method="mtp", num_speculative_tokens=1)
    loaded = []
    for folder in folders:
        model, params = load_model(folder, np.dtype(dtype))
        _, module = load_drafter(folder, config, model, np.dtype(dtype))
        loaded.append((params, module))
    jax.tree.map(np.testing.assert_array_equal, *loaded)


def test_scales_of_another_shape_or_none(checkpoints, folders, rewrite_tensors):
    other = {**QUANTISATION, "weight_block_size": [8, 8]}
    folder = checkpoints.copy(folders[0], quantization_config=other)
    refusal(lambda: load_model(folder, FLOAT32), "weight_scale_inv must be [", "[8, 8]")
    folder, name = checkpoints.copy(folders[0]), "model.layers.0.self_attn.o_proj.weight"
    lost = f"{name}_scale_inv"
    rewrite_tensors(
        folder / "model.safetensors", lambda old: {n: x for n, x in old.items() if n != lost}
    )
    refusal(lambda: load_model(folder, FLOAT32), f"without scales: {name}")


# --- MXFP4 ----------------------------------------------------------------------------------------


def packed(num_experts, num_in, num_out):
    """Blocks and scales, with every number and many scales."""
    rng = np.random.default_rng(0)
    shape = num_experts, num_out, num_in // 32
    scales = rng.integers(119, 130, shape).astype(np.uint8)
    return rng.integers(0, 256, (*shape, 16)).astype(np.uint8), scales


def unpacked(blocks, scales, dtype):
    """[E, in, out] as transformers has it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=dtype)


def test_every_number_is_what_transformers_makes_of_it():
    blocks, scales = packed(3, 64, 40)
    scales[0] = np.arange(80).reshape(40, 2) + 87  # from 2^-40 to 2^39
    spec = mxfp4_experts("x", 3, 64, 40)
    join = jax.jit(spec.join, static_argnames="dtype")
    found = join([blocks, scales], dtype=np.dtype("bfloat16"))
    assert found.shape == spec.shape == (3, 64, 40)
    expected = unpacked(blocks, scales, torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(np.asarray(found, np.float32), expected)


@pytest.fixture(scope="module")
def packings(checkpoints, rewrite_tensors):
    """(a checkpoint with packed experts, the same with unpacked ones)."""
    target = checkpoints.target("gpt_oss", num_hidden_layers=3).folder
    made = checkpoints.copy(target, **MXFP4), checkpoints.copy(target)
    names = "gate_up_proj", "down_proj"

    def pack(tensors):
        for name in [n for n in tensors if n.endswith(names)]:
            blocks, scales = map(torch.tensor, packed(*tensors.pop(name).shape))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        return tensors

    def unpack(tensors):
        for name in [n for n in tensors if n.endswith(names)]:
            tensors[name] = unpacked(*packed(*tensors[name].shape), torch.bfloat16)
        return tensors

    for one, change in zip(made, (pack, unpack), strict=True):
        rewrite_tensors(one / "model.safetensors", change)
    return made


def test_packed_experts_are_loaded_as_unpacked_ones(packings):
    loaded, expected = (load_model(one, FLOAT32)[1] for one in packings)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def test_packed_experts_of_another_type_are_refused(checkpoints, rewrite_tensors, packings):
    made = checkpoints.copy(packings[0])
    name = "model.layers.1.mlp.experts.down_proj_scales"
    rewrite_tensors(made / "model.safetensors", lambda old: old | {name: old[name].float()})
    refusal(lambda: load_model(made, FLOAT32), "not bytes", f"{name} (float32)")
    odd = checkpoints.copy(packings[0], hidden_size=48)
    refusal(lambda: load_model(odd, FLOAT32), "hidden_size=48", "multiples of 32")
