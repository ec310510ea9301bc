"""Quantised weights over several devices stay quantised, and represent the same numbers."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from support.engines import SIZES, K, generate_tokens, make_llm, random_prompts, simulated_engines
from support.rollouts import copied
from support.shared_models import llama
from support.targets import VOCAB

from specjax import SamplingParams
from specjax.config import SpeculativeConfig
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.registry import (
    describe_checkpoint,
    load_model,
    load_weights,
    read_config,
)
from specjax.device.parallel import divide_params
from specjax.device.placement import Placement
from specjax.device.weights.matrix import Dense
from specjax.device.weights.packed import Packed
from specjax.device.weights.scaled import Scaled
from specjax.device.weights.stored import dequantise
from specjax.device.weights.weight import is_weight
from specjax.rl import RolloutEngine

pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
from support.quantised import folders  # noqa: E402

pytestmark = pytest.mark.usefixtures("small_test")
FLOAT32 = np.dtype(np.float32)
WIDE = {"hidden_size": 64, "intermediate_size": 192}
NARROW = {"head_dtype": "fp8", "quantization": "int8"}
THREE = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, form, count, config",
    [
        ("llama", "pack-32", 2, WIDE),
        # The last device has heads of zeros; inputs of a group are not adjacent.
        ("llama", "gptq-order", 2, {**WIDE, **THREE, "hidden_size": 96}),
        ("llama", "awq", 4, {**WIDE, "head_dim": 16}),
        ("qwen3_5_text", "fp8", 2, {"intermediate_size": 64, "linear_value_head_dim": 16}),
        (
            *("deepseek_v3", "fp8", 2),
            {"intermediate_size": 64, "moe_intermediate_size": 64}
            | {"qk_nope_head_dim": 32, "v_head_dim": 16},
        ),
        ("qwen3_moe", "fp8", 4, {"moe_intermediate_size": 64, "head_dim": 16}),
        ("qwen3_moe", "awq", 2, {"moe_intermediate_size": 64, "head_dim": 16}),
    ],
)
def test_parts_are_those_of_the_weights_that_they_stand_for(checkpoints, kind, form, count, config):
    """Parts equal the dequantised weights' parts bit for bit, and stay quantised."""
    lines, loaded = [], []
    placement = Placement.on(*jax.devices()[:count])
    for folder in folders(checkpoints, kind, form, **config):
        model, params = load_model(folder, FLOAT32, placement, lines.append)
        if kind in ("qwen3_5_text", "deepseek_v3"):
            given = SpeculativeConfig(method="mtp", num_speculative_tokens=1), model, FLOAT32
            params = params, load_drafter(folder, *given, placement)[1]
        loaded.append(params)
    kinds = {type(x) for x in jax.tree.leaves(loaded[0], is_leaf=is_weight)}
    assert kinds & {Packed, Scaled} and not any("unpacked" in line for line in lines)
    jax.tree.map(np.testing.assert_array_equal, dequantise(loaded[0], FLOAT32), loaded[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, bits, count, config",
    [
        ("llama", "int4", 2, {"hidden_size": 256, "intermediate_size": 384}),  # 192 inputs each
        ("qwen3_moe", "fp8", 4, {}),
        pytest.param("deepseek_v3", "int8", 2, {}, marks=pytest.mark.slow),
    ],
)
def test_plain_weights_are_rounded_as_on_one_device(checkpoints, kind, bits, count, config):
    """The divided numbers are equal bit for bit, also after an update."""
    folder = checkpoints.target(kind, **config).folder
    model: Any = describe_checkpoint(folder, read_config(folder))
    divided, placement = replace(model, num_devices=count), Placement.on(*jax.devices()[:count])
    whole = load_weights(folder, model, FLOAT32, quantization=bits)
    expected = divide_params(divided, dequantise(whole, FLOAT32), placement)
    made = load_weights(folder, divided, FLOAT32, placement, quantization=bits)
    assert {n for x in jax.tree.leaves(made, is_leaf=is_weight) if is_weight(x) for n in x.numbers}
    jax.tree.map(np.testing.assert_array_equal, dequantise(made, FLOAT32), expected)


@pytest.mark.slow
def test_updates_and_copies_are_rounded_as_on_one_device(checkpoints):
    """This holds for a target, a drafter, and the drafter's copy of the head."""
    target, made = llama(checkpoints), []
    config = {"method": "eagle", "model": str(checkpoints.eagle(target).folder)}
    config |= {"num_speculative_tokens": K}
    kinds = {"quantization": "int8"}, {"head_dtype": "fp8", "quantization": "fp8"}
    for count in 1, 2:
        for own, narrow in zip(({}, kinds[0]), (kinds[1], {}), strict=True):
            given = {**SIZES, **own, "tensor_parallel_size": count}
            with (
                simulated_engines(),
                RolloutEngine(target.folder, speculative_config=config | narrow, **given) as one,
            ):
                assert (one.params.head is None) == (not narrow)
                before = copied(one.params)
                one.update_weights(target.folder)  # as loaded
                jax.tree.map(np.testing.assert_array_equal, one.params, before)
                made.append((one.drafter.weights, dequantise(one.params, FLOAT32)))
    for (_, whole), (head, parts) in zip(made[:2], made[2:], strict=True):
        placement = Placement.on(*jax.devices()[:2])
        divided = divide_params(head, whole.drafter, placement)
        jax.tree.map(np.testing.assert_array_equal, divided, parts.drafter)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, form, config, options",
    [
        ("llama", "gptq-order", WIDE, {"tensor_parallel_size": 2}),
        pytest.param(
            *("qwen3_5_text", "awq", {}, {"tensor_parallel_size": 2, "kv_cache_dtype": "int8"}),
            marks=pytest.mark.nightly,
        ),
        # Its parts are compared bit for bit above, and its experts' tokens in test_families.py.
        pytest.param(
            *("deepseek_v3", "fp8", {}),
            {"tensor_parallel_size": 4, "enable_expert_parallel": True},
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *("qwen3_5_text", None, {}, {"tensor_parallel_size": 2, "speculation": NARROW}),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_tokens_of_one_device(checkpoints, kind, form, config, options):
    """A quantised MTP module makes drafts, and some of them are accepted."""
    folder = folders(checkpoints, kind, form or "awq", **config)[form is None]
    method = "ngram" if kind == "llama" else "mtp"
    prompts = random_prompts(5, 20, 33, vocab_size=VOCAB)
    params = [SamplingParams(temperature=t, seed=3, max_tokens=16) for t in (0.0, 0.8, 1.0)]
    found = []
    sizes = {"tensor_parallel_size": 1, "enable_expert_parallel": False}
    for given in options | sizes, options:
        with make_llm(folder, method, k=K, dtype="float32", **given) as llm:
            tokens, metrics = generate_tokens(llm, prompts, params), llm.metrics()
            found.append((tokens, metrics.num_draft_tokens, metrics.num_accepted_tokens))
    assert found[0] == found[1]


def test_what_cannot_be_cut_is_unpacked_and_said(checkpoints):
    """A device would have half of a group of 16 inputs."""
    lines, loaded, placement = [], [], Placement.on(*jax.devices()[:2])
    for folder in folders(checkpoints, "llama", "awq"):
        loaded.append(load_model(folder, FLOAT32, placement, lines.append)[1])
    assert {type(x.mlp.down) for x in loaded[0].layers} == {Dense}
    assert {type(x.mlp.inner) for x in loaded[0].layers} == {Packed}
    jax.tree.map(np.testing.assert_array_equal, dequantise(loaded[0], FLOAT32), loaded[1])
    (said,) = lines
    assert "2 quantised tensors" in said and "mlp.down_proj" in said
