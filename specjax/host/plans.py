"""Plans of a step: prefill chunks, and a decode round."""

from dataclasses import dataclass
from functools import cached_property

from specjax.host.request import Demands
from specjax.host.sequence import Sequence
from specjax.host.shapes import Shape


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, start + count) of a sequence that is being prefilled."""

    sequence: Sequence
    start: int
    count: int
    is_first: bool = False  # since admission: the slot is new to the sequence
    is_last: bool = False  # the sequence decodes from here on
    is_resumed: bool = False  # after preemption: the token after the last chunk is known
    restored: int | None = None  # snapshot to restore before the first chunk
    taken: int | None = None  # snapshot to take after the chunk

    @property
    def samples(self) -> bool:
        """Whether a token is sampled after the chunk."""
        return self.is_last and not self.is_resumed


@dataclass(frozen=True)
class PrefillPlan:
    """One chunk each of some sequences, in a shape of `batch` rows by `width` tokens."""

    chunks: tuple[Chunk, ...]
    batch: int
    width: int
    better_shape: Shape | None = None  # (batch, width) that would fit better

    @cached_property
    def sequences(self) -> tuple[Sequence, ...]:
        """The sequences of the chunks, in order."""
        return tuple(chunk.sequence for chunk in self.chunks)

    @cached_property
    def demands(self) -> frozenset[Demands]:
        """The demands of its requests."""
        return frozenset({sequence.request.demands for sequence in self.sequences})


@dataclass(frozen=True)
class DecodePlan:
    """A decode round of some sequences, in a shape of `batch` rows and `k` drafts."""

    sequences: tuple[Sequence, ...]
    batch: int
    k: int
    num_drafts: int  # number of the k drafts that may be accepted
    better_shape: Shape | None = None  # (batch, k) that would fit better

    @cached_property
    def demands(self) -> frozenset[Demands]:
        """The demands of its requests."""
        return frozenset({sequence.request.demands for sequence in self.sequences})


@dataclass(frozen=True)
class StepPlan:
    """The parts of a step: chunks, and a round of sequences that are prefilled."""

    prefill: PrefillPlan | None
    decode: DecodePlan | None
    num_tokens: int  # scheduled, as budgets count them

    @property
    def parts(self) -> tuple[PrefillPlan | DecodePlan, ...]:
        """The parts, in the order of their launch."""
        return tuple(part for part in (self.prefill, self.decode) if part is not None)
