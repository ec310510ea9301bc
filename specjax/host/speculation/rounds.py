"""The load and the outcome of a round, from which a policy chooses K.

A policy sees the load when the round is scheduled, and the outcome later. It never sees tokens. If
the decision to verify a draft depended on the draft's token, or on a token drawn later, outputs
would not have the target's distribution.
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
        k: number of drafts of each of these requests.
        others: number of requests that do not draft, including padding.
    """

    drafting: int
    k: int
    others: int


class Split(NamedTuple):
    """The requests that draft in a split round. The other requests of the round do not draft.

    `drafting` holds the indices of the drafting requests in the list of ready requests.
    """

    shape: SplitShape
    drafting: Collection[int]


class SplitWish(NamedTuple):
    """A split round, which would be faster than the chosen round. Its program is not ready.

    In a split round, only some requests draft. `gain` is the fraction of the time per token that
    the split round would save.
    """

    shape: SplitShape
    gain: float


@dataclass(frozen=True)
class DecodeLoad:
    """The load of a round: the facts that a policy may use to choose K.

    Attributes:
        num_sequences: number of sequences ready to decode.
        num_context: number of tokens before the round, summed over sequences.
        max_tokens: the step's token budget; None for no budget. Sequences that do not fit wait.
        requests: a description of each sequence; None if the policy does not read it.
        splits: the shapes of split rounds (see `split`) whose programs are ready; None if the round
            may not be split.
        shapes: the shapes (batch size, K) of unsplit rounds whose programs are ready.
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
    """The outcome of a round (draft, then verify), or of one part of a split round.

    A split round has two parts: some requests draft, and the other requests do not draft. If one
    program ran both parts, `ms` is the time of the program, `others` and `others_context` describe
    the requests that did not draft, and all other fields describe the requests that drafted.

    Attributes:
        batch: batch size of the round's shape, including padding.
        k: number of drafts per request.
        num_context: number of tokens before the round, summed over sequences.
        verdicts: number of requests that had each outcome.
        ms: milliseconds of the round; None if unknown.
        requests: the outcome for each request; None if it is unknown.
        others: batch size, including padding, of the requests that did not draft in the same
            program; 0 without such requests.
        others_context: number of tokens before the round, summed over these requests.
    """

    batch: int
    k: int
    num_context: int
    verdicts: Mapping[DraftOutcome, int]
    ms: float | None
    requests: RequestOutcomes | None = None
    others: int = 0
    others_context: int = 0
