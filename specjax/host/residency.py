"""The state of a sequence while it is resident: its slot, its pages and its progress."""

from array import array
from dataclasses import dataclass, field
from operator import attrgetter


@dataclass(eq=False, slots=True, kw_only=True)
class Residency:
    """One stay of a sequence on the device, from its admission to its end or preemption.

    Attributes:
        slot: row of the device's state that belongs to the sequence.
        pages: pages of layers without a window, in the order of their tokens.
        token_capacity: number of tokens for which the sequence has pages, including window pages.
        num_to_prefill: number of tokens to run before the sequence decodes: the prompt's tokens,
            and all output tokens except the last.
        num_computed: how many of the `num_to_prefill` tokens were cached or have been scheduled.
        num_published_pages: number of leading pages that are in the prefix cache.
        snapshot_points: numbers of leading pages after which to take a snapshot of the recurrent
            states, ascending.
        branch_points: numbers of leading pages that other sequences may share with this sequence.
        window_page: index, in the page table, of the page with the token before the next token to
            run. Window pages are freed if no token from this page on reads them.
        is_on_device: whether a chunk of the sequence has been planned since its admission.
        last_step: number of the last step that ran the sequence.
    """

    slot: int
    num_to_prefill: int
    num_computed: int = 0
    pages: array = field(default_factory=lambda: array("i"))
    token_capacity: int = 0
    num_published_pages: int = 0
    snapshot_points: list[int] = field(default_factory=list)
    branch_points: tuple[int, ...] = ()
    window_page: int = 0
    is_on_device: bool = False
    last_step: int = 0

    @property
    def is_prefilled(self) -> bool:
        """Whether all `num_to_prefill` tokens were cached or have been scheduled."""
        return self.num_computed == self.num_to_prefill


slot_of = attrgetter("residency.slot")  # the slot of a resident sequence; faster than a function
