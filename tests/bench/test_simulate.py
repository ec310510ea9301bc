"""The results of `specjax bench simulate`."""

import json
from collections import Counter

import pytest

from specjax.bench.simulate import SimulationSettings, bench, pool_regret
from specjax.cli import main
from specjax.host.speculation.profile import Profile
from specjax.host.speculation.simulator import Outcome

# K = 2 is best up to 8 requests, K = 0 at 16; K = 1 never is.
PROFILE = {
    "is_online": False,
    "batch_stats": {"1": {"0": 6.0, "2": 7.0}, "8": {"0": 6.5, "2": 9.0}, "16": {"0": 8, "2": 24}},
    "max_num_speculative_tokens": 2,
    "acceptance_rate_per_pos": [0.6, 0.4],
}
COMMAND, SMALL = ["bench", "simulate"], ["--requests", "16", "--seeds", "2"]


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    return str(path)


def simulate(capsys, profile, policy, *options):
    argv = [*COMMAND, "--profile", profile, "--policy", policy, *SMALL, *options]
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["adaptive", "table", "profile", "static:2"])
def test_report(capsys, profile, policy):
    least = ["--requests", "4", "--seeds", "1"]
    assert simulate(capsys, profile, policy, *least) == simulate(capsys, profile, policy, *least)
    report = simulate(capsys, profile, policy)
    assert report["policy"] == policy and report["seeds"] == [0, 1]
    settings = {"profile": profile, "policy": policy, "acceptance_shift": 0.0}
    others = {"seeds": 2, "requests": 16, "context": 0, "one_k": False}
    assert report["settings"] == settings | others | {"text_acceptance": 0.0}
    regrets, ratios = report["regret_by_seed"], report["makespan_ratio_by_seed"]
    assert len(regrets) == len(ratios) == 2
    assert report["regret_mean"] == pytest.approx(sum(regrets) / 2)
    assert report["makespan_ratio_to_oracle"] == pytest.approx(sum(ratios) / 2)
    assert list(report["regret_by_batch"]) == ["1", "2", "4", "8", "16"]
    assert report["regret_worst_batch"] == max(report["regret_by_batch"].values())
    least = -0.2 if policy == "adaptive" else 0  # it may split rounds, unlike the oracle
    assert least <= report["regret_mean"] <= report["regret_worst_batch"] < 1
    assert 0.8 < report["makespan_ratio_to_oracle"] < 2


def test_text(capsys, caplog, profile):
    caplog.set_level("INFO", "specjax")
    assert main([*COMMAND, "--profile", profile, "--policy", "static:2", *SMALL]) == 0
    assert caplog.messages[0] == "simulating static:2, seed 0, run 1 of 4"
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["over", "seeds", "mean", "least", "most"]
    assert ["batch", "1", "2", "4", "8", "16"] in lines
    assert ["K", "2"] in lines and ["rounds", "100.0%"] in lines
    assert "2 seeds of 16 requests" in text and text.isascii()


def test_who_knows_more_regrets_less(capsys, profile):
    worst = simulate(capsys, profile, "static:0", "--seeds", "1")
    assert worst["k_histogram"].keys() == {"0"} and worst["regret_by_batch"]["16"] < 0.01
    assert worst["regret_mean"] > 0.2 and worst["makespan_ratio_to_oracle"] > 1.2
    assert simulate(capsys, profile, "profile", "--seeds", "1")["regret_mean"] < 0.1


@pytest.mark.slow
def test_requests_may_differ_in_their_drafts(capsys, profile):
    """Only some requests draft in a split round. Contexts cost no time in this profile."""
    options = ["--requests", "32", "--seeds", "1"]
    split = simulate(capsys, profile, "adaptive", *options, "--context", "5000")
    whole = simulate(capsys, profile, "adaptive", *options, "--one-k")
    assert split["split_rounds"] > 0 == whole["split_rounds"]
    assert split["settings"]["context"] == 5000
    assert split["request_k_histogram"].keys() == {"0", "1", "2"}
    texts = simulate(capsys, profile, "adaptive", *options, "--text-acceptance", "0.97")
    shares = [
        one["request_k_histogram"]["2"] / sum(one["request_k_histogram"].values())
        for one in (texts, split)
    ]
    assert shares[0] > 1.1 * shares[1] and texts["split_rounds"] > 0
    for bad in ("--context", "-1"), ("--text-acceptance", "1.5"):
        assert main([*COMMAND, "--profile", profile, "--policy", "adaptive", *bad]) == 2


@pytest.mark.slow
def test_a_shift_is_for_those_who_learn(capsys, profile, tmp_path):
    """After a shift of acceptance, policies that learn rates have less regret than a profile."""
    online = tmp_path / "online.json"
    online.write_text(json.dumps(PROFILE | {"is_online": True}))
    shift = ["--acceptance-shift", "-4", "--seeds", "1"]
    stale = simulate(capsys, profile, "profile", *shift)
    assert stale["settings"]["acceptance_shift"] == -4
    for learning in (
        simulate(capsys, profile, "adaptive", *shift),
        simulate(capsys, str(online), "profile", *shift),
    ):
        assert learning["regret_mean"] < stale["regret_mean"] / 2


def test_every_seed_begins_with_a_policy_that_has_learned_nothing():
    profile = Profile.of(PROFILE, "here")
    settings = {"profile": "here", "policy": "adaptive", "acceptance_shift": 0.0, "requests": 4}
    one, two = (bench(SimulationSettings(seeds=seeds, **settings), profile) for seeds in (1, 2))
    assert two["regret_by_seed"][0] == one["regret_by_seed"][0]


def test_regret_of_a_batch_size_is_pooled_by_time():
    short = Outcome(ms_by_batch=Counter({1: 10.0, 2: 5.0}), lost_by_batch=Counter({1: 5.0}))
    long = Outcome(ms_by_batch=Counter({1: 90.0}), lost_by_batch=Counter({1: 5.0}))
    assert pool_regret([short, long]) == {1: 0.1, 2: 0.0}
