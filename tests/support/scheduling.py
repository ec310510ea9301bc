"""Schedulers, requests and devices that answer, for tests with numbers worked out by hand.

Pages hold 8 tokens. What a device would find in its pages is not checked here.
"""

from dataclasses import dataclass

from specjax.config import EngineConfig
from specjax.host.plans import PrefillPlan
from specjax.host.request import Request
from specjax.host.scheduler import Scheduler
from specjax.host.sequence import RowOutput
from specjax.host.speculation.policy import StaticPolicy
from specjax.sampling_params import SamplingParams

STOP = 7


@dataclass(frozen=True, kw_only=True)
class Config(EngineConfig):
    """Takes any shapes for its chunks."""

    shapes: tuple[tuple[int, int], ...] = ()

    def __post_init__(self):
        super().__post_init__()
        if self.shapes:
            object.__setattr__(self, "prefill_shapes", self.shapes)


def make_config(**changes):
    sizes = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "page_size": 8,
        "num_pages": 32,
    }
    return Config(**(sizes | changes))


def make_scheduler(config, policy=0, **options):
    """`policy` may be the K of all steps."""
    return Scheduler(config, StaticPolicy(policy) if isinstance(policy, int) else policy, **options)


def roomy_scheduler(k=0, num_snapshots=None, windows=(), **changes):
    """A scheduler for prompts of many pages, each run in a chunk."""
    sizes = {"max_model_len": 128, "max_num_batched_tokens": 512, "num_pages": 64}
    config = make_config(**(sizes | changes))
    return make_scheduler(config, k, num_snapshots=num_snapshots, windows=windows)


def add(scheduler, i, prompt, max_tokens=8, *, num_samples=1, params=None, **fields):
    """Queue a request; its samples. A prompt that is but a length has tokens of its own."""
    tokens = range(1000 * i, 1000 * i + prompt) if isinstance(prompt, int) else prompt
    params = SamplingParams(n=num_samples, **(params or {}))
    seeds = tuple(range(num_samples))
    return scheduler.add(Request(i, tuple(tokens), params, max_tokens, seeds, (STOP,), **fields))


def chunks(step):
    """(request, start, count) of each chunk."""
    plan = step and step.prefill
    return [(c.sequence.request.request_id, c.start, c.count) for c in plan.chunks] if plan else []


def chunks_of(steps):
    """The chunks of all steps."""
    return [chunk for step in steps if step.prefill for chunk in step.prefill.chunks]


def spans(found):
    """(start, count) of chunks."""
    return [(chunk.start, chunk.count) for chunk in found]


def num_pages(*sequences):
    """How many pages each resident sequence has."""
    return [len(sequence.residency.pages) for sequence in sequences]


def rounds(step):
    """The requests that decode."""
    plan = step and step.decode
    return [s.request.request_id for s in plan.sequences] if plan else []


def commit(scheduler, part, *rows):
    return scheduler.commit(part, [RowOutput(list(tokens)) for tokens in rows])


def give(scheduler, step, tokens=(9,)):
    """Commit a step: these tokens of each round, and what chunks give; who got some."""
    touched = []
    for part in step.parts:
        if isinstance(part, PrefillPlan):
            rows = [[9] if chunk.samples else [] for chunk in part.chunks]
        else:
            rows = [tokens[: s.request.max_tokens - s.num_output] for s in part.sequences]
        touched += commit(scheduler, part, *rows)[1]
    return touched


def run_to_the_end(scheduler, tokens=(9,), *, is_async=True):
    """Every round gives these tokens to everyone in it; returns all steps."""
    steps, in_flight = [], None
    while scheduler.has_work or in_flight:
        previous, in_flight = in_flight, scheduler.schedule()
        steps += [in_flight] if in_flight else []
        if not is_async:
            previous, in_flight = in_flight, None
        assert previous or in_flight, "it hangs"
        if previous:
            give(scheduler, previous, tokens)
        assert len(steps) < 2000, "it hangs"
    return steps


def run(scheduler, tokens=(9,)):
    """Let everything finish, with results read at once; all chunks."""
    return chunks_of(run_to_the_end(scheduler, tokens, is_async=False))


def decoding(num_requests, config, policy=0):
    """A scheduler whose requests have run prompts of 2 tokens in one step, and got a token."""
    scheduler = make_scheduler(config, policy)
    samples = [add(scheduler, i, 2, 30)[0] for i in range(num_requests)]
    step = scheduler.schedule()
    assert len(chunks(step)) == num_requests
    give(scheduler, step)
    return scheduler, samples


def admissions(steps):
    """Names of samples by their first chunks."""
    found = [chunk.sequence for chunk in chunks_of(steps) if chunk.is_first]
    return [(sequence.request.request_id, sequence.index) for sequence in found]


def two_decoding(num_pages):
    """Two requests of 8 tokens of prompt, a page each, with their first token. K is 3."""
    config = make_config(max_model_len=8 * num_pages, num_pages=num_pages, shapes=((4, 64),))
    scheduler = make_scheduler(config, 3)
    samples = [add(scheduler, i, 8, 8 * num_pages - 8)[0] for i in range(2)]
    step = scheduler.schedule()
    assert chunks(step) == [(0, 0, 8), (1, 0, 8)]
    give(scheduler, step)
    return scheduler, *samples
