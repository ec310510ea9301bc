"""Prefix caches, and schedulers that use them."""

from specjax.config import EngineConfig
from specjax.host.pages import PageAllocator
from specjax.host.plans import PrefillPlan
from specjax.host.prefix_cache import PrefixCache, SnapshotIndex, extend_keys
from specjax.host.request import Request
from specjax.host.scheduler import Scheduler
from specjax.host.sequence import RowOutput
from specjax.host.speculation.policy import StaticPolicy
from specjax.sampling_params import SamplingParams

STOP = 7


def keys_of(tokens, salt=b"", page_size=4):
    keys = []
    extend_keys(keys, list(tokens), page_size, salt)
    return keys


def make_cache(num_pages=8, num_snapshots=None):
    pages = PageAllocator(num_pages)
    snapshots = None if num_snapshots is None else SnapshotIndex(num_snapshots)
    return PrefixCache(pages, snapshots), pages


def make_scheduler(k=0, num_snapshots=None, windows=(), **changes):
    sizes = {
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "page_size": 8,
        "num_pages": 64,
    }
    config = EngineConfig(**(sizes | changes))
    return Scheduler(config, StaticPolicy(k), num_snapshots=num_snapshots, windows=windows)


def add(scheduler, i, prompt, max_tokens=4, *, num_samples=1, priority=0, **params):
    """Queue a request; its first sample."""
    params, seeds = SamplingParams(n=num_samples, **params), tuple(range(num_samples))
    request = Request(i, tuple(prompt), params, max_tokens, seeds, (STOP,), priority=priority)
    return scheduler.add(request)[0]


def chunks(step):
    """(request, start, count) of each chunk."""
    plan = step and step.prefill
    return [(c.sequence.request.request_id, c.start, c.count) for c in plan.chunks] if plan else []


def give(scheduler, step, tokens=(9,)):
    """Commit a step: chunks give a token, each round these."""
    for part in step.parts:
        if isinstance(part, PrefillPlan):
            commit(scheduler, part, *[[9] if chunk.samples else [] for chunk in part.chunks])
        else:
            left = [s.request.max_tokens - s.num_output for s in part.sequences]
            commit(scheduler, part, *[tokens[:most] for most in left])


def run(scheduler, tokens=(9,)):
    """Let everything finish, with results read at once; all chunks."""
    found = []
    while scheduler.has_work:
        step = scheduler.schedule()
        assert step, "it hangs"
        found += step.prefill.chunks if step.prefill else []
        give(scheduler, step, tokens)
    return found


def spans(found):
    return [(c.start, c.count) for c in found]


def commit(scheduler, part, *rows):
    return scheduler.commit(part, [RowOutput(list(tokens)) for tokens in rows])
