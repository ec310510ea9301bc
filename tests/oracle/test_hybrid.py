"""Hybrid models against transformers: logits however a sequence is cut up, and greedy output.

Recurrent layers have three ways to the same numbers: whole sequences, chunks of a prompt, and the
rows of a verification, of which some are rejected.
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

from specjax import LLM, SamplingParams
from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.rows import CachedRows
from specjax.device.models.layers.attention import Attention
from specjax.device.models.model import init_caches
from specjax.device.models.registry import load_model

torch = pytest.importorskip("torch")

FLOAT32 = np.dtype(np.float32)
BATCH, LENGTH, PAGE_SIZE, K = 2, 168, 8, 3
WIDEST = 72  # chunk: more than the delta rule takes at once
# Prompt tokens of each request in each step, then rows that stand of the K+1 of each round.
CHUNKS = ((3, 5), (64, 65), (5, 0), (1, 64), (65, 3), (0, 1))
STANDING = ((4, 1), (2, 3), (1, 4), (3, 2)) * 3
ROPE = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}
CASES = {
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next-ratio-3-some-dense": (
        "qwen3_next",
        {
            "linear_num_value_heads": 6,
            "num_hidden_layers": 4,
            "mlp_only_layers": [3],
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5-ratio-1-tied": (
        "qwen3_5_text",
        {
            "linear_num_value_heads": 2,
            "tie_word_embeddings": True,
            "rms_norm_eps": 0.02,
            "max_shard_size": "20KB",
        },
    ),
    "qwen3_5-ratio-3": (
        "qwen3_5_text",
        {
            "linear_num_value_heads": 6,
            "num_hidden_layers": 4,
            "full_attention_interval": 4,
            "rope_parameters": ROPE,
            "num_key_value_heads": 4,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"num_experts_per_tok": 3}),
    "qwen3_5-vision-tied": ("qwen3_5", {"tie_word_embeddings": True}),
    "qwen3_5_moe-vision": ("qwen3_5_moe", {"num_hidden_layers": 2}),
}


def cases(*fast):
    """All cases, slow but for the `fast`."""
    return [
        pytest.param(case, id=name, marks=() if name in fast else pytest.mark.slow)
        for name, case in CASES.items()
    ]


@pytest.fixture(scope="module")
def target(request, checkpoints):
    kind, config = request.param
    return checkpoints.target(kind, **config)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 96, (BATCH, LENGTH))


@partial(jax.jit, static_argnames=("model", "folds"))
def run(params, cache, table, tokens, starts, counts, pending, model, folds):
    """Logits [B, T, V] of rows that go on from the cache, and the cache."""
    rows = CachedRows.starting_at(
        starts,
        counts,
        tokens.shape[1],
        table,
        slots=jnp.array([2, 0]),
        pending=pending,
        folds=folds,
    )
    features, cache = model.extend(params, tokens.reshape(-1), rows, cache)
    return model.logits(params, features.hidden).reshape(*tokens.shape, -1), cache


class Served:
    """Extends two sequences over a cache that held garbage, as an engine does."""

    def __init__(self, folder):
        self.model, self.params = load_model(folder, FLOAT32)
        num_pages = BATCH * LENGTH // PAGE_SIZE
        table = np.random.default_rng(1).permutation(num_pages + 3)[:num_pages]
        self.table = table.reshape(BATCH, -1).astype(np.int32)
        sizes = CacheSizes(3, num_pages + 3, PAGE_SIZE, K + 1)
        shapes = jax.eval_shape(lambda: init_caches(self.model, sizes, "float32"))
        # What nothing was written to must not matter.
        self.cache = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), shapes)

    def extend(self, rows, starts, *, pending, folds):
        """Logits of each request's rows, which are a round's, or those of chunks up to WIDEST."""
        counts = np.array([len(row) for row in rows], np.int32)
        width = WIDEST if folds else K + 1
        padded = np.array([[*row, *[0] * (width - len(row))] for row in rows], np.int32)
        starts, pending = np.array(starts, np.int32), np.array(pending, np.int32)
        logits, self.cache = run(
            self.params,
            self.cache,
            self.table,
            padded,
            starts,
            counts,
            pending,
            model=self.model,
            folds=folds,
        )
        return [np.asarray(one)[:count] for one, count in zip(logits, counts, strict=True)]


def served_logits(folder, tokens, chunks=CHUNKS, standing=STANDING):
    """Logits of the tokens, a chunk at a time, then in rounds with rejected drafts."""
    served, rng = Served(folder), np.random.default_rng(2)
    at, logits = np.zeros(BATCH, int), [[], []]
    pending = (0, 0)
    for counts in chunks:
        rows = [tokens[b, at[b] : at[b] + counts[b]] for b in range(BATCH)]
        for b, found in enumerate(served.extend(rows, at, pending=(0, 0), folds=True)):
            logits[b].append(found)
        at = at + counts
    assert len(set(at)) == 1 and at[0] >= 130
    for stands in standing:
        rows = rng.integers(0, 96, (BATCH, K + 1))
        for b, count in enumerate(stands):
            rows[b, :count] = tokens[b, at[b] : at[b] + count]
        for b, found in enumerate(served.extend(rows, at, pending=pending, folds=False)):
            logits[b].append(found[: stands[b]])
        at, pending = at + stands, stands
    return np.stack([np.concatenate(one) for one in logits])


@pytest.mark.parametrize(
    "target", cases("qwen3_next", "qwen3_5-vision-tied", "qwen3_5_moe"), indirect=True
)
def test_logits_of_whole_sequences(target, tokens):
    logits = causal_logits(target.folder, tokens)
    np.testing.assert_allclose(logits, hf_logits(target.hf, tokens), rtol=0, atol=1e-4)


# In test_mtp.py the engine runs Qwen3-Next, which is Qwen3.5's experts under other names.
@pytest.mark.parametrize("target", cases("qwen3_5-vision-tied", "qwen3_5_moe"), indirect=True)
def test_logits_of_chunks_and_rounds(target, tokens):
    logits = served_logits(target.folder, tokens)
    expected = hf_logits(target.hf, tokens)[:, : logits.shape[1]]
    assert logits.shape[1] == LENGTH
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


# --- greedy output --------------------------------------------------------------------------------


SIZES = {
    "max_model_len": 136,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 48,
    "decode_batches": (2,),
    "prefill_shapes": ((2, 24),),
}


def check_greedy(folder, hf, prompts, *, max_tokens=64, **options):
    """Every token is the argmax of transformers' logits for what is before it."""
    with LLM(folder, **SIZES, verbose=False, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        outputs = [o.outputs[0].token_ids for o in llm.generate(prompts, params, False)]
        metrics = llm.metrics()
    sequences = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    longest = max(map(len, sequences))
    logits = hf_logits(hf, [[*one, *[0] * (longest - len(one))] for one in sequences])
    for row, prompt, output in zip(logits, prompts, outputs, strict=True):
        assert len(output) == max_tokens
        expected = row[len(prompt) - 1 : len(prompt) + len(output) - 1].argmax(-1)
        assert output == expected.tolist()
    return metrics


PROMPTS = (1, K, K + 1, K + 2, 33, 65)


@pytest.mark.parametrize(
    "case", ["qwen3_5-vision-tied", pytest.param("qwen3_next", marks=pytest.mark.slow)]
)
def test_greedy_continuations(checkpoints, ragged_prompts, case):
    kind, config = CASES[case]
    target = checkpoints.target(kind, **config)
    check_greedy(target.folder, target.hf, ragged_prompts(*PROMPTS))


@pytest.mark.slow
def test_greedy_continuations_with_speculation(checkpoints, ragged_prompts):
    """As test_mtp.py does draft by draft, here by the public door."""
    kind, config = CASES["qwen3_5_moe"]
    target = checkpoints.target(kind, **config)
    files = checkpoints.mtp(target)
    speculation = {"method": "mtp", "num_speculative_tokens": K}
    metrics = check_greedy(
        files.folder, target.hf, ragged_prompts(*PROMPTS), speculative_config=speculation
    )
    assert metrics.num_accepted_tokens > 0


# --- files and dtypes -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text"])
def test_both_layouts_of_experts_give_the_same_parameters(checkpoints, kind):
    target = checkpoints.target(kind)
    (model, params), (other, others) = (
        load_model(one.folder, FLOAT32) for one in (target, checkpoints.fused(target))
    )
    assert model == other
    jax.tree.map(np.testing.assert_array_equal, params, others)


def test_the_outer_config_says_whether_the_head_is_tied(checkpoints):
    """Transformers writes the text part's own default beside it."""
    target = checkpoints.target("qwen3_5", tie_word_embeddings=True)
    config = json.loads((target.folder / "config.json").read_text())
    text = config["text_config"] | {"tie_word_embeddings": False}
    folder, tokens = checkpoints.copy(target.folder, text_config=text), [[1, 2, 3]]
    hf = type(target.hf).from_pretrained(folder)
    expected = hf_logits(target.hf, tokens)
    np.testing.assert_allclose(hf_logits(hf, tokens), expected, rtol=0, atol=1e-5)
    assert load_model(folder, FLOAT32)[0].tie_word_embeddings


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


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text"])
def test_bfloat16_log_probabilities(checkpoints, tokens, kind):
    """Within twice the distance that transformers' own bf16 keeps from fp32, on average."""
    target = checkpoints.target(kind, num_hidden_layers=2)
    exact = torch.log_softmax(torch.tensor(hf_logits(target.hf, tokens)), -1)
    half = copy.deepcopy(target.hf).to(torch.bfloat16)
    theirs = torch.log_softmax(torch.tensor(hf_logits(half, tokens)), -1)
    ours = torch.log_softmax(torch.tensor(causal_logits(target.folder, tokens, "bfloat16")), -1)
    error, their_error = (ours - exact).abs().mean(), (theirs - exact).abs().mean()
    assert 1e-4 < error < 2 * their_error < 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, seed", [("qwen3_next", 0), ("qwen3_5_text", 1), ("qwen3_5_moe_text", 2), ("qwen3_5", 0)]
)
def test_more_shapes(checkpoints, tokens, ragged_prompts, kind, seed):
    target = checkpoints.target(
        kind,
        seed=seed + 7,
        hidden_size=24 * (1 + seed),
        num_hidden_layers=2 + seed,
        full_attention_interval=2 + seed // 2,
        num_attention_heads=(3, 4, 6)[seed],
        num_key_value_heads=(1, 4, 2)[seed],
        head_dim=(8, 16, 24)[seed],
        linear_num_key_heads=(1, 3, 4)[seed],
        linear_num_value_heads=(3, 3, 8)[seed],
        linear_key_head_dim=(16, 4, 8)[seed],
        linear_value_head_dim=(4, 16, 8)[seed],
        linear_conv_kernel_dim=(2, 4, 5)[seed],
        tie_word_embeddings=bool(seed % 2),
    )
    expected = hf_logits(target.hf, tokens)
    chunks = np.random.default_rng(seed).permuted(np.array(CHUNKS), axis=0)
    for logits in (
        causal_logits(target.folder, tokens),
        served_logits(target.folder, tokens, chunks),
    ):
        # A row now and then is so steep that weights off by 1e-7 move it by more than 1e-4.
        error = np.abs(logits - expected)
        assert error.mean() < 1e-5 and (error > 1e-4).mean() < 1e-3 and error.max() < 1e-3
    files = checkpoints.mtp(target, seed=seed)
    speculation = {"method": "mtp", "num_speculative_tokens": 1 + 2 * seed}
    prompts = ragged_prompts(*PROMPTS, seed=seed)
    check_greedy(files.folder, target.hf, prompts, speculative_config=speculation)
