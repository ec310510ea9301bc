"""Configurations take turns, and runs are counted between two snapshots of the counters."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.engines import simulated_engine

from specjax.bench import measure as module
from specjax.bench.measure import PLAIN, Configuration, as_run, decode, measure
from specjax.config import EngineConfig
from specjax.host.request import Request
from specjax.host.speculation.policy import StaticPolicy
from specjax.sampling_params import SamplingParams


@pytest.fixture
def engine():
    """A simulated engine. It prefills four tokens in two steps. Its seventh token is 26."""
    config = EngineConfig(max_model_len=16, num_pages=4, page_size=8, max_num_batched_tokens=2)
    return simulated_engine(replace(config, max_num_seqs=1), StaticPolicy(0))


def test_prompts_and_the_step_in_vain_are_not_counted(engine):
    request = Request(3, (1, 2, 3, 4), SamplingParams(temperature=0), 9, (0,), stop_ids=(26,))
    run = decode(engine, [request])
    assert {key: len(output) for key, output in run.outputs.items()} == {3: 7}
    assert run.num_tokens == run.num_steps == run.num_request_steps == 6 and run.seconds > 0
    assert not engine.has_work and engine.metrics().num_decode_steps == 7


def test_counts_are_those_between_the_snapshots(engine):
    before = replace(engine.metrics(), num_generation_tokens=10, num_decode_steps=4)
    before = replace(before, num_accepted_tokens_per_pos=(3, 2))
    after = replace(before, num_generation_tokens=30, num_decode_steps=9)
    after = replace(after, num_accepted_tokens_per_pos=(9, 5, 1))
    run = as_run({}, 2.0, before, after)
    assert (run.num_tokens, run.num_steps, run.num_request_steps) == (20, 5, 10)
    assert run.num_accepted_per_pos == (6, 3, 1)
    assert run.tokens_per_second == 10 and run.ms_per_step == 400
    assert run.ms_per_token == 200  # two requests share a step, each gains two tokens by it
    both = as_run({}, 2.0, before, after, num_replicas=2)  # whose steps are at the same time
    assert both.tokens_per_second == 10 and (both.ms_per_step, both.ms_per_token) == (800, 400)


def test_every_round_runs_every_configuration_and_starts_with_another(monkeypatch):
    log = []

    def engine_of(name):
        def set_policy(policy, **_):
            log.append(Configuration(name, policy.k))

        return SimpleNamespace(engines=[SimpleNamespace(set_policy=set_policy)])

    monkeypatch.setattr(module, "decode", lambda engine, requests: (log[-1], requests))
    configurations = [Configuration(PLAIN, 0), Configuration("eagle", 1), Configuration("eagle", 3)]
    engines = {name: engine_of(name) for name in (PLAIN, "eagle")}
    rounds = measure(engines, configurations, ["first", "second", "third"])
    first = next(rounds)
    assert list(first) == configurations and len(log) == 3  # the others are still to be run
    for batch, one in zip(["first", "second", "third"], [first, *rounds], strict=True):
        assert one == {each: (each, batch) for each in configurations}
    a, b, c = configurations
    assert log == [a, b, c, b, c, a, c, a, b]
