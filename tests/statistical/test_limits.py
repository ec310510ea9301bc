"""Which rules for the number of drafts leave the output alone, summed exactly.

How many drafts a round makes, and how many of them may stand, may depend on all that came before
the round, and for draft i on what the drafts up to i are drawn from. Where drafts are drawn, it may
not depend on what draft i turned out to be, nor on anything drawn after it. A rule that does is as
easily written: with p = (.5, .5), q = (.9, .1) and a draft that is verified only if q(x) >= .5,
token 0 comes up with probability .9 (.5 / .9) + .1 .5 = .55.

Every output of three tokens is followed through the rounds that may give it. In each, the engine's
own `settle` judges all drafts that there may be, with its coins in each of the cells that the
chances of acceptance cut their space into. Certain drafts and shared noise allow any rule.
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
from support.fits import FIXED_SEED, NEW_SEED, new_seed, pvalue

from specjax.device import step, verification
from specjax.device.drafters.drafter import NoDrafter, Variant
from specjax.device.state import init_state
from specjax.device.verification import (
    Block,
    Draft,
    Rejection,
    SeedExact,
    acceptance,
    block_acceptance,
    target_probs,
)
from specjax.host.speculation.acceptance import Acceptance, Verdict
from specjax.host.speculation.policy import GoodputPolicy, Load, Policy, Round, TablePolicy
from specjax.host.speculation.step_cost import StepCost

V, K, NUM_TOKENS = 3, 3, 3
PROMPT = (0, 0)
LENGTH = len(PROMPT) + NUM_TOKENS * (K + 1)
UNLIMITED = 99
TOLERANCE = 1e-6  # chances are float32
METHODS = [Rejection(), Block()]


@dataclass(frozen=True)
class Tables:
    """By the number of tokens so far, two or more alike, and the last two of them."""

    p: np.ndarray  # [3, V, V, V]
    q: np.ndarray  # [3, V, V, V]
    lookup: np.ndarray  # [3, V, V], certain drafts

    @property
    def joint(self) -> np.ndarray:
        """Of the first three tokens, [V, V, V]."""
        first, second, third = self.p[0][PROMPT], self.p[1][PROMPT[-1]], self.p[2]
        return first[:, None, None] * second[:, :, None] * third


def tables_of(seed):
    """The odd ones have zeros."""
    rng = np.random.default_rng(seed)
    x = rng.dirichlet([1.0] * V, size=(2, 3, V, V)) + 0.03
    if seed % 2:
        x = np.where((x < 0.2) & (x < x.max(axis=-1, keepdims=True)), 0, x)
    p, q = x / x.sum(axis=-1, keepdims=True)
    return Tables(p, q, rng.integers(V, size=p.shape[:-1]))


def after(table, tokens, ends):
    """What a table says [B, ...] after the first ends[b] tokens, prompt included."""
    rows = np.arange(len(tokens))
    depths = np.minimum(ends - len(PROMPT), 2)
    return table[depths, tokens[rows, ends - 2], tokens[rows, ends - 1]]


def rows_after(table, tokens, ends, drafts):
    """What a table says [B, K+1, ...] before the drafts i32[B, K], and after each of them."""
    batch, k = drafts.shape
    tokens = np.pad(tokens, ((0, 0), (0, k)))
    tokens[np.arange(batch)[:, None], ends[:, None] + np.arange(k)] = drafts
    return np.stack([after(table, tokens, ends + i) for i in range(k + 1)], axis=1)


# The rules.


class Seen(NamedTuple):
    """What is known of a round that is over."""

    k: int
    num_drafts: int
    num_accepted: int
    note: int  # what else the rule wanted to keep


@dataclass(frozen=True)
class Past:
    """What came before a round."""

    tokens: tuple[int, ...] = ()
    rounds: tuple[Seen, ...] = ()


def all_of_them(past, drafts, q):
    return drafts.shape[1]


def nothing(drafts):
    return 0


@dataclass(frozen=True)
class Rule:
    """How many drafts a round makes, how many of them may stand, and by what words.

    `may_stand` and `found` see the drafts i32[B, K] and what they are drawn from, f32[B, K, V].
    """

    k: Callable = lambda past: K
    may_stand: Callable = all_of_them  # what the host says
    found: Callable = all_of_them  # what the drafter says
    max_tokens: int = UNLIMITED
    note: Callable = nothing  # of a round's drafts, for later rounds


def leading(flags):
    """How many flags [B, K] are set before the first that is not."""
    return np.cumprod(flags, axis=1).sum(axis=1)


def at_drafts(q, drafts):
    return np.take_along_axis(q, drafts[..., None], axis=2)[..., 0]


def k_of(make: Callable[[], Policy], num_sequences, past):
    """What a policy says that has seen the rounds of the past, among so many sequences."""
    policy = make()
    for i, seen in enumerate(past.rounds):
        load = Load(num_sequences(past.rounds[:i]))
        assert policy.choose(load) == seen.k
        verdict = Verdict(seen.num_drafts, seen.num_accepted)
        ms = 1 + 0.1 * seen.num_accepted
        policy.observe(Round(load.num_sequences, seen.k, 0, {verdict: 1}, ms))
    return policy.choose(Load(num_sequences(past.rounds)))


def goodput_policy():
    cost = StepCost({1: {0: 1.0, 1: 1.45, 2: 1.8, 3: 2.1}})
    return GoodputPolicy(range(K + 1), cost, Acceptance(K))


def table_policy():
    return TablePolicy(((1, 1, 3), (2, 2, 2), (3, 3, 1), (4, 9, 0)))


def alone(rounds):
    return 1


def with_others(rounds):
    """As if another request came for each draft that fell."""
    return 1 + sum(seen.num_drafts - seen.num_accepted for seen in rounds)


def by_verdict(past):
    """Most drafts once all have stood, or else fewer than before."""
    if not past.rounds:
        return 1
    last = past.rounds[-1]
    return K if last.num_accepted == last.num_drafts else last.k - 1


def by_tokens(past, drafts, q):
    return (1 + 2 * sum(past.tokens) + len(past.tokens)) % (K + 1)


def by_note(past, drafts, q):
    return past.rounds[-1].note if past.rounds else 1


def by_largest(past, drafts, q):
    """Where the drafter is unsure, stop: whatever it then drew."""
    return leading(q.max(axis=2) >= 0.6)


def by_drafts_before(past, drafts, q):
    """Whether draft i may stand depends in some way on those before it."""
    before = np.cumsum(drafts, axis=1) - drafts + np.arange(drafts.shape[1])
    return leading((sum(past.tokens) + before) % 3 < 2)


def by_value(past, drafts, q):
    return leading(at_drafts(q, drafts) >= 0.5)


def by_deeper_value(past, drafts, q):
    """None may stand unless the last turned out to be likely."""
    k = drafts.shape[1]
    return np.where(at_drafts(q, drafts)[:, k - 1 :] >= 0.5, k, 0).sum(axis=1)


def by_budget(past, drafts, q):
    """As many as their own confidences add up to."""
    return at_drafts(q, drafts).sum(axis=1).round()


ADAPTIVE = {
    "goodput": Rule(partial(k_of, goodput_policy, alone)),
    "table": Rule(partial(k_of, table_policy, with_others)),
    "by_verdict": Rule(by_verdict),
}
RIGHT = {
    **{f"k={k}": Rule(lambda past, k=k: k) for k in range(K + 1)},
    **{f"limit={n}": Rule(may_stand=lambda past, drafts, q, n=n: n) for n in range(K)},
    **ADAPTIVE,
    "max_tokens": Rule(max_tokens=NUM_TOKENS),
    "limit_by_tokens": Rule(may_stand=by_tokens),
    "found_by_tokens": Rule(found=by_tokens),
    "limit_by_earlier_drafts": Rule(may_stand=by_note, note=lambda drafts: int(drafts[-1])),
    "limit_by_largest": Rule(may_stand=by_largest),
    "found_by_largest": Rule(found=by_largest),
    "limit_by_drafts_before": Rule(may_stand=by_drafts_before),
    "all_together": Rule(by_verdict, by_largest, by_tokens, max_tokens=NUM_TOKENS),
}
WRONG = {
    "limit_by_value": Rule(may_stand=by_value),
    "found_by_value": Rule(found=by_value),
    "limit_by_deeper_value": Rule(may_stand=by_deeper_value),
    "limit_by_budget": Rule(may_stand=by_budget),
}


TABLES = pytest.mark.parametrize(
    "seeds", [(0, 1), pytest.param(range(2, 8), marks=pytest.mark.slow)], ids=["", "more"]
)


def each(rules):
    return pytest.mark.parametrize("rule", [pytest.param(r, id=name) for name, r in rules.items()])


# A round of the engine.


class Rows(NamedTuple):
    """Requests, and where they stand."""

    tokens: np.ndarray  # i32[B, T], prompt and output
    ends: np.ndarray  # i32[B], how many of them there are
    limits: np.ndarray  # i32[B], most that there may be
    seeds: np.ndarray  # u32[B]
    temperature: np.ndarray  # f32[B]


def logits_of(p, temperature):
    """What gives p [B, K+1, V] at a temperature, or at 0 its best tokens."""
    with np.errstate(divide="ignore"):
        logits = np.log(p) * np.where(temperature > 0, temperature, 1)[:, None, None]
    return logits.astype(np.float32)


@cache
def idle_state(batch):
    """An engine's state without requests."""
    one = jax.jit(init_state, static_argnums=range(5))(1, LENGTH, V, None, None)
    return jax.tree.map(lambda x: np.repeat(np.asarray(x), batch, axis=0), one)


def settle(method, state, rows, may_stand, draft, logits):
    """`step.settle` of an engine in which nothing else goes on."""
    batch = len(rows.tokens)
    sampling = replace(state.requests.sampling, seeds=rows.seeds, temperature=rows.temperature)
    state = replace(
        state,
        tokens=rows.tokens,
        requests=replace(state.requests, limits=rows.limits, sampling=sampling),
    )
    goes_on = rows.ends < rows.limits
    state = state.with_progress(
        jnp.arange(batch), rows.ends - 1, jnp.zeros(batch, jnp.int32), goes_on
    )
    inputs = step.DecodeInputs(jnp.arange(batch), may_stand, jnp.zeros((batch, 0), jnp.int32))
    model = step.StepModel(None, NoDrafter(), method, "auto", 1, 1, "raw")
    extension = step.Extension(None, logits)
    return step.settle(None, state, inputs, draft, extension, model=model, variant=Variant())


class Judged(NamedTuple):
    """What came of drafts [B, K], each with coins of one cell."""

    volume: jax.Array  # f32[B], of the cell
    num_accepted: jax.Array  # i32[B]
    following: jax.Array  # f32[B, V], what the next token is drawn from
    num_tokens: jax.Array  # i32[B], that are output
    num_drafts: jax.Array  # i32[B], that could have stood


@partial(jax.jit, static_argnums=0)
def judge(method, state, rows, may_stand, draft, logits, wins):
    """Settle with coins that are less than the chances where `wins` [B, K] says so."""
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
        _, outputs = settle(method, state, rows, may_stand, draft, logits)
    return Judged(*found[0], outputs.num_tokens, outputs.num_drafts)


def proposals(tables, past, k, *, certain):
    """All drafts [N, k] of a round, the probability of each, and what they are drawn from."""
    vocab_size = tables.q.shape[-1]
    drafts = np.array(list(itertools.product(range(vocab_size), repeat=k)), np.int32)
    tokens = np.tile(np.array([*PROMPT, *past.tokens], np.int32), (len(drafts), 1))
    ends = np.full(len(drafts), tokens.shape[1])
    q = rows_after(tables.q, tokens, ends, drafts)[:, :k]
    if certain:
        chain = rows_after(tables.lookup, tokens, ends, drafts)[:, :k]
        weights = (drafts == chain).all(axis=1).astype(float)
    else:
        weights = at_drafts(q, drafts).prod(axis=1)
    return drafts, weights, q


def round_of(method, tables, rule, past, *, certain):
    """Each way that a round may go: its probability, its drafts, and how they were judged."""
    k = rule.k(past)
    drafts, weights, q = proposals(tables, past, k, certain=certain)
    limits = [
        np.broadcast_to(f(past, drafts, q), len(drafts)).astype(np.int32)
        for f in (rule.may_stand, rule.found)
    ]
    cells = np.array(list(itertools.product([False, True], repeat=k)), bool)

    def per_cell(x):
        return np.repeat(x, len(cells), axis=0)

    may_stand, counts = map(per_cell, limits)
    wins = np.tile(cells, (len(drafts), 1))
    drafts, weights, q = map(per_cell, (drafts, weights, q))
    batch, ends = len(drafts), len(PROMPT) + len(past.tokens)
    tokens = np.zeros((batch, LENGTH), np.int32)
    tokens[:, :ends] = [*PROMPT, *past.tokens]
    rows = Rows(
        tokens,
        np.full(batch, ends, np.int32),
        np.full(batch, len(PROMPT) + rule.max_tokens, np.int32),
        np.zeros(batch, np.uint32),
        np.ones(batch, np.float32),
    )
    logits = logits_of(rows_after(tables.p, tokens, rows.ends, drafts), rows.temperature)
    draft = Draft(drafts, None if certain else q.astype(np.float32), counts)
    state = idle_state(batch)
    judged = jax.device_get(judge(method, state, rows, may_stand, draft, logits, wins))
    assert (judged.num_accepted <= np.minimum(may_stand, counts)).all()
    assert (judged.num_tokens == judged.num_accepted + 1).all()
    return k, weights * judged.volume.astype(float), drafts, judged


@dataclass
class Emitted:
    """The joint distribution of three tokens, and what the rounds on the way to them were like."""

    joint: np.ndarray
    rounds: set[tuple[int, int, int]]  # number, k, and how many drafts could have stood


def emitted_by(method, tables, rule, *, certain=False):
    """Follow the rounds that a rule allows until three tokens are known."""
    vocab_size = tables.p.shape[-1]
    result = Emitted(np.zeros((vocab_size,) * NUM_TOKENS), set())
    level = {Past(): 1.0}
    while level:
        following: dict[Past, float] = {}
        for past, reached in level.items():
            k, weights, drafts, judged = round_of(method, tables, rule, past, certain=certain)
            for b in np.flatnonzero(weights):
                num_drafts, num_accepted = int(judged.num_drafts[b]), int(judged.num_accepted[b])
                result.rounds.add((len(past.rounds), k, num_drafts))
                stand = (*past.tokens, *drafts[b, :num_accepted].tolist())
                weight = reached * weights[b]
                if len(stand) >= NUM_TOKENS:
                    result.joint[stand[:NUM_TOKENS]] += weight
                    continue
                each_token = weight * judged.following[b].astype(float)
                if len(stand) == NUM_TOKENS - 1:
                    result.joint[stand] += each_token
                    continue
                seen = Seen(k, num_drafts, num_accepted, rule.note(drafts[b]))
                for token in np.flatnonzero(each_token).tolist():
                    then = Past((*stand, token), (*past.rounds, seen))
                    following[then] = following.get(then, 0.0) + each_token[token]
        level = following
    return result


def bias(emitted, tables):
    """The total variation between what is emitted and what should be."""
    return np.abs(emitted.joint - tables.joint).sum() / 2


@pytest.mark.parametrize("method", METHODS)
@each(RIGHT)
@TABLES
def test_rules_that_look_back_change_nothing(method, rule, seeds):
    for seed in seeds:
        tables = tables_of(seed)
        assert bias(emitted_by(method, tables, rule), tables) < TOLERANCE


@pytest.mark.parametrize("method", METHODS)
@each(ADAPTIVE)
def test_adaptive_rules_adapt(method, rule):
    """Or the test above would say nothing of them."""
    rounds = emitted_by(method, tables_of(0), rule).rounds
    assert len({k for number, k, _ in rounds if number == 1}) > 1


@pytest.mark.parametrize("method", METHODS)
@each(WRONG)
def test_rules_by_the_value_of_a_draft_are_found(method, rule):
    for seed in 0, 2:
        tables = tables_of(seed)
        assert bias(emitted_by(method, tables, rule), tables) > 1e-2


@pytest.mark.parametrize("method", METHODS)
def test_by_how_much_such_a_rule_is_wrong(method):
    p, q = (np.broadcast_to(x, (3, V, V, V)) for x in ([0.5, 0.5, 0], [0.9, 0.1, 0]))
    tables = Tables(p, q, np.zeros((3, V, V), int))
    rule = Rule(lambda past: 1, by_value)
    first = emitted_by(method, tables, rule).joint.sum(axis=(1, 2))
    np.testing.assert_allclose(first, [0.55, 0.45, 0], atol=TOLERANCE)
    first = emitted_by(method, tables, replace(rule, may_stand=by_largest)).joint.sum(axis=(1, 2))
    np.testing.assert_allclose(first, [0.5, 0.5, 0], atol=TOLERANCE)


@pytest.mark.parametrize("method", METHODS)
@each(RIGHT | WRONG)
@TABLES
def test_certain_drafts_allow_any_rule(method, rule, seeds):
    """Their values are known before they are made, so a rule by them looks back, too."""
    limits = set()
    for seed in seeds:
        tables = tables_of(seed)
        emitted = emitted_by(method, tables, rule, certain=True)
        assert bias(emitted, tables) < TOLERANCE
        limits |= {num_drafts for _, _, num_drafts in emitted.rounds}
    assert len(limits) > 1 or rule not in WRONG.values()


# Requests by the thousand, with the engine's own coins and draws.

settle_all = jax.jit(settle, static_argnums=0)
ROWS = 1000


def serve(method, tables, temperature, ks, may_stand, seed=0):
    """The first three tokens [ROWS, 3] after three rounds of ks drafts.

    As its past, the rule `may_stand` is told how many drafts of each request stood in the last
    round. Requests have the seeds from `seed` on.
    """
    rng = np.random.default_rng(seed)
    tokens, ends = np.zeros((ROWS, LENGTH), np.int32), np.full(ROWS, len(PROMPT), np.int32)
    num_accepted = np.zeros(ROWS, np.int32)
    for k in ks:
        drafts = np.zeros((ROWS, 0), np.int32)
        for _ in range(k):
            q = rows_after(tables.q, tokens, ends, drafts)[:, -1]
            drawn = (q.cumsum(axis=1) < rng.random((ROWS, 1))).sum(axis=1, dtype=np.int32)
            drafts = np.append(drafts, drawn[:, None], axis=1)
        q = rows_after(tables.q, tokens, ends, drafts)[:, :k].astype(np.float32)
        limits = np.broadcast_to(may_stand(num_accepted, drafts, q), ROWS).astype(np.int32)
        logits = logits_of(rows_after(tables.p, tokens, ends, drafts), temperature)
        seeds = (seed + np.arange(ROWS)).astype(np.uint32)
        rows = Rows(tokens, ends, np.full(ROWS, UNLIMITED, np.int32), seeds, temperature)
        draft = Draft(drafts, q)
        state, outputs = settle_all(method, idle_state(ROWS), rows, limits, draft, logits)
        num_accepted = np.asarray(outputs.num_tokens) - 1
        assert (num_accepted <= limits).all()
        tokens, ends = np.asarray(state.tokens), np.asarray(state.lengths) + 1
    return tokens[:, len(PROMPT) :][:, :NUM_TOKENS]


def by_last_verdict(num_accepted, drafts, q):
    """More for requests whose drafts stood."""
    return np.minimum(1 + 2 * num_accepted, drafts.shape[1])


def served_pvalue(method, rule, count, first_seed=0):
    """Of the first three tokens of `count` requests."""
    tables, temperature = tables_of(4), np.full(ROWS, 0.7, np.float32)
    counts = np.zeros(V**NUM_TOKENS)
    for start in range(0, count, ROWS):
        tokens = serve(method, tables, temperature, (K, K, K), rule, first_seed + start)
        counts += np.bincount(tokens @ [V * V, V, 1], minlength=V**NUM_TOKENS)
    return pvalue(counts, tables.joint.ravel())


@pytest.mark.parametrize("rule", [all_of_them, by_last_verdict, by_largest])
@pytest.mark.parametrize("method", METHODS)
def test_requests_served_by_a_rule_have_the_targets_distribution(method, rule):
    assert served_pvalue(method, rule, 6_000) > FIXED_SEED


@pytest.mark.parametrize("method", METHODS)
def test_requests_served_by_a_wrong_rule_have_not(method):
    """So that those of the test above are enough to tell."""
    assert served_pvalue(method, by_value, 6_000) < 1e-20


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(30_000, marks=pytest.mark.slow),
        pytest.param(1_000_000, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("rule", [all_of_them, by_last_verdict, by_largest])
@pytest.mark.parametrize("method", METHODS)
def test_more_requests_of_new_seeds(record_property, method, rule, count):
    """SPECJAX_TEST_SEED repeats a run whose seed was printed."""
    assert served_pvalue(method, rule, count, new_seed(record_property)) > NEW_SEED


def at_random(num_accepted, drafts, q):
    return np.random.default_rng(drafts.sum()).integers(drafts.shape[1] + 1, size=len(drafts))


FIXED = [at_random, by_last_verdict, by_value, by_deeper_value, by_budget]
TEMPERATURES = {"greedy": np.zeros(ROWS, np.float32)}
TEMPERATURES["mixed"] = np.resize(np.float32([0, 0.7]), ROWS)


@cache
def served_plainly(seed, kind):
    temperature = TEMPERATURES[kind]
    return serve(SeedExact(), tables_of(seed), temperature, (0, 0, 0), all_of_them)


@pytest.mark.parametrize("may_stand", FIXED)
@pytest.mark.parametrize("method", [SeedExact(), *METHODS])
def test_tokens_that_are_fixed_allow_any_rule(method, may_stand):
    """By shared noise, or at temperature 0: beside requests that draw, and among themselves."""
    for seed, ks in enumerate([(3, 1, 3), (1, 3, 3)]):
        for kind, temperature in TEMPERATURES.items():
            served = serve(method, tables_of(seed), temperature, ks, may_stand)
            is_fixed = (temperature == 0) | (method == SeedExact())
            plain = served_plainly(seed, kind)
            np.testing.assert_array_equal(served[is_fixed], plain[is_fixed])
