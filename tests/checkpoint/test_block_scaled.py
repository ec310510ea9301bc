"""Checkpoints in float8 with scales of blocks, against the rule written in torch."""

import jax
import numpy as np
import pytest

from specjax.checkpoint.errors import CheckpointError
from specjax.config import SpeculativeConfig
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.registry import load_model

torch = pytest.importorskip("torch")

BLOCK = (8, 12)  # divides some of the sizes and not others
QUANTISATION = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "fmt": "e4m3"}


def quantised(weight):
    """(float8 tensor, scales) of a matrix."""
    rows, columns = (-(-n // side) for n, side in zip(weight.shape, BLOCK, strict=True))
    scales, stored = torch.empty(rows, columns), torch.empty(weight.shape)
    for i in range(rows):
        for j in range(columns):
            where = (
                slice(i * BLOCK[0], (i + 1) * BLOCK[0]),
                slice(j * BLOCK[1], (j + 1) * BLOCK[1]),
            )
            scales[i, j] = weight[where].abs().max() / 448
            stored[where] = weight[where] / scales[i, j]
    return stored.to(torch.float8_e4m3fn), scales


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


def test_scales_of_another_shape(checkpoints, folders):
    other = {**QUANTISATION, "weight_block_size": [8, 8]}
    folder = checkpoints.copy(folders[0], quantization_config=other)
    with pytest.raises(CheckpointError, match=r"weight_scale_inv must be \[.*blocks of \[8, 8\]"):
        load_model(folder, np.dtype(np.float32))


def test_float8_without_its_scales(checkpoints, folders, rewrite_tensors):
    folder, name = checkpoints.copy(folders[0]), "model.layers.0.self_attn.o_proj.weight"
    rewrite_tensors(
        folder / "model.safetensors",
        lambda tensors: {n: x for n, x in tensors.items() if n != f"{name}_scale_inv"},
    )
    with pytest.raises(CheckpointError, match=f"scales: {name}"):
        load_model(folder, np.dtype(np.float32))
