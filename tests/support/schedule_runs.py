"""Runs schedules on simulated engines, and compares each output with a run alone."""

import warnings
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import jax
import numpy as np
from support.checked_engine import CheckedEngine
from support.schedules import Arrival, Expected, Rng, Schedule, chance, make_schedule

from specjax.host.sequence import Sequence
from specjax.outputs import Logprob

PROGRAMS = "admit prefill begin decode propose extend settle observe restore read".split()


@dataclass
class Run:
    """A running schedule: its samples, their expected outputs, and the outputs delivered so far."""

    schedule: Schedule
    engine: CheckedEngine
    tally: Counter
    rng: Rng
    samples: dict[Sequence, Expected] = field(default_factory=dict)
    delivered: dict[Sequence, tuple[int, bool]] = field(default_factory=dict)
    ended_by_us: set[Sequence] = field(default_factory=set)

    def add(self, arrival: Arrival) -> None:
        """Add a request to the engine. Sometimes it has the id of a request that has ended."""
        request = arrival.request
        live = self.engine.scheduler._live
        others = [s.request.request_id for s in self.samples if s.request.request_id not in live]
        if others and chance(self.rng, 0.1):
            request = replace(request, request_id=others[self.rng.integers(len(others))])
        if request.request_id in live:
            request = replace(request, request_id=("again", arrival.request.request_id))
        for sequence, expected in zip(self.engine.add(request), arrival.expected, strict=True):
            self.samples[sequence] = expected
            self.delivered[sequence] = 0, False
        self.tally["requests"] += 1

    def disturb(self) -> None:
        """Cause random events between two steps, such as an abort."""
        for name, probability in self.schedule.disturbances.items():
            if not chance(self.rng, probability):
                continue
            getattr(self, f"_{name}")()
            self.tally[name] += 1
            self.engine.check()

    def _abort(self) -> None:
        if self.samples:
            ids = sorted({s.request.request_id for s in self.samples}, key=str)
            self.end(self.engine.abort(ids[self.rng.integers(len(ids))]))

    def _preempt(self) -> None:
        """Preempt a random request, often one that is still in prefill."""
        running = list(self.engine.scheduler.residents.running)
        if chance(self.rng, 0.5):
            running = [s for s in running if not s.residency.is_prefilled] or running
        if running:
            self.engine.scheduler._preempt(running[self.rng.integers(len(running))])

    def _clear(self) -> None:
        self.engine.scheduler.prefixes.clear()

    def _fail(self) -> None:
        self.engine.programs.to_fail.append(str(self.rng.choice(PROGRAMS)))

    def _reset(self) -> None:
        live = self.live()
        self.engine.reset()
        self.end(live)

    def live(self) -> list[Sequence]:
        """Return the samples that have not finished."""
        return [s for samples in self.engine.scheduler._live.values() for s in samples]

    def end(self, sequences: Iterable[Sequence]) -> None:
        """Record that these samples were aborted, and must not change any more."""
        for sequence in sequences:
            assert sequence.finish_reason == "abort" and sequence.residency is None
            assert sequence not in self.ended_by_us
            self.ended_by_us.add(sequence)
            self.delivered[sequence] = sequence.num_output, True
            self.check_output(sequence)
            self.tally["aborted"] += 1

    def step(self) -> None:
        """Run an engine step, and check all outputs that it delivers."""
        live, has_failed = self.live(), False
        try:
            touched = self.engine.step()
        except jax.errors.JaxRuntimeError:
            has_failed = True
            # Tokens that were read before the failure have not been delivered.
            self.end([s for s in live if s.finish_reason == "abort"])
            touched = [s for s in live if s.finish_reason != "abort"]
            assert all(s.is_finished for s in touched)
        has_failed |= any(map(self._has_failed, touched))
        self.tally["failures met"] += has_failed
        assert self.tally["failures met"] <= self.tally["fail"], "a failure out of nothing"
        assert len(set(touched)) == len(touched) or "fail" in self.schedule.disturbances
        for sequence in live:
            if sequence in self.ended_by_us:
                continue
            now = sequence.num_output, sequence.is_finished
            has_changed = now != self.delivered[sequence]
            assert has_changed == (sequence in set(touched)), "told of nothing, or not told"
            self.delivered[sequence] = now
            if has_changed:
                self.check_output(sequence)
        self.tally["steps"] += 1

    def check_output(self, sequence: Sequence) -> None:
        """Check that the output so far is the beginning of the expected output."""
        expected, output = self.samples[sequence], sequence.output
        reason = sequence.finish_reason
        assert output == expected.tokens[: len(output)], f"output of {_name(sequence)}"
        if sequence.request.params.logprobs is not None:
            start = sequence.num_prompt_tokens
            assert sequence.logprobs == [_told(start + i, t) for i, t in enumerate(output)]
        if reason in ("abort", None) or (reason == "error" and self._has_failed(sequence)):
            return
        if getattr(sequence.matcher, "has_failed_late", False):
            assert reason == "error" and isinstance(sequence.error, ValueError)
            return
        assert reason == expected.reason, f"{_name(sequence)} ended by {reason}: {sequence.error}"
        if reason == "error":
            assert isinstance(sequence.error, RuntimeError | ValueError)
            assert len(output) < len(expected.tokens)
        else:
            assert output == expected.tokens, f"{_name(sequence)} has {len(output)} tokens"
            text = output[:-1] if sequence.hides_last else output
            assert sequence.watch is None or sequence.watch.seen == text
            assert sequence.matcher is None or sequence.matcher.seen == output
        if sequence.request.params.prompt_logprobs is not None:
            prompt = sequence.request.prompt_token_ids
            told = [_told(i, token) for i, token in enumerate(prompt)]
            assert sequence.prompt_logprobs == [None, *told[1:]]
        self.tally["finished"] += 1
        self.tally["tokens"] += len(output)

    def _has_failed(self, sequence: Sequence) -> bool:
        return isinstance(sequence.error, jax.errors.JaxRuntimeError)

    def check_end(self) -> None:
        """Check that all samples have ended, and that all pages and slots are free."""
        scheduler, config = self.engine.scheduler, self.engine.config
        self.engine.drain()
        assert not self.engine._in_flight
        assert not scheduler.has_work and not scheduler.residents.running and not scheduler._live
        assert all(pool.num_free == pool.num_pages for pool in scheduler.residents.pools)
        assert len(scheduler.residents.free_slots) == config.max_num_seqs
        assert all(sequence.is_finished for sequence in self.samples)
        metrics = self.engine.metrics()
        assert metrics.num_generation_tokens == sum(s.num_output for s in self.samples)
        if {"fail", "reset"} & self.schedule.disturbances.keys():
            return  # what was in flight was lost
        assert not any(s.num_in_flight or s.max_tokens_in_flight for s in self.samples)
        reasons = Counter(sequence.finish_reason for sequence in self.samples)
        assert metrics.requests_finished == reasons
        assert metrics.num_prompt_tokens == self.tally["prompt tokens run"]


def run_schedule(schedule: Schedule) -> Run:
    """Run a schedule to its end.

    Raises:
        AssertionError: a check failed.
    """
    tally: Counter = Counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="exact=True with")  # small budgets, on purpose
        engine = CheckedEngine(schedule, tally)
    run = Run(schedule, engine, tally, np.random.default_rng([schedule.seed, 3]))
    coming = deque(schedule.arrivals)
    most = coming[-1].step + 50 + 4 * schedule.num_tokens
    step = 0
    while coming or engine.has_work:
        while coming and coming[0].step <= step:
            run.add(coming.popleft())
        if not engine.has_work and chance(run.rng, 0.5):
            step = coming[0].step
            continue
        if step < most // 2:  # else, preempted requests might never finish
            run.disturb()
        run.step()
        step += 1
        assert step <= most, f"{most} steps were not enough"
    run.check_end()
    tally["prefix hits"] += engine.scheduler.num_found
    tally["prefix hits with windows"] += engine.scheduler.num_found * bool(schedule.windows)
    tally["schedules"] += 1
    return run


def check_schedule(seed: int) -> Counter:
    """Run the schedule of a seed, and return counts of events.

    If only the device determines the outputs (`is_undisturbed`), the schedule runs a second time
    with the other value of `async_scheduling`. Both runs must have the same numbers of rounds and
    drafts.
    """
    schedule = make_schedule(seed)
    try:
        run = run_schedule(schedule)
        if schedule.is_undisturbed:
            is_async = not schedule.config.async_scheduling
            config = replace(schedule.config, async_scheduling=is_async)
            other = run_schedule(replace(schedule, config=config))
            assert _totals(run) == _totals(other), "rounds differ with steps in flight"
    except Exception as error:
        error.add_note(
            f"{schedule}\nAgain: python benchmarks/fuzz_schedules.py --seed {seed} --schedules 1 "
            "--real 0"
        )
        raise
    return run.tally


def _totals(run: Run) -> tuple[int, ...]:
    m = run.engine.metrics()
    return m.num_generation_tokens, m.num_drafts, m.num_draft_tokens, m.num_accepted_tokens


def _told(position: int, token: int) -> dict[int, Logprob]:
    return {token: Logprob(-float(position), token)}


def _name(sequence: Sequence) -> str:
    return f"request {sequence.request.request_id}.{sequence.index}"
