"""Runs random schedules on a real engine, and compares each request with a run alone.

All schedules use one engine, because its programs take long to compile. Each schedule has a new
scheduler, whose numbers of slots and pages and whose token budget are random, within the limits of
the programs.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from support.schedules import Rng, Watch, chance

from specjax import LLM, SamplingParams
from specjax.bench.identity import Identity, compare
from specjax.device.models.model import is_recurrent, page_windows
from specjax.engine.engine import Engine
from specjax.engine.metrics import Recorder
from specjax.host.request import Request
from specjax.host.scheduler import Scheduler
from specjax.host.sequence import Sequence

MAX_LENGTH, MAX_OUTPUT = 64, 32  # of a request, as far as the engine's sizes allow
MAX_SPARE = 2  # more pages than the longest request needs
NUM_FAMILIES = 2


@dataclass
class Found:
    """The results of schedules: compared outputs, and counts of events."""

    identity: Identity = field(default_factory=Identity)
    tally: Counter = field(default_factory=Counter)

    def __add__(self, other: "Found") -> "Found":
        return Found(self.identity + other.identity, self.tally + other.tally)


def run_real_schedule(llm: LLM, alone: LLM, seed: int) -> Found:
    """Run the schedule of a seed on `llm`, and its requests one at a time on `alone`.

    Raises:
        AssertionError: an output was lost or repeated, or pages or slots were not freed.
    """
    rng = np.random.default_rng([seed, 4])
    requests = make_requests(llm, rng, seed)
    try:
        samples, tally = _serve(llm.engine, requests, rng)
    except Exception as error:
        error.add_note(
            f"Again: python benchmarks/fuzz_schedules.py --seed {seed} --schedules 0 --real 1"
        )
        raise
    others = [sample for request in requests for sample in _serve_alone(alone.engine, request)]
    pairs, before, after = [], [], []
    for sample, other in zip(samples, others, strict=True):
        output, wanted = sample.output, other.output
        if sample.finish_reason == "abort":
            wanted = wanted[: len(output)]
        elif output == wanted:
            assert sample.finish_reason == other.finish_reason
        pairs.append((other.request, sample.index))
        before.append(wanted)
        after.append(output)
    identity = compare(llm.engine, pairs, before, after)
    marked = [f"schedule {seed}, {text}" for text in identity.mismatches]
    return Found(replace(identity, mismatches=marked), tally)


def begin_anew(engine: Engine, rng: Rng) -> None:
    """Give an engine a new scheduler, as if it had other sizes and options.

    The engine keeps its compiled programs.
    """
    config = engine.config
    max_drafts = max(engine.scheduler.policy.choices)
    longest = min(config.max_model_len, MAX_LENGTH)
    fewest_pages = -(-longest // config.page_size)
    most_pages = min(fewest_pages + MAX_SPARE, config.num_pages)
    changed = replace(
        config,
        max_model_len=longest,
        max_num_seqs=int(rng.integers(1, config.max_num_seqs + 1)),
        max_num_scheduled_tokens=int(rng.integers(max_drafts + 1, config.max_num_batched_tokens)),
        num_pages=int(rng.integers(fewest_pages, most_pages + 1)),
        enable_prefix_caching=chance(rng, 0.8),
        scheduling_policy="priority" if chance(rng, 0.3) else "fcfs",
    )
    engine.reset()
    engine.config = replace(config, async_scheduling=chance(rng, 0.7))
    num_snapshots = None
    if is_recurrent(engine.target):
        num_snapshots = int(rng.integers(0, config.num_snapshots + 1))
    engine.scheduler = Scheduler(
        changed,
        engine.scheduler.policy,
        draft_slots=engine.drafter.draft_slots(max_drafts),
        num_snapshots=num_snapshots,
        windows=page_windows(engine.target, config),
        suggester=engine.scheduler.suggester,
    )
    engine._recorder = Recorder()


def _serve(engine: Engine, requests: list[Request], rng: Rng) -> tuple[list[Sequence], Counter]:
    """Run the requests, which arrive over time. Some are aborted."""
    begin_anew(engine, rng)
    scheduler, config = engine.scheduler, engine.scheduler.config
    if config.scheduling_policy == "priority":
        requests = [replace(r, priority=int(rng.integers(-1, 2))) for r in requests]
    samples: list[list[Sequence]] = []
    delivered: dict[Sequence, list[int]] = {}
    rate, step = float(rng.choice([0.3, 2, 20])), 0
    engine.prepare(requests)
    while len(samples) < len(requests) or engine.has_work:
        for request in requests[len(samples) :][: rng.poisson(rate)]:
            samples.append(engine.add(request))
        if samples and chance(rng, 0.05):
            engine.abort(requests[rng.integers(len(samples))].request_id)
        for sequence in engine.step():
            told = delivered.get(sequence, [])
            assert sequence.output[: len(told)] == told and (
                sequence.output != told or sequence.is_finished
            )
            delivered[sequence] = sequence.output
        step += 1
        assert step < 4000, "no end in sight"
    engine.drain()
    every = [sequence for group in samples for sequence in group]
    for sequence in every:
        is_told = sequence.finish_reason == "abort" or delivered[sequence] == sequence.output
        assert sequence.is_finished and is_told
    assert not scheduler.has_work and scheduler.pages.num_free == config.num_pages
    assert len(scheduler.residents.free_slots) == config.max_num_seqs
    metrics = engine.metrics()
    assert metrics.num_generation_tokens == sum(sequence.num_output for sequence in every)
    tally = {
        "schedules": 1,
        "requests": len(requests),
        "aborted": metrics.requests_finished.get("abort", 0),
        "steps": metrics.num_steps,
        "tokens": metrics.num_generation_tokens,
        "preemptions": metrics.num_preemptions,
        "prefix hits": metrics.prefix_cache_hits,
        "accepted": metrics.num_accepted_tokens,
    }
    return every, Counter(tally)


def _serve_alone(engine: Engine, request: Request) -> list[Sequence]:
    engine.prepare([request])
    samples = engine.add(request)
    while engine.has_work:
        engine.step()
    return samples


def make_requests(llm: LLM, rng: Rng, seed: int) -> list[Request]:
    """Return requests with temperature 0 or 0.8. Many prompts have a common prefix."""
    longest, vocab_size = min(llm.engine.config.max_model_len, MAX_LENGTH), llm.target.vocab_size
    families = rng.integers(0, vocab_size, (NUM_FAMILIES, longest)).tolist()
    requests: list[Request] = []
    for i in range(int(rng.integers(4, 11))):
        # Several short prompts are admitted, and their outputs run out of pages.
        most = (longest - MAX_OUTPUT) // rng.choice([1, 4])
        length = int(rng.integers(1, most + 1))
        prompt = families[rng.integers(NUM_FAMILIES)][: rng.integers(0, length + 1)]
        prompt = [*prompt, *rng.integers(0, vocab_size, length).tolist()][:length]
        if requests and chance(rng, 0.2):
            prompt = list(requests[rng.integers(len(requests))].prompt_token_ids)
        last = int(rng.integers(1, MAX_OUTPUT + 1))
        stop_ids = rng.integers(0, vocab_size, 8 if chance(rng, 0.2) else 0).tolist()
        params = SamplingParams(
            n=int(rng.integers(2, 4)) if chance(rng, 0.2) else 1,
            temperature=float(rng.choice([0.0, 0.8])),
            seed=int(rng.integers(2**32)),
            max_tokens=MAX_OUTPUT if chance(rng, 0.5) else int(rng.integers(1, MAX_OUTPUT + 1)),
            stop_token_ids=stop_ids,
            ignore_eos=True,
        )
        name: Any = (seed, i)
        request = llm.request_maker.make(prompt, params, i, f"prompt {i}", request_id=name)
        if chance(rng, 0.1):
            request = replace(request, watch_text=partial(Watch, last, False))
        requests.append(request)
    return requests
