"""Times that replays of rounds measure, on a made-up device, host and clock."""

import time
from itertools import product

import numpy as np
import pytest

from specjax.device.drafters.drafter import Variant
from specjax.device.layout import Layout
from specjax.engine.replay import measure_rounds

KS, BATCHES = (0, 2), (1, 4)
MAX_MODEL_LEN, SHORT = 800, 100


class Outputs:
    """Results that are ready when the made-up device has computed them. Reading them waits."""

    def __init__(self, machine, done):
        self.machine, self.done = machine, done

    def copy_to_host_async(self):
        """Do nothing."""

    def is_ready(self):
        return self.machine.now >= self.done

    def __array__(self, *arguments, **options):
        self.machine.now = max(self.machine.now, self.done)
        return np.zeros(1)


class Machine:
    """A host that takes `host_ms` to launch a round, and a device that runs one round at a time."""

    def __init__(self, host_ms, round_ms):
        self.host_ms, self.round_ms = host_ms, round_ms
        self.now = self.free_at = 1e3

    def fill(self):
        """Do nothing: requests are only known by their length."""

    def set_context(self, length):
        self.context = length

    def run(self, key, packed):
        self.now += self.host_ms
        self.free_at = max(self.free_at, self.now) + self.round_ms(key.batch, key.k, self.context)
        return Outputs(self, self.free_at)


def round_ms(batch, k, context=0):
    return 5.0 + 0.5 * batch + 2.0 * k + 0.002 * batch * context


@pytest.mark.parametrize("host_ms", [1.0, 30.0])
def test_a_round_takes_what_it_takes_while_serving(monkeypatch, host_ms):
    """Host and device work in parallel, so a round takes the longer of their times."""
    machine = Machine(host_ms, round_ms)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now / 1e3)
    layout = Layout(4, MAX_MODEL_LEN, MAX_MODEL_LEN // 16, 10)
    cost = measure_rounds(machine, Variant(), layout, (64,), KS, BATCHES)
    monkeypatch.undo()
    for (batch, k), context in product(product(BATCHES, KS), (0, SHORT)):
        expected = max(host_ms, round_ms(batch, k, context))
        assert cost.ms(batch, k, batch * context) == pytest.approx(expected, rel=0.01)


def test_context_costs_what_it_costs_the_k_that_minds_it_least(monkeypatch):
    machine = Machine(1.0, lambda batch, k, context: 5.0 + 0.002 * (1 + k) * batch * context)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now / 1e3)
    layout = Layout(4, MAX_MODEL_LEN, MAX_MODEL_LEN // 16, 10)
    cost = measure_rounds(machine, Variant(), layout, (64,), KS, BATCHES)
    assert cost.ms_per_context_token == pytest.approx(0.002, rel=0.01)
    assert cost.ms_per_context_draft == pytest.approx(0.002, rel=0.01)
