"""Weights in 4 bits and in 8-bit integers, compared with each format's own tool or definition."""

import json
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest
from support.engines import generate_tokens, make_llm, random_prompts
from support.logits import causal_logits, hf_logits
from support.refusals import refusal

from specjax import SamplingParams
from specjax.checkpoint.quantised.registry import FORMATS
from specjax.cli import main
from specjax.config import SpeculativeConfig
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.registry import load_model
from specjax.device.weights.experts import ExpertMatrices
from specjax.device.weights.matrix import Dense
from specjax.device.weights.mixed import Mixed
from specjax.device.weights.packed import Packed
from specjax.device.weights.packed_experts import PackedExperts
from specjax.device.weights.scaled import Scaled
from specjax.device.weights.stored import dequantise
from specjax.device.weights.weight import is_weight
from specjax.serving.memory import weight_bytes
from specjax.serving.source import open_model

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
AutoModelForCausalLM = pytest.importorskip("transformers").AutoModelForCausalLM
from support.quantised import FORMS, folders  # noqa: E402

FLOAT32 = np.dtype(np.float32)
SIZES = {
    "llama": {"hidden_size": 128, "intermediate_size": 192},
    "qwen3_moe": {"moe_intermediate_size": 32},
}


@pytest.fixture(scope="module")
def folders_of(checkpoints):
    """See `support.quantised.folders`."""
    return cache(partial(folders, checkpoints))


def kinds_of(params):
    """Return the classes of all weights, including the parts of merged weights."""
    leaves = jax.tree.leaves(params, is_leaf=is_weight)
    parts = [part for x in leaves if isinstance(x, Mixed) for part in x.values]
    return {type(x) for x in [*leaves, *parts]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, form, dtype, expected",
    [
        ("llama", "pack-32", "float32", Packed),
        ("llama", "pack-64", "float32", Packed),
        ("llama", "pack-128", "bfloat16", Packed),
        ("llama", "pack-channel", "float32", Packed),
        ("llama", "pack-8", "float32", Scaled),
        ("phi3", "int-channel", "bfloat16", Scaled),
        ("qwen3_next", "int-tensor", "float32", Scaled),
        ("qwen3_next", "pack-channel", "bfloat16", Packed),
        ("qwen3_next", "mxfp4", "bfloat16", Packed),
        ("llama", "nvfp4", "bfloat16", Packed),
        ("qwen3_5_text", "modelopt", "bfloat16", Packed),
        ("deepseek_v3", "awq", "bfloat16", Packed),
        ("deepseek_v3", "int-tensor", "float32", Scaled),  # experts and latents, too
        ("qwen3_moe", "awq", "float32", PackedExperts),
        ("qwen3_moe", "nvfp4", "bfloat16", PackedExperts),
        ("qwen3_moe", "gptq", "float32", PackedExperts),
        ("llama", "gptq", "float32", Packed),
        ("llama", "gptq-order", "float32", Packed),
        ("qwen3_5_text", "gptq-v2", "float32", Packed),
    ],
)
def test_they_stay_packed_and_mean_what_their_tool_says(folders_of, kind, form, dtype, expected):
    """Weights equal the tool's bit for bit. The loaded size in bytes is known before loading."""
    loaded = []
    for folder in folders_of(kind, form, **SIZES.get(kind, {})):
        model, params = load_model(folder, np.dtype(dtype))
        if kind in ("qwen3_5_text", "deepseek_v3"):
            config = SpeculativeConfig(method="mtp", num_speculative_tokens=1)
            params = params, load_drafter(folder, config, model, np.dtype(dtype))[1]
        loaded.append(params)
    assert expected in kinds_of(loaded[0]) and kinds_of(loaded[1]).isdisjoint({Packed, Scaled})
    assert expected != PackedExperts or ExpertMatrices not in kinds_of(loaded[0])
    jax.tree.map(np.testing.assert_array_equal, dequantise(loaded[0], dtype), loaded[1])
    if not isinstance(loaded[0], tuple):
        bytes_ = sum(x.nbytes for x in jax.tree.leaves(loaded[0]))
        source = open_model(folders_of(kind, form, **SIZES.get(kind, {}))[0])
        assert weight_bytes(source.specs, dtype) == bytes_


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, form",
    [
        *(("llama", "pack-32"), ("llama", "gptq-order"), ("qwen3_5_text", "awq")),
        *(("qwen2", "modelopt"), ("qwen3_moe", "pack-64")),
    ],
)
def test_logits_are_those_of_the_model_that_they_stand_for(folders_of, kind, form):
    narrow, plain = folders_of(kind, form)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 24))
    hf = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    np.testing.assert_allclose(causal_logits(narrow, tokens), hf_logits(hf, tokens), atol=1e-4)


@pytest.mark.slow
def test_the_same_tokens_with_and_without_drafts(folders_of):
    """Requests at several temperatures, on a hybrid model whose MTP module is also packed."""
    folder = folders_of("qwen3_5_text", "awq")[0]
    prompts = random_prompts(5, 20, 33, vocab_size=96)
    params = [SamplingParams(temperature=t, seed=3, max_tokens=20) for t in (0.0, 0.8, 1.0)]
    made = []
    for method in None, "mtp":
        with make_llm(folder, method, dtype="float32") as llm:
            made.append(generate_tokens(llm, prompts, params))
    assert made[0] == made[1] and all(len(tokens) == 20 for tokens in made[0])


def test_info_counts_the_parameters_of_a_packed_drafter(folders_of, capsys):
    counts = []
    for folder in folders_of("qwen3_5_text", "awq"):
        assert main(["info", str(folder), "--method", "mtp", "--k", "1", "--json"]) == 0
        counts.append(json.loads(capsys.readouterr().out)["drafter"]["num_parameters"])
    assert counts[0] == counts[1]


def test_what_is_unpacked_is_said(folders_of):
    lines = []
    load_model(folders_of("deepseek_v3", "awq")[0], FLOAT32, log=lines.append)
    (said,) = [line for line in lines if "are unpacked to float32" in line]
    assert "kv_b_proj" in said


# --- what does not fit ----------------------------------------------------------------------------

STEM = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def damaged(checkpoints, folders_of, rewrite_tensors):
    """Return a function that loads a small Llama after changes to its first matrix's tensors."""

    def load(form, change, **config):
        folder = checkpoints.copy(folders_of("llama", form)[0], **config)

        def edit(tensors):
            own = {n: x for n, x in tensors.items() if n.startswith(STEM)}
            others = {n: x for n, x in tensors.items() if n not in own}
            made = change({n.removeprefix(f"{STEM}."): x for n, x in own.items()})
            return others | {f"{STEM}.{n}": x.contiguous() for n, x in made.items()}

        rewrite_tensors(folder / "model.safetensors", edit)
        lines = []
        return lambda: load_model(folder, FLOAT32, log=lines.append), lines

    return load


SCALES = {"pack-32": "weight_scale", "awq": "scales", "gptq-order": "scales"}


@pytest.mark.parametrize("form", SCALES)
def test_scales_that_are_missing_or_no_scales(damaged, form):
    name = SCALES[form]
    refusal(damaged(form, lambda x: {n: y for n, y in x.items() if n != name})[0], f"{STEM}.{name}")
    for bad in 0.0, -1.0, float("nan"):
        load, _ = damaged(form, lambda x, bad=bad: x | {name: 0 * x[name] + bad})
        refusal(load, f"{STEM}.{name} has scales that are not positive")
    load, _ = damaged(form, lambda x: x | {name: x[name][:, :-3]})
    refusal(load, f"{STEM}.{name} must be [", "got [")


@pytest.mark.parametrize("form", ["fp8", "awq"])
def test_a_module_that_lacks_scales_is_named(checkpoints, folders_of, rewrite_tensors, form):
    folder, lost = checkpoints.copy(folders_of("qwen3_5_text", form)[0]), []

    def lose(tensors):
        lost.extend(name for name in tensors if name.startswith("mtp.") and "scale" in name)
        return {name: x for name, x in tensors.items() if name != lost[0]}

    rewrite_tensors(folder / "model.safetensors", lose)
    config = SpeculativeConfig(method="mtp", num_speculative_tokens=1)

    def load():
        load_drafter(folder, config, load_model(folder, FLOAT32)[0], FLOAT32)

    refusal(load, lost[0].rpartition(".")[0])


def test_groups_that_do_not_cover(damaged):
    load, _ = damaged("gptq-order", lambda x: x | {"g_idx": 0 * x["g_idx"]})
    refusal(load, f"{STEM}.g_idx must give each of 2 groups 16 inputs")


def test_config_and_tensors_of_different_kinds(damaged, checkpoints, folders_of):
    """Quantised tensors without a quantization_config are an error; the reverse is only logged."""
    load, _ = damaged("awq", dict, quantization_config=None)
    refusal(load, "belongs to a quantised matrix", "no quantization_config")
    plain = folders_of("llama", "awq")[1]
    lines, config = [], FORMS["awq"].config
    load_model(checkpoints.copy(plain, quantization_config=config), FLOAT32, log=lines.append)
    assert any("no tensor is" in line for line in lines)


@pytest.mark.parametrize(
    "given",
    [
        {"quant_method": "gptq", "bits": 3, "group_size": 128},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ],
)
def test_other_formats_are_named_with_what_is_supported(checkpoints, folders_of, given):
    folder = checkpoints.copy(folders_of("llama", "awq")[1], quantization_config=given)
    refusal(lambda: load_model(folder, FLOAT32), given["quant_method"], FORMATS[-1].described)


def test_parts_with_other_groups_keep_them(damaged):
    """If parts of a merged matrix have different group sizes, they are stored separately."""
    written: Any = FORMS["pack-channel"].write(torch.ones(32, 32))
    load, _ = damaged("pack-32", lambda x: written[0])
    qkv = load()[1].layers[0].attention.qkv
    assert [type(one) for one in qkv.values] == [Packed, Packed]
    x = np.ones((3, 32), np.float32)
    expected = x @ qkv.plain(FLOAT32).values
    np.testing.assert_allclose(qkv.multiply(x), expected, rtol=1e-5)
    np.testing.assert_allclose(qkv.multiply_from(x, 40), expected[:, 40:], rtol=1e-5)
    assert isinstance(qkv.plain(FLOAT32), Dense)
