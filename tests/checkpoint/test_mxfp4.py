"""Experts in MXFP4, which stay packed, compared with transformers' dequantised experts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.engines import generate_tokens, make_llm, random_prompts
from support.logits import causal_logits, hf_logits
from support.refusals import refusal
from support.updates import updated

from specjax import SamplingParams
from specjax.checkpoint.mxfp4 import mxfp4_experts
from specjax.device.models.registry import load_model, save_model
from specjax.device.placement import Placement
from specjax.device.weights.mxfp4_experts import mxfp4_specs
from specjax.device.weights.packed_experts import PackedExperts
from specjax.device.weights.stored import dequantise
from specjax.serving.memory import weight_bytes
from specjax.serving.source import open_model

torch = pytest.importorskip("torch")
AutoModelForCausalLM = pytest.importorskip("transformers").AutoModelForCausalLM
FLOAT32 = np.dtype(np.float32)
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}


def packed(num_experts, num_in, num_out):
    """Return blocks and scales that have every 4-bit number and many scales."""
    rng = np.random.default_rng(0)
    shape = num_experts, num_out, num_in // 32
    scales = rng.integers(119, 124, shape).astype(np.uint8)
    return rng.integers(0, 256, (*shape, 16)).astype(np.uint8), scales


def unpacked(blocks, scales, dtype):
    """Return the weights [E, in, out], dequantised by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("num_in", [64, 96])
def test_every_number_is_what_transformers_makes_of_it(num_in):
    """One matrix is dequantised while loading, and another one stays packed."""
    blocks, scales = packed(3, num_in, 40)
    scales[0] = np.arange(20 * num_in // 16).reshape(40, -1) + 67  # from 2^-60 to 2^59 at most
    spec, bf16 = mxfp4_experts("x", 3, num_in, 40), np.dtype("bfloat16")
    kept = mxfp4_specs(spec)
    numbers, exponents = (
        jax.jit(one.join, static_argnames="dtype")([given], dtype=bf16)
        for one, given in ((kept.values, blocks), (kept.scales, scales))
    )
    assert numbers.shape == kept.values.shape and exponents.shape == kept.scales.shape
    assert numbers.dtype == exponents.dtype == np.dtype(kept.values.dtype) == np.uint8
    found = jax.jit(spec.join, static_argnames="dtype")([blocks, scales], dtype=bf16)
    here = spec.join([blocks, scales], bf16)
    pairs = ((kept.values, blocks, numbers), (kept.scales, scales, exponents))
    for one, given, on_device in pairs:
        np.testing.assert_array_equal(one.join([given], bf16), on_device)
    expected = unpacked(blocks, scales, torch.bfloat16).float().numpy()
    plain = replace(kept, values=numbers, scales=exponents).plain(bf16).values
    for one in found, here, plain:
        assert one.shape == spec.shape == (3, num_in, 40)
        np.testing.assert_array_equal(np.asarray(one, np.float32), expected)


def test_loading_unpacks_nothing_on_the_way():
    """The program that reorders packed numbers needs almost no memory besides its result."""
    spec = mxfp4_specs(mxfp4_experts("x", 4, 256, 64)).values
    (shape,) = spec.file_shapes
    given = [jax.ShapeDtypeStruct(shape, jnp.uint8)]
    join = jax.jit(lambda parts: spec.join(parts, FLOAT32))
    sizes = join.lower(given).compile().memory_analysis()
    assert sizes.output_size_in_bytes == 4 * 256 * 64 // 2 > 8 * sizes.temp_size_in_bytes


@pytest.fixture(scope="module")
def packings(checkpoints, rewrite_tensors):
    """Return two folders of one model: one with packed experts, one with dequantised experts."""
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


@pytest.mark.slow
def test_experts_stay_packed_and_mean_what_they_stand_for(packings, tmp_path):
    """Saved weights are dequantised. The loaded size in bytes is known before loading."""
    (model, params), (_, plain) = (load_model(one, FLOAT32) for one in packings)
    assert {type(layer.mlp.down) for layer in params.layers} == {PackedExperts}
    bytes_ = sum(x.nbytes for x in jax.tree.leaves(params))
    assert weight_bytes(open_model(packings[0]).specs, "float32") == bytes_
    jax.tree.map(np.testing.assert_array_equal, dequantise(params, FLOAT32), plain)
    save_model(tmp_path / "saved", model, params, packings[0])
    loaded = load_model(tmp_path / "saved", FLOAT32)[1]
    jax.tree.map(np.testing.assert_array_equal, loaded, plain)


@pytest.mark.slow
def test_an_update_by_numbers_that_have_a_code_keeps_them(packings):
    """An update with weights that MXFP4 can represent is exact.

    A trainer's names are the plain model's.
    """
    (model, params), (_, plain) = (load_model(one, FLOAT32) for one in packings)
    other = jax.tree.map(lambda x: 0 * x if x.dtype == np.uint8 else x, params)
    made = updated(model, other, packings[1])
    jax.tree.map(np.testing.assert_array_equal, dequantise(made, FLOAT32), plain)


@pytest.mark.slow
def test_logits_are_those_of_the_model_that_they_stand_for(packings):
    tokens = np.random.default_rng(0).integers(0, 96, (2, 24))
    hf = AutoModelForCausalLM.from_pretrained(packings[1], dtype=torch.float32)
    found, expected = causal_logits(packings[0], tokens), hf_logits(hf, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.slow
def test_parts_of_several_devices_stay_packed(packings):
    """Each of two devices has half of the experts' inner columns."""
    lines, loaded, placement = [], [], Placement.on(*jax.devices()[:2])
    for folder in packings:
        loaded.append(load_model(folder, FLOAT32, placement, lines.append)[1])
    assert {type(layer.mlp.down) for layer in loaded[0].layers} == {PackedExperts} and not lines
    jax.tree.map(np.testing.assert_array_equal, dequantise(loaded[0], FLOAT32), loaded[1])


@pytest.mark.nightly
def test_the_same_tokens_with_and_without_drafts(packings):
    """With drafts, the model runs on two devices, each with half of the experts."""
    prompts = random_prompts(5, 20, 33, vocab_size=96)
    params = [SamplingParams(temperature=t, seed=3, max_tokens=20) for t in (0.0, 0.8, 1.0)]
    made = []
    devices = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    for method, more in (None, {}), ("ngram", devices):
        with make_llm(packings[0], method, dtype="float32", **more) as llm:
            made.append(generate_tokens(llm, prompts, params))
    assert made[0] == made[1] and all(len(tokens) == 20 for tokens in made[0])


def test_packed_experts_that_are_damaged_are_refused(checkpoints, rewrite_tensors, packings):
    made = checkpoints.copy(packings[0])
    name = "model.layers.1.mlp.experts.down_proj_scales"
    rewrite_tensors(made / "model.safetensors", lambda old: old | {name: old[name].float()})
    refusal(lambda: load_model(made, FLOAT32), "not bytes", f"{name} (float32)")
    nan = checkpoints.copy(packings[0])
    rewrite_tensors(nan / "model.safetensors", lambda old: old | {name: 0 * old[name] + 255})
    refusal(lambda: load_model(nan, FLOAT32), f"{name} has scales that are NaN")
    odd = checkpoints.copy(packings[0], hidden_size=48)
    refusal(lambda: load_model(odd, FLOAT32), "hidden_size=48", "multiples of 32")
