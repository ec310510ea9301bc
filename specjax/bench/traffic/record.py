"""The times and the contents of one request and its response, measured by the client."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specjax.bench.result import Accepted

Rounds = tuple[tuple[int, int], ...]  # (drafts, accepted drafts) of each round with drafts


@dataclass(kw_only=True)
class Record:
    """A request and its response so far. Points in time are seconds since the start of the run.

    Attributes:
        output_len: number of output tokens.
        arrived: when the request was ready to be sent. It is sent at `sent`, which is later if
            --max-concurrency holds the request back.
        late: seconds between the planned arrival and `arrived`.
        ttft: seconds from `sent` to the first chunk with tokens; None before this chunk.
        gaps: the seconds between one chunk with tokens and the next.
        chunk_tokens: number of tokens of each chunk; empty if unknown.
        latency: seconds from `sent` to the end of the response; None before the end.
        token_ids: token ids of the output; empty if the server does not return them.
        prompt_ids: token ids of the prompt, from the server; empty if the server does not return
            them.
        rounds: pairs (draft tokens, accepted draft tokens), one for each round with drafts; empty
            if unknown.
        accepted: `accepted[n]` is the number of rounds with n accepted draft tokens; empty if
            unknown.
        num_drafts: number of draft tokens in the rounds that `accepted` counts.
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
    prompt_ids: list[int] = field(default_factory=list)
    rounds: Rounds = ()
    accepted: tuple[int, ...] = ()
    num_drafts: int = 0
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the response ended without an error."""
        return self.error is None and self.latency is not None

    @property
    def queue_time(self) -> float:
        """Seconds that --max-concurrency held the request back."""
        return self.sent - self.arrived

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 if there is no second token."""
        if self.output_len <= 1 or self.latency is None or self.ttft is None:
            return 0.0
        return (self.latency - self.ttft) / (self.output_len - 1)


def by_group(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Return `Accepted.as_json` of each group. Groups without drafts are left out."""
    found: defaultdict[str, Accepted] = defaultdict(Accepted)
    for record in records:
        if record.rounds:
            found[record.group] += Accepted.of_rounds(record.rounds)
        elif sum(record.accepted):
            found[record.group] += of_histogram(record.accepted, record.num_drafts)
    return {group: counts.as_json() for group, counts in sorted(found.items())}


def of_histogram(accepted: Sequence[int], num_drafts: int) -> Accepted:
    """Return counts of draft tokens, from a histogram of rounds.

    `accepted[n]` is the number of rounds that accepted n draft tokens. `num_drafts` is the number
    of draft tokens in all rounds.
    """
    return Accepted(
        num_drafts=sum(accepted),
        num_draft_tokens=num_drafts,
        accepted_per_position=tuple(sum(accepted[i:]) for i in range(1, len(accepted))),
    )
