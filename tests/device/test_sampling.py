"""From logits to tokens, compared with loops, sorts and softmax in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from support.asked import sampling_of

from specjax.device.drafters.drafter import DraftContext, Variant
from specjax.device.edits import History
from specjax.device.logprobs import token_logprobs
from specjax.device.noise import Stream, gumbel_noise
from specjax.device.requests import Requests, init_requests
from specjax.device.sampling import choose, draw_draft, process, scale
from specjax.sampling_params import SamplingParams

compiled_process, compiled_choose = jax.jit(process), jax.jit(choose)
compiled_logprobs = jax.jit(token_logprobs, static_argnums=2)
compiled_draw = jax.jit(draw_draft, static_argnames=("vocab_size", "stream", "wants_probs"))
noise_of = jax.jit(gumbel_noise, static_argnums=(1, 3))
BATCH = 100


def padded(*trees):
    """Pad trees of arrays with greedy rows, so that one compiled program runs all of them."""

    def pad(x):
        return np.pad(x, ((0, BATCH - len(x)), *((0, 0),) * (np.ndim(x) - 1)))

    return jax.tree.map(pad, trees)


def run_choose(logits, sampling, positions):
    """Run `choose` with logits that are padded to 30 tokens with -inf."""
    n, vocab_size = logits.shape
    logits = np.pad(logits, ((0, 0), (0, 30 - vocab_size)), constant_values=-np.inf)
    return np.asarray(compiled_choose(*padded(logits, sampling, positions)))[:n]


def history_of(requests, drafts, length=18):
    lengths = [len(one.prompt) + len(one.output) for one in requests]
    rows = [
        [*one.prompt, *one.output, *row, *[5] * length][:length]
        for one, row in zip(requests, drafts.tolist(), strict=True)
    ]
    return History(np.array(rows, np.int32), np.array(lengths, np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size, k, seed", [(7, 1, 0), (33, 3, 1), (200, 0, 3)])
def test_processed_logits_of_random_requests(asked, vocab_size, k, seed):
    """Logits after edits, min_p, top_k and top_p. The logits that are kept are not scaled."""
    rng, batch = np.random.default_rng(seed), BATCH
    drafts = rng.integers(0, min(vocab_size, 9), (batch, k))
    requests = [asked.random(rng, vocab_size, row.tolist()) for row in drafts]
    requests = [replace(one, processor=-1) for one in requests]
    logits = (np.round(rng.normal(size=(batch, k + 1, vocab_size)) * 16) / 8).astype(np.float32)
    device = asked.on_device(requests, vocab_size)
    processed = np.asarray(compiled_process(logits, device, history_of(requests, drafts)))
    num_cut = 0
    for b, one in enumerate(requests):
        for t in range(k + 1):
            now = one.then(*drafts[b, :t].tolist())
            edited = now.edit(logits[b, t])
            kept = now.kept(edited)
            expected = np.where(kept, edited, -np.inf)
            np.testing.assert_allclose(processed[b, t], expected, rtol=1e-5, atol=1e-5)
            num_cut += not all(kept)
            if not one.params.edits_logits:
                np.testing.assert_array_equal(processed[b, t], logits[b, t])
    assert num_cut > batch / 2


def test_initial_requests_ask_for_nothing():
    logits = np.random.default_rng(0).normal(size=(BATCH, 1, 200)).astype(np.float32)
    lengths = np.resize(np.int32([0, 4, 18]), BATCH)
    history = History(np.full((BATCH, 18), -1, np.int32), lengths)
    requests = jax.jit(init_requests, static_argnums=(0, 1))(BATCH, 200)
    np.testing.assert_array_equal(compiled_process(logits, requests, history), logits)


def test_requests_are_put_at_their_slots(asked):
    """Requests with a slot number past the last slot are ignored."""
    new = asked.on_device([asked(SamplingParams(top_k=k)) for k in (4, 5, 6)], 40)
    empty = asked.on_device([asked()] * 4, 40)
    put = jax.jit(Requests.put)(empty, np.array([2, 4, 0]), new)
    assert put.sampling.top_k.tolist() == [6, 0, 4, 0]
    assert jax.jit(Requests.at)(put, np.array([2, 0])).sampling.seeds.tolist() == [0, 2]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1e-3, 1e-8, 1e-20, 2e-38, 1e-42])
def test_a_tiny_temperature_is_greedy(temperature):
    """The division by the temperature may overflow. The batch may also have warmer requests."""
    rows = [-3.0, 5.0, 30.0, 29.0, -np.inf], [-9.0, -7.0, -7.5, -30.0, -9.0], [2, 1, 3, 4, 0]
    logits = np.float32(rows)
    positions, counters = np.arange(3), (np.arange(3), np.zeros(3, int))
    alone = run_choose(logits, sampling_of([temperature] * 3), positions)
    assert alone.tolist() == [2, 1, 3]
    mixed = sampling_of([temperature, temperature, 1.0])
    assert run_choose(logits, mixed, positions)[:2].tolist() == [2, 1]
    token, q = compiled_draw(logits, None, 5, mixed, Stream.DRAFT, counters, wants_probs=True)
    assert token[:2].tolist() == [2, 1]
    np.testing.assert_array_equal(q[:2], np.eye(5)[[2, 1]])


def test_draws_are_a_function_of_seed_position_and_temperature():
    logits = np.tile(np.random.default_rng(0).normal(size=30).astype(np.float32), (6, 1))
    params = sampling_of([1.0, 1.0, 1.0, 0.5, 2.0, 1.0], [5, 5, 6, 5, 5, 5])
    positions = np.array([8, 8, 8, 9, 10, 11])
    together = run_choose(logits, params, positions)
    order = np.array([4, 2, 0, 5, 1, 3])
    others = run_choose(logits, jax.tree.map(lambda x: x[order], params), positions[order])
    assert others.tolist() == together[order].tolist()
    assert together[0] == together[1] != together[2]
    noise = noise_of(params.seeds, Stream.TARGET, (positions,), 30)
    scaled = logits / params.temperature[:, None]
    np.testing.assert_array_equal(together, (scaled + noise).argmax(-1))


@pytest.mark.parametrize("temperatures", [(1.0, 0.0, 0.3), (0.0, 0.0, 0.0)])
def test_a_drafter_like_the_target_draws_its_tokens(temperatures):
    """With the target's noise, equal logits give equal tokens, also in a part of the vocabulary."""
    n, positions = 99, np.arange(99)
    logits = 2 * np.random.default_rng(1).normal(size=(n, 30)).astype(np.float32)
    ids = np.array([3, 17, 4, 29, 11])
    params = sampling_of(np.resize(temperatures, n))
    shared = {"stream": Stream.TARGET, "counters": (positions,), "wants_probs": False}
    whole, q = compiled_draw(logits, None, 30, params, **shared)
    assert q is None and whole.dtype == np.int32
    np.testing.assert_array_equal(whole, run_choose(logits, params, positions))
    part, _ = compiled_draw(logits[:, ids], ids, 30, params, **shared)
    masked = np.where(np.isin(np.arange(30), ids), logits, -np.inf)
    np.testing.assert_array_equal(part, run_choose(masked, params, positions))
    other, _ = compiled_draw(logits, None, 30, params, **shared | {"stream": Stream.DRAFT})
    is_greedy, same = params.temperature == 0, np.asarray(other == whole)
    assert same[is_greedy].all()
    assert is_greedy.all() or not same[~is_greedy].all()


def test_logits_are_divided_by_the_temperature_unless_it_is_zero():
    scaled = scale(jnp.array([[2.0, -jnp.inf], [2.0, 1.0]]), sampling_of([0.5, 0.0]))
    np.testing.assert_array_equal(scaled, [[4, -np.inf], [2, 1]])


def test_what_drafts_were_drawn_from():
    """Drafts are drawn from the softmax over the target's ids, which is one-hot in greedy rows."""
    logits = 2 * np.random.default_rng(2).normal(size=(4, 5)).astype(np.float32)
    ids, temperatures = np.array([3, 17, 4, 29, 11]), np.array([1.0, 0.0, 0.3, 2.0])
    counters = np.arange(4), np.zeros(4, int)
    token, q = compiled_draw(
        logits, ids, 30, sampling_of(temperatures), Stream.DRAFT, counters, wants_probs=True
    )
    expected = np.zeros((4, 30))
    scaled = logits.astype(np.float64) / np.maximum(temperatures, 1e-9)[:, None]
    expected[:, ids] = scipy.special.softmax(scaled, axis=1)
    np.testing.assert_allclose(q, expected, atol=1e-6)
    assert token[1] == ids[logits[1].argmax()]
    noise = np.asarray(noise_of(np.arange(4, dtype=np.uint32), Stream.DRAFT, counters, 30))
    drawn = ids[(scaled + noise[:, ids]).argmax(-1)]
    np.testing.assert_array_equal(token, drawn)


def test_a_draft_that_nothing_was_left_for_has_no_probability():
    """For example, the drafter's vocabulary may lack all tokens that a request allows."""
    logits = np.float32([[-np.inf] * 5, [0.0, -np.inf, -np.inf, -np.inf, -np.inf]])
    sampling, counters = sampling_of([1.0, 1.0]), (np.arange(2), np.zeros(2, int))
    _, q = compiled_draw(logits, None, 5, sampling, Stream.DRAFT, counters, wants_probs=True)
    np.testing.assert_array_equal(q, [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0]])


@pytest.mark.parametrize("vocab_size, num_top", [(7, 7), (200, 5), (200, 0), (5000, 20)])
def test_logprobs_and_ranks_against_a_sort(vocab_size, num_top):
    """Tied tokens share the rank of the first of them, and are listed by ascending id."""
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=(40, vocab_size)) * np.resize([1, 10, 0.01], 40)[:, None]
    logits[::2] = np.round(logits[::2])
    logits[1::4, rng.random(vocab_size) < 0.5] = -np.inf
    logits[:, 0] = 2.0
    logits = logits.astype(np.float32)
    tokens = rng.integers(0, vocab_size, 40)
    tokens[:6] = logits[:6].argmax(-1)
    found = jax.device_get(compiled_logprobs(logits, tokens, num_top))
    assert found.ranks.dtype == found.top_ids.dtype == np.int32
    assert found.top_ids.shape == found.top_logprobs.shape == (40, num_top)
    for i, (row, token) in enumerate(zip(logits.astype(np.float64), tokens, strict=True)):
        logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        order = np.argsort(-row, kind="stable")[:num_top]
        tolerance = {"rtol": 1e-5, "atol": 1e-5}
        np.testing.assert_allclose(found.logprobs[i], logprobs[token], **tolerance)
        np.testing.assert_array_equal(found.top_ids[i], order)
        np.testing.assert_allclose(found.top_logprobs[i], logprobs[order], **tolerance)
        assert found.ranks[i] == 1 + sum(row > row[token])
    assert found.ranks[:6].tolist() == [1] * 6


class Ban:
    """A logits processor that forbids the token `token`."""

    token = 0

    def __call__(self, tokens, length, logits):
        return logits.at[self.token].set(-np.inf)


@pytest.mark.slow
def test_each_program_traces_logits_processors_anew():
    """Their attributes may have changed since an earlier program was traced."""
    ban, row, requests = Ban(), jnp.arange(1), init_requests(1, 5)
    edits = replace(requests.edits, processor=jnp.zeros_like(row))
    requests, history = replace(requests, edits=edits), History(jnp.zeros((1, 8), int), row + 3)
    variant = Variant(processors=((0, (ban,)),))
    given = row, row + 2, row >= 0, row[:, None], requests, history, jnp.array(True)
    context = DraftContext(*given, "auto", 1, True, variant)
    for ban.token, expected in (0, 1), (1, 0):
        draw = jax.jit(lambda x: context.draw(x, None, 5, [], is_greedy=False)[0])
        assert draw(jnp.array([[4.0, 3.0, 2.0, 1.0, 0.0]])).tolist() == [expected]
