"""Interleaving, and counting between two snapshots of an engine's counters."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from specjax.bench.measure import PLAIN, Configuration, as_run, decode, measure
from specjax.config import EngineConfig
from specjax.engine.metrics import Compilations, Metrics, Recorder
from specjax.host.request import Request
from specjax.host.scheduler import Scheduler
from specjax.host.speculation.policy import StaticPolicy
from specjax.sampling_params import SamplingParams

EMPTY = Recorder().snapshot(
    Scheduler(EngineConfig(max_model_len=16, num_pages=1), StaticPolicy(0)),
    Compilations(num_programs=0, num_late=0, num_pending=0, seconds=0.0),
)


@dataclass
class ScriptedEngine:
    """Plays two prefill steps, then decode steps of `tokens_per_step`, the last one in vain."""

    name: str
    log: list
    tokens_per_step: int = 1
    counters: Metrics = EMPTY
    requests: list = field(default_factory=list)
    progress: int = 0

    def set_policy(self, policy):
        self.log.append((self.name, policy.k))

    def add(self, request):
        self.requests.append(request)
        self.progress = 0

    @property
    def has_work(self):
        return bool(self.requests)

    def metrics(self):
        return self.counters

    def count(self, **more):
        fields = {name: getattr(self.counters, name) + value for name, value in more.items()}
        self.counters = replace(self.counters, **fields)

    def step(self):
        [request] = self.requests
        self.progress += 1
        if self.progress <= 2:
            half = len(request.prompt_token_ids) // 2
            self.count(num_prompt_tokens=half, num_generation_tokens=self.progress - 1)
            return []
        done = 1 + (self.progress - 2) * self.tokens_per_step
        if done > request.max_tokens:
            self.requests = []
            self.count(num_decode_steps=1)
            return []
        self.count(num_decode_steps=1, num_generation_tokens=self.tokens_per_step)
        is_last = done == request.max_tokens
        found = SimpleNamespace(request=request, output=list(range(done)), is_finished=is_last)
        return [found]


def request(key=0, max_tokens=7):
    return Request(key, (1, 2, 3, 4), SamplingParams(temperature=0), max_tokens, (0,))


def test_prompts_and_the_step_in_vain_are_not_counted():
    engine = ScriptedEngine("plain", [])
    run = decode(engine, [request(key=3)])
    assert run.outputs == {3: tuple(range(7))}
    assert run.num_tokens == run.num_steps == run.num_request_steps == 6 and run.seconds > 0
    assert not engine.has_work and engine.counters.num_decode_steps == 7


def test_counts_are_those_between_the_snapshots():
    before = replace(EMPTY, num_generation_tokens=10, num_drafts=4, num_decode_steps=4)
    before = replace(before, num_accepted_tokens_per_pos=(3, 2))
    after = replace(EMPTY, num_generation_tokens=30, num_drafts=14, num_decode_steps=9)
    after = replace(after, num_accepted_tokens_per_pos=(9, 5, 1))
    run = as_run({}, 2.0, before, after)
    assert (run.num_tokens, run.num_steps, run.num_request_steps) == (20, 5, 10)
    assert run.num_accepted_per_pos == (6, 3, 1)
    assert run.num_tokens == run.num_request_steps + sum(run.num_accepted_per_pos)
    assert run.tokens_per_second == 10 and run.ms_per_step == 400
    assert run.ms_per_token == 200  # two requests share a step, each gains two tokens by it


def test_every_round_runs_every_configuration_and_starts_with_another():
    log = []
    engines = {PLAIN: ScriptedEngine(PLAIN, log), "eagle": ScriptedEngine("eagle", log, 2)}
    configurations = [Configuration(PLAIN, 0), Configuration("eagle", 1), Configuration("eagle", 3)]
    rounds = measure(engines, configurations, [[request(i)] for i in range(3)])
    first = next(rounds)
    assert list(first) == configurations and len(log) == 3  # the others are still to be run
    rounds = [first, *rounds]
    a, b, c = ((configuration.method, configuration.k) for configuration in configurations)
    assert log == [a, b, c, b, c, a, c, a, b]
    assert all([list(one[c].outputs) for one in rounds] == [[0], [1], [2]] for c in configurations)
