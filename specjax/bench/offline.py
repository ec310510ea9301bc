"""Runs prompts through an `LLM` in this process, and reads the LLM's counts of drafts."""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

from specjax.bench.datasets.queries import Query
from specjax.bench.devices import set_policies
from specjax.bench.identity import compare
from specjax.bench.result import Accepted, Speculation
from specjax.bench.sources import DraftsBySource
from specjax.bench.traffic.record import Record, by_group
from specjax.engine.metrics import Metrics
from specjax.host.speculation.policy import Round, StaticPolicy
from specjax.llm import LLM
from specjax.outputs import RequestOutput
from specjax.sampling_params import SamplingParams

RoundTimes = Mapping[tuple[int, int], list[float]]  # milliseconds by batch size and K


class Timed:
    """Wraps the policy that chooses K, and records how long rounds (draft and verify) take.

    Attributes:
        times: the milliseconds of each round, by batch size and K.
    """

    is_learning = True  # so that the engine reports rounds

    def __init__(self, policy: Any):
        self.policy = policy
        self.times: defaultdict[tuple[int, int], list[float]] = defaultdict(list)

    def observe(self, outcome: Round) -> None:
        """Record a round, and let the policy learn from it."""
        if outcome.ms is not None:
            self.times[outcome.batch, outcome.k].append(outcome.ms)
        if self.policy.is_learning:
            self.policy.observe(outcome)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


@dataclass(frozen=True, kw_only=True)
class BatchRun:
    """The result of one pass over the prompts.

    `before` and `after` are the engine's metrics before and after the pass.
    """

    seconds: float
    records: Sequence[Record]
    before: Metrics
    after: Metrics

    @property
    def num_tokens(self) -> int:
        """The number of generated tokens."""
        return sum(record.output_len for record in self.records)


@dataclass(kw_only=True)
class Offline:
    """An LLM, and the sampling parameters of all prompts.

    Args:
        sampling: fields of `SamplingParams`, the same for all prompts.
        seed: the seed of the first prompt. The prompt at index i has the seed `seed` + i.
    """

    llm: LLM
    sampling: Mapping[str, Any]
    seed: int
    timed: list[Timed] = field(default_factory=list)

    def watch(self) -> None:
        """Record the times of rounds from now on, for every replica."""
        for replica in self.llm.engine.engines:
            self.timed.append(Timed(replica.scheduler.policy))
            replica.scheduler.policy = self.timed[-1]  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def round_times(self) -> RoundTimes:
        """The milliseconds of each recorded round of all replicas, by batch size and K."""
        found: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        for timed in self.timed:
            for shape, milliseconds in timed.times.items():
                found[shape] += milliseconds
        return found

    def params(self, query: Query) -> SamplingParams:
        """Return the sampling parameters of a prompt."""
        own = {"max_tokens": query.output_len, "seed": self.seed + query.index}
        return SamplingParams(**{"detokenize": False, **own, **self.sampling})

    def generate(self, queries: Sequence[Query]) -> BatchRun:
        """Run all prompts at once, and time them together."""
        prompts = [list(query.token_ids or ()) for query in queries]
        params = [self.params(query) for query in queries]
        before, begun = self.llm.metrics(), time.monotonic()
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return BatchRun(
            seconds=seconds,
            records=[_record(q, o, begun) for q, o in zip(queries, outputs, strict=True)],
            before=before,
            after=self.llm.metrics(),
        )

    def verify(
        self, queries: Sequence[Query], batch: BatchRun
    ) -> tuple[dict[str, Any], RoundTimes]:
        """Decode the prompts without drafts, and compare the tokens with the tokens in `batch`.

        Return the comparison, and the times of steps without drafts. Afterwards the engine no
        longer drafts.
        """
        engine = self.llm.engine
        set_policies(engine, partial(StaticPolicy, 0))
        self.timed = []
        self.watch()
        plain = self.generate(queries)
        requests = [
            (self.llm.make_request(list(q.token_ids or ()), self.params(q)), 0) for q in queries
        ]
        found = compare(
            engine.engines[0],
            [(replace(one, request_id=i), index) for i, (one, index) in enumerate(requests)],
            [record.token_ids for record in plain.records],
            [record.token_ids for record in batch.records],
        )
        return {
            "num_outputs": found.num_outputs,
            "num_tokens": found.num_tokens,
            "near_ties": found.near_ties,
            "mismatches": found.mismatches,
            "plain_seconds": plain.seconds,
            "times_plain": plain.seconds / batch.seconds,
        }, self.round_times


def _record(query: Query, output: RequestOutput, begun: float) -> Record:
    """Return the `Record` of an output. `begun` is the `time.monotonic()` when the batch began."""
    sample, times = output.outputs[0], output.metrics
    record = Record(
        index=query.index,
        group=query.group,
        prompt_len=len(output.prompt_token_ids),
        output_len=len(sample.token_ids),
        token_ids=list(sample.token_ids),
        error=None if sample.error is None else str(sample.error),
    )
    if times is not None:
        record.arrived = record.sent = times.queued_ts - begun
        record.rounds = tuple(times.rounds)
        record.ttft = times.first_token_latency
        if times.last_token_ts is not None:
            record.latency = times.last_token_ts - times.queued_ts
    return record


def describe_speculation(
    batches: Sequence[BatchRun],
    *,
    source: str | None,
    drafting: RoundTimes,
    plain: RoundTimes | None,
    synthetic_rates: Sequence[float] | None,
) -> Speculation:
    """Return counts and times of speculation over all batches.

    Args:
        source: the method of the drafter; None for plain decoding.
        drafting: milliseconds of each round during the batches, by batch size and K.
        plain: milliseconds of each step without drafts; None if they were not measured.
    """
    total, k_histogram = Accepted(), Counter[int]()
    sources = DraftsBySource.total(DraftsBySource.between(one.before, one.after) for one in batches)
    steps = host = wait = 0.0
    for batch in batches:
        before, after = batch.before, batch.after
        total += Accepted.of_rounds([pair for one in batch.records for pair in one.rounds])
        k_histogram += Counter(after.k_histogram) - Counter(before.k_histogram)
        steps += after.num_steps - before.num_steps
        host += _growth("host_ms", before, after)
        wait += _growth("wait_ms", before, after)
    steps = max(1.0, steps)
    rounds = [ms for found in drafting.values() for ms in found]
    is_drafting = total.num_drafts > 0
    # Without sources on the host, the metrics name no source.
    if source is not None and is_drafting and not sources.drafts:
        counts = total.num_drafts, total.num_draft_tokens, total.num_accepted
        sources = DraftsBySource(*({source: count} for count in counts))
    return Speculation(
        total=total.as_json() if is_drafting else None,
        by_group=by_group([one for batch in batches for one in batch.records]),
        by_source=sources.figures,
        k_histogram={str(k): count for k, count in sorted(k_histogram.items())},
        ms_per_round={str(k): fmean(ms) for k, ms in _by_k(drafting).items()},
        round_over_plain={} if plain is None else round_over_plain(drafting, plain),
        host_ms=host / steps,
        wait_ms=wait / steps,
        device_ms=fmean(rounds) if rounds else None,
        synthetic_rates=synthetic_rates,
    )


def _growth(name: str, before: Metrics, after: Metrics) -> float:
    """Return how much a metric's sum over all steps has grown from `before` to `after`.

    The metric `name` is a mean over steps, so its sum is the mean times the number of steps.
    """
    return getattr(after, name) * after.num_steps - getattr(before, name) * before.num_steps


def _by_k(times: RoundTimes) -> dict[int, list[float]]:
    found: defaultdict[int, list[float]] = defaultdict(list)
    for (_, k), milliseconds in times.items():
        found[k] += milliseconds
    return dict(sorted(found.items()))


def round_over_plain(drafting: RoundTimes, plain: RoundTimes) -> dict[str, float]:
    """Return for each K the time of a round, divided by the time of a plain step.

    The plain steps have the same batch sizes as the rounds. Rounds are left out if no plain step
    of their batch size was timed.
    """
    own: Counter[int] = Counter()
    base: Counter[int] = Counter()
    for (batch, k), milliseconds in drafting.items():
        if k and plain.get((batch, 0)):
            own[k] += sum(milliseconds)  # pyright: ignore[reportArgumentType]
            base[k] += len(milliseconds) * fmean(plain[batch, 0])  # pyright: ignore[reportArgumentType]
    return {str(k): own[k] / base[k] for k in sorted(own)}
