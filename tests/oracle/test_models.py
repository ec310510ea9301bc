"""Every model family against transformers: logits at all positions, and greedy continuations."""

import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import LLM, SamplingParams
from specjax.device.cache.rows import CachedRows
from specjax.device.models.registry import load_model
from specjax.train.context import CausalRows

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
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
CASES = {
    "llama": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-bias-head-dim": (
        "llama",
        {"attention_bias": True, "num_key_value_heads": 1, "head_dim": 10, "seed": 3},
    ),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 16}),
    "llama-linear-rope-eps": ("llama", {"rope_parameters": LINEAR_ROPE, "rms_norm_eps": 0.05}),
    "qwen2": ("qwen2", {"num_key_value_heads": 1}),
    "qwen2-tied-sharded": ("qwen2", {"tie_word_embeddings": True, "max_shard_size": "10KB"}),
    "qwen3-head-dim": ("qwen3", {"head_dim": 12, "num_hidden_layers": 1}),
    "qwen3-tied": (
        "qwen3",
        {"head_dim": 16, "num_key_value_heads": 4, "tie_word_embeddings": True, "seed": 4},
    ),
}


FAMILIES = ("llama", "qwen2", "qwen3-tied")


@pytest.fixture(scope="module", params=CASES)
def target(request, checkpoints):
    kind, config = CASES[request.param]
    return checkpoints.target(kind, **({"num_hidden_layers": 2} | config))


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 96, (BATCH, LENGTH))


def hf_logits(hf, tokens):
    with torch.no_grad():
        return hf(torch.tensor(tokens)).logits.float().numpy()


def causal_logits(folder, tokens, dtype):
    """Logits [B, T, V] of whole sequences, as in training."""
    model, params = load_model(folder, np.dtype(dtype))
    rows = CausalRows.of(*tokens.shape)

    @jax.jit
    def run(params, tokens):
        features, _ = model.extend(params, tokens, rows, None)
        return model.logits(params, features.hidden)

    return np.asarray(run(params, jnp.array(tokens.reshape(-1)))).reshape(*tokens.shape, -1)


def paged_logits(folder, tokens):
    """Logits [B, T, V] from chunks over a pool whose pages lie in no order."""
    model, params = load_model(folder, np.dtype(np.float32))
    batch, length = tokens.shape
    num_pages = batch * length // PAGE_SIZE
    table = np.random.default_rng(1).permutation(num_pages + 3)[:num_pages]
    table = jnp.array(table.reshape(batch, -1))
    kv = model.init_cache(batch, num_pages + 3, PAGE_SIZE, CHUNK, "float32")

    @jax.jit
    def run(params, kv, tokens, starts):
        counts = jnp.full(batch, CHUNK)
        rows = CachedRows.starting_at(starts, counts, CHUNK, table)
        features, kv = model.extend(params, tokens, rows, kv)
        return model.logits(params, features.hidden), kv

    chunks = []
    kv = jnp.full_like(kv, jnp.nan)  # what nothing was written to must not matter
    for start in range(0, length, CHUNK):
        chunk = jnp.array(tokens[:, start : start + CHUNK].reshape(-1))
        logits, kv = run(params, kv, chunk, jnp.full(batch, start))
        chunks.append(np.asarray(logits).reshape(batch, CHUNK, -1))
    return np.concatenate(chunks, axis=1)


def test_logits_of_whole_sequences(target, tokens):
    expected = hf_logits(target.hf, tokens)
    logits = causal_logits(target.folder, tokens, "float32")
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_logits_of_chunks_over_pages(target, tokens):
    logits = paged_logits(target.folder, tokens)
    np.testing.assert_allclose(logits, hf_logits(target.hf, tokens), rtol=0, atol=1e-4)


def greedy(folder, prompts, max_tokens=64):
    with LLM(
        folder, max_model_len=128, max_num_seqs=1, max_num_batched_tokens=32, show_progress=False
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


def test_rope_fields_of_older_configs(checkpoints, tokens):
    for rope in LLAMA3_ROPE, LINEAR_ROPE:
        target = checkpoints.target("llama", num_hidden_layers=1, rope_parameters=rope)
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
        logits = causal_logits(old, tokens, "float32")
        np.testing.assert_allclose(logits, hf_logits(target.hf, tokens), rtol=0, atol=1e-4)


def test_torch_files(checkpoints, tokens):
    target = checkpoints.target("qwen2", num_hidden_layers=1)
    folder = checkpoints.copy(target.folder)
    (folder / "model.safetensors").unlink()
    torch.save(target.hf.state_dict(), folder / "pytorch_model.bin")
    logits = causal_logits(folder, tokens, "float32")
    np.testing.assert_array_equal(logits, causal_logits(target.folder, tokens, "float32"))


def test_shards_are_really_there(checkpoints):
    kind, config = CASES["qwen2-tied-sharded"]
    folder = checkpoints.target(kind, **({"num_hidden_layers": 2} | config)).folder
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
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
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
    )
    expected = hf_logits(target.hf, tokens)
    np.testing.assert_allclose(
        causal_logits(target.folder, tokens, "float32"), expected, rtol=0, atol=1e-4
    )
    np.testing.assert_allclose(paged_logits(target.folder, tokens), expected, rtol=0, atol=1e-4)
