"""Experts packed in MXFP4 against transformers' own unpacking."""

import jax
import numpy as np
import pytest
from support.refusals import refusal

from specjax.checkpoint.mxfp4 import mxfp4_experts
from specjax.device.models.registry import load_model

torch = pytest.importorskip("torch")
FLOAT32 = np.dtype(np.float32)
QUANTISED = {"quantization_config": {"quant_method": "mxfp4"}}


def packed(num_experts, num_in, num_out, seed=0):
    """Blocks and scales, with every number and many scales."""
    rng = np.random.default_rng(seed)
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
def folder(checkpoints, rewrite_tensors):
    """(a checkpoint with packed experts, the same with unpacked ones)."""
    target = checkpoints.target("gpt_oss", num_hidden_layers=3).folder
    made = checkpoints.copy(target, **QUANTISED), checkpoints.copy(target)
    names = "gate_up_proj", "down_proj"

    def pack(tensors, is_packed):
        for name in [n for n in tensors if n.endswith(names)]:
            blocks, scales = packed(*tensors.pop(name).shape)
            if is_packed:
                tensors |= {f"{name}_blocks": torch.tensor(blocks)}
                tensors |= {f"{name}_scales": torch.tensor(scales)}
            else:
                tensors[name] = unpacked(blocks, scales, torch.bfloat16)
        return tensors

    for one, is_packed in zip(made, (True, False), strict=True):
        rewrite_tensors(one / "model.safetensors", lambda old, new=is_packed: pack(old, new))
    return made


def test_packed_experts_are_loaded_as_unpacked_ones(folder):
    loaded, expected = (load_model(one, FLOAT32)[1] for one in folder)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def test_packed_experts_of_another_type_are_refused(checkpoints, rewrite_tensors, folder):
    made = checkpoints.copy(folder[0])
    name = "model.layers.1.mlp.experts.down_proj_scales"
    rewrite_tensors(made / "model.safetensors", lambda old: old | {name: old[name].float()})
    refusal(lambda: load_model(made, FLOAT32), "not bytes", f"{name} (float32)")
    refusal(
        lambda: load_model(checkpoints.copy(folder[0], hidden_size=48), FLOAT32),
        "hidden_size=48",
        "multiples of 32",
    )
