"""Every model family against transformers: logits at all positions, and greedy continuations."""

import copy
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.logits import causal_logits, hf_logits

from specjax import LLM, SamplingParams
from specjax.device.cache import latent
from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.rows import CachedRows
from specjax.device.models.model import init_caches
from specjax.device.models.registry import load_model

torch = pytest.importorskip("torch")

BATCH, LENGTH, CHUNK = 2, 72, 24
PAGE_SIZE = 8
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
# Together they have all three families, tied and not; query heads that share keys with none, some
# and all; every rope; biases of either kind; and one that is saved in shards.
CASES = {
    "llama": ("llama", {}),
    "llama-mha-tied-linear-rope-eps": (
        "llama",
        {
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_parameters": LINEAR_ROPE,
            "rms_norm_eps": 0.05,
        },
    ),
    "llama-bias-head-dim-llama3-rope": (
        "llama",
        {
            "attention_bias": True,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "rope_parameters": LLAMA3_ROPE,
            "seed": 3,
        },
    ),
    "qwen2-tied-sharded": (
        "qwen2",
        {
            "num_hidden_layers": 1,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "max_shard_size": "10KB",
        },
    ),
    "qwen3-head-dim-yarn": (
        "qwen3",
        {"head_dim": 12, "num_hidden_layers": 1, "rope_parameters": YARN_ROPE},
    ),
    # Windows shorter than a chunk; in all layers, and in some by name.
    "mistral-window": ("mistral", {"sliding_window": 10, "head_dim": 12, "num_hidden_layers": 1}),
    "ministral-windows-by-name": (
        "ministral",
        {
            "head_dim": 8,
            "sliding_window": 17,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "ministral3-window": (
        "ministral3",
        {
            "num_hidden_layers": 1,
            "head_dim": 8,
            "sliding_window": 30,
            "rope_parameters": {
                **YARN_ROPE,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "phi3-partial-rope": (
        "phi3",
        {
            "num_hidden_layers": 1,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
    "gpt-oss": ("gpt_oss", {"num_hidden_layers": 3}),
    # Norms after attention and feed-forward layer; windows with a rotation of their own; soft caps.
    "gemma3-tied": ("gemma3_text", {"num_hidden_layers": 3, "tie_word_embeddings": True}),
    "gemma2-bias": ("gemma2", {"attention_bias": True}),
    "arcee": ("arcee", {"num_hidden_layers": 1, "head_dim": 12}),
    "qwen3-moe-dense-layer": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}),
    # Queries with a rank and without, three heads, groups of experts, YaRN with both weights or
    # one, a rotation of halves, tied; with a rank of 64, chunks may be in the plain form.
    "deepseek_v3-groups-yarn": (
        "deepseek_v3",
        {
            "kv_lora_rank": 64,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**YARN_ROPE, "mscale": 1.3, "mscale_all_dim": 0.8},
        },
    ),
    "deepseek_v3-no-q-rank": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "rope_parameters": {**YARN_ROPE, "mscale_all_dim": 0.8},
        },
    ),
    "glm4_moe-bias-norms": ("glm4_moe", {"attention_bias": True, "use_qk_norm": True}),
    "glm4_moe_lite": ("glm4_moe_lite", {"num_attention_heads": 5, "num_key_value_heads": 5}),
}
# Those of the others are the targets of test_eagle.py, whose output is compared as well.
FAMILIES = (
    "llama",
    pytest.param("qwen2-tied-sharded", marks=pytest.mark.slow),
    pytest.param("qwen3-head-dim-yarn", marks=pytest.mark.slow),
    pytest.param("deepseek_v3-groups-yarn", marks=pytest.mark.slow),
    pytest.param("glm4_moe_lite", marks=pytest.mark.slow),
)


def made(checkpoints, name):
    """The target of a case."""
    kind, config = CASES[name]
    return checkpoints.target(kind, **({"num_hidden_layers": 2} | config))


SLOW = "deepseek_v3-no-q-rank", "glm4_moe_lite"
PARAMS = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]


@pytest.fixture(scope="module", params=PARAMS)
def target(request, checkpoints):
    return made(checkpoints, request.param)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 96, (BATCH, LENGTH))


@partial(jax.jit, static_argnames=("model", "folds"))
def extend(params, kv, tokens, starts, table, model, folds):
    """Logits [B, CHUNK, V] of a chunk that starts at starts[b], and the pool."""
    counts = jnp.full_like(starts, CHUNK)
    rows = CachedRows.starting_at(starts, counts, CHUNK, table, folds=folds)
    features, kv = model.extend(params, tokens.reshape(-1), rows, kv)
    return model.logits(params, features.hidden).reshape(*tokens.shape, -1), kv


def paged_logits(folder, tokens, folds=True):
    """Logits [B, T, V] from chunks, which fold, over a pool whose pages lie in no order."""
    model, params = load_model(folder, np.dtype(np.float32))
    num_pages = BATCH * LENGTH // PAGE_SIZE
    table = np.random.default_rng(1).permutation(num_pages + 3)[:num_pages]
    table = table.reshape(BATCH, -1).astype(np.int32)
    sizes = CacheSizes(BATCH, num_pages + 3, PAGE_SIZE, CHUNK)
    shapes = jax.eval_shape(lambda: init_caches(model, sizes, "float32"))
    # What nothing was written to must not matter.
    kv = tuple(np.full(shape.shape, np.nan, np.float32) for shape in shapes)
    chunks = []
    for start in range(0, LENGTH, CHUNK):
        starts = np.full(BATCH, start, np.int32)
        logits, kv = extend(
            params, kv, tokens[:, start : start + CHUNK], starts, table, model, folds
        )
        chunks.append(np.asarray(logits))
    return np.concatenate(chunks, axis=1)


def test_logits_of_whole_sequences(target, tokens):
    expected = hf_logits(target.hf, tokens)
    logits = causal_logits(target.folder, tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_logits_of_chunks_over_pages(target, tokens, monkeypatch):
    monkeypatch.setattr(latent, "PRODUCTS_PER_NUMBER", 0)
    logits = paged_logits(target.folder, tokens)
    np.testing.assert_allclose(logits, hf_logits(target.hf, tokens), rtol=0, atol=1e-4)


def greedy(folder, prompts, max_tokens=64):
    with LLM(
        folder,
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        decode_batches=(2,),
        prefill_shapes=((2, 32),),
        verbose=False,
    ) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens), False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("target", FAMILIES, indirect=True)
def test_greedy_continuations(target, ragged_prompts):
    prompts = ragged_prompts(1, 5, 32, 64)
    for prompt, output in zip(prompts, greedy(target.folder, prompts), strict=True):
        logits = hf_logits(target.hf, [prompt + output])[0, len(prompt) - 1 : -1]
        assert output == logits.argmax(-1).tolist()
        assert len(output) == 64


@pytest.mark.parametrize(
    "name", ["llama-bias-head-dim-llama3-rope", "llama-mha-tied-linear-rope-eps"]
)
def test_rope_fields_of_older_configs(checkpoints, tokens, name):
    target, rope = made(checkpoints, name), CASES[name][1]["rope_parameters"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    if rope is LINEAR_ROPE:
        scaling["type"] = scaling.pop("rope_type")
    old = checkpoints.copy(
        target.folder,
        rope_parameters=None,
        rope_theta=rope["rope_theta"],
        rope_scaling=scaling,
    )
    assert "rope_parameters" in json.loads((target.folder / "config.json").read_text())
    np.testing.assert_allclose(
        causal_logits(old, tokens), hf_logits(target.hf, tokens), rtol=0, atol=1e-4
    )


def test_torch_files(checkpoints, tokens):
    target = made(checkpoints, "llama-bias-head-dim-llama3-rope")
    folder = checkpoints.copy(target.folder)
    (folder / "model.safetensors").unlink()
    torch.save(target.hf.state_dict(), folder / "pytorch_model.bin")
    np.testing.assert_array_equal(
        causal_logits(folder, tokens), causal_logits(target.folder, tokens)
    )


def test_shards_are_really_there(checkpoints):
    folder = made(checkpoints, "qwen2-tied-sharded").folder
    assert len(list(folder.glob("model-*.safetensors"))) > 2


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_bfloat16_log_probabilities(checkpoints, tokens, kind):
    """Within twice the distance that transformers' own bf16 keeps from fp32, on average."""
    target = checkpoints.target(kind, num_hidden_layers=2)
    exact = torch.log_softmax(torch.tensor(hf_logits(target.hf, tokens)), -1)
    half = copy.deepcopy(target.hf).to(torch.bfloat16)
    theirs = torch.log_softmax(torch.tensor(hf_logits(half, tokens)), -1)
    ours = torch.log_softmax(torch.tensor(causal_logits(target.folder, tokens, "bfloat16")), -1)
    error, their_error = (ours - exact).abs().mean(), (theirs - exact).abs().mean()
    assert 1e-4 < error < 2 * their_error < 0.1
    assert (ours - theirs).abs().max() < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, seed", [(2, 2, 20, 0), (6, 3, 8, 1), (8, 2, 4, 2)]
)
def test_more_shapes(checkpoints, tokens, kind, heads, kv_heads, head_dim, seed):
    target = checkpoints.target(
        kind,
        seed=seed,
        hidden_size=24 * (1 + seed),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_hidden_layers=1 + seed,
        tie_word_embeddings=bool(seed % 2),
        **({"sliding_window": 5 + 25 * seed} if kind == "mistral" else {}),
    )
    expected = hf_logits(target.hf, tokens)
    np.testing.assert_allclose(causal_logits(target.folder, tokens), expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(paged_logits(target.folder, tokens), expected, rtol=0, atol=1e-4)
