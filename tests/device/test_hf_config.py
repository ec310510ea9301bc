"""Configs and weights that a model cannot be made of are refused by field or tensor name."""

import json

import numpy as np
import pytest
from support.targets import CONFIG_SIZES, LATENT_SIZES

from specjax.checkpoint.errors import CheckpointError
from specjax.config import EngineConfig
from specjax.device.drafters.drafter import NoDrafter, Params
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.registry import describe_model, load_model
from specjax.engine.compiled import CompiledPrograms
from specjax.engine.engine import Engine
from specjax.host.speculation.policy import StaticPolicy

FLOAT32 = np.dtype(np.float32)
DELTA, ATTENTION = "linear_attention", "full_attention"
HYBRIDS = ["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"]
SIZES = CONFIG_SIZES | {"head_dim": 16}


def described(kind, nested=None, **fields):
    """The model of a config; fields lie in its text part where there would be one."""
    nested = kind in ("qwen3_5", "qwen3_5_moe") if nested is None else nested
    config = SIZES | fields
    config = {"text_config": config} if nested else config
    return describe_model(HFConfig({"model_type": kind, **config}, "there/config.json"))


def refusal(do, *words):
    """The message of the CheckpointError that `do` must raise; it holds all `words`."""
    with pytest.raises(CheckpointError) as error:
        do()
    text = str(error.value)
    assert all(str(word) in text for word in words), text


BAD_FIELDS = [
    ({"layer_types": [ATTENTION] * 3 + [DELTA], "full_attention_interval": 4}, ["interval=4"]),
    ({"layer_types": [DELTA] * 3 + [ATTENTION], "full_attention_interval": 2}, ["interval=2"]),
    ({"layer_types": [DELTA] * 3 + ["sliding_attention"]}, ["sliding_attention"]),
    ({"layer_types": [DELTA] * 3}, ["num_hidden_layers=4"]),
    ({"layer_types": [DELTA] * 5}, ["num_hidden_layers=4"]),
    ({"layer_types": []}, ["num_hidden_layers=4"]),
    ({"full_attention_interval": 0}, []),
    ({"linear_num_value_heads": 6, "linear_num_key_heads": 4}, ["=6", "linear_num_key_heads=4"]),
    ({"linear_num_key_heads": 0}, []),
    ({"linear_conv_kernel_dim": -1}, []),
    ({"quantization_config": {"quant_method": "fp8"}}, ["fp8"]),
    ({"attn_output_gate": False}, ["False", "True"]),
    ({"attention_bias": True}, ["True"]),
    ({"use_sliding_window": True}, ["True"]),
    ({"hidden_act": "gelu"}, ["'gelu'", "'silu'"]),
    ({"mamba_ssm_dtype": "bfloat16"}, ["'bfloat16'", "'float32'"]),
    ({"output_gate_type": "sigmoid"}, ["'sigmoid'", "'swish'"]),
    ({"mtp_use_dedicated_embeddings": True}, ["True"]),
    ({"partial_rotary_factor": 0.1}, ["0.1", "even", "16"]),
    ({"partial_rotary_factor": 0}, ["even"]),
    ({"partial_rotary_factor": 1.25}, ["1.25", "16"]),
    ({"partial_rotary_factor": -0.5}, ["-0.5"]),
    ({"num_hidden_layers": None}, ["positive"]),
    ({"vocab_size": "many"}, ["'many'"]),
]


@pytest.mark.parametrize("fields, words", BAD_FIELDS, ids=lambda x: str(x)[:60])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_field_that_a_hybrid_model_cannot_have(kind, fields, words):
    described(kind)
    refusal(lambda: described(kind, **fields), "there/config.json", next(iter(fields)), *words)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_quantised_weights_beside_a_nested_config(kind):
    fields = {"model_type": kind, "text_config": SIZES}
    fields["quantization_config"] = {"quant_method": "fp8"}
    refusal(lambda: describe_model(HFConfig(fields, "config.json")), "quantization_config", "fp8")


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"num_experts_per_tok": 9, "num_experts": 8}, ["num_experts_per_tok=9", "num_experts=8"]),
        ({"num_experts": -2}, ["num_experts", "-2"]),
        ({"moe_intermediate_size": 0}, ["moe_intermediate_size"]),
        ({"shared_expert_intermediate_size": 1.5}, ["shared_expert_intermediate_size", "1.5"]),
    ],
)
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"])
def test_a_mixture_that_cannot_be(kind, fields, words):
    refusal(lambda: described(kind, **fields), *words)


def latent(kind="deepseek_v3", **fields):
    return described(kind, **{**LATENT_SIZES, "num_hidden_layers": 4, **fields})


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"attention_bias": True}, ["attention_bias=True"]),
        ({"num_key_value_heads": 2}, ["num_key_value_heads=2", "4"]),
        ({"scoring_func": "softmax"}, ["scoring_func='softmax'", "sigmoid"]),
        ({"topk_method": "greedy"}, ["topk_method='greedy'"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq=2"]),
        ({"n_group": 3}, ["n_group=3", "n_routed_experts=8"]),
        ({"n_group": 8, "topk_group": 8}, ["n_group=8", "two or more"]),
        ({"n_group": 2, "topk_group": 3}, ["topk_group=3", "n_group=2"]),
        ({"n_group": 4, "topk_group": 1}, ["num_experts_per_tok=3", "2 experts"]),
        ({"q_lora_rank": 0}, ["q_lora_rank", "0"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        ({"first_k_dense_replace": -1}, ["first_k_dense_replace"]),
    ],
    ids=lambda x: str(x)[:60],
)
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe_lite"])
def test_a_field_that_latent_attention_cannot_have(kind, fields, words):
    latent(kind)
    refusal(lambda: latent(kind, **fields), "there/config.json", *words)


def test_which_layers_of_latent_attention_are_dense():
    assert latent().dense_layers == (0, 1, 2)
    assert latent(first_k_dense_replace=0).dense_layers == ()
    assert latent("glm4_moe_lite", first_k_dense_replace=1).dense_layers == (0,)
    types = ["sparse", "dense", "sparse", "dense"]
    assert latent("glm4_moe_lite", mlp_layer_types=types).dense_layers == (1, 3)
    for bad in types[1:], "dense", ["linear"] * 4:
        refusal(lambda bad=bad: latent("glm4_moe_lite", mlp_layer_types=bad), "mlp_layer_types")
    refusal(lambda: latent("glm4_moe_lite", first_k_dense_replace=2), "first_k_dense_replace=2")


ROPE = "rope_parameters"
BAD_GEMMAS = [
    ("gemma2", {"hidden_activation": "gelu"}, ["'gelu'", "'gelu_pytorch_tanh'"]),
    ("gemma2", {"final_logit_softcapping": -30.0}, ["-30.0", "positive"]),
    ("gemma2", {"query_pre_attn_scalar": 0}, ["0", "positive"]),
    ("gemma3_text", {"use_bidirectional_attention": True}, ["True", "later tokens", "without"]),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, ["50.0", "without"]),
    ("gemma3_text", {"sliding_window": None}, ["sliding_attention"]),
    ("gemma3_text", {"sliding_window_pattern": 0}, ["0", "positive"]),
    ("gemma3_text", {ROPE: {"rope_type": "linear", "factor": 2.0}}, ["full_attention", "2.0"]),
    ("gemma3_text", {ROPE: {ATTENTION: 5}}, ["full_attention must be an object", "5"]),
    (
        "gemma3_text",
        {ROPE: {"sliding_attention": {"rope_type": "ntk"}}},
        ["sliding_attention", "'ntk'"],
    ),
    ("gemma3_text", {"rope_local_base_freq": "1e4"}, ["'1e4'", "positive"]),
    ("arcee", {"hidden_act": "silu"}, ["'silu'", "'relu2'"]),
]


@pytest.mark.parametrize("kind, fields, words", BAD_GEMMAS, ids=lambda x: str(x)[:60])
def test_a_field_that_gemma_and_arcee_cannot_have(kind, fields, words):
    described(kind)
    refusal(lambda: described(kind, **fields), "there/config.json", next(iter(fields)), *words)


@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling", None])
def test_llama_rotates_whole_heads(where):
    fields = {"partial_rotary_factor": 0.5}
    fields = fields if where is None else {where: fields}
    refusal(lambda: described("llama", **fields), "partial_rotary_factor=0.5", "whole heads")


def test_the_part_of_a_head_that_is_rotated():
    parts = {"partial_rotary_factor": 0.5, "rope_theta": 5e3}
    assert described("qwen3_next").rope.head_dim == 4
    assert described("qwen3_next", **parts).rope.head_dim == 8
    model = described("qwen3_next", partial_rotary_factor=0.75, rope_parameters=parts)
    assert (model.rope.head_dim, model.rope.theta) == (8, 5e3)
    assert described("llama", partial_rotary_factor=1.0).rope.head_dim == 16


def test_layers_told_by_interval_or_by_name():
    by_default, by_interval = described("qwen3_5_text"), described("qwen3_5", num_hidden_layers=6)
    assert by_default.layer_types == (DELTA,) * 3 + (ATTENTION,)
    assert by_interval.layer_types == (DELTA,) * 3 + (ATTENTION,) + (DELTA,) * 2
    types = [ATTENTION, DELTA, DELTA, ATTENTION]
    assert described("qwen3_next", layer_types=types).layer_types == tuple(types)


def test_which_layers_have_experts():
    def dense(kind, **fields):
        model = described(kind, **fields)
        return None if model.experts is None else model.dense_layers

    assert dense("qwen3_next") == dense("qwen3_5_moe_text") == ()
    assert dense("qwen3_next", mlp_only_layers=[1]) == (1,)
    assert dense("qwen3_next", mlp_only_layers=[1], decoder_sparse_step=2) == (0, 1, 2)
    assert dense("qwen3_next", num_experts=0) is None
    assert dense("qwen3_5_text") is None


@pytest.mark.parametrize(
    "outer, inner, is_tied",
    [(True, None, True), (None, True, True), (True, False, True), (False, True, False)],
)
def test_the_outer_config_says_whether_the_head_is_tied(outer, inner, is_tied):
    text = SIZES | {"tie_word_embeddings": inner}
    fields = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": outer}
    assert describe_model(HFConfig(fields, "config.json")).tie_word_embeddings == is_tied


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "conv1d.weight"])
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_a_missing_tensor(checkpoints, rewrite_tensors, kind, name):
    folder = checkpoints.copy(checkpoints.target(kind).folder)
    prefix = "model.language_model" if kind == "qwen3_5" else "model"
    name = f"{prefix}.layers.0.linear_attn.{name}"

    def drop(tensors):
        return {key: x for key, x in tensors.items() if key != name}

    rewrite_tensors(folder / "model.safetensors", drop)
    refusal(lambda: load_model(folder, FLOAT32), "missing", name)


@pytest.mark.parametrize("single, fused", [("up_proj", "gate_up_proj"), ("down_proj", "down_proj")])
def test_mixed_layouts_of_experts(checkpoints, rewrite_tensors, single, fused):
    import torch

    target = checkpoints.fused(checkpoints.target("qwen3_5_moe_text"))
    folder, prefix = checkpoints.copy(target.folder), "model.layers.1.mlp.experts"
    one = f"{prefix}.0.{single}.weight"
    rewrite_tensors(folder / "model.safetensors", lambda old: old | {one: torch.zeros(24, 32)})
    refusal(lambda: load_model(folder, FLOAT32), one, f"{prefix}.gate_up_proj")


@pytest.mark.parametrize("fused", ["gate_up_proj", "down_proj"])
def test_half_of_the_fused_experts(checkpoints, rewrite_tensors, fused):
    target = checkpoints.fused(checkpoints.target("qwen3_5_moe_text"))
    folder, name = checkpoints.copy(target.folder), f"model.layers.1.mlp.experts.{fused}"

    def drop(tensors):
        return {key: x for key, x in tensors.items() if key != name}

    rewrite_tensors(folder / "model.safetensors", drop)
    refusal(lambda: load_model(folder, FLOAT32), "missing", name)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.linear_attn.conv1d.bias",
        "model.language_model.layers.0.linear_attn.conv1d.bias",
        "model.language_model.visual.blocks.0.attn.proj.bias",
        "mtpx.fc.weight",
        "head.weight",
    ],
)
def test_tensors_beside_the_vision_tower_are_unexpected(checkpoints, rewrite_tensors, name):
    import torch

    target = checkpoints.target("qwen3_5")
    held = load_model(target.folder, FLOAT32)[0]
    folder = checkpoints.copy(target.folder)
    assert held.hidden_size == 32
    for ignored in "model.visual.more.weight", "visual.more.weight", "mtp.fc.weight":
        rewrite_tensors(
            folder / "model.safetensors", lambda old, new=ignored: old | {new: torch.zeros(2)}
        )
    load_model(folder, FLOAT32)
    rewrite_tensors(folder / "model.safetensors", lambda old: old | {name: torch.zeros(2)})
    refusal(lambda: load_model(folder, FLOAT32), "unexpected", name)


def test_a_tower_alone_does_not_make_its_names_the_models(checkpoints):
    """The prefix of the text part is told by its tensors, not by the config's nesting."""
    target = checkpoints.target("qwen3_5_text")
    config = json.loads((target.folder / "config.json").read_text())
    folder = checkpoints.copy(
        target.folder, model_type="qwen3_5", text_config=config, vision_config={}
    )
    assert load_model(folder, FLOAT32)[0] == load_model(target.folder, FLOAT32)[0]


# --- the ring of recurrent states -----------------------------------------------------------------


def test_more_drafts_than_the_ring_was_sized_for(checkpoints, monkeypatch):
    monkeypatch.setattr(CompiledPrograms, "compile_ahead", lambda *_, **__: None)
    for kind in "qwen3_5_text", "llama":
        model, params = load_model(checkpoints.target(kind).folder, FLOAT32)
        config = EngineConfig(
            max_model_len=32, max_num_seqs=1, max_num_batched_tokens=16, num_pages=8
        )
        engine = Engine(config, model, NoDrafter(), Params(params, None), StaticPolicy(2))
        engine.set_policy(StaticPolicy(1))
        engine.set_policy(StaticPolicy(2))
        if kind == "llama":
            engine.set_policy(StaticPolicy(3))
            continue
        with pytest.raises(ValueError, match="K=3 does not fit.*2 drafts.*num_speculative_tokens"):
            engine.set_policy(StaticPolicy(3))
        assert engine.scheduler.policy == StaticPolicy(2)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"text_config": 5}, "text_config must be an object, got 5"),
        ({"layer_types": 5}, "layer_types must name .* got 5"),
        ({"layer_types": [["linear_attention"]] * 4}, "layer_types must name"),
        ({"mtp_num_hidden_layers": "2"}, "mtp_num_hidden_layers must be a positive integer"),
    ],
)
def test_fields_of_other_types(fields, message):
    fields = SIZES | {"model_type": "qwen3_5"} | fields
    with pytest.raises(CheckpointError, match=message):
        describe_model(HFConfig(fields, "config.json"))
