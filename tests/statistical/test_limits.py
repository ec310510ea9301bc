"""Which rules for the number of drafts keep the target's distribution, summed exactly.

A rule sets how many drafts a round makes, and how many may be accepted. It may depend on everything
before the round and, for draft i, on the distributions of the drafts up to i. If drafts are drawn,
it must not depend on draft i itself, or on later draws. Such a wrong rule is easily written: with p
= (.5, .5), q = (.9, .1) and a draft that is verified only if q(x) >= .5, token 0 has probability .9
(.5 / .9) + .1 .5 = .55.

Every output of three tokens is followed through all rounds that can produce it. In each round, the
engine's own `settle` verifies all possible drafts, with coins in each of the cells into which the
chances of acceptance divide their space. With certain drafts or shared noise, any rule is allowed.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.device import step, verification
from specjax.device.drafters.drafter import NoDrafter, Variant
from specjax.device.inputs import DecodeInputs, StepModel
from specjax.device.state import init_state
from specjax.device.verification import (
    Block,
    Draft,
    Rejection,
    acceptance,
    block_acceptance,
    target_probs,
)
from specjax.host.speculation.acceptance import Acceptance, DraftOutcome
from specjax.host.speculation.policy import DecodeLoad, GoodputPolicy, Round
from specjax.host.speculation.requests import ReadyRequests, RequestOutcomes, RequestRates
from specjax.host.speculation.step_cost import StepCost

V, K, NUM_TOKENS = 3, 3, 3
PROMPT = (0, 0)
LENGTH = len(PROMPT) + NUM_TOKENS * (K + 1)
UNLIMITED = 99
METHODS = [Rejection(), Block()]


@dataclass(frozen=True)
class Tables:
    """Distributions by the number of tokens so far (0, 1 or more) and by the last two tokens."""

    p: np.ndarray  # [3, V, V, V]
    q: np.ndarray  # [3, V, V, V]
    lookup: np.ndarray  # [3, V, V], certain drafts

    @property
    def joint(self) -> np.ndarray:
        """The distribution [V, V, V] of the first three tokens."""
        first, second, third = self.p[0][PROMPT], self.p[1][PROMPT[-1]], self.p[2]
        return first[:, None, None] * second[:, :, None] * third


def tables_of(seed):
    """Return random tables. With an odd seed, some probabilities are zero."""
    rng = np.random.default_rng(seed)
    x = rng.dirichlet([1.0] * V, size=(2, 3, V, V)) + 0.03
    if seed % 2:
        x = np.where((x < 0.2) & (x < x.max(axis=-1, keepdims=True)), 0, x)
    p, q = x / x.sum(axis=-1, keepdims=True)
    return Tables(p, q, rng.integers(V, size=p.shape[:-1]))


def after(table, tokens, ends):
    """Return the table's entries [B, ...] after the first ends[b] tokens, including the prompt."""
    rows = np.arange(len(tokens))
    depths = np.minimum(ends - len(PROMPT), 2)
    return table[depths, tokens[rows, ends - 2], tokens[rows, ends - 1]]


def rows_after(table, tokens, ends, drafts):
    """Return the table's entries [B, K+1, ...] before the drafts i32[B, K] and after each draft."""
    batch, k = drafts.shape
    tokens = np.pad(tokens, ((0, 0), (0, k)))
    tokens[np.arange(batch)[:, None], ends[:, None] + np.arange(k)] = drafts
    return np.stack([after(table, tokens, ends + i) for i in range(k + 1)], axis=1)


# The rules.


class Seen(NamedTuple):
    """The known facts of a finished round."""

    k: int
    num_drafts: int
    num_accepted: int


@dataclass(frozen=True)
class Past:
    """The tokens and rounds before a round."""

    tokens: tuple[int, ...] = ()
    rounds: tuple[Seen, ...] = ()


def all_of_them(past, drafts, q):
    return drafts.shape[1]


@dataclass(frozen=True)
class Rule:
    """A rule: the drafts of a round, how many may be accepted, and the maximum number of tokens.

    `may_stand` and `found` take the drafts i32[B, K] and their distributions f32[B, K, V].
    """

    k: Callable = lambda past: K
    may_stand: Callable = all_of_them  # what the host says
    found: Callable = all_of_them  # what the drafter says
    max_tokens: int = UNLIMITED


def leading(flags):
    """Return the number of leading flags [B, K] that are set."""
    return np.cumprod(flags, axis=1).sum(axis=1)


def at_drafts(q, drafts):
    return np.take_along_axis(q, drafts[..., None], axis=2)[..., 0]


STEP_MS = {0: 1.0, 1: 1.45, 2: 1.8, 3: 2.1}


def by_goodput(past):
    """Return the K of a policy that has observed the past rounds."""
    policy = GoodputPolicy(range(K + 1), StepCost({1: STEP_MS}), Acceptance(K))
    for seen in past.rounds:
        assert policy.choose(DecodeLoad(1)) == seen.k
        verdict = DraftOutcome(seen.num_drafts, seen.num_accepted)
        ms = STEP_MS[seen.k] * (1 + 0.01 * seen.num_accepted)
        policy.observe(Round(1, seen.k, 0, {verdict: 1}, ms))
    return policy.choose(DecodeLoad(1))


def by_verdict(past):
    """Return K if the last round's drafts were all accepted, else fewer drafts than before."""
    if not past.rounds:
        return 1
    last = past.rounds[-1]
    return K if last.num_accepted == last.num_drafts else last.k - 1


def by_own_rates(past, drafts, q):
    """Return all drafts or none, by the request's own acceptance rates, as in split rounds."""
    rates = RequestRates(K)
    for seen in past.rounds:
        rates.observe(RequestOutcomes([0], [seen.num_drafts], [seen.num_accepted]))
    request = ReadyRequests([0], [None], [len(past.tokens)], [K])
    gains = rates.sums(rates.rates(request, lambda group, bucket: [0.5, 0.25, 0.125]))
    return K if gains[0, K] > 0.8 else 0


def by_next(past, drafts, q):
    """A wrong rule: whether draft i may be accepted depends on the next draft."""
    following = np.roll(drafts, -1, axis=1)
    return leading(following <= drafts) if drafts.shape[1] else 0


def by_tokens(past, drafts, q):
    return (1 + 2 * sum(past.tokens) + len(past.tokens)) % (K + 1)


def by_largest(past, drafts, q):
    """Stop at the first draft of which the drafter is unsure, regardless of the drawn token."""
    return leading(q.max(axis=2) >= 0.6)


def by_drafts_before(past, drafts, q):
    """Whether draft i may be accepted depends on the drafts before it."""
    before = np.cumsum(drafts, axis=1) - drafts + np.arange(drafts.shape[1])
    return leading((sum(past.tokens) + before) % 3 < 2)


def by_value(past, drafts, q):
    return leading(at_drafts(q, drafts) >= 0.5)


RIGHT = {
    **{f"k={k}": Rule(lambda past, k=k: k) for k in range(K + 1)},
    **{f"limit={n}": Rule(may_stand=lambda past, drafts, q, n=n: n) for n in range(K)},
    "goodput": Rule(by_goodput),
    "by_verdict": Rule(by_verdict),
    "max_tokens": Rule(max_tokens=NUM_TOKENS),
    "limit_by_tokens": Rule(may_stand=by_tokens),
    "limit_by_own_rates": Rule(may_stand=by_own_rates),
    "found_by_tokens": Rule(found=by_tokens),
    "limit_by_largest": Rule(may_stand=by_largest),
    "limit_by_drafts_before": Rule(may_stand=by_drafts_before),
    "all_together": Rule(by_verdict, by_largest, by_tokens, max_tokens=NUM_TOKENS),
}
WRONG = {
    "limit_by_value": Rule(may_stand=by_value),
    "limit_by_next": Rule(may_stand=by_next),
}


# A round of the engine.


@cache
def idle_state(batch):
    """Return an engine's state without requests."""
    one = jax.jit(init_state, static_argnums=range(6))(1, LENGTH, V, (), (), None)
    return jax.tree.map(lambda x: np.repeat(np.asarray(x), batch, axis=0), one)


def settle(method, state, tokens, end, limit, may_stand, draft, logits):
    """Call `step.settle` for an engine without other requests."""
    rows = jnp.arange(len(tokens))
    sampling = replace(state.requests.sampling, temperature=jnp.ones(len(rows)))
    requests = replace(state.requests, limits=0 * rows + limit, sampling=sampling)
    state = replace(state, tokens=tokens, requests=requests)
    nothing, goes_on = 0 * rows, jnp.ones(len(rows), bool)
    state = state.with_progress(rows, nothing + end - 1, nothing, goes_on, is_observed=True)
    inputs = DecodeInputs(rows, may_stand, nothing, nothing[:, None][:, :0], None)
    model = StepModel(None, NoDrafter(), method, "auto", 1, 1, "raw")
    extension = step.Extension(None, logits)
    return step.settle(None, state, inputs, draft, extension, model=model, variant=Variant())


class Judged(NamedTuple):
    """The results for drafts [B, K], with the coins of one cell for each row."""

    volume: jax.Array  # f32[B], of the cell
    num_accepted: jax.Array  # i32[B]
    following: jax.Array  # f32[B, V], what the next token is drawn from
    num_drafts: jax.Array  # i32[B], that could have stood


@partial(jax.jit, static_argnums=0)
def judge(method, state, tokens, end, limit, may_stand, draft, logits, wins):
    """Settle with coins below the chance of acceptance where `wins` [B, K] is true."""
    found = []

    def verify_drawn(draft, target, drawn):
        p = target_probs(target)
        if method == Rejection():
            chances = acceptance(p[:, :-1], draft)
        else:
            chances = block_acceptance(p, draft, target.num_drafts)[1]
        low, high = jnp.where(wins, 0, chances), jnp.where(wins, chances, 1)
        patch.setattr(verification, "_coins", lambda target, count: (low + high) / 2)
        num_accepted, weights = drawn(draft, target)
        spare = jnp.take_along_axis(p, num_accepted[:, None, None], axis=1)[:, 0]
        weights = jnp.maximum(weights, 0)
        weights = jnp.where(weights.any(axis=1, keepdims=True), weights, spare)
        following = weights / weights.sum(axis=1, keepdims=True)
        found.append(((high - low).prod(axis=1), num_accepted, following))
        return verification._verdict(draft, num_accepted, jnp.zeros_like(num_accepted))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "_verify_drawn", verify_drawn)
        _, outputs = settle(method, state, tokens, end, limit, may_stand, draft, logits)
    return Judged(*found[0], outputs.num_drafts)


def round_of(method, tables, rule, past, *, certain):
    """Return each possible outcome of a round: its probability, its drafts and the verdict."""
    k, end = rule.k(past), len(PROMPT) + len(past.tokens)
    ways = np.array(list(itertools.product(range(V), repeat=k)), np.int32)
    cells = np.array(list(itertools.product([False, True], repeat=k)), bool)
    drafts, wins = np.repeat(ways, len(cells), axis=0), np.tile(cells, (len(ways), 1))
    batch = len(drafts)
    tokens, ends = np.zeros((batch, LENGTH), np.int32), np.full(batch, end)
    tokens[:, :end] = [*PROMPT, *past.tokens]
    q = rows_after(tables.q, tokens, ends, drafts)[:, :k]
    weights = at_drafts(q, drafts).prod(axis=1)
    if certain:
        chain = rows_after(tables.lookup, tokens, ends, drafts)[:, :k]
        weights = (drafts == chain).all(axis=1).astype(float)
    may_stand, counts = (
        np.broadcast_to(f(past, drafts, q), batch).astype(np.int32)
        for f in (rule.may_stand, rule.found)
    )
    with np.errstate(divide="ignore"):
        logits = np.log(rows_after(tables.p, tokens, ends, drafts)).astype(np.float32)
    draft = Draft(drafts, None if certain else q.astype(np.float32), counts)
    asked = tokens, end, len(PROMPT) + rule.max_tokens, may_stand, draft, logits, wins
    judged = jax.device_get(judge(method, idle_state(batch), *asked))
    assert (judged.num_accepted <= np.minimum(may_stand, counts)).all()
    return k, weights * judged.volume.astype(float), drafts, judged


def emitted_by(method, tables, rule, *, certain=False):
    """Return the joint distribution of three tokens, over all rounds that a rule allows."""
    joint, level = np.zeros((V,) * NUM_TOKENS), {Past(): 1.0}
    while level:
        following: dict[Past, float] = {}
        for past, reached in level.items():
            k, weights, drafts, judged = round_of(method, tables, rule, past, certain=certain)
            for b in np.flatnonzero(weights):
                num_accepted, weight = int(judged.num_accepted[b]), reached * weights[b]
                stand = (*past.tokens, *drafts[b, :num_accepted].tolist())
                if len(stand) >= NUM_TOKENS:
                    joint[stand[:NUM_TOKENS]] += weight
                    continue
                each_token = weight * judged.following[b].astype(float)
                if len(stand) == NUM_TOKENS - 1:
                    joint[stand] += each_token
                    continue
                seen = Seen(k, int(judged.num_drafts[b]), num_accepted)
                for token in np.flatnonzero(each_token).tolist():
                    then = Past((*stand, token), (*past.rounds, seen))
                    following[then] = following.get(then, 0.0) + each_token[token]
        level = following
    return joint


def bias(joint, tables):
    """Return the total variation between the emitted and the expected distribution."""
    return np.abs(joint - tables.joint).sum() / 2


TOLERANCE = 1e-6  # chances are float32
TABLES = pytest.mark.parametrize(
    "seeds", [(0, 1), pytest.param(range(2, 8), marks=pytest.mark.slow)], ids=["", "more"]
)


def each(rules):
    return pytest.mark.parametrize("rule", [pytest.param(r, id=name) for name, r in rules.items()])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@each(RIGHT)
@TABLES
def test_rules_that_look_back_change_nothing(method, rule, seeds):
    for seed in seeds:
        tables = tables_of(seed)
        assert bias(emitted_by(method, tables, rule), tables) < TOLERANCE


GUESSES = {
    "the_targets_own": lambda p: p,
    "little_in_common": lambda p: np.where(p > 0.3, 0.01, p),
    "drafts_that_do_not_know_of_each_other": lambda p: np.broadcast_to(p[:, :1, :1], p.shape),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("guess", GUESSES.values(), ids=GUESSES)
def test_any_drafter_changes_nothing(method, guess):
    for seed in 0, 1:
        tables = tables_of(seed)
        q = guess(tables.p)
        tables = replace(tables, q=q / q.sum(axis=-1, keepdims=True))
        assert bias(emitted_by(method, tables, Rule()), tables) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@each(WRONG)
def test_rules_by_the_value_of_a_draft_are_found(method, rule):
    for seed in 0, 2:
        tables = tables_of(seed)
        assert bias(emitted_by(method, tables, rule), tables) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@each(RIGHT | WRONG)
@TABLES
def test_certain_drafts_allow_any_rule(method, rule, seeds):
    """The tokens of certain drafts are known before the round, so a rule may use them."""
    for seed in seeds:
        tables = tables_of(seed)
        assert bias(emitted_by(method, tables, rule, certain=True), tables) < TOLERANCE
