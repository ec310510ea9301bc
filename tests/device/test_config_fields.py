"""Fields of configs: transformers' own are all known, others' are errors, and unknown ones warn."""

import json
from pathlib import Path

import pytest
from support.refusals import refusal
from support.targets import CONFIG_SIZES

from specjax.checkpoint.demo import demo_folder
from specjax.device.models.config_fields import CHANGES, HARMLESS, READ
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.registry import KINDS, MODELS, describe_model, read_config
from specjax.device.models.text_config import WRAPPERS

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
CLASSES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "ministral": "MinistralConfig",
    "ministral3": "Ministral3Config",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "qwen3_moe": "Qwen3MoeConfig",
    "phi3": "Phi3Config",
    "arcee": "ArceeConfig",
    "gemma2": "Gemma2Config",
    "gemma3_text": "Gemma3TextConfig",
    "gpt_oss": "GptOssConfig",
    "qwen3_next": "Qwen3NextConfig",
    "qwen3_5_text": "Qwen3_5TextConfig",
    "qwen3_5_moe_text": "Qwen3_5MoeTextConfig",
    "deepseek_v3": "DeepseekV3Config",
    "glm4_moe": "Glm4MoeConfig",
    "glm4_moe_lite": "Glm4MoeLiteConfig",
}
WHOLES = {
    "qwen3_5": "Qwen3_5Config",
    "qwen3_5_moe": "Qwen3_5MoeConfig",
    "qwen3_vl": "Qwen3VLConfig",
    "qwen3_vl_moe": "Qwen3VLMoeConfig",
    "qwen2_vl": "Qwen2VLConfig",
    "qwen2_5_vl": "Qwen2_5_VLConfig",
    "mistral3": "Mistral3Config",
    "glm4v_moe": "Glm4vMoeConfig",
    "llava": "LlavaConfig",
    "internvl": "InternVLConfig",
    "idefics3": "Idefics3Config",
    "smolvlm": "SmolVLMConfig",
    "voxtral": "VoxtralConfig",
    "gemma3": "Gemma3Config",
}


def described(kind="llama", **fields):
    config = {"model_type": kind, **CONFIG_SIZES, **fields}
    return describe_model(HFConfig(config, "there/config.json"))


def test_every_family_has_its_list():
    assert READ.keys() == MODELS.keys() == CLASSES.keys()
    assert WRAPPERS.keys() == WHOLES.keys()
    assert not any(READ[kind] & HARMLESS for kind in READ) and not CHANGES.keys() & HARMLESS


# Default heads of some classes are 42 wide, and half of that is odd; published ones are 128 wide.
WIDTH = {"head_dim": 128}
DEFAULT_SIZES = {"glm4_moe": WIDTH, "glm4v_moe": {"text_config": {"num_attention_heads": 32}}}


@pytest.mark.parametrize("kind, name", [*CLASSES.items(), *WHOLES.items()])
def test_the_defaults_of_transformers_are_taken(kind, name):
    """Without a warning, which would be an error here, and alike however they are saved."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name)(**DEFAULT_SIZES.get(kind, {}))
    given = config.to_dict(), config.to_diff_dict(), json.loads(config.to_json_string())
    one, *others = (describe_model(HFConfig(fields, "config.json")) for fields in given)
    assert all(other == one for other in others)


# Fields that transformers' classes require, or that the sizes of a test need.
NEEDED = {
    *(*CONFIG_SIZES, "model_type", "n_routed_experts", "moe_intermediate_size"),
    *("num_experts_per_tok", "text_config", "vision_config"),
}


@pytest.mark.parametrize("kind, name", [*CLASSES.items(), *WHOLES.items()])
def test_missing_fields_mean_what_transformers_has(kind, name):
    kept = NEEDED | DEFAULT_SIZES.get(kind, {}).keys()
    if kind == "ministral3":  # the scaling of queries must be in its config
        kept |= {"rope_parameters"}

    def pruned(fields):
        return {
            name: pruned(value) if name == "text_config" else value
            for name, value in fields.items()
            if name in kept
        }

    cls = getattr(pytest.importorskip("transformers"), name)
    fields = pruned(cls(**DEFAULT_SIZES.get(kind, {})).to_dict())
    whole = cls.from_dict(fields).to_dict()
    one, other = (describe_model(HFConfig(given, "config.json")) for given in (fields, whole))
    assert one == other


def test_published_configs_are_taken():
    folders = [path.parent for path in CONFIGS.glob("*/config.json")]
    for folder in [*folders, demo_folder("demo-llama"), demo_folder("demo-qwen3.5")]:
        describe_model(read_config(folder))


HARMLESS_ONES = {
    "_name_or_path": "meta-llama/Llama-3.1-8B",
    "auto_map": {"AutoModel": "modeling.Llama"},
    "attention_dropout": 0.1,
    "pretraining_tp": 2,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "unsloth_fixed": True,
    "pad_token_id": 128004,
    "_attn_implementation_autoset": True,
    "rope_interleaved": False,
    "sliding_window": None,
    "logit_scale": 1.0,
    "brand_new": None,
    "brand_new_too": False,
}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_next"])
def test_fields_that_do_not_matter(kind):
    assert described(kind, **HARMLESS_ONES) == described(kind)
    windows = {"sliding_window": 4096, "max_window_layers": 28}
    if kind in ("qwen2", "qwen3"):
        assert described(kind, **windows, use_sliding_window=False) == described(kind)


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_fields_that_change_the_mathematics(name):
    value = ["sliding_attention"] * 4 if name == "layer_types" else 30
    kind = next(kind for kind in READ if name not in READ[kind])
    words = "there/config.json", f"{name}={value!r}", CHANGES[name], f"{kind!r}"
    refusal(lambda: described(kind, **{name: value}), *words)


SLIDING, FULL = "sliding_attention", "full_attention"
# Fields of a model of four layers, and their windows.
WINDOWS = [
    ("mistral", {}, [4096] * 4),
    ("mistral", {"sliding_window": None}, [None] * 4),
    ("mistral", {"sliding_window": 7}, [7] * 4),
    ("ministral", {"layer_types": [SLIDING, FULL] * 2}, [4096, None] * 2),
    ("ministral", {"sliding_window": None}, [None] * 4),
    ("qwen3", {"sliding_window": 7, "layer_types": [FULL] * 4}, [None] * 4),
    ("qwen3", {"sliding_window": 7, "max_window_layers": 1}, [None] * 4),
    ("qwen3", {"use_sliding_window": True}, [None] * 4),  # from layer 28 on
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}, [None] * 3 + [4096]),
    ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 3}, [4096] * 4),
    ("qwen3_moe", {"sliding_window": 7}, [None] * 4),
    ("gpt_oss", {}, [128, None] * 2),
    ("gpt_oss", {"sliding_window": 9, "layer_types": [FULL, SLIDING] * 2}, [None, 9] * 2),
    ("gemma2", {}, [4096, None] * 2),
    ("gemma3_text", {}, [4096] * 4),
    ("gemma3_text", {"sliding_window": 9, "sliding_window_pattern": 3}, [9, 9, None, 9]),
    ("gemma3_text", {"layer_types": [FULL] * 4, "sliding_window": None}, [None] * 4),
    ("phi3", {}, [None] * 4),
    ("phi3", {"sliding_window": 2047}, [2047] * 4),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, [4096] * 4),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": [FULL, SLIDING] * 2},
        [None, 5] * 2,
    ),
]


@pytest.mark.parametrize("kind, fields, windows", WINDOWS, ids=str)
def test_layers_within_a_window(kind, fields, windows):
    model = described(kind, **fields)
    assert [model.cache_kinds[i].window for i in model.layer_kinds] == windows
    first = model.with_layers(1)
    assert [kind.window for kind in first.cache_kinds] == windows[:1]


def test_windows_that_contradict_themselves():
    types = {"layer_types": [FULL] * 3 + [SLIDING]}
    refusal(lambda: described("qwen3", **types), "layer_types", "use_sliding_window is false")
    given = types | {"sliding_window": None}
    refusal(lambda: described("ministral", **given), "layer_types", "sliding_window")
    refusal(lambda: described("ministral", layer_types=[SLIDING]), "num_hidden_layers=4")
    refusal(lambda: described("mistral", sliding_window=0), "sliding_window", "0")


@pytest.mark.parametrize(
    "kind, near",
    [("mixtral", "mistral"), ("qwen2_moe", "qwen3_moe"), ("mamba2", None), ("olmo3", None)],
)
def test_another_model_type_is_told_its_kin(kind, near):
    text = refusal(lambda: described(kind), f"model_type={kind!r}", ", ".join(KINDS))
    assert text.endswith(f"did you mean {near!r}?" if near else KINDS[-1])


def test_text_models_and_wholes_that_are_not_read():
    text = {"model_type": "olmo3", **CONFIG_SIZES}
    words = "config.json: text_config", "model_type='olmo3'", "mistral3"
    refusal(lambda: described("mistral3", text_config=text), *words)
    refusal(lambda: described("llava_next", text_config=text), "model_type='llava_next'", "llava")


def test_fields_that_nobody_knows_are_warned_of():
    with pytest.warns(UserWarning, match=r"there/config\.json: brand_new, other is unknown"):
        assert described(other=2, brand_new="x") == described()
    with pytest.warns(UserWarning, match=r"config\.json: text_config: brand_new is unknown"):
        inside = {**CONFIG_SIZES, "brand_new": 3}
        describe_model(HFConfig({"model_type": "qwen3_5", "text_config": inside}, "config.json"))


METHODS = [
    {"quant_method": "awq", "bits": 4, "group_size": 128},
    {"quant_method": "gptq", "bits": 4},
    {"quant_method": "fp8"},
    {"quant_method": "fp8", "weight_block_size": [128]},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"},
    {"quant_method": "compressed-tensors"},
    {"quant_method": "bitsandbytes", "load_in_8bit": True},
    {"quant_method": "mxfp4"},
    "int8",
    {"bits": 8},
]


@pytest.mark.parametrize("given", METHODS, ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_quantised_weights_are_refused_by_their_method(kind, given):
    method = given["quant_method"] if "quant_method" in given else given
    words = "quantization_config", repr(method), "bfloat16"
    refusal(lambda: described(kind, quantization_config=given), *words)


def test_nothing_quantised():
    assert described(quantization_config=None) == described(quantization_config={}) == described()


WRONG_TYPES = [
    ("model_type", ["llama"]),
    ("model_type", 3),
    ("rms_norm_eps", "1e-6"),
    ("rms_norm_eps", -1e-6),
    ("rms_norm_eps", True),
    ("rope_theta", "10000"),
    ("rope_theta", 0),
    ("rope_scaling", "linear"),
    ("rope_scaling", {"type": ["linear"]}),
    ("rope_scaling", {"type": "linear", "factor": "two"}),
    ("rope_scaling", {"type": "linear", "factor": 0}),
    ("rope_parameters", [1]),
    ("tie_word_embeddings", "no"),
    ("attention_bias", "False"),
    ("head_dim", 7.5),
    ("num_attention_heads", [4]),
    ("num_key_value_heads", 3),
    ("max_position_embeddings", "long"),
]


@pytest.mark.parametrize("name, value", WRONG_TYPES, ids=str)
def test_fields_of_the_wrong_type(name, value):
    text = refusal(lambda: described(**{name: value}), "there/config.json: ", name)
    assert "\n" not in text


# --- Gemma ----------------------------------------------------------------------------------------


def test_a_published_gemma_config_says_little():
    """The rest is as transformers has it: heads, vocabulary, windows, frequencies."""
    text = {
        **{"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240},
        **{"num_hidden_layers": 34, "sliding_window": 1024},
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    parts = {"mm_tokens_per_image": 256, "boi_token_index": 255999, "vision_config": {"a": 1}}
    model = describe_model(HFConfig({"model_type": "gemma3", "text_config": text, **parts}, "x"))
    assert (model.vocab_size, model.num_heads, model.num_kv_heads) == (262208, 8, 4)
    assert model.windows[:7] == (1024,) * 5 + (None, 1024) and model.tie_word_embeddings
    assert (model.rope.theta, model.rope.factor, model.max_position) == (1e6, 8.0, 131072)
    assert (model.local_rope.theta, model.local_rope.scaling) == (1e4, "default")
    assert (model.query_scale, model.logit_cap, model.score_cap) == (1, None, None)
    assert model.ropes == (model.local_rope, model.rope)


def test_older_names_in_published_gemma_configs():
    names = {"sliding_window_size": 4096, "hidden_act": "gelu_pytorch_tanh"}
    assert described("gemma2", **names) == described("gemma2")


def test_caps_that_are_switched_off():
    caps = "attn_logit_softcapping", "final_logit_softcapping"
    model = described("gemma2")
    assert (model.score_cap, model.logit_cap) == (50, 30)
    model = described("gemma2", **dict.fromkeys(caps))
    assert (model.score_cap, model.logit_cap) == (None, None)
