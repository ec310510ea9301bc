"""What a client saw of one request."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specjax.bench.result import Accepted

Rounds = tuple[tuple[int, int], ...]  # (drafts, accepted drafts) of each round with drafts


@dataclass(kw_only=True)
class Record:
    """A request and its answer so far. Times are seconds; points in time count from the start.

    Attributes:
        output_len: tokens of the answer.
        arrived: when the request was due. It may wait for --max-concurrency until `sent`.
        ttft: from `sent` to the first chunk with tokens; None before that.
        gaps: between one chunk with tokens and the next.
        chunk_tokens: tokens of each chunk; empty if the server does not tell.
        latency: from `sent` to the end of the answer; None before that.
        token_ids: tokens of the answer; empty if the server does not tell.
        rounds: rounds with drafts; empty if the server does not tell.
        accepted: rounds by their number of accepted drafts, from 0; empty if not told.
        num_drafts: drafts of all rounds.
        error: why the request failed; None if it did not.
    """

    index: int
    group: str = ""
    prompt_len: int = 0
    output_len: int = 0
    arrived: float = 0.0
    late: float = 0.0
    sent: float = 0.0
    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    latency: float | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    rounds: Rounds = ()
    accepted: tuple[int, ...] = ()
    num_drafts: int = 0
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the answer ended without an error."""
        return self.error is None and self.latency is not None

    @property
    def queue_time(self) -> float:
        """Seconds that the client held the request back."""
        return self.sent - self.arrived

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 if there is no second token."""
        if self.output_len <= 1 or self.latency is None or self.ttft is None:
            return 0.0
        return (self.latency - self.ttft) / (self.output_len - 1)


def by_group(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Return the counts of drafts of each group of the data set."""
    found: defaultdict[str, Accepted] = defaultdict(Accepted)
    for record in records:
        if record.rounds:
            found[record.group] += Accepted.of_rounds(record.rounds)
        elif sum(record.accepted):
            found[record.group] += of_histogram(record.accepted, record.num_drafts)
    return {group: counts.as_json() for group, counts in sorted(found.items())}


def of_histogram(accepted: Sequence[int], num_drafts: int) -> Accepted:
    """Return the counts of rounds, given that `accepted[n]` rounds accepted n drafts."""
    return Accepted(
        num_drafts=sum(accepted),
        num_draft_tokens=num_drafts,
        accepted_per_position=tuple(sum(accepted[i:]) for i in range(1, len(accepted))),
    )
