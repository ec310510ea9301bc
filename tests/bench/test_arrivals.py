"""Arrival times follow their distribution, and a client that sends too late is detected."""

import math

import numpy as np
import pytest
from support.refusals import refusal

from specjax.bench.traffic.arrivals import Arrivals
from specjax.bench.traffic.goodput import goodput, read_limits
from specjax.bench.traffic.record import Record


@pytest.mark.parametrize("rate, shape", [(4.0, 1.0), (20.0, 0.3), (0.5, 9.0)])
def test_gaps_have_the_moments_of_a_gamma_distribution(rate, shape):
    """Mean 1 / rate and variance 1 / (rate^2 shape), each within five standard errors."""
    count = 20_000
    gaps = np.diff(Arrivals(rate=rate, burstiness=shape).times(count, seed=7))
    variance = 1 / (rate**2 * shape)
    assert abs(gaps.mean() - 1 / rate) < 5 * math.sqrt(variance / count)
    spread = math.sqrt((2 + 6 / shape) / count)  # of a sample variance: excess kurtosis 6 / shape
    assert abs(gaps.var() / variance - 1) < 5 * spread


def test_p_values_are_uniform_under_the_law_and_tiny_under_another():
    law = Arrivals(rate=5.0, burstiness=2.0)
    p_values = [law.check(law.times(60, seed), [0.0] * 60)["p_value"] for seed in range(200)]
    assert abs(np.mean(p_values) - 0.5) < 5 * math.sqrt(1 / 12 / 200)
    assert 0.0 < np.mean(np.less(p_values, 0.1)) < 0.2
    for other in Arrivals(rate=5.0, burstiness=0.3), Arrivals(rate=9.0, burstiness=2.0):
        times = other.times(400, 0)
        assert law.check(times, [0.0] * 400)["p_value"] < 1e-6
    late = law.check([0.0, 0.3], [0.0, 0.02])
    assert late["p_value"] is None and late["max_late_ms"] == pytest.approx(20)


def test_ramps_and_constant_gaps():
    assert Arrivals().times(3, 0) == [0, 0, 0] and Arrivals().check([0.0], [0.0]) is None
    even = Arrivals(rate=4.0, burstiness=math.inf)
    np.testing.assert_allclose(even.times(4, 0), [0, 0.25, 0.5, 0.75])
    ramp = {"start_rate": 2.0, "end_rate": 32.0}
    np.testing.assert_allclose(Arrivals(ramp="linear", **ramp).rates(4), [2, 12, 22, 32])
    np.testing.assert_allclose(Arrivals(ramp="exponential", **ramp).rates(5), [2, 4, 8, 16, 32])
    times = Arrivals(ramp="exponential", **ramp).times(4000, 1)
    gaps = np.diff(times)
    assert gaps[:500].mean() / gaps[-500:].mean() == pytest.approx(16**0.875, rel=0.3)
    assert Arrivals(ramp="exponential", **ramp).check(times, times)["p_value"] > 1e-3


@pytest.mark.parametrize("options, words", [
    ({"rate": 0.0}, ["--request-rate 0 must be above 0"]),
    ({"rate": math.nan}, ["--request-rate nan"]),
    ({"burstiness": 0.0}, ["--burstiness 0 must be above 0"]),
    ({"start_rate": 2.0}, ["--ramp-up-start-rps 2 goes with --ramp-up-strategy"]),
    ({"ramp": "linear", "start_rate": 2.0}, ["--ramp-up-end-rps None must be a rate"]),
    ({"ramp": "linear", "start_rate": 0.0, "end_rate": 1.0}, ["--ramp-up-start-rps 0.0"]),
    ({"ramp": "linear", "rate": 3.0, "start_rate": 1.0, "end_rate": 2.0}, ["contradicts"]),
], ids=str)  # fmt: skip
def test_wrong_rates(options, words):
    refusal(lambda: Arrivals(**options), *words)


@pytest.mark.parametrize("given, words", [
    (["ttft:200"], ["needs a unit, ms or s", "ttft:200ms"]),
    (["ttft:200us"], ["needs a unit"]),
    (["ttft"], ["must be like ttft:200ms"]),
    (["ttft:0ms"], ["above 0"]),
    (["ttft:1.2.3ms"], ["must be like"]),
    (["speed:2s"], ["limits none of ttft, tpot, itl, e2el"]),
    (["tpot:2s", "tpot:1ms"], ["limits tpot twice"]),
], ids=str)  # fmt: skip
def test_wrong_limits(given, words):
    refusal(lambda: read_limits(given), *words)


def test_goodput_counts_requests_within_all_limits():
    limits = read_limits(["ttft:200ms", "e2el:1.5s"])
    assert limits == {"ttft": 200, "e2el": 1500}
    seconds = [(0.1, 1.0), (0.2, 1.6), (0.3, 1.0), (0.2, 1.5)]
    complete = [Record(index=0, ttft=t, latency=e) for t, e in seconds]
    found = goodput(limits, complete, 5, duration=2.0)  # a fifth failed
    assert found["requests_per_second"] == 1.0 and found["share"] == 0.4
    assert found["share_by_limit"] == {"ttft": 0.6, "e2el": 0.6}
    assert goodput({}, complete, 5, 2.0) is None
