"""Counts an engine's steps, tokens, accepted drafts and so on, from its start on."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, fields
from itertools import compress, zip_longest
from typing import Any, NamedTuple

from specjax.engine.low_acceptance import LowAcceptance
from specjax.host.plans import DecodePlan, PrefillPlan, StepPlan
from specjax.host.scheduler import Scheduler
from specjax.host.sequence import RowOutput, Sequence
from specjax.host.speculation.contexts import FIRST_LENGTHS, context_buckets


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """A snapshot of an engine's counters. The fields `..._ms` are mean times in milliseconds.

    If vLLM has the same counter, its name is vLLM's. As in vLLM, a "draft" is all draft tokens of a
    request in a round. A round that gives a request n tokens counts n - 1 accepted draft tokens. So
    mean_acceptance_length is exactly the mean number of tokens that a request gains in a round with
    drafts.

    Attributes:
        num_steps: number of launched steps. A step has prefill chunks, a decode round or both.
        num_prefill_steps: number of steps with prefill chunks.
        num_decode_steps: number of steps with a decode round.
        acceptance_rate_per_pos: fraction of the draft tokens at each position that were accepted. A
            draft token after a rejected draft token counts as not accepted. So the acceptance
            length of K drafts is 1 plus the sum of the first K rates.
        k_histogram: number of rounds per K.
        request_k_histogram: for each number of draft tokens from 0 to K, how often a request had
            this number in a round.
        drafts_per_context: number of drafts by bucket of the request's length. The key of a bucket
            is its smallest length.
        accepted_tokens_per_context: number of accepted draft tokens by the same buckets.
        drafts_per_source: number of drafts by their source. Sources on the host are "suffix",
            "corpus", "history" and "replay" (`reuse_noise`). Drafts of the drafter are counted
            under the method's name, or under "ngram" if the method is "suffix". Empty without
            sources on the host.
        draft_tokens_per_source: number of draft tokens by source.
        accepted_tokens_per_source: number of accepted draft tokens by source.
        requests_finished: number of finished samples per finish_reason.
        prefix_cache_queries: number of tokens to prefill, summed over all admissions. A sequence
            is admitted again after a preemption.
        prefix_cache_hits: how many of these tokens were found in the prefix cache.
        prefix_cache_evictions: number of pages and snapshots evicted.
        kv_cache_usage: fraction of pages in use now. Layers with sliding windows have separate
            pages; the largest fraction counts.
        budget_use: mean number of tokens per step, as a fraction of max_num_scheduled_tokens.
        in_flight_depth: mean number of steps in flight when another step is launched.
        num_compiles_after_warmup: number of programs that a request had to wait for.
        num_compiling: number of programs that are queued for compiling or being compiled.
        host_ms: host time per step for planning, packing, launching and handing out tokens.
        wait_ms: time per step that the host waits for the device.
        host_gap_ms: time from reading a step to launching the next step. During this time, the
            device may be idle unless another step is in flight.
    """

    num_requests_running: int
    num_requests_waiting: int
    num_preemptions: int
    requests_finished: dict[str, int]
    num_steps: int
    num_prefill_steps: int
    num_decode_steps: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    num_draft_tokens_per_pos: tuple[int, ...]
    acceptance_rate_per_pos: tuple[float, ...]
    mean_acceptance_length: float
    k_histogram: dict[int, int]
    request_k_histogram: dict[int, int]
    drafts_per_context: dict[int, int]
    accepted_tokens_per_context: dict[int, int]
    drafts_per_source: dict[str, int]
    draft_tokens_per_source: dict[str, int]
    accepted_tokens_per_source: dict[str, int]
    prefix_cache_queries: int
    prefix_cache_hits: int
    prefix_cache_evictions: int
    kv_cache_usage: float
    budget_use: float
    in_flight_depth: float
    num_compilations: int
    num_compiles_after_warmup: int
    num_compiling: int
    compile_seconds: float
    host_ms: float
    wait_ms: float
    host_gap_ms: float

    def as_dict(self) -> dict[str, Any]:
        """Return the counters as a dict of plain Python types."""
        return asdict(self)

    def as_prometheus(self) -> str:
        """Return the counters in Prometheus' text format."""
        lines = []
        for name, (kind, values) in _series(self).items():
            lines.append(f"# TYPE specjax:{name} {kind}")
            lines += [f"specjax:{name}{label} {value}" for label, value in values.items()]
        return "\n".join(lines) + "\n"


def sum_of(parts: SequenceOf[Metrics]) -> Metrics:
    """Return the metrics of several engines together.

    Counters are added. Means (see `_MEANS`) are averaged, weighted by each engine's number of
    steps. `kv_cache_usage` is the mean over engines. Acceptance rates and lengths are computed from
    the added counters.
    """
    if len(parts) == 1:
        return parts[0]
    total = {
        one.name: _added([getattr(part, one.name) for part in parts]) for one in fields(Metrics)
    }
    num_steps = max(1, total["num_steps"])
    for name in _MEANS:
        total[name] = sum(getattr(part, name) * part.num_steps for part in parts) / num_steps
    accepted, drafted = total["num_accepted_tokens_per_pos"], total["num_draft_tokens_per_pos"]
    return Metrics(
        **total
        | {
            "kv_cache_usage": total["kv_cache_usage"] / len(parts),
            "acceptance_rate_per_pos": _rates(accepted, drafted),
            "mean_acceptance_length": _acceptance_length(sum(accepted), total["num_drafts"]),
        }
    )


_MEANS = "budget_use", "in_flight_depth", "host_ms", "wait_ms", "host_gap_ms"


def _added(values: SequenceOf[Any]) -> Any:
    """Return the sum of numbers, of tuples by position, or of dicts by key."""
    if isinstance(values[0], tuple):
        return tuple(map(sum, zip_longest(*values, fillvalue=0)))
    if isinstance(values[0], dict):
        return dict(sum(map(Counter, values), Counter()))
    return sum(values)


def _rates(accepted: SequenceOf[int], drafted: SequenceOf[int]) -> tuple[float, ...]:
    pairs = zip(accepted, drafted, strict=True)
    return tuple(num_accepted / count if count else 0.0 for num_accepted, count in pairs)


def _acceptance_length(num_accepted: int, num_drafts: int) -> float:
    return 1 + num_accepted / num_drafts if num_drafts else 1.0


class Compilations(NamedTuple):
    """The number of compiled programs, and the time that compiling took."""

    num_programs: int
    num_late: int  # programs that a request had to wait for
    num_pending: int  # programs that are queued or being compiled
    seconds: float


class Stopwatch:
    """Adds up the seconds spent in its `with` blocks, which must not be nested."""

    def __init__(self):
        self.seconds = self._start = 0.0

    def __enter__(self):
        self._start = time.perf_counter()

    def __exit__(self, *error: object):
        self.seconds += time.perf_counter() - self._start


class Recorder:
    """Counts steps and their results, and adds up times.

    `is_trained` says whether the drafter has trained weights. If so, a warning is logged once if
    hardly any drafts are accepted.

    Attributes:
        host: measures the host's work for steps.
        wait: measures how long the host waits for the device.
    """

    def __init__(self, *, is_trained: bool = False):
        self._low_acceptance = LowAcceptance() if is_trained else None
        self._counts: Counter[str] = Counter()
        self.host, self.wait = Stopwatch(), Stopwatch()
        self._gap_seconds = 0.0
        self._finished: Counter[str] = Counter()
        self._k: Counter[int] = Counter()
        self._outcomes: Counter[_Outcome] = Counter()

    def record_gap(self, seconds: float) -> None:
        """Record the time between reading a step and the next launch."""
        self._gap_seconds += seconds
        self._counts["gaps"] += 1

    def record_launch(self, plan: StepPlan, depth: int) -> None:
        """Count a launched step. `depth` is the number of other steps in flight."""
        self._counts["steps"] += 1
        self._counts["scheduled"] += plan.num_tokens
        self._counts["depth"] += depth

    def record_finished(self, sequences: Iterable[Sequence]) -> None:
        """Count the samples that have ended."""
        for sequence in sequences:
            if sequence.finish_reason is not None:
                self._finished[sequence.finish_reason] += 1

    def record_part(
        self, plan: PrefillPlan | DecodePlan, rows: SequenceOf[RowOutput], num_kept: list[int]
    ) -> None:
        """Count the results of chunks or of a round.

        `rows` and `num_kept` have an item per sequence of `plan`: the device's results, and the
        number of tokens that the sequence gained.
        """
        self._counts["generation"] += (num_gained := sum(num_kept))
        if isinstance(plan, PrefillPlan):
            self._counts["prefill_steps"] += 1
            self._counts["prompt"] += plan.num_tokens
            return
        if not plan.is_rest:
            self._k[plan.num_drafts] += 1
        num_drafts = [row.num_drafts for row in rows]
        buckets = context_buckets([len(sequence.token_ids) for sequence in plan.sequences])
        self._outcomes.update(zip(num_drafts, num_kept, buckets, strict=True))
        if self._low_acceptance is not None:
            num_rounds = len(num_kept) - num_kept.count(0)
            self._low_acceptance.record(
                sum(compress(num_drafts, num_kept)), num_gained - num_rounds
            )

    def snapshot(
        self,
        scheduler: Scheduler,
        compilations: Compilations,
    ) -> Metrics:
        """Return the current counters."""
        counts, rounds = self._counts, dict(self._k)
        sources = scheduler.suggester.counts.items()
        pools, snapshots = scheduler.residents.pools, scheduler.prefixes.snapshots
        num_steps = counts["steps"]

        def per_step(value: float) -> float:
            return value / num_steps if num_steps else 0.0

        return Metrics(
            num_requests_running=scheduler.num_running,
            num_requests_waiting=scheduler.num_waiting,
            num_preemptions=scheduler.num_preemptions,
            requests_finished=dict(self._finished),
            num_steps=num_steps,
            num_prefill_steps=counts["prefill_steps"],
            num_decode_steps=sum(rounds.values()),
            num_prompt_tokens=counts["prompt"],
            num_generation_tokens=counts["generation"],
            **_of_drafts(dict(self._outcomes), max(rounds, default=0)),
            k_histogram=rounds,
            drafts_per_source={name: of.num_rounds for name, of in sources},
            draft_tokens_per_source={name: of.num_draft_tokens for name, of in sources},
            accepted_tokens_per_source={name: of.num_accepted_tokens for name, of in sources},
            prefix_cache_queries=scheduler.num_looked_up,
            prefix_cache_hits=scheduler.num_found,
            prefix_cache_evictions=sum(pool.num_evictions for pool in pools)
            + (snapshots.num_evictions if snapshots else 0),
            kv_cache_usage=max(1 - pool.num_free / pool.num_pages for pool in pools),
            budget_use=per_step(counts["scheduled"] / scheduler.config.max_num_scheduled_tokens),
            in_flight_depth=per_step(counts["depth"]),
            num_compilations=compilations.num_programs,
            num_compiles_after_warmup=compilations.num_late,
            num_compiling=compilations.num_pending,
            compile_seconds=compilations.seconds,
            host_ms=per_step(1e3 * self.host.seconds),
            wait_ms=per_step(1e3 * self.wait.seconds),
            host_gap_ms=1e3 * self._gap_seconds / max(1, counts["gaps"]),
        )


# A request's round: its number of drafts, the tokens that the request gained (0 if it had ended),
# and the bucket of its length.
_Outcome = tuple[int, int, int]


def _of_drafts(outcomes: Mapping[_Outcome, int], max_drafts: int) -> dict[str, Any]:
    """Return the counters of drafts. `outcomes` counts how often requests had each outcome."""
    drafted, accepted = [0] * max_drafts, [0] * max_drafts  # by position
    of_requests, drafts_at, accepted_at = Counter(), Counter(), Counter()
    for (num_drafts, kept, bucket), count in outcomes.items():
        if not kept:
            continue
        of_requests[num_drafts] += count
        if num_drafts:
            drafts_at[FIRST_LENGTHS[bucket]] += count
            accepted_at[FIRST_LENGTHS[bucket]] += count * (kept - 1)
        for position in range(num_drafts):
            drafted[position] += count
        for position in range(kept - 1):
            accepted[position] += count
    num_drafts = sum(drafts_at.values())
    return {
        "num_drafts": num_drafts,
        "num_draft_tokens": sum(drafted),
        "num_accepted_tokens": sum(accepted),
        "num_accepted_tokens_per_pos": tuple(accepted),
        "num_draft_tokens_per_pos": tuple(drafted),
        "acceptance_rate_per_pos": _rates(accepted, drafted),
        "mean_acceptance_length": _acceptance_length(sum(accepted), num_drafts),
        "request_k_histogram": dict(of_requests),
        "drafts_per_context": dict(drafts_at),
        "accepted_tokens_per_context": dict(accepted_at),
    }


_PER_SOURCE = [one.name for one in fields(Metrics) if one.name.endswith("_per_source")]


def _series(m: Metrics) -> dict[str, tuple[str, dict[str, float]]]:
    """Return a mapping from each Prometheus series' name to its type and its values by label."""

    def counter(value: float) -> tuple[str, dict[str, float]]:
        return "counter", {"": value}

    def gauge(value: float) -> tuple[str, dict[str, float]]:
        return "gauge", {"": value}

    def labelled(name: str, values: Mapping[Any, float]) -> tuple[str, dict[str, float]]:
        return "counter", {f'{{{name}="{key}"}}': value for key, value in values.items()}

    return {
        "num_requests_running": gauge(m.num_requests_running),
        "num_requests_waiting": gauge(m.num_requests_waiting),
        "kv_cache_usage_perc": gauge(m.kv_cache_usage),
        "num_preemptions_total": counter(m.num_preemptions),
        "prompt_tokens_total": counter(m.num_prompt_tokens),
        "generation_tokens_total": counter(m.num_generation_tokens),
        "request_success_total": labelled("finished_reason", m.requests_finished),
        "prefix_cache_queries_total": counter(m.prefix_cache_queries),
        "prefix_cache_hits_total": counter(m.prefix_cache_hits),
        "prefix_cache_evictions_total": counter(m.prefix_cache_evictions),
        "spec_decode_num_drafts_total": counter(m.num_drafts),
        "spec_decode_num_draft_tokens_total": counter(m.num_draft_tokens),
        "spec_decode_num_accepted_tokens_total": counter(m.num_accepted_tokens),
        "spec_decode_num_accepted_tokens_per_pos_total": labelled(
            "position", dict(enumerate(m.num_accepted_tokens_per_pos))
        ),
        "spec_decode_num_rounds_total": labelled("k", m.k_histogram),
        "spec_decode_num_request_rounds_total": labelled("k", m.request_k_histogram),
        "spec_decode_drafts_per_context_total": labelled("context", m.drafts_per_context),
        "spec_decode_accepted_tokens_per_context_total": labelled(
            "context", m.accepted_tokens_per_context
        ),
        **{
            f"spec_decode_{name}_total": labelled("source", getattr(m, name))
            for name in _PER_SOURCE
        },
        "num_steps_total": counter(m.num_steps),
        "compile_seconds_total": counter(m.compile_seconds),
        "num_compiles_after_warmup_total": counter(m.num_compiles_after_warmup),
        "num_compiling": gauge(m.num_compiling),
        "budget_use": gauge(m.budget_use),
        "in_flight_depth": gauge(m.in_flight_depth),
        "host_ms": gauge(m.host_ms),
        "wait_ms": gauge(m.wait_ms),
        "host_gap_ms": gauge(m.host_gap_ms),
    }
