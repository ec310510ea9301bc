"""What an engine counted since it started."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from specjax.host.scheduler import DecodePlan, StepPlan


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """A snapshot of an engine's counters; times are in milliseconds.

    A step that put out n tokens of a request counts n - 1 drafts as accepted, so that
    mean_acceptance_length is exactly the tokens that a decoding request gained per step.
    """

    num_prefill_steps: int
    num_decode_steps: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    mean_acceptance_length: float
    k_histogram: dict[int, int]
    num_compilations: int
    num_compiles_after_warmup: int
    compile_seconds: float
    host_gap_ms: float

    def as_dict(self) -> dict[str, Any]:
        """The counters as plain types."""
        return asdict(self)


class Recorder:
    """Counts what steps did."""

    def __init__(self):
        self._counts: Counter[str] = Counter()
        self._accepted: list[int] = []
        self._k: Counter[int] = Counter()
        self._gap_seconds = 0.0
        self._num_gaps = 0

    def record_gap(self, seconds: float) -> None:
        """Time the host took between one result and the next launch."""
        self._gap_seconds += seconds
        self._num_gaps += 1

    def record_step(self, plan: StepPlan, num_tokens: list[int]) -> None:
        """Count a step whose results have come back: how many tokens each of its rows gained."""
        self._counts["generation"] += sum(num_tokens)
        if not isinstance(plan, DecodePlan):
            self._counts["prefill_steps"] += 1
            self._counts["prompt"] += sum(chunk.count for chunk in plan.chunks)
            return
        self._counts["decode_steps"] += 1
        k = plan.num_drafts
        self._k[k] += 1
        self._accepted += [0] * (k - len(self._accepted))
        for count in num_tokens:
            if k and count:
                self._counts["drafts"] += 1
                self._counts["draft_tokens"] += k
                for position in range(count - 1):
                    self._accepted[position] += 1

    def snapshot(self, *, num_compilations: int, num_late: int, compile_seconds: float) -> Metrics:
        """The counters now."""
        counts, drafts = self._counts, self._counts["drafts"]
        return Metrics(
            num_prefill_steps=counts["prefill_steps"],
            num_decode_steps=counts["decode_steps"],
            num_prompt_tokens=counts["prompt"],
            num_generation_tokens=counts["generation"],
            num_drafts=drafts,
            num_draft_tokens=counts["draft_tokens"],
            num_accepted_tokens=sum(self._accepted),
            num_accepted_tokens_per_pos=tuple(self._accepted),
            mean_acceptance_length=1 + sum(self._accepted) / drafts if drafts else 1.0,
            k_histogram=dict(self._k),
            num_compilations=num_compilations,
            num_compiles_after_warmup=num_late,
            compile_seconds=compile_seconds,
            host_gap_ms=1e3 * self._gap_seconds / self._num_gaps if self._num_gaps else 0.0,
        )
