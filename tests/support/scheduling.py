"""Small schedulers for tests whose expected numbers are computed by hand.

Pages hold 8 tokens. There is no device: the tests give the tokens of each step.
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
    """An engine config that accepts any shapes of prefill chunks."""

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
    """Return a scheduler. `policy` is a policy, or the K of all steps."""
    return Scheduler(config, StaticPolicy(policy) if isinstance(policy, int) else policy, **options)


def roomy_scheduler(k=0, num_snapshots=None, windows=(), **changes):
    """Return a scheduler with room for long prompts, which run in one chunk each."""
    sizes = {"max_model_len": 128, "max_num_batched_tokens": 512, "num_pages": 64}
    config = make_config(**(sizes | changes))
    return make_scheduler(config, k, num_snapshots=num_snapshots, windows=windows)


def add(scheduler, i, prompt, max_tokens=8, *, num_samples=1, params=None, **fields):
    """Queue a request, and return its samples.

    `prompt` is a list of tokens, or the length of a prompt that no other request has.
    """
    tokens = range(1000 * i, 1000 * i + prompt) if isinstance(prompt, int) else prompt
    params = SamplingParams(n=num_samples, **(params or {}))
    seeds = tuple(range(num_samples))
    return scheduler.add(Request(i, tuple(tokens), params, max_tokens, seeds, (STOP,), **fields))


def chunks(step):
    """Return (request, start, count) for each chunk of a step."""
    plan = step and step.prefill
    return [(c.sequence.request.request_id, c.start, c.count) for c in plan.chunks] if plan else []


def chunks_of(steps):
    """Return the chunks of all steps."""
    return [chunk for step in steps if step.prefill for chunk in step.prefill.chunks]


def spans(found):
    """Return (start, count) for each chunk."""
    return [(chunk.start, chunk.count) for chunk in found]


def num_pages(*sequences):
    """Return the number of pages of each resident sequence."""
    return [len(sequence.residency.pages) for sequence in sequences]


def rounds(step):
    """Return the ids of the requests that decode in a step."""
    plan = step and step.decode
    return [s.request.request_id for s in plan.sequences] if plan else []


def commit(scheduler, part, *rows):
    return scheduler.commit(part, [RowOutput(list(tokens)) for tokens in rows])


def give(scheduler, step, tokens=(9,)):
    """Commit a step, and return the sequences that got tokens.

    Each decoding sequence gets `tokens`. A sequence whose prompt ends gets the token 9.
    """
    touched = []
    for part in step.parts:
        if isinstance(part, PrefillPlan):
            rows = [[9] if chunk.samples else [] for chunk in part.chunks]
        else:
            rows = [tokens[: s.request.max_tokens - s.num_output] for s in part.sequences]
        touched += commit(scheduler, part, *rows)[1]
    return touched


def run_to_the_end(scheduler, tokens=(9,), *, is_async=True):
    """Run all requests to the end, and return all steps.

    In each round, each request gets `tokens`.
    """
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
    """Run all requests to the end, one step at a time, and return all chunks."""
    return chunks_of(run_to_the_end(scheduler, tokens, is_async=False))


def decoding(num_requests, config, policy=0):
    """Return a scheduler and its samples, which have one output token each.

    The prompts have 2 tokens.
    """
    scheduler = make_scheduler(config, policy)
    samples = [add(scheduler, i, 2, 30)[0] for i in range(num_requests)]
    step = scheduler.schedule()
    assert len(chunks(step)) == num_requests
    give(scheduler, step)
    return scheduler, samples


def admissions(steps):
    """Return the samples in the order in which their first chunks ran."""
    found = [chunk.sequence for chunk in chunks_of(steps) if chunk.is_first]
    return [(sequence.request.request_id, sequence.index) for sequence in found]


def two_decoding(num_pages):
    """Return a scheduler and two samples, with 8 prompt tokens and one output token each.

    Each sample has one page. K is 3.
    """
    config = make_config(max_model_len=8 * num_pages, num_pages=num_pages, shapes=((4, 64),))
    scheduler = make_scheduler(config, 3)
    samples = [add(scheduler, i, 8, 8 * num_pages - 8)[0] for i in range(2)]
    step = scheduler.schedule()
    assert chunks(step) == [(0, 0, 8), (1, 0, 8)]
    give(scheduler, step)
    return scheduler, *samples
