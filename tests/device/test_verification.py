"""Properties of verification. Its distribution is tested in tests/statistical."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.asked import sampling_of

from specjax.config import SpeculativeConfig
from specjax.device import verification
from specjax.device.noise import Stream, gumbel_noise, uniform_noise
from specjax.device.sampling import choose
from specjax.device.verification import (
    Block,
    Draft,
    Rejection,
    SeedExact,
    Synthetic,
    Target,
    make_verification,
    target_probs,
)

V, K, ROWS = 6, 3, 96
# With the drafts' distribution, and with drafts that are certain.
DRAWN = [(Rejection(), False), (Rejection(), True), (Block(), False), (Block(), True)]
LOSSLESS = [(SeedExact(), True), *DRAWN]
RATES = (0.9, 0.45, 0.4)
METHODS = [*LOSSLESS, (Synthetic(RATES), True)]


# To compile takes longer than to run.
@partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def verify(method, draft, target):
    return method.verify(draft, target)


def run(method, draft, target):
    return jax.device_get(verify(method, draft, target))


def target_of(logits, temperatures=(1.0,), num_drafts=None):
    n, num_rows = logits.shape[:2]
    return Target(
        np.array(logits, np.float32),
        sampling_of(np.resize(temperatures, n)),
        10 + np.arange(n, dtype=np.int32) % 7,
        np.array(np.full(n, num_rows - 1) if num_drafts is None else num_drafts, np.int32),
    )


def draft_of(tokens, probs=None):
    return Draft(np.array(tokens, np.int32), None if probs is None else np.array(probs, np.float32))


def case(seed, temperatures=(1.0,), *, certain=False, n=ROWS, num_drafts=None):
    """Return drafts drawn from random distributions, and random logits. Some logits are -inf."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(n, K + 1, V))
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    logits[:, :, 0] = 0
    target = target_of(logits, temperatures, num_drafts)
    q = np.exp(np.maximum(logits[:, :-1], -0.5) + rng.normal(size=(n, K, V)))
    q[rng.random(q.shape) < 0.1] = 0
    q[:, :, 1] += 0.05
    q /= q.sum(axis=-1, keepdims=True)
    tokens = np.where(q > 0, np.log(q + 1e-30) + rng.gumbel(size=q.shape), -np.inf).argmax(-1)
    greedy = target.sampling.temperature == 0
    best = logits[greedy, :-1].argmax(-1)
    tokens[greedy] = np.where(rng.random(best.shape) < 0.7, best, tokens[greedy])
    q[greedy] = np.eye(V)[tokens[greedy]]
    return draft_of(tokens, None if certain else q), target


def emitted(verdict):
    rows, counts = np.asarray(verdict.tokens).tolist(), np.asarray(verdict.num_accepted)
    return [row[: n + 1] for row, n in zip(rows, counts, strict=True)]


def longest_prefix(drafts, tokens):
    """Return the drafts that equal `tokens`, then the first token that differs."""
    equal = [a == b for a, b in zip(drafts, tokens, strict=False)]
    return tokens[: [*equal, False].index(False) + 1]


def plain_tokens(target, row):
    """Return the tokens of decoding without drafts, at row `row` of the target's logits."""
    row = np.broadcast_to(row, ROWS)
    logits = target.logits[np.arange(ROWS), row]
    return np.asarray(draw_plain(logits, target.sampling, target.lengths + row.astype(np.int32)))


draw_plain, probs_of = jax.jit(choose), jax.jit(target_probs)
coins_of = jax.jit(verification._coins, static_argnums=1)
gumbel, uniform = (jax.jit(noise, static_argnums=(1, 3)) for noise in (gumbel_noise, uniform_noise))


def cut(draft, target, k):
    """Return the drafts and the target's logits of a step with only k drafts."""
    probs = None if draft.probs is None else draft.probs[:, :k]
    logits, num_drafts = target.logits[:, : k + 1], np.full(ROWS, k, np.int32)
    return draft_of(draft.tokens[:, :k], probs), replace(
        target, logits=logits, num_drafts=num_drafts
    )


@pytest.mark.parametrize("method, certain", METHODS)
class TestEveryMethod:
    def test_emits_what_stands_and_one_token(self, method, certain):
        draft, target = case(0, (1.0, 0.0, 0.3), certain=certain)
        verdict = run(method, draft, target)
        assert verdict.tokens.shape == (ROWS, K + 1) and verdict.tokens.dtype == jnp.int32
        assert set(verdict.num_accepted.tolist()) == set(range(K + 1))
        for b, tokens in enumerate(emitted(verdict)):
            assert tokens[:-1] == draft.tokens[b, : len(tokens) - 1].tolist()
            # Also what was emitted last is the target's to emit.
            assert all(target.logits[b, t, token] > -np.inf for t, token in enumerate(tokens))

    @pytest.mark.slow
    def test_masked_drafts_are_as_if_they_were_not_there(self, method, certain):
        """With num_drafts of K drafts, the result is as if there were only num_drafts drafts."""
        num_drafts = np.resize(range(K + 1), ROWS)
        draft, target = case(1, (1.0, 0.0, 0.3, 1.0, 2.0), certain=certain, num_drafts=num_drafts)
        masked = np.arange(K) >= num_drafts[:, None]
        tokens = np.where(masked, [0, V - 1, 2**31 - 1], draft.tokens)
        probs = None if certain else np.where(masked[..., None], np.nan, draft.probs)
        verdict = run(method, draft_of(tokens, probs), target)
        assert (verdict.num_accepted <= num_drafts).all()
        assert (verdict.num_accepted == num_drafts)[num_drafts > 0].any()
        tokens = emitted(verdict)
        for k in 0, 1, K:
            fewer = emitted(run(method, *cut(draft, target, k)))
            rows = np.flatnonzero(num_drafts == k)
            assert [tokens[b] for b in rows] == [fewer[b] for b in rows]
            assert k or fewer == plain_tokens(target, 0)[:, None].tolist()

    @pytest.mark.parametrize("fill", [-np.inf, np.nan])
    def test_drafts_end_where_no_token_is_left(self, method, certain, fill):
        """Later drafts are ignored, and the token -1 stands for the missing next token."""
        ends = np.resize(range(K + 1), ROWS)
        draft, target = case(13, (1.0, 0.0, 0.3, 1.0, 2.0), certain=certain)
        logits = target.logits.copy()
        logits[np.arange(ROWS), ends] = fill
        found = emitted(run(method, draft, replace(target, logits=logits)))
        shorter = run(method, draft, replace(target, num_drafts=ends.astype(np.int32)))
        expected = emitted(shorter)
        for tokens, accepted, end in zip(expected, shorter.num_accepted, ends, strict=True):
            tokens[end:] = [-1] if accepted == end else tokens[end:]
        assert found == expected
        assert {len(tokens) for tokens in found if tokens[-1] < 0} == set(range(1, K + 2))


@pytest.mark.parametrize("method, certain", LOSSLESS)
def test_greedy_is_the_longest_prefix_of_the_best(method, certain):
    """In a greedy batch, drafts need no distribution. In a mixed batch, others are sampled."""
    draft, target = case(4, (0.0,), certain=certain)
    best = target.logits.argmax(-1).tolist()
    expected = list(map(longest_prefix, draft.tokens.tolist(), best))
    assert {len(tokens) for tokens in expected} == set(range(1, K + 2))
    zeros = None if certain else np.zeros_like(draft.probs)
    assert emitted(run(method, draft._replace(probs=zeros), target)) == expected
    mixed = replace(target, sampling=sampling_of(np.resize([1.0, 0.0], ROWS)))
    assert emitted(run(method, draft, mixed))[1::2] == expected[1::2]


def legal_prefix(draft, target):
    """Return the number of drafts before the first draft that the target cannot produce."""
    at_draft = np.take_along_axis(target.logits[:, :-1], draft.tokens[..., None], axis=2)[..., 0]
    legal = np.cumprod(np.isfinite(at_draft), axis=1).sum(axis=1)
    assert set(legal.tolist()) == set(range(K + 1))
    return legal


@pytest.mark.parametrize("method", [Rejection(), Block()])
class TestDrawnMethods:
    def test_drafts_of_the_target_itself_all_stand(self, method):
        _, target = case(7)
        p = np.asarray(probs_of(target))[:, :-1]
        with np.errstate(divide="ignore"):
            tokens = (np.log(p) + np.random.default_rng(0).gumbel(size=p.shape)).argmax(-1)
        verdict = run(method, draft_of(tokens, p), target)
        assert verdict.num_accepted.tolist() == [K] * ROWS

    def test_a_draft_without_a_distribution_falls(self, method):
        """Probabilities of 0 mean that the drafter has no token that the request allows."""
        draft, target = case(8)
        tokens, probs = draft.tokens.copy(), draft.probs.copy()
        tokens[:, 1], probs[:, 1] = 0, 0
        verdict = run(method, draft_of(tokens, probs), target)
        alone = run(method, draft, replace(target, num_drafts=np.ones(ROWS, np.int32)))
        assert emitted(verdict) == emitted(alone)
        assert verdict.num_accepted.max() == 1

    @pytest.mark.slow
    def test_a_coin_of_zero_accepts_nothing_impossible(self, monkeypatch, method):
        """Coins are uniform in [0, 1). A coin of 0 accepts every draft of a probability above 0."""
        monkeypatch.setattr(verification, "_coins", lambda target, k: jnp.zeros((ROWS, k)))
        draft, target = case(9)
        verdict = jax.jit(method.verify)(draft, target)
        np.testing.assert_array_equal(verdict.num_accepted, legal_prefix(draft, target))


def test_the_target_s_distribution_is_used_if_no_token_is_likelier_than_in_the_draft_s():
    """p - q has no positive entry, as rounding may leave it; half of the drafts are rejected."""
    _, target = case(12)
    p = np.array(probs_of(target))[:, :-1]
    tokens = p.argmax(-1)
    q = p.copy()
    np.put_along_axis(q, tokens[..., None], 2 * p.max(-1, keepdims=True), axis=-1)
    verdict = run(Rejection(), draft_of(tokens, q), target)
    rejected = np.flatnonzero(verdict.num_accepted < K)
    rows = verdict.num_accepted[rejected]
    emitted_here = verdict.tokens[rejected, rows]
    assert len(rejected) > ROWS / 2 and set(emitted_here.tolist()) == set(range(V))
    assert (p[rejected, rows, emitted_here] > 0).all()


def test_the_coins_of_a_round_have_a_stream_of_their_own():
    """A coin depends on the round's first position and its index, so rounds share no coins."""
    _, target = case(11)
    drawn = uniform(target.sampling.seeds, Stream.ACCEPT, (target.lengths,), K)
    np.testing.assert_array_equal(coins_of(target, K), drawn)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, rates",
    [
        ({"synthetic_acceptance_length": 2.6}, (1, 0.6, 0)),
        ({"synthetic_acceptance_length": 4}, (1, 1, 1)),
        ({"synthetic_acceptance_rates": list(RATES)}, RATES),
    ],
)
def test_synthetic_rates(options, rates):
    """Rate i is the fraction of all steps that accept at least i drafts, for any tokens."""
    config = SpeculativeConfig(
        method="eagle",
        model="none",
        num_speculative_tokens=K,
        verification="synthetic",
        **options,
    )
    np.testing.assert_allclose(config.synthetic_rates, rates)
    method = make_verification(config)
    assert hash(method) == hash(make_verification(config))
    rng, logits = np.random.default_rng(0), np.broadcast_to(3 * np.eye(V)[0], (ROWS, K + 1, V))
    target, accepted = target_of(logits, (1.0, 0.0), np.resize([3, 3, 2, 1], ROWS)), []
    for start in range(0, 200 * ROWS, ROWS):
        seeds = np.arange(start, start + ROWS, dtype=np.uint32)
        others = replace(target, sampling=replace(target.sampling, seeds=seeds))
        draft = draft_of(rng.integers(0, V, (ROWS, K)))
        accepted.append(run(method, draft, others).num_accepted)
    assert (accepted <= target.num_drafts).all()
    for i, rate in enumerate(rates):
        stands = np.array(accepted)[:, target.num_drafts > i] > i
        assert abs(stands.mean() - rate) <= 3 * np.sqrt(rate * (1 - rate) / stands.size)


@pytest.mark.slow
def test_synthetic_never_accepts_what_the_target_cannot_produce():
    """Later drafts and the next token are also legal, and other requests are not affected.

    A step may have fewer drafts than there are rates.
    """
    draft, target = case(9, (1.0, 0.0))
    legal = legal_prefix(draft, target)
    for k in 1, K:
        verdict = run(Synthetic((1.0, 1.0, 1.0)), *cut(draft, target, k))
        np.testing.assert_array_equal(verdict.num_accepted, np.minimum(legal, k))
        last = np.asarray(verdict.tokens)[np.arange(ROWS), verdict.num_accepted]
        np.testing.assert_array_equal(last, plain_tokens(target, verdict.num_accepted))


@pytest.mark.parametrize(
    "name, method", [("seed_exact", SeedExact()), ("rejection", Rejection()), ("block", Block())]
)
def test_methods_have_their_config_names(name, method):
    config = SpeculativeConfig(
        method="eagle", model="none", num_speculative_tokens=1, verification=name
    )
    assert make_verification(config) == method
    assert method.shares_noise == (name == "seed_exact") and Synthetic((0.5,)).shares_noise


def test_a_rejection_draws_with_the_targets_stream():
    """The draw uses the noise of the token's position, which no other draw of the request uses."""
    draft, target = case(12)
    verdict = run(Rejection(), draft, target)
    p, rows = np.asarray(probs_of(target)), np.arange(ROWS)
    a = np.asarray(verdict.num_accepted)
    assert set(a.tolist()) == set(range(K + 1))
    q = np.pad(draft.probs, ((0, 0), (0, 1), (0, 0)))[rows, a]
    noise = gumbel(target.sampling.seeds, Stream.TARGET, (target.lengths + a,), V)
    with np.errstate(divide="ignore"):
        best = (np.log(np.maximum(p[rows, a] - q, 0)) + noise).argmax(-1)
    np.testing.assert_array_equal(np.asarray(verdict.tokens)[rows, a], best)
