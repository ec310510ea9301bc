"""Logits divided over two devices: same tokens as on one device, and close numbers."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from specjax.device.edits import History, apply_processors
from specjax.device.logprobs import logprobs_of, token_logprobs
from specjax.device.noise import Stream
from specjax.device.sampling import choose, draw_draft, process
from specjax.device.verification import Block, Draft, Rejection, SeedExact, Synthetic, Target
from specjax.device.vocabulary import WHOLE, SplitVocabulary

K, BATCH = 2, 48
SIZES = [100, 130]  # with 64 and 128 columns a device, so that the second has 36 tokens, and 2


def double_first(tokens, length, logits):
    return logits.at[tokens[0]].multiply(2).at[-1].set(0.5)


def both(function, split, *others, of_columns=False):
    """Return the results of `function`, which takes a vocabulary, on one device and on two.

    Args:
        split: arrays [..., V], which are divided over the devices by columns.
        of_columns: whether the results [..., V] are also divided by columns.
    """
    total = split[0].shape[-1]
    vocabulary = SplitVocabulary(total, 2, "tokens")
    padding = 2 * vocabulary.size - total
    padded = [np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)]) for x in split]

    def spec(x):
        return PartitionSpec(*[None] * (x.ndim - 1), "tokens")

    def on_device(split, *others):
        return function(vocabulary, *map(vocabulary.without_padding, split), *others)

    expected = jax.jit(partial(function, WHOLE))(*split, *others)
    found = jax.jit(
        jax.shard_map(
            on_device,
            mesh=Mesh(np.array(jax.devices()[:2]), "tokens"),
            in_specs=(list(map(spec, split)), *[PartitionSpec()] * len(others)),
            out_specs=jax.tree.map(spec, expected) if of_columns else PartitionSpec(),
            check_vma=False,
        )
    )(padded, *others)
    if of_columns:
        found = jax.tree.map(lambda x: x[..., :total], found)
    return jax.tree.map(np.asarray, (expected, found))


@pytest.fixture(params=SIZES)
def step(request, asked):
    """Requests of all kinds, their history, drafts and logits, and a random generator."""
    rng, total = np.random.default_rng(request.param), request.param
    drafts = rng.integers(0, 9, (BATCH, K)).astype(np.int32)
    device = asked.on_device([asked.random(rng, total, row.tolist()) for row in drafts], total)
    sampling = replace(
        device.sampling,
        temperature=rng.choice([0, 0.5, 1, 3], BATCH).astype(np.float32),
        top_k=rng.choice([0, 1, 5, total], BATCH).astype(np.int32),
        top_p=rng.choice([1, 0.9, 0.5], BATCH).astype(np.float32),
        min_p=rng.choice([0, 0.02], BATCH).astype(np.float32),
    )
    tokens = np.concatenate([rng.integers(0, total, (BATCH, 18)), drafts], axis=1)
    history = History(tokens.astype(np.int32), np.full(BATCH, 18, np.int32))
    logits = np.round(8 * rng.normal(0, 3, (BATCH, K + 1, total))).astype(np.float32) / 8  # ties
    logits[0], logits[1, :, 3], logits[2, :, 90:] = -np.inf, np.nan, -np.inf
    return replace(device, sampling=sampling), history, drafts, logits, rng


@pytest.mark.slow
def test_edits_and_truncation(step):
    requests, history, _, logits, rng = step
    masks = rng.integers(-(2**31), 2**31, (*logits.shape[:2], -(-logits.shape[-1] // 32)))
    masks[..., 0] |= 1

    def edited(vocabulary, logits, requests, history, masks):
        processors = ((0, (double_first,)),)
        logits = apply_processors(logits, requests, history, processors, vocabulary)
        return process(logits, requests, history, masks, vocabulary=vocabulary)

    arguments = jax.tree.map(lambda x: x[3:], (requests, history, masks.astype(np.int32)))
    expected, found = both(edited, [logits[3:]], *arguments, of_columns=True)
    assert 0.01 < np.isfinite(expected).mean() < 0.5
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["reference", "interpret"])
def test_drawn_tokens(step, kernels):
    requests, history, _, logits, _ = step

    def draw(vocabulary, logits, sampling, positions):
        rows = logits.reshape(-1, logits.shape[-1])
        return choose(rows, sampling, positions, vocabulary=vocabulary, kernels=kernels)

    expected, found = both(draw, [logits], requests.sampling, history.lengths)
    assert (expected[:6] == -1).all() and (expected[6:] >= 0).all() and (expected > 64).any()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "step, method",
    [(100, SeedExact()), (130, Rejection()), (100, Block()), (130, Synthetic((0.7, 0.4)))],
    indirect=["step"],
)
def test_verdicts(step, method):
    """Drafts are drawn if the method uses their distribution; else most are the best token."""
    requests, history, drafts, logits, rng = step
    guess = logits[:, :K] + rng.normal(size=(BATCH, K, logits.shape[-1])).astype(np.float32)
    most = rng.integers(0, K + 1, BATCH).astype(np.int32)
    drafts = np.where(rng.random(drafts.shape) < 0.7, logits[:, :K].argmax(-1), drafts)

    def verdict(vocabulary, logits, guess, sampling, lengths, most, drafts):
        probs = None
        if not method.shares_noise:
            counters = jnp.repeat(lengths, K), jnp.tile(jnp.arange(K), BATCH)
            rows = guess.reshape(BATCH * K, -1), None, 0, sampling.repeat(K), Stream.DRAFT, counters
            drafts, probs = draw_draft(*rows, wants_probs=True, vocabulary=vocabulary)
            drafts, probs = drafts.reshape(BATCH, K), probs.reshape(BATCH, K, -1)
        target = Target(logits, sampling, lengths, most, vocabulary=vocabulary)
        found = method.verify(Draft(drafts, probs), target)
        return drafts, found.tokens, found.num_accepted

    arguments = requests.sampling, history.lengths, most, drafts.astype(np.int32)
    expected, found = both(verdict, [logits, guess], *arguments)
    assert 0 < expected[2].mean() < K
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(other, one)


@pytest.mark.slow
def test_drafts_of_a_reduced_vocabulary(step):
    """A drafter's logits are whole on each device.

    The distribution is divided like the target's.
    """
    requests, _, _, logits, rng = step
    total = logits.shape[-1]
    ids = rng.permutation(total)[:40].astype(np.int32)

    def draft(vocabulary, logits, own, sampling, ids):
        arguments = own, ids, total, sampling, Stream.DRAFT, (jnp.arange(BATCH),)
        token, q = draw_draft(*arguments, wants_probs=True, vocabulary=vocabulary)
        return jnp.broadcast_to(token[:, None], q.shape), q

    own = logits[:, 0, ids]
    expected, found = both(draft, [logits[:, 0]], own, requests.sampling, ids, of_columns=True)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], atol=1e-6)
    np.testing.assert_allclose(expected[1][3:].sum(axis=-1), 1, rtol=1e-5)


def test_log_probabilities(step):
    _, _, _, logits, rng = step
    rows = logits[2:, 0]
    tokens = rng.integers(0, 64, len(rows)).astype(np.int32)

    def report(vocabulary, logits, tokens):
        found = token_logprobs(logits, tokens, 70, vocabulary)
        return found._replace(raw=logprobs_of(logits, tokens, vocabulary))

    expected, found = both(report, [rows], tokens)
    np.testing.assert_array_equal(found.top_ids, expected.top_ids)
    np.testing.assert_array_equal(found.ranks, expected.ranks)
    for name in ("logprobs", "top_logprobs", "raw"):
        one, other = getattr(expected, name), getattr(found, name)
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)
