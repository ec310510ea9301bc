"""Requests served by rules for the number of drafts, with the engine's own coins and draws.

That certain rules leave the output alone is summed exactly in `test_limits`; here requests by the
thousand are counted.
"""

from functools import cache

import jax
import numpy as np
import pytest
from support.draft_limits import (
    LENGTH,
    METHODS,
    NUM_TOKENS,
    PROMPT,
    UNLIMITED,
    K,
    Rows,
    V,
    all_of_them,
    by_budget,
    by_deeper_value,
    by_largest,
    by_value,
    idle_state,
    logits_of,
    rows_after,
    settle,
    tables_of,
)
from support.fits import FIXED_SEED, NEW_SEED, pvalue
from support.seeds import new_seed

from specjax.device.verification import Draft, SeedExact

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
