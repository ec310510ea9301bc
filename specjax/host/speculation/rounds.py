"""What a policy for K sees of a round: its load when it is scheduled, and later its outcome.

A policy never sees tokens. If the choice whether to verify a draft depended on the draft's token,
or on a token drawn later, the output would not have the target's distribution.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from specjax.host.speculation.acceptance import DraftOutcome
from specjax.host.speculation.requests import ReadyRequests, RequestOutcomes


class SplitShape(NamedTuple):
    """The shape of a split round, in which only some requests draft (see `split`).

    Attributes:
        drafting: number of requests that draft, including padding.
        k: the number of their drafts.
        others: number of the other requests, including padding.
    """

    drafting: int
    k: int
    others: int


class Split(NamedTuple):
    """A split of a round.

    `drafting` holds the indices, among the ready requests, of those that draft.
    """

    shape: SplitShape
    drafting: Collection[int]


class SplitWish(NamedTuple):
    """A split round that would be faster than the chosen one, but whose program is not ready.

    `gain` is the fraction of the round's time that it would save.
    """

    shape: SplitShape
    gain: float


@dataclass(frozen=True)
class DecodeLoad:
    """The load of a round.

    Attributes:
        num_sequences: number of sequences ready to decode.
        num_context: number of tokens before the round, summed over sequences.
        max_tokens: the step's token budget, or None for no budget. Sequences that do not fit wait.
        requests: what is known of each sequence; None if the policy does not weigh requests.
        splits: the shapes of split rounds whose programs are ready; None if the round may not be
            split.
        shapes: the shapes (batch size, K) of rounds whose programs are ready.
    """

    num_sequences: int
    num_context: int = 0
    max_tokens: int | None = None
    requests: ReadyRequests | None = None
    splits: Collection[SplitShape] | None = None
    shapes: Collection[tuple[int, int]] = ()

    def share(self, k: int) -> float:
        """Return the fraction of sequences that fit into a round of k drafts.

        At least one sequence fits.
        """
        if self.max_tokens is None or not self.num_sequences:
            return 1.0
        return min(1.0, max(1, self.max_tokens // (k + 1)) / self.num_sequences)


@dataclass(frozen=True)
class Round:
    """The outcome of a round.

    Attributes:
        batch: batch size of the round's shape, including padding.
        k: number of drafts per request.
        num_context: number of tokens before the round, summed over sequences.
        verdicts: number of requests by outcome.
        ms: milliseconds of the round; None if unknown.
        chunk_ms: milliseconds of prefill chunks since the previous step; None if the round is the
            second of its step.
        is_joined: whether the chunks and the round were one program. Then `chunk_ms` is the time of
            both.
        requests: the outcome for each request; None if it is unknown.
        others: batch size of the requests without drafts that ran in the same program, including
            padding; 0 unless the round was split. All other fields are about the requests with
            drafts, but `ms` is the time of the program.
        others_context: number of tokens before the round, summed over these requests.
    """

    batch: int
    k: int
    num_context: int
    verdicts: Mapping[DraftOutcome, int]
    ms: float | None
    chunk_ms: float | None = 0.0
    is_joined: bool = False
    requests: RequestOutcomes | None = None
    others: int = 0
    others_context: int = 0
