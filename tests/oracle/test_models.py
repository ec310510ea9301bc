"""The logits of every model family equal transformers', however a sequence is divided.

Recurrent layers compute the same numbers in three ways: for whole sequences, for chunks of a
prompt, and for rounds, in which some rows are rejected.
"""

import copy
import json
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.logits import causal_logits, hf_logits
from support.marks import marked

from specjax.device.cache import latent
from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.rows import CachedRows
from specjax.device.models.layers.attention import Attention
from specjax.device.models.model import init_caches
from specjax.device.models.registry import load_model

torch = pytest.importorskip("torch")

FLOAT32 = np.dtype(np.float32)
BATCH, PAGE_SIZE, K = 2, 8, 3
# The widest chunk, prompt tokens of each request in each step, then rows that stand of the K+1 of
# each round. Hybrids' chunks are also of more than the delta rule takes at once.
OF_ATTENTION = 24, ((24, 5), (24, 24), (5, 24), (19, 19)), ()
OF_HYBRIDS = (
    72,
    ((3, 5), (64, 65), (5, 0), (1, 64), (65, 3), (0, 1)),
    ((4, 1), (2, 3), (1, 4), (3, 2)) * 3,
)
LENGTHS = {OF_ATTENTION: 72, OF_HYBRIDS: 168}


def of(kind, **config):
    """Return a model type, and fields of its config."""
    return kind, config


LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=1000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN_ROPE = dict(
    rope_type="yarn", rope_theta=300.0, factor=4.0, original_max_position_embeddings=32
)
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
# Together they have all families, tied and not; query heads that share keys with none, some and
# all; every rope; biases of either kind; and one that is saved in shards.
CASES = {
    "llama": of("llama"),
    "llama-mha-tied-linear-rope-eps": of(
        "llama",
        num_key_value_heads=4,
        tie_word_embeddings=True,
        rope_parameters=LINEAR_ROPE,
        rms_norm_eps=0.05,
    ),
    "llama-bias-head-dim-llama3-rope": of(
        "llama",
        attention_bias=True,
        num_key_value_heads=1,
        head_dim=10,
        rope_parameters=LLAMA3_ROPE,
        seed=3,
    ),
    "qwen2-tied-sharded": of(
        "qwen2",
        num_hidden_layers=1,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        max_shard_size="10KB",
    ),
    "qwen3-head-dim-yarn": of("qwen3", head_dim=12, num_hidden_layers=1, rope_parameters=YARN_ROPE),
    # Windows shorter than a chunk; in all layers, and in some by name.
    "mistral-window": of("mistral", sliding_window=10, head_dim=12, num_hidden_layers=1),
    "ministral-windows-by-name": of(
        "ministral",
        head_dim=8,
        sliding_window=17,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "ministral3-window": of(
        "ministral3",
        num_hidden_layers=1,
        head_dim=8,
        sliding_window=30,
        rope_parameters=YARN_ROPE
        | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3},
    ),
    "phi3-partial-rope": of(
        "phi3",
        num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5},
    ),
    "gpt-oss": of("gpt_oss", num_hidden_layers=3),
    # Norms after attention and feed-forward layer; windows with a rotation of their own; soft caps.
    "gemma3-tied": of("gemma3_text", num_hidden_layers=3, tie_word_embeddings=True),
    "gemma2-bias": of("gemma2", attention_bias=True),
    "arcee": of("arcee", num_hidden_layers=1, head_dim=12),
    "qwen3-moe-dense-layer": of("qwen3_moe", mlp_only_layers=[1], norm_topk_prob=True),
    # Queries with a rank and without, three heads, groups of experts, YaRN with both weights or
    # one, a rotation of halves, tied; with a rank of 64, chunks may be in the plain form.
    "deepseek_v3-groups-yarn": of(
        "deepseek_v3",
        kv_lora_rank=64,
        n_group=4,
        topk_group=2,
        rope_parameters={**YARN_ROPE, "mscale": 1.3, "mscale_all_dim": 0.8},
    ),
    "deepseek_v3-no-q-rank": of(
        "deepseek_v3",
        q_lora_rank=None,
        num_attention_heads=3,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        rope_interleave=False,
        norm_topk_prob=False,
        n_shared_experts=2,
        rope_parameters={**YARN_ROPE, "mscale_all_dim": 0.8},
    ),
    "glm4_moe-bias-norms": of("glm4_moe", attention_bias=True, use_qk_norm=True),
    "glm4_moe_lite": of("glm4_moe_lite", num_attention_heads=5, num_key_value_heads=5),
}
HYBRIDS = {
    "qwen3_next": of("qwen3_next"),
    "qwen3_next-ratio-3-some-dense": of(
        "qwen3_next",
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=4,
        linear_conv_kernel_dim=2,
        num_hidden_layers=4,
        mlp_only_layers=[3],
        decoder_sparse_step=2,
        norm_topk_prob=False,
        tie_word_embeddings=True,
    ),
    "qwen3_5-ratio-1-tied": of(
        "qwen3_5_text",
        linear_num_value_heads=2,
        tie_word_embeddings=True,
        rms_norm_eps=0.02,
        max_shard_size="20KB",
    ),
    "qwen3_5-ratio-3": of(
        "qwen3_5_text",
        linear_num_value_heads=6,
        num_hidden_layers=4,
        full_attention_interval=4,
        rope_parameters=dict(rope_type="default", rope_theta=1000.0, partial_rotary_factor=0.5),
        num_key_value_heads=4,
        linear_conv_kernel_dim=3,
    ),
    "qwen3_5_moe": of("qwen3_5_moe_text", num_experts_per_tok=3),
    "qwen3_5-vision-tied": of("qwen3_5", tie_word_embeddings=True),
    "qwen3_5_moe-vision": of("qwen3_5_moe", num_hidden_layers=2),
}
# Tokens that engines put out are compared for the targets of drafters' tests, and in test_port.py.
QUICK = CASES.keys() - {"deepseek_v3-no-q-rank", "glm4_moe_lite"} | {
    "qwen3_5_moe",
    "qwen3_5-vision-tied",
}
NIGHTLY = {"qwen3_next-ratio-3-some-dense", "qwen3_5-ratio-3", "qwen3_5_moe-vision"}


def written(checkpoints, name):
    """Return the target of a case."""
    kind, config = (CASES | HYBRIDS)[name]
    return checkpoints.target(kind, **config)


@pytest.fixture(
    scope="module",
    params=marked(CASES | HYBRIDS, fast=QUICK, slow=(CASES | HYBRIDS).keys() - QUICK - NIGHTLY),
)
def case(request, checkpoints):
    """A target, tokens, transformers' logits, and how the tokens are divided."""
    target = written(checkpoints, request.param)
    schedule = OF_HYBRIDS if request.param in HYBRIDS else OF_ATTENTION
    tokens = random_tokens(LENGTHS[schedule])
    return target, tokens, hf_logits(target.hf, tokens), schedule


def random_tokens(length):
    return np.random.default_rng(0).integers(0, 96, (BATCH, length))


@partial(jax.jit, static_argnames=("model", "folds"))
def extend(params, cache, table, tokens, starts, counts, pending, model, folds):
    """Return the logits [B, T, V] of rows that continue from the cache, and the new cache."""
    slots = jnp.array([2, 0])
    rows = CachedRows.starting_at(
        starts, counts, tokens.shape[1], table, slots=slots, pending=pending, folds=folds
    )
    features, cache = model.extend(params, tokens.reshape(-1), rows, cache)
    return model.logits(params, features.hidden).reshape(*tokens.shape, -1), cache


def served_logits(folder, tokens, schedule):
    """Return the logits of tokens as in an engine: in chunks, then in rounds with rejected drafts.

    Pages are in random order, and the cache starts with garbage.
    """
    model, params = load_model(folder, FLOAT32)
    num_pages, rng = tokens.size // PAGE_SIZE, np.random.default_rng(2)
    table = np.random.default_rng(1).permutation(num_pages + 3)[:num_pages]
    table = table.reshape(BATCH, -1).astype(np.int32)
    sizes = CacheSizes(3, num_pages + 3, PAGE_SIZE, K + 1)
    shapes = jax.eval_shape(lambda: init_caches(model, sizes, "float32"))
    # What nothing was written to must not matter.
    cache = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), shapes)
    widest, chunks, rounds = schedule
    at, pending, logits = np.zeros(BATCH, np.int32), np.zeros(BATCH, np.int32), [[], []]
    steps = [(widest, counts, counts) for counts in chunks]
    steps += [(K + 1, (K + 1,) * BATCH, stands) for stands in rounds]
    for width, counts, stands in steps:
        rows = rng.integers(0, 96, (BATCH, width)).astype(np.int32)
        for b, count in enumerate(stands):
            rows[b, :count] = tokens[b, at[b] : at[b] + count]
        folds, counts = counts is stands, np.array(counts, np.int32)
        found, cache = extend(
            params, cache, table, rows, at, counts, pending, model=model, folds=folds
        )
        for b, count in enumerate(stands):
            logits[b].append(np.asarray(found)[b, :count])
        at = (at + stands).astype(np.int32)
        pending = np.array((0,) * BATCH if folds else stands, np.int32)
    return np.stack([np.concatenate(one) for one in logits])


def test_logits_of_whole_sequences(case):
    target, tokens, expected, _ = case
    np.testing.assert_allclose(causal_logits(target.folder, tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_logits_of_chunks_and_rounds(case, monkeypatch):
    monkeypatch.setattr(latent, "PRODUCTS_PER_NUMBER", 0)
    target, tokens, expected, schedule = case
    logits = served_logits(target.folder, tokens, schedule)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["llama-bias-head-dim-llama3-rope", "llama-mha-tied-linear-rope-eps"]
)
def test_rope_fields_of_older_configs(checkpoints, name):
    target, rope = written(checkpoints, name), CASES[name][1]["rope_parameters"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    if rope is LINEAR_ROPE:
        scaling["type"] = scaling.pop("rope_type")
    assert "rope_parameters" in json.loads((target.folder / "config.json").read_text())
    fields = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    old = checkpoints.copy(target.folder, rope_parameters=None, **fields)
    check_same_parameters(old, target.folder)


def check_same_parameters(folder, other):
    (model, params), (expected, its_params) = (load_model(f, FLOAT32) for f in (folder, other))
    assert model == expected
    jax.tree.map(np.testing.assert_array_equal, params, its_params)


def test_torch_files(checkpoints):
    target = written(checkpoints, "llama-bias-head-dim-llama3-rope")
    folder = checkpoints.copy(target.folder)
    (folder / "model.safetensors").unlink()
    torch.save(target.hf.state_dict(), folder / "pytorch_model.bin")
    check_same_parameters(folder, target.folder)


def test_shards_are_really_there(checkpoints):
    folder = written(checkpoints, "qwen2-tied-sharded").folder
    assert len(list(folder.glob("model-*.safetensors"))) > 2


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text"])
def test_both_layouts_of_experts_give_the_same_parameters(checkpoints, kind):
    target = checkpoints.target(kind)
    check_same_parameters(checkpoints.fused(target).folder, target.folder)


def test_the_outer_config_says_whether_the_head_is_tied(checkpoints):
    """transformers also writes the default of the text config, which must be ignored."""
    target = checkpoints.target("qwen3_5", tie_word_embeddings=True)
    config = json.loads((target.folder / "config.json").read_text())
    text = config["text_config"] | {"tie_word_embeddings": False}
    folder, tokens = checkpoints.copy(target.folder, text_config=text), [[1, 2, 3]]
    hf = type(target.hf).from_pretrained(folder)
    expected = hf_logits(target.hf, tokens)
    np.testing.assert_allclose(hf_logits(hf, tokens), expected, rtol=0, atol=1e-5)
    assert load_model(folder, FLOAT32)[0].tie_word_embeddings


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text"])
@pytest.mark.parametrize("in_file", ["float32", "bfloat16"])
def test_decays_are_kept_in_float32(checkpoints, rewrite_tensors, kind, in_file):
    target = checkpoints.target(kind)
    folder = checkpoints.copy(target.folder)
    dtype = getattr(torch, in_file)
    rewrite_tensors(
        folder / "model.safetensors",
        lambda tensors: {name: x.to(dtype) for name, x in tensors.items()},
    )
    _, params = load_model(folder, np.dtype(ml_dtypes.bfloat16))
    for i, layer in enumerate(params.layers):
        assert layer.attention_norm.dtype == layer.mlp_norm.dtype == jnp.bfloat16
        if isinstance(layer.attention, Attention):
            continue
        ours = {"A_log": layer.attention.log_decay, "dt_bias": layer.attention.decay_bias}
        for name, found in ours.items():
            tensor = target.hf.get_decoder().layers[i].linear_attn.get_parameter(name)
            assert found.dtype == jnp.float32
            np.testing.assert_array_equal(found, tensor.detach().to(dtype).float())
        assert layer.attention.in_proj.values.dtype == layer.attention.conv.dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, most", [("llama", 0.1), ("qwen3", 0.1), ("qwen3_next", 0.2), ("qwen3_5_text", 0.2)]
)
def test_bfloat16_log_probabilities(checkpoints, kind, most):
    """The mean error is at most twice the error of transformers in bf16."""
    target = checkpoints.target(kind)
    tokens = random_tokens(LENGTHS[OF_ATTENTION if most == 0.1 else OF_HYBRIDS])
    half = copy.deepcopy(target.hf).to(torch.bfloat16)
    exact, theirs, ours = (
        torch.log_softmax(torch.tensor(logits), -1)
        for logits in (
            hf_logits(target.hf, tokens),
            hf_logits(half, tokens),
            causal_logits(target.folder, tokens, "bfloat16"),
        )
    )
    error, their_error = (ours - exact).abs().mean(), (theirs - exact).abs().mean()
    assert 1e-4 < error < 2 * their_error < most
    assert kind not in ("llama", "qwen3") or (ours - theirs).abs().max() < 0.3
