"""Plain checkpoints that are quantised while loading, compared with compressed-tensors."""

import weakref
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support.engines import generate_tokens, make_llm, random_prompts
from support.logits import causal_logits, hf_logits
from support.refusals import refusal

from specjax import LLM, SamplingParams
from specjax.checkpoint.demo import TARGET, demo_folder
from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.quantised.rounding import round_matrices
from specjax.checkpoint.stored_tensor import StoredTensor
from specjax.cli import main
from specjax.device.models.registry import (
    describe_checkpoint,
    load_model,
    load_weights,
    read_config,
)
from specjax.device.weights.experts import ExpertMatrices
from specjax.device.weights.matrix import Dense
from specjax.device.weights.packed import Packed
from specjax.device.weights.scaled import Scaled
from specjax.device.weights.scaled_experts import ScaledExperts
from specjax.device.weights.stored import dequantise
from specjax.device.weights.weight import is_weight
from specjax.serving.memory import weight_bytes
from specjax.serving.source import open_model

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
AutoModelForCausalLM = pytest.importorskip("transformers").AutoModelForCausalLM
from support.quantised import FORMS, compressed  # noqa: E402

pytestmark = pytest.mark.usefixtures("small_test")
FLOAT32 = np.dtype(np.float32)
WIDE = {"hidden_size": 128, "intermediate_size": 192}
TOOLS = {
    "fp8": compressed("float-quantized", type="float", num_bits=8, strategy="channel"),
    "int8": FORMS["int-channel"],
    "int4": FORMS["pack-128"],
}


def in_memory(array, path="file"):
    return SimpleNamespace(path=path, dtype=array.dtype, shape=array.shape, read=lambda: array)


@pytest.mark.parametrize("bits", TOOLS)
def test_numbers_and_scales_are_those_of_the_tool(bits):
    """Only ties may be rounded differently, because XLA divides differently. One row is zero."""
    weight = np.random.default_rng(0).normal(0, 0.1, (24, 256)).astype(np.float32)
    weight[3], weight[5, 7] = 0, 9.0
    stored, meant = TOOLS[bits].write(torch.tensor(weight))
    files = round_matrices(TensorFiles("f", {"w": in_memory(weight)}), ["w"], bits, FLOAT32)
    made = files.files.tensors["w"]
    numbers, scales = np.asarray(made.weight.read()), made.scales.read()
    expected = stored["weight_packed" if bits == "int4" else "weight"]
    assert numbers.dtype.name == str(expected.dtype).removeprefix("torch.")
    assert numbers.shape == expected.shape
    used = np.arange(24) != 3
    np.testing.assert_allclose(scales[used], stored["weight_scale"].numpy()[used], rtol=2e-7)
    off = np.abs(np.asarray(made.read()) - meant.numpy()) / scales.repeat(256 // scales.shape[1], 1)
    assert np.mean(off > 1e-3) < 0.01 and off.max() < (33 if bits == "fp8" else 1.001)
    error = np.linalg.norm(meant.numpy() - weight) / np.linalg.norm(weight)
    assert files.matrices["w"].error == pytest.approx(error, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, bits, expected",
    [
        ("llama", "int4", {Packed, Dense}),
        ("qwen3_moe", "fp8", {Scaled, ScaledExperts, Dense}),
        ("qwen3_next", "int8", {Scaled, ScaledExperts, Dense}),
        ("qwen3_moe", "int4", {Packed, ExpertMatrices, Dense}),
    ],
)
def test_projections_are_quantised_and_routers_are_not(checkpoints, kind, bits, expected):
    """All other weights are unchanged. The loaded size in bytes is known before loading."""
    folder = checkpoints.target(kind, **(WIDE if bits == "int4" else {})).folder
    model, lines = describe_checkpoint(folder, read_config(folder)), []
    plain = load_weights(folder, model, FLOAT32)
    made = load_weights(folder, model, FLOAT32, log=lines.append, quantization=bits)
    weights = jax.tree.leaves(made, is_leaf=is_weight)
    assert {type(x) for x in weights if is_weight(x)} - {type(made.embedding)} >= expected
    assert (
        f"{folder}: " in lines[0]
        and f"matrices are quantised to {bits}; the largest relative error is" in lines[0]
    )
    assert ("stay plain" in lines[0]) == (bits == "int4")  # 192 inputs, and experts
    limits = {"fp8": 0.04, "int8": 0.02, "int4": 0.15}
    for old, new in zip(*map(jax.tree.leaves, (plain, dequantise(made, FLOAT32))), strict=True):
        assert np.linalg.norm(old - new) <= limits[bits] * np.linalg.norm(old)
    specs = open_model(folder, quantization=bits).specs
    assert weight_bytes(specs, FLOAT32) == sum(x.nbytes for x in jax.tree.leaves(made))
    if kind == "qwen3_moe":
        router = made.layers[0].mlp.router
        np.testing.assert_array_equal(router.values, plain.layers[0].mlp.router.values)


@pytest.mark.nightly
def test_the_same_tokens_with_and_without_drafts(checkpoints):
    folder = checkpoints.target("llama", **WIDE).folder
    prompts, made = random_prompts(5, 20, 33, vocab_size=96), []
    params = [SamplingParams(temperature=t, seed=3, max_tokens=20) for t in (0.0, 0.8, 1.0)]
    for method in None, "ngram":
        with make_llm(folder, method, dtype="float32", quantization="int4") as llm:
            assert isinstance(llm.engine.params.target.layers[0].attention.qkv, Packed)
            made.append(generate_tokens(llm, prompts, params))
    assert made[0] == made[1]


@pytest.mark.slow
def test_the_plain_model_is_never_in_memory_as_a_whole(monkeypatch):
    """At most the tensors of the 4 arrays that are being read are in memory."""
    alive, most, read = weakref.WeakValueDictionary(), [0], StoredTensor.read

    def counted(self):
        array = read(self)
        alive[self.offset] = array
        most[0] = max(most[0], sum(x.nbytes for x in alive.values()))
        return array

    monkeypatch.setattr(StoredTensor, "read", counted)
    demo = demo_folder(TARGET)
    model = describe_checkpoint(demo, read_config(demo))
    made = load_weights(demo, model, FLOAT32, quantization="int8")
    assert 0 < most[0] < 0.5 * sum(x.nbytes for x in jax.tree.leaves(made))


def test_what_cannot_be_quantised_is_refused(checkpoints, rewrite_tensors):
    folder = checkpoints.target("llama").folder
    refusal(lambda: LLM(folder, quantization="fp4"), "'fp4' is not supported", "fp8, int8, int4")
    config = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    other = checkpoints.copy(folder, quantization_config=config)
    refusal(lambda: LLM(other, quantization="fp8"), "quantization_config", "quantised already")
    value = open_model(folder).target
    refusal(lambda: LLM(value, params={}, quantization="fp8"), "needs a checkpoint")
    words = "quantization='int4' changes no matrix", "multiple of 128"
    refusal(lambda: LLM(folder, quantization="int4"), *words)
    name, bad = "model.layers.1.mlp.up_proj.weight", checkpoints.copy(folder)
    rewrite_tensors(bad / "model.safetensors", lambda old: old | {name: old[name] / 0})
    refusal(lambda: load_weights(bad, value, FLOAT32, quantization="int8"), name, "NaN or inf")


@pytest.mark.slow
@pytest.mark.parametrize("bits", TOOLS)
def test_a_written_folder(checkpoints, tmp_path, capsys, bits):
    """transformers computes our logits from it, and engines the tokens of `quantization`."""
    source = checkpoints.with_letters(checkpoints.target("llama", **WIDE).folder)
    assert main(["quantize", str(source), str(tmp_path), "--quantization", bits]) == 0
    assert f"quantised to {bits}; the largest" in capsys.readouterr().out
    assert (tmp_path / "tokenizer.json").exists()
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 24))
    np.testing.assert_allclose(hf_logits(hf, tokens), causal_logits(tmp_path, tokens), atol=1e-4)
    model = describe_checkpoint(source, read_config(source))
    made = load_weights(source, model, FLOAT32, quantization=bits)
    jax.tree.map(np.testing.assert_array_equal, made, load_model(tmp_path, FLOAT32)[1])
    again = ["quantize", str(source), str(tmp_path), "--quantization", bits]
    assert main(again) == 2 and "has weights; name a new folder" in capsys.readouterr().err
    assert main([again[0], str(tmp_path), f"{tmp_path}/x", *again[3:]]) == 2
    assert "quantised already" in capsys.readouterr().err
