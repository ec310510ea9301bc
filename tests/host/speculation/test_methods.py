"""Policies, made by their names."""

import pytest
from support.refusals import refusal

from specjax.host.speculation.acceptance import DraftOutcome
from specjax.host.speculation.methods import (
    WARM_UP_ROUNDS,
    make_policy,
    profile_policy,
    spread_ks,
)
from specjax.host.speculation.policy import DecodeLoad, Round, StaticPolicy, TablePolicy
from specjax.host.speculation.profile import Profile
from specjax.host.speculation.step_cost import StepCost

BATCHES = (1, 2, 4, 8)
# Drafts pay at one request, and not at eight.
PROFILE = Profile({1: {0: 2.0, 2: 2.2}, 8: {0: 4.0, 2: 12.0}}, (0.6, 0.4), 2)


def replay():
    return StepCost(PROFILE.step_ms, ks=(0, 1, 2), batches=BATCHES)


def test_static_and_table():
    for k in 0, 2:
        assert make_policy(f"static:{k}", PROFILE, BATCHES) == StaticPolicy(k)
    assert make_policy("table", PROFILE, BATCHES) == TablePolicy(PROFILE.as_table())


def test_ks_are_close_together_only_where_they_differ_much():
    assert spread_ks(4) == (0, 1, 2, 3, 4)
    assert spread_ks(11) == (0, 1, 2, 3, 4, 5, 7, 9, 11)
    assert spread_ks(12) == (*spread_ks(11), 12)


@pytest.mark.parametrize("name", ["table", "profile", "adaptive"])
def test_k_falls_with_the_load(name):
    policy = make_policy(name, PROFILE, BATCHES)
    policy.begin(replay)
    assert policy.choose(DecodeLoad(1)) == 2 and policy.choose(DecodeLoad(8)) == 0
    assert set(policy.choices) <= {0, 1, 2}


@pytest.mark.parametrize("is_online", [False, True])
def test_only_an_online_profile_learns_rates_after_its_warm_up(is_online):
    profile = Profile(PROFILE.step_ms, PROFILE.rates, 2, is_online)
    policy = profile_policy(profile, BATCHES)
    policy.begin(replay)
    failed = Round(1, 2, 0, {DraftOutcome(2, 0): 200}, 2.2)
    for _ in range(WARM_UP_ROUNDS - 1):
        policy.observe(failed)
    assert policy.goodput(DecodeLoad(1))[2] == pytest.approx(2 / 2.2)
    for _ in range(100):
        policy.observe(failed)
    expected = (1 if is_online else 2) / 2.2
    assert policy.goodput(DecodeLoad(1))[2] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    "name, words",
    [
        *((name, "static:K, table, profile, adaptive") for name in ("", "static", "static:")),
        *((name, "is not one of") for name in ("static:-1", "static:1.5", "table:3", "Adaptive")),
        ("static:3", "max_num_speculative_tokens=2"),
    ],
)
def test_bad_names(name, words):
    assert refusal(lambda: make_policy(name, PROFILE, BATCHES), words).startswith(name)
