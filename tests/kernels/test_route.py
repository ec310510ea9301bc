"""Every implementation of the choice of experts, compared with stable sorts in f64."""

import functools
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.route import Rule, route
from pallas_kernels.route.triton import fits

GROUPS = Rule(is_sigmoid=True, num_groups=4, num_chosen_groups=2)


class Case(NamedTuple):
    rows: int
    experts: int
    chosen: int
    rule: Rule = Rule()
    dtype: str = "float32"
    has_correction: bool = False
    has_padding: bool = True
    step: float = 0.0  # that logits are multiples of, for ties

    def arguments(self, seed=0):
        rng = np.random.default_rng(seed)
        logits = 2 * rng.normal(size=(self.rows, self.experts))
        if self.step:
            logits = self.step * np.round(logits / self.step)
        correction = rng.normal(size=self.experts).astype(np.float32) / 8
        is_padding = rng.random(self.rows) < 0.3
        return (
            logits.astype(jnp.dtype(self.dtype)),
            correction if self.has_correction else None,
            is_padding if self.has_padding else None,
        )


CASES = {
    "one-row": Case(1, 8, 1),
    "all-experts": Case(5, 8, 8, Rule(scaling=0.5), has_padding=False),
    "sigmoid": Case(5, 100, 4, Rule(True, scaling=2.5), has_correction=True),
    "sigmoid-with-ties": Case(16, 32, 4, Rule(True, normalises=False), "bfloat16", step=0.5),
    "not-normalised": Case(16, 512, 8, Rule(normalises=False), "bfloat16"),
    "more-rows-than-bits": Case(64, 128, 8, Rule(), "bfloat16"),
    "groups": Case(7, 32, 4, GROUPS, has_correction=True),
}


@functools.cache
def compiled(kernels, num_chosen, rule):
    def run(logits, correction, is_padding):
        return route(logits, num_chosen, rule, correction, is_padding, kernels=kernels)

    return jax.jit(run)


@pytest.fixture
def run(kernels):
    """Return a function that runs a compiled implementation for a case."""
    return lambda case, *given: compiled(kernels, case.chosen, case.rule)(*given)


def weighted(logits, experts, rule):
    """Return the weights of the chosen experts in f64."""
    x = np.asarray(logits, np.float64)
    scores = 1 / (1 + np.exp(-x))
    if not rule.is_sigmoid:
        scores = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    weights = np.take_along_axis(scores, experts, axis=1)
    if rule.normalises:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return weights * rule.scaling


def chosen_by_definition(logits, num_chosen, rule, correction):
    x = np.asarray(logits, np.float64)
    scores = 1 / (1 + np.exp(-x)) if rule.is_sigmoid else x
    if correction is not None:
        scores = scores + correction
    for row in scores:
        groups = row.reshape(rule.num_groups, -1)  # a view
        strength = -np.sort(-groups, axis=1)[:, :2].sum(axis=1)
        groups[np.argsort(-strength, kind="stable")[rule.num_chosen_groups :]] = -np.inf
    return np.argsort(-scores, axis=1, kind="stable")[:, :num_chosen]


def check_places(routes, num_experts, num_chosen):
    """Check that entries are sorted by expert, in a stable order."""
    entries = np.asarray(routes.experts).reshape(-1)
    order = np.argsort(entries, kind="stable")
    np.testing.assert_array_equal(routes.order, order)
    np.testing.assert_array_equal(routes.rows, order // num_chosen)
    np.testing.assert_array_equal(routes.sizes, np.bincount(entries, minlength=num_experts))
    assert {one.dtype for one in routes[1:]} == {jnp.dtype("int32")}


@pytest.mark.slow
@pytest.mark.every_jax
@pytest.mark.parametrize("name", CASES)
def test_matches_the_definition(run, name):
    case = CASES[name]
    for seed in range(3):
        logits, correction, is_padding = case.arguments(seed)
        routes = run(case, logits, correction, is_padding)
        experts = chosen_by_definition(logits, case.chosen, case.rule, correction)
        is_real = np.ones(case.rows, bool) if is_padding is None else ~is_padding
        weights = weighted(logits, experts, case.rule)
        assert routes.weights.dtype == jnp.float32
        np.testing.assert_allclose(routes.weights[is_real], weights[is_real], rtol=2e-6)
        experts[~is_real] = experts[0]
        np.testing.assert_array_equal(routes.experts, experts)
        check_places(routes, case.experts, case.chosen)


@pytest.mark.parametrize("name", ["all-experts", "sigmoid", "not-normalised"])
def test_places_are_valid_whatever_the_logits(run, name):
    """Each row has different experts, even for NaN, so that no place outside is read or written."""
    case = CASES[name]
    logits, correction, is_padding = case.arguments()
    logits[0], logits[1, ::2], logits[2] = np.nan, np.inf, -np.inf
    logits[3] = np.full(logits.itemsize, 255, np.uint8).view(logits.dtype)[0]  # the lowest NaN
    logits[4, 1:] = np.nan
    routes = run(case, logits, correction, is_padding)
    experts = np.sort(routes.experts, axis=1)
    assert experts.min() >= 0 and experts.max() < case.experts
    assert np.all(np.diff(experts, axis=1) > 0)
    check_places(routes, case.experts, case.chosen)


@pytest.mark.slow
@pytest.mark.every_jax
@pytest.mark.parametrize("kernels", ["auto", "interpret"])
def test_many_rows_and_groups_are_plain_jax_without_a_word(kernels, monkeypatch, caplog):
    """The chunks of prompts always use plain JAX, so there is no warning and no error."""
    monkeypatch.setattr(dispatch, "why_not", lambda name: None)
    logits = Case(128, 128, 4).arguments()[0]
    assert fits(64, 128, 8, Rule()) and fits(16, 512, 10, Rule())
    assert not fits(*logits.shape, 4, Rule()) and not fits(8, 128, 4, GROUPS)
    assert not fits(0, 8, 2, Rule()) and not fits(1, 513, 2, Rule())
    assert not fits(4, 64, 33, Rule())
    with caplog.at_level(logging.WARNING):
        check_places(route(logits, 4, Rule(), kernels=kernels), 128, 4)
        check_places(route(logits[:8], 4, GROUPS, kernels=kernels), 128, 4)
    assert not caplog.records
