"""Schedulers, requests and devices that answer, for tests with numbers worked out by hand.

Pages hold 8 tokens. What a device would find in its pages is not checked here.
"""

from dataclasses import dataclass, field
from functools import partial

from specjax.config import EngineConfig
from specjax.host.plans import PrefillPlan
from specjax.host.request import Request
from specjax.host.scheduler import Scheduler
from specjax.host.sequence import RowOutput
from specjax.host.speculation.policy import PolicyRule, StaticPolicy
from specjax.sampling_params import SamplingParams

STOP = 7


@dataclass(frozen=True)
class FewerWhenFull(PolicyRule):
    """K falls with the batch size, to see that it is asked with the right one."""

    choices: tuple[int, ...] = (0, 1, 2, 3)

    def choose(self, load):
        return max(0, 3 - load.num_sequences // 2)


@dataclass
class CountingWatch:
    """Ends an output with its `last`-th token, as a text might: only the host knows."""

    last: int
    num_seen: int = 0
    stop_reason: str | None = None

    def append(self, tokens):
        assert self.stop_reason is None, "it was shown more after it had stopped"
        self.num_seen += len(tokens)
        if self.num_seen < self.last:
            return None
        self.stop_reason = "text"
        return self.last - (self.num_seen - len(tokens))


@dataclass
class StrictMatcher:
    """Refuses one token."""

    refused: int
    is_finished: bool = False
    seen: list[int] = field(default_factory=list)

    def accept(self, tokens):
        if self.refused in tokens:
            raise RuntimeError(f"token {self.refused} is not in the grammar")
        self.seen += tokens


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


def add(scheduler, i, prompt_length, max_tokens=8, *, num_samples=1, cut=None, **fields):
    """Queue a request, by default with a prompt of its own; its samples.

    If `cut` is given, its text ends with that token of the output.
    """
    start = 1000 * i
    if cut:
        fields["watch_text"] = partial(CountingWatch, cut)
    request = Request(
        i,
        tuple(range(start, start + prompt_length)),
        SamplingParams(n=num_samples),
        max_tokens,
        tuple(range(num_samples)),
        (STOP,),
        **fields,
    )
    return scheduler.add(request)


def chunks(step):
    """(request, start, count) of each chunk."""
    plan = step and step.prefill
    return [(c.sequence.request.request_id, c.start, c.count) for c in plan.chunks] if plan else []


def num_pages(*sequences):
    """How many pages each resident sequence has."""
    return [len(sequence.residency.pages) for sequence in sequences]


def rounds(step):
    """The requests that decode."""
    plan = step and step.decode
    return [s.request.request_id for s in plan.sequences] if plan else []


def commit(scheduler, part, *rows):
    return scheduler.commit(part, [RowOutput(list(tokens)) for tokens in rows])


def give(scheduler, step, num_tokens=1):
    """Commit a step: so many tokens of each round, and what chunks give; who got some."""
    touched = []
    for part in step.parts:
        if isinstance(part, PrefillPlan):
            rows = [[9] if chunk.samples else [] for chunk in part.chunks]
            touched += commit(scheduler, part, *rows)[1]
            continue
        left = [s.request.max_tokens - s.num_output for s in part.sequences]
        rows = [[9] * min(num_tokens, most) for most in left]
        touched += commit(scheduler, part, *rows)[1]
    return touched


def run_to_the_end(scheduler, is_async=True, num_tokens=1):
    """Every round gives so many tokens to everyone in it; returns all steps."""
    steps, in_flight, num_idle = [], None, 0
    while scheduler.has_work or in_flight:
        previous, in_flight = in_flight, scheduler.schedule()
        steps += [in_flight] if in_flight else []
        if is_async and previous:
            give(scheduler, previous, num_tokens)
        elif not is_async and in_flight:
            give(scheduler, in_flight, num_tokens)
            in_flight = None
        num_idle = 0 if previous or steps[-1:] == [in_flight] or not is_async else num_idle + 1
        assert num_idle < 3 and len(steps) < 2000, "it hangs"
    return steps


def decoding(num_requests, config, policy=0, **fields):
    """A scheduler whose requests have run prompts of 2 tokens in one step, and got a token."""
    scheduler = make_scheduler(config, policy)
    samples = [add(scheduler, i, 2, 30, **fields)[0] for i in range(num_requests)]
    step = scheduler.schedule()
    assert len(chunks(step)) == num_requests
    give(scheduler, step)
    return scheduler, samples


def admissions(steps):
    """Names of samples by their first chunks."""
    return [
        (c.sequence.request.request_id, c.sequence.index)
        for step in steps
        if step.prefill
        for c in step.prefill.chunks
        if c.is_first
    ]


def two_decoding(num_pages, *, k=3, **fields):
    """Two requests of 8 tokens of prompt, a page each, with their first token."""
    config = make_config(max_model_len=8 * num_pages, num_pages=num_pages, shapes=((4, 64),))
    scheduler = make_scheduler(config, k)
    samples = [add(scheduler, i, 8, 8 * num_pages - 8, **fields)[0] for i in range(2)]
    step = scheduler.schedule()
    assert chunks(step) == [(0, 0, 8), (1, 0, 8)]
    give(scheduler, step)
    return scheduler, *samples
