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
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.draft_limits import (
    ADAPTIVE,
    LENGTH,
    METHODS,
    NUM_TOKENS,
    PROMPT,
    RIGHT,
    WRONG,
    Past,
    Rows,
    Rule,
    Seen,
    Tables,
    V,
    at_drafts,
    by_largest,
    by_value,
    idle_state,
    logits_of,
    rows_after,
    settle,
    tables_of,
)

from specjax.device import verification
from specjax.device.verification import Draft, Rejection, acceptance, block_acceptance, target_probs

TOLERANCE = 1e-6  # chances are float32
TABLES = pytest.mark.parametrize(
    "seeds", [(0, 1), pytest.param(range(2, 8), marks=pytest.mark.slow)], ids=["", "more"]
)


def each(rules):
    return pytest.mark.parametrize("rule", [pytest.param(r, id=name) for name, r in rules.items()])


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
