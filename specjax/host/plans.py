"""What the scheduler plans for a step: prefill chunks and a decode round."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from specjax.host.budgets import Budget
from specjax.host.drafts.suggester import Suggestion
from specjax.host.request import Demands
from specjax.host.sequence import Sequence
from specjax.host.shapes import Shape
from specjax.host.speculation.rounds import SplitWish


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, start + count) of a sequence that is being prefilled."""

    sequence: Sequence
    start: int
    count: int
    is_first: bool = False  # whether it is the first chunk since the sequence got its slot
    is_last: bool = False  # whether the sequence decodes after this chunk
    is_resumed: bool = False  # whether the sequence has output tokens, so that none is sampled
    restored: int | None = None  # id of the snapshot to restore before the first chunk
    taken: int | None = None  # id of the snapshot to take after the chunk

    @property
    def samples(self) -> bool:
        """Whether a token is sampled after the chunk."""
        return self.is_last and not self.is_resumed


@dataclass(frozen=True)
class PrefillPlan:
    """A prefill batch: one chunk from each of several sequences.

    The batch is padded to `batch` rows of `width` tokens.
    """

    chunks: tuple[Chunk, ...]
    batch: int
    width: int
    better_shape: Shape | None = None  # best shape, compiled or not; None if all are compiled
    better_tokens: int = 0  # number of tokens that a step of this shape would prefill
    suggested: ClassVar[tuple[()]] = ()

    def land(self) -> None:
        """Tell the sequences that the chunks are no longer in flight."""
        _land([chunk.sequence for chunk in self.chunks if chunk.samples], 1)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the chunks."""
        return sum(chunk.count for chunk in self.chunks)

    @cached_property
    def sequences(self) -> tuple[Sequence, ...]:
        """The sequence of each chunk, in the order of `chunks`."""
        return tuple(chunk.sequence for chunk in self.chunks)

    @cached_property
    def demands(self) -> frozenset[Demands]:
        """The different `Demands` of the plan's requests."""
        return frozenset({sequence.request.demands for sequence in self.sequences})


@dataclass(frozen=True)
class DecodePlan:
    """A decode round of several sequences, padded to `batch` rows of `k` drafts each."""

    sequences: tuple[Sequence, ...]
    batch: int
    k: int
    num_drafts: int  # how many of the k drafts may be accepted
    better_shape: Shape | None = None  # best shape, compiled or not; None if all are compiled
    suggested: tuple[Suggestion | None, ...] = ()  # by sequence; empty without drafts from the host
    is_rest: bool = False  # whether it is the part of a split round that does not draft
    wish: SplitWish | None = None  # a split round that would be faster, but is not compiled

    def land(self) -> None:
        """Tell the sequences that the round is no longer in flight."""
        _land(self.sequences, self.num_drafts + 1)

    @cached_property
    def demands(self) -> frozenset[Demands]:
        """The different `Demands` of the plan's requests."""
        return frozenset({sequence.request.demands for sequence in self.sequences})


@dataclass(frozen=True)
class StepPlan:
    """A step: prefill chunks of some sequences, and a decode round of prefilled sequences.

    If the round is split, `decode` has the sequences that draft, and `rest` has the others.
    """

    prefill: PrefillPlan | None
    decode: DecodePlan | None
    num_tokens: int  # number of scheduled tokens, as budgets count them
    rest: DecodePlan | None = None

    @property
    def parts(self) -> tuple[PrefillPlan | DecodePlan, ...]:
        """The parts `prefill`, `decode` and `rest`, except parts that are None."""
        return tuple([p for p in (self.prefill, self.decode, self.rest) if p is not None])


@dataclass
class OpenStep:
    """A step while it is being planned."""

    budget: Budget
    width: int  # the width of its chunks
    max_chunks: int
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the chunks."""
        return sum(chunk.count for chunk in self.chunks)


@dataclass
class OpenRound:
    """A round that is being planned, or one of the two parts of a split round."""

    k: int
    num_drafts: int  # how many of the k drafts may be accepted
    sequences: list[Sequence] = field(default_factory=list)


def _land(sequences: Iterable[Sequence], max_tokens: int) -> None:
    """Record that a round, or chunks after which tokens are sampled, are no longer in flight.

    `max_tokens` is the maximum number of tokens that a sequence could gain.
    """
    for sequence in sequences:  # a method's calls would take longer
        sequence.num_in_flight -= 1
        sequence.max_tokens_in_flight -= max_tokens
