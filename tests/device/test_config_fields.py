"""Config fields have transformers' meanings and defaults, and unknown fields raise a warning.

Values that no model can have are in test_hf_config.py.
"""

import json
from operator import attrgetter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from support.configs import described
from support.targets import CONFIG_SIZES

from specjax.checkpoint.demo import demo_folder
from specjax.device.models.config_fields import CHANGES, HARMLESS, READ
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.registry import KINDS, MODELS, describe_model, read_config

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"


def test_every_family_has_its_list():
    assert READ.keys() == MODELS.keys()
    assert not any(READ[kind] & HARMLESS for kind in READ) and not CHANGES.keys() & HARMLESS


# Default heads of some classes are 42 wide, and half of that is odd; published ones are 128 wide.
WIDTH = {"head_dim": 128}
DEFAULT_SIZES = {"glm4_moe": WIDTH, "glm4v_moe": {"text_config": {"num_attention_heads": 32}}}


def class_of(kind):
    """Return transformers' config class for a model type."""
    return pytest.importorskip("transformers").CONFIG_MAPPING[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_the_defaults_of_transformers_are_taken(kind):
    """Every saved form of a default config gives the same model, without a warning."""
    config = class_of(kind)(**DEFAULT_SIZES.get(kind, {}))
    given = config.to_dict(), config.to_diff_dict(), json.loads(config.to_json_string())
    one, *others = (describe_model(HFConfig(fields, "config.json")) for fields in given)
    assert all(other == one for other in others)


# Fields that transformers' classes require, or that the sizes of a test need.
NEEDED = {
    *(*CONFIG_SIZES, "model_type", "n_routed_experts", "moe_intermediate_size"),
    *("num_experts_per_tok", "text_config", "vision_config"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_missing_fields_mean_what_transformers_has(kind):
    kept = NEEDED | DEFAULT_SIZES.get(kind, {}).keys()
    if kind == "ministral3":  # the scaling of queries must be in its config
        kept |= {"rope_parameters"}

    def pruned(fields):
        return {
            name: pruned(value) if name == "text_config" else value
            for name, value in fields.items()
            if name in kept
        }

    cls = class_of(kind)
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
    "torch_dtype": "bfloat16",
    "unsloth_fixed": True,
    "_attn_implementation_autoset": True,
    "rope_interleaved": False,
    "sliding_window": None,
    "logit_scale": 1.0,
    "quantization_config": {},
    "brand_new": None,
    "brand_new_too": False,
}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_next"])
def test_fields_that_do_not_matter(kind):
    assert described(kind, **HARMLESS_ONES) == described(kind)
    windows = {"sliding_window": 4096, "max_window_layers": 28}
    if kind in ("qwen2", "qwen3"):
        assert described(kind, **windows, use_sliding_window=False) == described(kind)


SLIDING, FULL, DELTA = "sliding_attention", "full_attention", "linear_attention"
# Fields of a model of four layers, and their windows.
WINDOWS = [
    ("mistral", {"sliding_window": None}, [None] * 4),
    ("ministral", {"layer_types": [SLIDING, FULL] * 2}, [4096, None] * 2),
    ("qwen3", {"sliding_window": 7, "max_window_layers": 1}, [None] * 4),
    ("qwen3", {"use_sliding_window": True}, [None] * 4),  # from layer 28 on
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}, [None] * 3 + [4096]),
    ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 3}, [4096] * 4),
    ("qwen3_moe", {"sliding_window": 7}, [None] * 4),
    ("gpt_oss", {"sliding_window": 9, "layer_types": [FULL, SLIDING] * 2}, [None, 9] * 2),
    ("gemma3_text", {"sliding_window": 9, "sliding_window_pattern": 3}, [9, 9, None, 9]),
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


def test_fields_that_nobody_knows_are_warned_of():
    with pytest.warns(UserWarning, match=r"there/config\.json: brand_new, other is unknown"):
        assert described(other=2, brand_new="x") == described()
    with pytest.warns(UserWarning, match=r"config\.json: text_config: brand_new is unknown"):
        inside = {**CONFIG_SIZES, "brand_new": 3}
        describe_model(HFConfig({"model_type": "qwen3_5", "text_config": inside}, "config.json"))


def test_older_names_in_published_gemma_configs():
    """Other fields that these configs lack have transformers' defaults."""
    scaling = {"factor": 8.0, "rope_type": "linear"}
    model = described("gemma3_text", rope_scaling=scaling, num_hidden_layers=6)
    assert (model.rope.scaling, model.rope.factor, model.max_position) == ("linear", 8.0, 131072)
    assert model.ropes == (model.local_rope, model.rope) and model.local_rope.scaling == "default"
    names = {"sliding_window_size": 4096, "hidden_act": "gelu_pytorch_tanh"}
    assert described("gemma2", **names) == described("gemma2")


CAPS = "attn_logit_softcapping", "final_logit_softcapping"
PARTS = {"partial_rotary_factor": 0.5, "rope_theta": 5e3}
SPARSE_OR_DENSE = ["sparse", "dense", "sparse", "dense"]
MEANINGS = [
    ("gemma2", {}, "score_cap", 50),
    ("gemma2", {}, "logit_cap", 30),
    ("gemma2", dict.fromkeys(CAPS), "score_cap", None),
    ("gemma2", dict.fromkeys(CAPS), "logit_cap", None),
    ("qwen3_next", {}, "rope.head_dim", 4),
    ("qwen3_next", PARTS, "rope.head_dim", 8),
    ("qwen3_next", {"partial_rotary_factor": 0.75, "rope_parameters": PARTS}, "rope.head_dim", 8),
    ("qwen3_next", {"partial_rotary_factor": 0.75, "rope_parameters": PARTS}, "rope.theta", 5e3),
    ("llama", {"partial_rotary_factor": 1.0}, "rope.head_dim", 16),
    ("qwen3_5_text", {}, "layer_types", (DELTA,) * 3 + (FULL,)),
    ("qwen3_5", {"num_hidden_layers": 6}, "layer_types", (DELTA,) * 3 + (FULL,) + (DELTA,) * 2),
    ("qwen3_next", {"layer_types": [FULL, DELTA] * 2}, "layer_types", (FULL, DELTA) * 2),
    ("deepseek_v3", {}, "dense_layers", (0, 1, 2)),
    ("deepseek_v3", {"first_k_dense_replace": 0}, "dense_layers", ()),
    ("glm4_moe_lite", {"first_k_dense_replace": 1}, "dense_layers", (0,)),
    ("glm4_moe_lite", {"mlp_layer_types": SPARSE_OR_DENSE}, "dense_layers", (1, 3)),
    ("qwen3_next", {}, "dense_layers", ()),
    ("qwen3_5_moe_text", {}, "dense_layers", ()),
    ("qwen3_next", {"mlp_only_layers": [1]}, "dense_layers", (1,)),
    ("qwen3_next", {"mlp_only_layers": [1], "decoder_sparse_step": 2}, "dense_layers", (0, 1, 2)),
    ("qwen3_moe", {}, "experts.router.rule.normalises", False),
    ("qwen3_moe", {"norm_topk_prob": True}, "experts.router.rule.normalises", True),
    ("qwen3_next", {"num_experts": 0}, "experts", None),
    ("qwen3_5_text", {}, "experts", None),
]


@pytest.mark.parametrize("kind, fields, name, value", MEANINGS, ids=str)
def test_what_fields_mean(kind, fields, name, value):
    assert attrgetter(name)(described(kind, **fields)) == value


@pytest.mark.parametrize(
    "outer, inner, is_tied",
    [(True, None, True), (None, True, True), (True, False, True), (False, True, False)],
)
def test_the_outer_config_says_whether_the_head_is_tied(outer, inner, is_tied):
    text = CONFIG_SIZES | {"tie_word_embeddings": inner}
    fields = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": outer}
    assert describe_model(HFConfig(fields, "config.json")).tie_word_embeddings == is_tied


# --- scaled rotations; what attention makes of them is in tests/oracle/test_models.py -------------

ORIGINAL = {"original_max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, **ORIGINAL}
ROTATIONS = {
    "llama3": {
        **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **ORIGINAL},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "yarn": YARN,
    "yarn-deepseek": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 16},
    "yarn-one-mscale": {**YARN, "mscale": 0.707, "beta_slow": 2},
    "yarn-not-truncated": {**YARN, "rope_theta": 150000.0, "factor": 32.0, "truncate": False},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.5, "rope_theta": 1e6},
    "yarn-of-the-whole-length": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0},
    "yarn-factor-below-one": {**YARN, "factor": 0.5},
    "yarn-ramp-of-no-width": {**YARN, "rope_theta": 1e30},
}
# The original length outside of `rope_parameters`, where it counts before the one inside.
OUTSIDE = {"yarn": {"original_max_position_embeddings": 1024}, "llama3": ORIGINAL}


@pytest.mark.parametrize("dim", [64, 10])
@pytest.mark.parametrize(
    "name, outside", [*((n, {}) for n in ROTATIONS), *OUTSIDE.items()], ids=str
)
def test_scaled_rotations(name, outside, dim):
    pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = ROTATIONS[name]
    length = {"max_position_embeddings": 2048, **outside}
    config = class_of("llama")(head_dim=dim, rope_parameters=dict(fields), **length)
    expected, factor = ROPE_INIT_FUNCTIONS[fields["rope_type"]](config)
    rope = HFConfig({"rope_parameters": fields, **length}, "config.json").rope(dim)
    np.testing.assert_allclose(rope.inverse_frequencies(), expected.numpy(), rtol=2e-6)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-6)
    cos, sin = rope.angles(jnp.arange(3)).rotation
    np.testing.assert_allclose(cos**2 + sin**2, factor**2, rtol=1e-5)


def test_rope_scaling_replaces_what_transformers_has_saved():
    """Model cards say to add `rope_scaling` to a config that already has `rope_parameters`."""
    saved = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    expected = described("qwen3", rope_parameters=QWEN3 | {"rope_theta": 1e6})
    assert described("qwen3", **saved, rope_scaling=QWEN3) == expected
    fields = {**saved, "rope_scaling": QWEN3, "rope_theta": 5e5}
    theirs = class_of("qwen3").from_dict(fields).rope_parameters
    assert described("qwen3", **fields) == described("qwen3", rope_parameters=theirs)


QWEN3 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LENGTHS = [  # as vLLM derives them, or what `max_position_embeddings` says if that is more
    (40960, QWEN3, 131072),
    (131072, QWEN3, 131072),
    (262144, QWEN3, 262144),
    (40960, {"type": "yarn", "factor": 4.0}, 163840),
    (4096, {"type": "linear", "factor": 8.0}, 32768),
    (131072, ROTATIONS["llama3"], 131072),
    (4096, {"rope_type": "default"}, 4096),
]


@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("length, rope, longest", LENGTHS)
def test_how_many_positions_a_scaled_model_has(length, rope, longest, where):
    for kind in "qwen3", "llama":
        fields = {"max_position_embeddings": length, where: rope}
        assert described(kind, **fields).max_position == longest
