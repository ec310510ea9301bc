"""Losslessness without sampling: every draft and every coin of a tiny vocabulary, summed exactly.

A target p and a drafter q are tables of probabilities after each prefix. A round over K drafts is
summed over all drafts that q makes, and over the coins, whose space falls into the cells that the
chances of acceptance cut it into. What it emits is completed by plain tokens of p, and must have
the probability that p gives it. The rules that others shipped by mistake fail the same sums.
"""

import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specjax.device import verification
from specjax.device.noise import Stream
from specjax.device.requests import Sampling
from specjax.device.sampling import choose, draw_draft
from specjax.device.verification import (
    Block,
    Draft,
    Rejection,
    SeedExact,
    Target,
    acceptance,
    block_acceptance,
    target_probs,
)

V, K, TEMPERATURE = 4, 2, 0.7
DRAFTS = np.array(list(itertools.product(range(V), repeat=K)), np.int32)
FIRST, SECOND = DRAFTS.T
ROWS = np.arange(len(DRAFTS))


@dataclass(frozen=True)
class Tables:
    """p [V], [V, V] and [V, V, V] after no, one and two tokens; q after none and one."""

    p: tuple[np.ndarray, ...]
    q: tuple[np.ndarray, ...]

    @property
    def joint(self) -> np.ndarray:
        """Of the next K + 1 tokens, [V, V, V]."""
        return self.p[0][:, None, None] * self.p[1][..., None] * self.p[2]


def tables_of(seed):
    """The even ones without zeros; in 5 q is p, in 6 they have little in common, and in 7 the
    second draft does not know of the first, as where heads or masks draft side by side."""
    rng = np.random.default_rng(seed)

    def table(depth, zeros):
        x = rng.dirichlet([0.8] * V, size=(V,) * depth)
        x = np.where(rng.random(x.shape) < zeros, 0, x + 0.02)
        x[..., rng.integers(V)] += 0.05
        return x / x.sum(axis=-1, keepdims=True)

    zeros = 0.3 * (seed % 2)
    p = tuple(table(depth, zeros) for depth in range(K + 1))
    q = tuple(table(depth, zeros) for depth in range(K))
    if seed == 5:
        q = p[:K]
    if seed == 6:
        q = tuple(np.where(x > 0.3, 0.01, x) for x in p[:K])
        q = tuple(x / x.sum(axis=-1, keepdims=True) for x in q)
    if seed == 7:
        q = q[0], np.broadcast_to(q[1][0], q[1].shape)
    return Tables(p, q)


class Round(NamedTuple):
    """A round for each of DRAFTS."""

    draft: Draft
    target: Target
    weights: np.ndarray  # the probability that the drafter makes it


def round_of(tables, *, certain=False, num_drafts=K):
    """Drafts drawn from q, or always its likeliest ones."""
    q = np.stack([np.broadcast_to(tables.q[0], (len(ROWS), V)), tables.q[1][FIRST]], axis=1)
    p = np.broadcast_to(tables.p[0], (len(ROWS), V)), tables.p[1][FIRST], tables.p[2][FIRST, SECOND]
    with np.errstate(divide="ignore"):
        logits = TEMPERATURE * np.log(np.stack(p, axis=1))
    weights = tables.q[0][FIRST] * tables.q[1][FIRST, SECOND]
    if certain:
        weights = np.zeros(len(ROWS))
        first = tables.q[0].argmax()
        weights[first * V + tables.q[1][first].argmax()] = 1.0
    counts = np.broadcast_to(np.array(num_drafts, np.int32), len(ROWS))
    target = Target(logits.astype(np.float32), sampling_of(len(ROWS)), np.full(16, 5), counts)
    return Round(Draft(DRAFTS, None if certain else q.astype(np.float32)), target, weights)


def sampling_of(count):
    ones = np.ones(count, np.float32)
    seeds = np.arange(count, dtype=np.uint32)
    return Sampling(TEMPERATURE * ones, seeds, np.zeros(count, np.int32), ones, 0 * ones)


probs_of = jax.jit(target_probs)


@partial(jax.jit, static_argnums=0)
def settle(method, draft, target, below):
    """How many drafts `method` accepts, its weights of the next token, and bounds of the coins.

    The coins lie below the chances of acceptance where `below` bool[K] says so, or else above.
    """
    p = target_probs(target)
    if method == Rejection():
        chances = acceptance(p[:, :-1], draft)
    else:
        chances = block_acceptance(p, draft, target.num_drafts)[1]
    low, high = jnp.where(below, 0, chances), jnp.where(below, chances, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "_coins", lambda target, count: (low + high) / 2)
        patch.setattr(
            verification, "_verify_drawn", lambda draft, target, drawn: drawn(draft, target)
        )
        return *method.verify(draft, target), low, high


class Cell(NamedTuple):
    """Coins between `low` and `high` [16, K], all with the same outcome for a draft."""

    low: np.ndarray
    high: np.ndarray
    num_accepted: np.ndarray  # [16]
    following: np.ndarray  # [16, V], the distribution of the next token

    @property
    def volume(self):
        return (self.high - self.low).prod(axis=1)


def cells_of(method, draft, target):
    p = np.asarray(probs_of(target), np.float64)
    for below in itertools.product([True, False], repeat=K):
        found = jax.device_get(settle(method, draft, target, np.array(below)))
        accepted, weights, low, high = found[0], *(x.astype(np.float64) for x in found[1:])
        weights = np.maximum(weights, 0)
        empty = weights.sum(axis=1, keepdims=True) == 0
        weights = np.where(empty, p[ROWS, accepted], weights)
        yield Cell(low, high, accepted, weights / weights.sum(axis=1, keepdims=True))


def emitted_by(method, tables, one, recover=None):
    """The joint distribution [V, V, V] of the first K + 1 tokens, a round and then plain ones.

    `recover` may replace the distribution that follows: (round, cell) -> [16, V].
    """
    joint = np.zeros((V, V, V))
    for cell in cells_of(method, one.draft, one.target):
        following = cell.following if recover is None else recover(one, cell)
        for b, (first, second) in enumerate(DRAFTS):
            x = one.weights[b] * cell.volume[b] * following[b]
            if cell.num_accepted[b] == 0:
                joint += x[:, None, None] * tables.p[1][:, :, None] * tables.p[2]
            elif cell.num_accepted[b] == 1:
                joint[first] += x[:, None] * tables.p[2][first]
            else:
                joint[first, second] += x
    return joint


@pytest.mark.parametrize("num_drafts", range(K + 1))
@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("method", [Rejection(), Block()])
def test_the_joint_distribution_is_the_targets(method, certain, num_drafts):
    for seed in range(8):
        tables = tables_of(seed)
        one = round_of(tables, certain=certain, num_drafts=num_drafts)
        np.testing.assert_allclose(emitted_by(method, tables, one), tables.joint, atol=1e-6)


def bias(method, tables, one, recover=None):
    """The total variation between what is emitted and what should be."""
    return np.abs(emitted_by(method, tables, one, recover) - tables.joint).sum() / 2


def races(q, r):
    """P(argmin E/q = i, argmin E/r = j) [V, V] for exponential E: two draws with the same noise.

    For i != j both minima are known once t = E_j/r_j : E_i/q_i is; the others must be slower in
    either race, which integrates to q_i r_j of the integral of 1 / (sum_k max(q_k, r_k t))^2 over
    the t that let i and j win, q_j/r_j <= t <= q_i/r_i. Between kinks the sum is a line a + b t.
    """
    joint = np.zeros((V, V))
    kinks = np.array([q[k] / r[k] for k in range(V) if r[k] > 0])
    for i, j in itertools.product(range(V), repeat=2):
        if q[i] == 0 or r[j] == 0:
            continue
        if i == j:
            joint[i, i] = 1 / np.maximum(q / q[i], r / r[i]).sum()
            continue
        start, end = q[j] / r[j], (q[i] / r[i] if r[i] > 0 else np.inf)
        cuts = [start, *sorted(x for x in kinks if start < x < end), end]
        for low, high in itertools.pairwise(cuts):
            if low >= high:
                continue
            middle = low + 1.0 if high == np.inf else (low + high) / 2
            a, b = q[q >= r * middle].sum(), r[q < r * middle].sum()
            gone = 0.0 if high == np.inf else 1 / (b * (a + b * high)) if b > 0 else -high / a**2
            joint[i, j] += (
                q[i] * r[j] * ((1 / (b * (a + b * low)) if b > 0 else -low / a**2) - gone)
            )
    return joint


def test_races_by_their_marginals_and_by_sampling():
    for seed in range(6):
        tables = tables_of(seed)
        for q, r in zip(tables.q[1], tables.p[1], strict=True):
            np.testing.assert_allclose(races(q, r).sum(axis=1), q, atol=1e-9)
            np.testing.assert_allclose(races(q, r).sum(axis=0), r, atol=1e-9)
    q, r, n = tables.q[1][0], tables.p[1][1], 200_000
    noise = np.random.default_rng(0).exponential(size=(n, V))
    with np.errstate(divide="ignore"):
        pairs = (noise / q).argmin(axis=1) * V + (noise / r).argmin(axis=1)
    expected = races(q, r).ravel() * n
    counts = np.bincount(pairs, minlength=V * V)
    assert (counts[expected == 0] == 0).all()
    assert stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue > 1e-4


# What must fail. Each rule with the methods that it breaks.


def shared_noise(one, cell):
    """The next token is drawn with the noise that drew the draft in its place."""
    following = cell.following.copy()
    for b, a in enumerate(cell.num_accepted):
        if a < one.target.num_drafts[b]:
            q, token = np.asarray(one.draft.probs[b, a], np.float64), DRAFTS[b, a]
            if q[token] > 0:
                following[b] = races(q, cell.following[b])[token] / q[token]
    return following


def no_residual(one, cell):
    """The next token is drawn from p, whatever was rejected."""
    return np.asarray(probs_of(one.target), np.float64)[ROWS, cell.num_accepted]


@pytest.mark.parametrize("recover", [shared_noise, no_residual])
@pytest.mark.parametrize("method", [Rejection(), Block()])
def test_wrong_recoveries_are_found(method, recover):
    for seed in 0, 2, 4:
        tables = tables_of(seed)
        assert bias(method, tables, round_of(tables), recover) > 1e-3
        assert bias(method, tables, round_of(tables)) < 1e-6


@pytest.mark.parametrize("method", [Rejection(), Block()])
def test_trimming_a_draft_for_its_own_value_is_found(method):
    """As by a drafter that drops a token of little confidence. For those before it, it may."""
    for seed in 0, 2, 4:
        tables = tables_of(seed)
        is_sure = np.stack([tables.q[0][FIRST], tables.q[1][FIRST, SECOND]], axis=1) > 0.3
        by_value = np.cumprod(is_sure, axis=1).sum(axis=1)
        assert bias(method, tables, round_of(tables, num_drafts=by_value)) > 1e-3
        by_prefix = np.where(FIRST < 2, 1, 2)
        assert bias(method, tables, round_of(tables, num_drafts=by_prefix)) < 1e-6


def two_rounds(method, tables, *, reuses_coin=False, reuses_noise=False):
    """The joint distribution [V, V] of two tokens, a round of two drafts and then one of one.

    The second follows where the first accepts nothing. Its draft and its coin are at a position
    where the first round had some, too, and may be made of the same noise.
    """
    one, joint = round_of(tables), np.zeros((V, V))
    for cell in cells_of(method, one.draft, one.target):
        for b, (first, second) in enumerate(DRAFTS):
            weight = one.weights[b] * cell.volume[b]
            if weight == 0:
                continue
            if cell.num_accepted[b] == 1:
                joint[first] += weight * cell.following[b]
            elif cell.num_accepted[b] == 2:
                joint[first, second] += weight
            else:
                low, high = (cell.low[b, 1], cell.high[b, 1]) if reuses_coin else (0, 1)
                for x in range(V):
                    p, q = tables.p[1][x], tables.q[1][x]
                    before = tables.q[1][first]
                    drawn = races(before, q)[second] / before[second] if reuses_noise else q
                    chance = np.minimum(p / np.where(q > 0, q, np.inf), 1)
                    stands = np.clip((chance - low) / (high - low), 0, 1)
                    left = np.maximum(p - q, 0)
                    left = left / left.sum() if left.sum() > 0 else p
                    then = drawn * stands + (drawn * (1 - stands)).sum() * left
                    joint[x] += weight * cell.following[b, x] * then
    return joint


@pytest.mark.parametrize("reuses", ["reuses_coin", "reuses_noise"])
def test_noise_by_position_alone_is_found(reuses):
    """A block's outcome says something of all its coins and drafts, those that fell included."""
    for seed in 0, 2, 4:
        tables = tables_of(seed)
        expected = tables.p[0][:, None] * tables.p[1]
        np.testing.assert_allclose(two_rounds(Block(), tables), expected, atol=1e-6)
        wrong = two_rounds(Block(), tables, **{reuses: True})
        assert np.abs(wrong - expected).sum() / 2 > 1e-3
        # Rejection looks at nothing past the first draft that fell, so that it would do there.
        harmless = two_rounds(Rejection(), tables, **{reuses: True})
        np.testing.assert_allclose(harmless, expected, atol=1e-6)


# Seed-exact: what is emitted are the target's own draws.

draw_plain = jax.jit(choose)
draw = jax.jit(draw_draft, static_argnames=("vocab_size", "stream", "wants_probs"))


def test_seed_exact_emits_one_chain_whatever_the_drafts():
    """For each seed, all sixteen drafts give a prefix of what plain decoding draws."""
    num_seeds = 2000
    verify = jax.jit(SeedExact().verify)
    for seed in 0, 1:
        one = round_of(tables_of(seed), certain=True)
        logits = one.target.logits.reshape(V, V, K + 1, V)
        sampling, chain = sampling_of(num_seeds), []
        rows = [logits[0, 0, 0], logits[:, 0, 1], logits[:, :, 2]]
        for t, table in enumerate(rows):
            table = np.broadcast_to(table, (num_seeds, V)) if t == 0 else table[tuple(chain)]
            chain.append(np.asarray(draw_plain(table, sampling, np.full(num_seeds, 5 + t))))
        plain = np.stack(chain, axis=1)
        counts = np.bincount(plain @ [V * V, V, 1], minlength=V**3)
        expected = num_seeds * tables_of(seed).joint.ravel()
        assert (counts[expected == 0] == 0).all()
        assert binned_chisquare(counts, expected) > 1e-4

        def tile(x):
            return np.tile(x, (num_seeds, *[1] * (x.ndim - 1)))

        target = jax.tree.map(tile, one.target)
        target = replace(target, sampling=jax.tree.map(lambda x: np.repeat(x, len(ROWS)), sampling))
        verdict = verify(Draft(tile(DRAFTS), None), target)
        stands = np.arange(K + 1) <= np.asarray(verdict.num_accepted)[:, None]
        chains = np.repeat(plain, len(ROWS), axis=0)
        np.testing.assert_array_equal(np.where(stands, verdict.tokens, chains), chains)
        longest = np.cumprod(tile(DRAFTS) == chains[:, :K], axis=1).sum(axis=1)
        np.testing.assert_array_equal(verdict.num_accepted, longest)


def binned_chisquare(counts, expected):
    """The p-value, cells that expect little taken together."""
    rare = expected < 8
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    return stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue


@pytest.mark.parametrize("seed", range(4))
def test_coupled_drafts_stand_as_often_as_the_races_say(seed):
    """sum_i 1 / sum_j max(p_j/p_i, q_j/q_i), and p(argmax q) where the draft is certain."""
    n, tables = 40_000, tables_of(seed)
    p, q = tables.p[0], tables.q[0]
    expected = np.trace(races(q, p))
    assert 1 - np.abs(p - q).sum() / 2 >= expected >= p @ q
    with np.errstate(divide="ignore"):
        logits = TEMPERATURE * np.log(np.stack([p, q])).astype(np.float32)
    sampling, positions = sampling_of(n), np.arange(n) % 11
    tokens = np.asarray(draw_plain(np.tile(logits[0], (n, 1)), sampling, positions))

    def check(drafts, rate):
        assert abs((drafts == tokens).mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / n)

    for stream, rate in (Stream.TARGET, expected), (Stream.DRAFT, p @ q):
        rows = np.tile(logits[1], (n, 1))
        drafts, _ = draw(rows, None, V, sampling, stream, (positions,), wants_probs=False)
        check(np.asarray(drafts), rate)
    check(q.argmax(), p[q.argmax()])
