"""Unusable configs and weights are refused, and the error names the field or tensor."""

import json
import math

import numpy as np
import pytest
from support.configs import described
from support.refusals import label, refusal
from support.targets import CONFIG_SIZES, LATENT_KINDS

from specjax.config import EngineConfig
from specjax.device.drafters.drafter import NoDrafter, Params
from specjax.device.models.config_fields import CHANGES, READ
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.registry import KINDS, describe_model, load_model
from specjax.engine.compiled import CompiledPrograms
from specjax.engine.engine import Engine
from specjax.host.speculation.policy import StaticPolicy

FLOAT32 = np.dtype(np.float32)
DELTA, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
ROPE = "rope_parameters"
MANY = 10**9  # layers or experts that would take a long time to list
HYBRIDS = "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"
MIXTURES = "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}

# What models of several kinds cannot have, and what the error says besides the first field's name.
REFUSED = [
    (
        HYBRIDS,
        [
            ({"layer_types": [FULL] * 3 + [DELTA], "full_attention_interval": 4}, "interval=4"),
            ({"layer_types": [DELTA] * 3 + [FULL], "full_attention_interval": 2}, "interval=2"),
            ({"layer_types": [DELTA] * 3 + [SLIDING]}, SLIDING),
            ({"layer_types": [DELTA] * 3}, "num_hidden_layers=4"),
            ({"layer_types": 5}, "got 5"),
            ({"full_attention_interval": 0}, ""),
            ({"linear_num_value_heads": 6, "linear_num_key_heads": 4}, "=6", "key_heads=4"),
            ({"mtp_num_hidden_layers": "2"}, "a positive integer"),
            *(({name: MANY}, "4096") for name in ("num_hidden_layers", "mtp_num_hidden_layers")),
            ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
            ({"attn_output_gate": False}, "False", "True"),
            ({"attention_bias": True}, "True"),
            ({"use_sliding_window": True}, "True"),
            ({"hidden_act": "gelu"}, "'gelu'", "'silu'"),
            ({"mamba_ssm_dtype": "bfloat16"}, "'bfloat16'", "'float32'"),
            ({"output_gate_type": "sigmoid"}, "'sigmoid'", "'swish'"),
            ({"mtp_use_dedicated_embeddings": True}, "True"),
            ({"partial_rotary_factor": 0.1}, "0.1", "even", "16"),
            ({"partial_rotary_factor": 0}, "even"),
            ({"partial_rotary_factor": 1.25}, "1.25", "16"),
            ({"vocab_size": "many"}, "'many'"),
        ],
    ),
    (
        MIXTURES,
        [
            ({"mlp_only_layers": 5}, "=5", "a list"),
            ({"num_experts_per_tok": 9, "num_experts": 8}, "num_experts_per_tok=9", "=8"),
            ({"num_experts": MANY}, "4096"),
            ({"moe_intermediate_size": 0}, ""),
            ({"shared_expert_intermediate_size": 1.5}, "1.5"),
        ],
    ),
    (
        LATENT_KINDS,
        [
            ({"attention_bias": True}, "attention_bias=True"),
            ({"num_key_value_heads": 2}, "num_key_value_heads=2", "4"),
            ({"scoring_func": "softmax"}, "scoring_func='softmax'", "sigmoid"),
            ({"topk_method": "greedy"}, "topk_method='greedy'"),
            ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
            ({"n_group": 3}, "n_group=3", "n_routed_experts=8"),
            ({"n_group": 8, "topk_group": 8}, "n_group=8", "two or more"),
            ({"topk_group": 3, "n_group": 2}, "topk_group=3", "n_group=2"),
            ({"topk_group": 1, "n_group": 4}, "num_experts_per_tok=3", "2 experts"),
            ({"q_lora_rank": 0}, "0"),
            *(({name: MANY}, "4096") for name in ("n_routed_experts", "num_nextn_predict_layers")),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
            ({"first_k_dense_replace": -1}, ""),
        ],
    ),
    (
        ["glm4_moe_lite"],
        [
            *(({"mlp_layer_types": x}, "") for x in (["dense"] * 3, "dense", ["linear"] * 4)),
            ({"first_k_dense_replace": 2}, "first_k_dense_replace=2"),
        ],
    ),
    (
        ["gemma2"],
        [
            ({"hidden_activation": "gelu"}, "'gelu'", "'gelu_pytorch_tanh'"),
            ({"final_logit_softcapping": -30.0}, "-30.0", "positive"),
            ({"query_pre_attn_scalar": 0}, "0", "positive"),
        ],
    ),
    (
        ["gemma3_text"],
        [
            ({"use_bidirectional_attention": True}, "True", "later tokens", "without"),
            ({"attn_logit_softcapping": 50.0}, "50.0", "without"),
            ({"sliding_window": None}, SLIDING),
            *(({"layer_types": x}, SLIDING, x) for x in ([[FULL], "x", FULL, FULL], [{}] * 4)),
            ({"num_hidden_layers": MANY}, "4096"),
            ({"sliding_window_pattern": 0}, "0", "positive"),
            ({ROPE: {"rope_type": "linear", "factor": 2.0}}, FULL, "2.0"),
            ({ROPE: {FULL: 5}}, f"{FULL} must be an object", "5"),
            ({ROPE: {SLIDING: {"rope_type": "ntk"}}}, SLIDING, "'ntk'"),
            ({"rope_local_base_freq": "1e4"}, "'1e4'", "positive"),
        ],
    ),
    (["arcee"], [({"hidden_act": "silu"}, "'silu'", "'relu2'")]),
    (
        ["qwen3"],
        [({"layer_types": [FULL] * 3 + [SLIDING]}, "use_sliding_window is false")],
    ),
    (
        ["qwen2", "qwen3"],
        [
            ({"max_window_layers": x, "use_sliding_window": True}, repr(x), "integer")
            for x in ("28", 2.5, -1, [1])
        ],
    ),
    (
        ["ministral"],
        [
            ({"layer_types": [FULL, SLIDING] * 2, "sliding_window": None}, "window is not set"),
            ({"layer_types": [SLIDING]}, "num_hidden_layers=4"),
        ],
    ),
    (["mistral"], [({"sliding_window": 0}, "0")]),
    (
        ["llama"],
        [
            ({"model_type": ["llama"]}, ""),
            ({"model_type": 3}, ""),
            *(({"rms_norm_eps": x}, "positive") for x in ("1e-6", -1e-6, True)),
            *(({"rope_theta": x}, "positive") for x in ("10000", 0)),
            ({"rope_scaling": "linear"}, "an object"),
            ({"rope_scaling": {"type": ["linear"]}}, "not supported"),
            ({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor"),
            ({ROPE: [1]}, "an object"),
            ({ROPE: {FULL: {}, SLIDING: None}}, f"each kind of layer ({FULL})"),
            ({"tie_word_embeddings": "no"}, "true or false"),
            ({"num_attention_heads": [4]}, "positive integer"),
            ({"num_key_value_heads": 3}, "must divide num_attention_heads=4"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5", "whole heads"),
            *(
                ({"partial_rotary_factor": x}, f"partial_rotary_factor={x!r}", "a number")
                for x in ("abc", math.nan, [1], True, 10**400)
            ),
            ({"num_hidden_layers": MANY}, "4096"),
            *(
                ({"rope_scaling": LLAMA3 | {"high_freq_factor": x}}, f"high_freq_factor={x}", "4.0")
                for x in (4.0, 1.0)
            ),
            *(
                ({name: {"partial_rotary_factor": 0.5, "rope_type": "default"}}, "whole heads")
                for name in (ROPE, "rope_scaling")
            ),
        ],
    ),
]


@pytest.mark.parametrize(
    "kind, fields, words",
    [(kind, fields, words) for kinds, rows in REFUSED for kind in kinds for fields, *words in rows],
    ids=label,
)
def test_a_field_that_a_model_cannot_have(kind, fields, words):
    described(kind)
    names = [] if "partial_rotary_factor" in str(fields) else [next(iter(fields))]
    text = refusal(lambda: described(kind, **fields), "there/config.json", *names, *words)
    assert "\n" not in text


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_fields_that_change_the_mathematics(name):
    value = [SLIDING] * 4 if name == "layer_types" else 30
    kind = next(kind for kind in READ if name not in READ[kind])
    words = "there/config.json", f"{name}={value!r}", CHANGES[name], f"{kind!r}"
    refusal(lambda: described(kind, **{name: value}), *words)


@pytest.mark.parametrize(
    "kind, near",
    [("mixtral", "mistral"), ("qwen2_moe", "qwen3_moe"), ("mamba2", None), ("olmo3", None)],
)
def test_another_model_type_is_told_its_kin(kind, near):
    text = refusal(lambda: described(kind), f"model_type={kind!r}", ", ".join(KINDS))
    assert text.endswith(f"did you mean {near!r}?" if near else KINDS[-1])


@pytest.mark.parametrize(
    "kind, fields, words",
    [
        ("mistral3", {"model_type": "olmo3"}, ("text_config", "model_type='olmo3'", "mistral3")),
        ("llava_next", {"model_type": "olmo3"}, ("model_type='llava_next'", "llava")),
        ("qwen3_5", 5, ("text_config must be an object, got 5",)),
    ],
)
def test_text_models_and_wholes_that_are_not_read(kind, fields, words):
    text = CONFIG_SIZES | fields if isinstance(fields, dict) else fields
    whole = HFConfig({"model_type": kind, "text_config": text}, "config.json")
    refusal(lambda: describe_model(whole), "config.json", *words)


FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
METHODS = [
    {"quant_method": "gptq"},
    {"quant_method": "fp8", "weight_block_size": [128]},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"},
    {"quant_method": "compressed-tensors"},
    *(
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": FLOAT8 | one}},
            **others,
        }
        for one, others in (
            ({"num_bits": 4}, {}),
            ({"symmetric": False}, {}),
            ({"strategy": "group"}, {}),
            ({}, {"sparsity_config": {"format": "sparse-24-bitmask"}}),
        )
    ),
    {"quant_method": "mxfp4"},
    "int8",
    {"bits": 8},
]


@pytest.mark.parametrize("given", METHODS, ids=str)
def test_quantised_weights_are_refused_by_their_method(given):
    """The quantization_config is in the config of the text model, or next to its `text_config`."""
    method = given["quant_method"] if "quant_method" in given else given
    words = "quantization_config", repr(method), "bfloat16"
    whole = {"model_type": "qwen3_5", "text_config": CONFIG_SIZES, "quantization_config": given}
    refusal(lambda: described("llama", quantization_config=given), *words)
    refusal(lambda: describe_model(HFConfig(whole, "config.json")), *words)


# --- weights --------------------------------------------------------------------------------------


DELTA_NAMES = "model.layers.0.linear_attn", "model.language_model.layers.0.linear_attn"
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture
def rewritten(checkpoints, rewrite_tensors):
    """Return a function that writes a model's folder without some tensors, or with more tensors."""
    torch = pytest.importorskip("torch")

    def write(kind, removed=(), added=()):
        target = checkpoints.target("qwen3_5_moe_text" if kind == "fused" else kind)
        target = checkpoints.fused(target) if kind == "fused" else target
        folder = checkpoints.copy(target.folder)

        def change(tensors):
            assert {*removed} <= tensors.keys()
            more = {name: torch.zeros(24, 32) for name in added}
            return {name: x for name, x in tensors.items() if name not in removed} | more

        rewrite_tensors(folder / "model.safetensors", change)
        return folder

    return write


@pytest.mark.parametrize(
    "kind, how, name, words",
    [
        ("qwen3_next", "removed", f"{DELTA_NAMES[0]}.A_log", "missing"),
        ("qwen3_5", "removed", f"{DELTA_NAMES[1]}.dt_bias", "missing"),
        ("qwen3_5", "removed", f"{DELTA_NAMES[1]}.conv1d.weight", "missing"),
        ("fused", "removed", f"{EXPERTS}.gate_up_proj", "missing"),  # half of the experts
        ("fused", "removed", f"{EXPERTS}.down_proj", "missing"),
        ("qwen3_5", "added", f"{DELTA_NAMES[0]}.conv1d.bias", "unexpected"),
        ("qwen3_5", "added", f"{DELTA_NAMES[1]}.conv1d.bias", "unexpected"),
        ("qwen3_5", "added", "model.language_model.visual.attn.bias", "unexpected"),
        ("qwen3_5", "added", "mtpx.fc.weight", "unexpected"),
        ("qwen3_5", "added", "head.weight", "unexpected"),
        ("fused", "added", f"{EXPERTS}.0.up_proj.weight", "gate_up_proj"),  # two layouts
        ("fused", "added", f"{EXPERTS}.0.down_proj.weight", "gate_up_proj"),
    ],
)
def test_tensors_that_do_not_fit(rewritten, kind, how, name, words):
    refusal(lambda: load_model(rewritten(kind, **{how: [name]}), FLOAT32), name, words)


def test_the_vision_tower_and_drafters_are_ignored(rewritten):
    added = "model.visual.more.weight", "visual.more.weight", "mtp.fc.weight"
    load_model(rewritten("qwen3_5", added=added), FLOAT32)


def test_a_tower_alone_does_not_make_its_names_the_models(checkpoints):
    """The prefix of the text model's tensors is found from the tensors, not from the config."""
    target = checkpoints.target("qwen3_5_text")
    config = json.loads((target.folder / "config.json").read_text())
    folder = checkpoints.copy(
        target.folder, model_type="qwen3_5", text_config=config, vision_config={}
    )
    assert load_model(folder, FLOAT32)[0] == load_model(target.folder, FLOAT32)[0]


# --- the ring of recurrent states -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_5_text", "llama"])
def test_more_drafts_than_the_ring_was_sized_for(checkpoints, monkeypatch, kind):
    monkeypatch.setattr(CompiledPrograms, "compile_ahead", lambda *_, **__: None)
    model, params = load_model(checkpoints.target(kind).folder, FLOAT32)
    config = EngineConfig(max_model_len=32, max_num_seqs=1, max_num_batched_tokens=16, num_pages=8)
    engine = Engine(config, model, NoDrafter(), Params(params, None), StaticPolicy(2))
    for k in 1, 2:
        engine.set_policy(StaticPolicy(k))
    if kind == "llama":
        engine.set_policy(StaticPolicy(3))
    else:
        words = "K=3 does not fit", "2 drafts", "num_speculative_tokens"
        refusal(lambda: engine.set_policy(StaticPolicy(3)), *words)
        assert engine.scheduler.policy == StaticPolicy(2)
