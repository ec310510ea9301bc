"""Float8 weights with scales, for each form of scales, compared with dequantisation in torch."""

import re
from functools import cache

import jax
import numpy as np
import pytest
from support.engines import generate_tokens, make_llm, random_prompts
from support.logits import causal_logits, hf_logits
from support.refusals import refusal
from support.updates import updated

from specjax import SamplingParams
from specjax.config import SpeculativeConfig
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.registry import load_model, save_model
from specjax.device.weights.experts import ExpertMatrices
from specjax.device.weights.matrix import Dense
from specjax.device.weights.scaled import Scaled
from specjax.device.weights.scaled_experts import ScaledExperts
from specjax.device.weights.scaled_latent_up import ScaledLatentUp
from specjax.device.weights.stored import dequantise
from specjax.device.weights.weight import is_weight
from specjax.serving.memory import weight_bytes
from specjax.serving.source import open_model

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
AutoModelForCausalLM = pytest.importorskip("transformers").AutoModelForCausalLM
pytestmark = pytest.mark.usefixtures("small_test")
FLOAT32 = np.dtype(np.float32)
BLOCK = (8, 12)  # divides some of the sizes and not others


def compressed(strategy, **others):
    """Return a quantization_config of compressed-tensors."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **others}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"dynamic": True}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


# By name: the config, the scales' suffix, what a scale is for, and the shape of one for all.
FORMS = {
    "block": (
        {"quant_method": "fp8", "weight_block_size": list(BLOCK), "fmt": "e4m3"},
        ("_scale_inv", BLOCK, None),
    ),
    "tall": (
        {"quant_method": "fp8", "weight_block_size": [32, 12]},
        ("_scale_inv", (32, 12), None),
    ),
    "blocks": (compressed("block", block_structure=list(BLOCK)), ("_scale", BLOCK, None)),
    "channel": (compressed("channel"), ("_scale", (1, None), None)),
    "tensor": (compressed("tensor"), ("_scale", (None, None), (1,))),
    "static": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        ("_scale_inv", (None, None), ()),
    ),
}


def quantised(weight, sides):
    """Return float8 numbers of `weight`'s shape, their scales, and the weight they represent."""
    sides = [side or n for n, side in zip(weight.shape, sides, strict=True)]
    rows, columns = (-(-n // side) for n, side in zip(weight.shape, sides, strict=True))
    stored = (8 * weight).to(torch.float8_e4m3fn)
    scales = torch.linspace(0.1, 0.2, rows * columns).view(rows, -1)
    rows, columns = (torch.arange(n) // side for n, side in zip(weight.shape, sides, strict=True))
    return stored, scales, stored.float() * scales[rows[:, None], columns]


@pytest.fixture(scope="module")
def folders_of(checkpoints, rewrite_tensors):
    """Return a function that makes two folders of a model: in float8, and dequantised."""

    @cache
    def make(kind, form, **config):
        target = checkpoints.target(kind, **config)
        if kind == "deepseek_v3":
            target = checkpoints.mtp(target, layout="single")
        narrow, plain = (checkpoints.copy(target.folder) for _ in range(2))
        quantisation, (suffix, sides, shape) = FORMS[form]
        stored, meant = {}, {}

        def quantise(tensors):
            for name, tensor in tensors.items():
                if re.search(r"layers.*(_proj|_qkvz)\.weight$", name):
                    values, scales, meant[name] = quantised(tensor, sides)
                    scales = scales if shape is None else scales.view(shape)
                    stored.update({name: values, f"{name}{suffix}": scales})
                    stored[name.replace(".weight", ".input_scale")] = torch.tensor(1.0)
            return tensors | stored

        rewrite_tensors(narrow / "model.safetensors", quantise)
        rewrite_tensors(plain / "model.safetensors", lambda tensors: tensors | meant)
        return checkpoints.copy(narrow, quantization_config=quantisation), plain

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, form, dtype",
    [
        pytest.param("deepseek_v3", "block", "float32", marks=pytest.mark.slow),
        ("deepseek_v3", "block", "bfloat16"),
        ("qwen3_moe", "channel", "bfloat16"),
        ("qwen3_next", "blocks", "bfloat16"),
        ("qwen3_next", "tensor", "float32"),
        ("llama", "channel", "bfloat16"),
        ("phi3", "static", "float32"),
    ],
)
def test_they_stay_in_float8_and_mean_what_they_stand_for(folders_of, kind, form, dtype):
    """Experts stay in float8, too. Tensors that are not matrices are dequantised."""
    folders, loaded = folders_of(kind, form), []
    for folder in folders:
        model, params = load_model(folder, np.dtype(dtype))
        if kind == "deepseek_v3":
            config = SpeculativeConfig(method="mtp", num_speculative_tokens=1)
            params = params, load_drafter(folder, config, model, np.dtype(dtype))[1]
        loaded.append(params)
    weights = jax.tree.leaves(loaded[0], is_leaf=is_weight)
    kept = [x for x in weights if isinstance(x, Scaled | ScaledExperts)]
    assert len(kept) >= 4 and {x.values.dtype.name for x in kept} == {"float8_e4m3fn"}
    assert not any(isinstance(x, ExpertMatrices) for x in weights)
    jax.tree.map(np.testing.assert_array_equal, dequantise(loaded[0], dtype), loaded[1])
    if kind != "deepseek_v3":
        bytes_ = sum(x.nbytes for x in jax.tree.leaves(loaded[0]))
        assert weight_bytes(open_model(folders[0]).specs, dtype) == bytes_


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, form",
    [
        *(("llama", "blocks"), ("qwen2", "static"), ("qwen3_next", "block")),
        *(("qwen3_moe", "block"), ("qwen3_moe", "tensor"), ("deepseek_v3", "channel")),
    ],
)
def test_logits_are_those_of_the_model_that_they_stand_for(folders_of, kind, form):
    narrow, plain = folders_of(kind, form)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 24))
    hf = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    expected = hf_logits(hf, tokens)
    np.testing.assert_allclose(causal_logits(narrow, tokens), expected, atol=1e-4)


@pytest.mark.nightly
def test_latents_stay_in_float8(folders_of):
    """Latent projections stay in float8, even if heads begin inside a block of scales.

    With an MTP module in float8, tokens are the dequantised model's tokens without drafts. An
    update with a trainer's weights gives the same weights, up to the rounding of blocks.
    """
    folders = folders_of("deepseek_v3", "tall", qk_nope_head_dim=32, v_head_dim=16)
    (model, params), (_, expected) = (load_model(one, FLOAT32) for one in folders)
    assert {type(layer.attention.up) for layer in params.layers} == {ScaledLatentUp}
    jax.tree.map(np.testing.assert_array_equal, dequantise(params, FLOAT32), expected)
    made = dequantise(updated(model, params, folders[1]), FLOAT32)
    for new, old in zip(*map(jax.tree.leaves, (made, expected)), strict=True):
        assert np.linalg.norm(new - old) <= 0.03 * np.linalg.norm(old)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 24))
    hf = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32)
    np.testing.assert_allclose(causal_logits(folders[0], tokens), hf_logits(hf, tokens), atol=1e-4)
    prompts = random_prompts(5, 20, 33, vocab_size=96)
    params = [SamplingParams(temperature=t, seed=3, max_tokens=20) for t in (0.0, 0.8, 1.0)]
    made = []
    for folder, method in zip(folders, ("mtp", None), strict=True):
        with make_llm(folder, method, dtype="float32") as llm:
            made.append(generate_tokens(llm, prompts, params))
    assert made[0] == made[1] and all(len(tokens) == 20 for tokens in made[0])


@pytest.mark.slow
def test_some_tensors_of_a_matrix_are_not_in_float8(checkpoints, folders_of, rewrite_tensors):
    """Parts of a merged matrix that are stored plain stay plain. Saved weights are always plain."""
    narrow, plain = folders_of("llama", "block")
    mixed, name = checkpoints.copy(narrow), "model.layers.0.self_attn.k_proj.weight"
    key = {name: safetensors.load_file(plain / "model.safetensors")[name]}
    rewrite_tensors(
        mixed / "model.safetensors",
        lambda old: {n: x for n, x in (old | key).items() if n != f"{name}_scale_inv"},
    )
    model, params = load_model(mixed, FLOAT32)
    qkv = params.layers[0].attention.qkv
    assert [type(one) for one in qkv.values] == [Scaled, Dense, Scaled]
    x = np.ones((3, qkv.values[0].values.shape[1]), np.float32)
    whole = qkv.multiply(x)
    assert whole.shape == (3, qkv.num_out)
    first = qkv.start("k")
    np.testing.assert_array_equal(qkv.multiply_from(x, first), whole[:, first:])
    save_model(mixed / "saved", model, params, mixed)
    loaded, expected = (load_model(one, FLOAT32)[1] for one in (mixed / "saved", plain))
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def test_scales_of_another_shape_or_none(checkpoints, folders_of, rewrite_tensors):
    other = {**FORMS["block"][0], "weight_block_size": [8, 8]}
    folder = checkpoints.copy(folders_of("llama", "block")[0], quantization_config=other)
    refusal(lambda: load_model(folder, FLOAT32), "weight_scale_inv must be [", "[8, 8]")
    folder, name = (
        checkpoints.copy(folders_of("llama", "block")[0]),
        "model.layers.0.mlp.up_proj.weight",
    )
    file = folder / "model.safetensors"
    scales = f"{name}_scale_inv"
    for bad in 0.0, -1.0, float("nan"):
        rewrite_tensors(file, lambda old, bad=bad: old | {scales: bad + 0 * old[scales]})
        refusal(lambda: load_model(folder, FLOAT32), f"{scales} has scales that are not positive")
    rewrite_tensors(file, lambda old: {n: x for n, x in old.items() if n != scales})
    refusal(lambda: load_model(folder, FLOAT32), f"without scales: {name}")
    folder = checkpoints.copy(folders_of("llama", "block")[0])
    nan = {name: torch.full((48, 32), torch.nan).to(torch.float8_e4m3fn)}
    rewrite_tensors(folder / "model.safetensors", lambda old: old | nan)
    refusal(lambda: load_model(folder, FLOAT32), "NaN or infinity", name)
