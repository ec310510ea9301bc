"""Who runs next. Plain Python over ints: no device, no clock, no randomness.

A request waits, then owns a slot and its pages, is prefilled in chunks, decodes, and finishes. The
scheduler plans step N + 1 before it knows what step N gave, so it counts on what is certain: every
step of a decoding request gives at least one token.
"""

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from specjax.host.pages import PageAllocator
from specjax.host.speculation.policy import Policy
from specjax.request import Request


@dataclass(eq=False)
class Sequence:
    """A request in residence: its slot, its pages, how far it has come."""

    request: Request
    slot: int
    pages: list[int]
    num_prefilled: int = 0
    num_in_flight: int = 0  # steps launched whose tokens have not come back
    output: list[int] = field(default_factory=list)

    @property
    def is_prefilled(self) -> bool:
        """Whether every prompt token has been scheduled."""
        return self.num_prefilled == len(self.request.prompt_token_ids)

    @property
    def may_go_on(self) -> bool:
        """Whether the steps in flight might leave tokens to generate."""
        return len(self.output) + self.num_in_flight < self.request.max_tokens


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, start + count) of a sequence's prompt."""

    sequence: Sequence
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends with this chunk."""
        return self.start + self.count == len(self.sequence.request.prompt_token_ids)


@dataclass(frozen=True)
class PrefillPlan:
    """A chunk of some prompts, run in a shape of `batch` rows by `width` tokens."""

    chunks: tuple[Chunk, ...]
    batch: int
    width: int


@dataclass(frozen=True)
class DecodePlan:
    """A round of speculation with `k` drafts, run in a shape of `batch` rows."""

    sequences: tuple[Sequence, ...]
    batch: int
    k: int


StepPlan = PrefillPlan | DecodePlan


class Scheduler:
    """Continuous batching, first come first served, prefill and decode steps in turn.

    Pages for a request's longest possible run are taken when it is admitted, so that a request
    that has started always finishes.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        pages: PageAllocator,
        page_size: int,
        token_budget: int,
        decode_batches: SequenceOf[int],
        prefill_widths: SequenceOf[int],
        policy: Policy,
    ):
        self.policy = policy
        self.pages = pages
        self._page_size = page_size
        self._token_budget = token_budget
        self._decode_batches = decode_batches
        self._prefill_widths = prefill_widths
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._num_slots = num_slots
        self._was_prefill = False

    @property
    def has_work(self) -> bool:
        """Whether any request has not finished."""
        return bool(self._waiting or self._prefilling or self._decoding)

    @property
    def num_running(self) -> int:
        """Requests that own a slot."""
        return len(self._prefilling) + len(self._decoding)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def drop_all(self) -> None:
        """Forget every request and free what they own."""
        self._waiting.clear()
        for sequence in [*self._prefilling, *self._decoding]:
            self._release(sequence)
        self._prefilling, self._decoding = [], []

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to launch until results arrive."""
        self._admit()
        ready = [sequence for sequence in self._decoding if sequence.may_go_on]
        self._was_prefill = bool(self._prefilling) and not (ready and self._was_prefill)
        if self._was_prefill:
            return self._plan_prefill()
        return self._plan_decode(ready) if ready else None

    def commit(self, plan: StepPlan, outputs: SequenceOf[SequenceOf[int]]) -> list[Sequence]:
        """Record the tokens that each row of `plan` gave; return the sequences that finished."""
        rows = (
            plan.sequences
            if isinstance(plan, DecodePlan)
            else [chunk.sequence for chunk in plan.chunks]
        )
        finished = []
        for sequence, tokens in zip(rows, outputs, strict=True):
            if not tokens:  # a chunk before a prompt's last, or a sequence that had finished
                continue
            sequence.num_in_flight -= 1
            sequence.output += tokens
            is_full = len(sequence.output) >= sequence.request.max_tokens
            if is_full or tokens[-1] in sequence.request.stop_ids:
                finished.append(sequence)
        for sequence in finished:
            self._decoding.remove(sequence)
            self._release(sequence)
        return finished

    def _admit(self) -> None:
        while self._waiting and self._free_slots:
            request = self._waiting[0]
            # The last token is never run through the target: its key and value need no room.
            pages = self.pages.allocate(-(-(request.max_length - 1) // self._page_size))
            if pages is None:
                return
            self._waiting.popleft()
            self._prefilling.append(Sequence(request, self._free_slots.pop(), pages))

    def _release(self, sequence: Sequence) -> None:
        self._free_slots.append(sequence.slot)
        self.pages.release(sequence.pages)

    def _plan_prefill(self) -> PrefillPlan:
        first = self._prefilling[0]
        remaining = len(first.request.prompt_token_ids) - first.num_prefilled
        width = _at_least(self._prefill_widths, min(remaining, self._prefill_widths[-1]))
        most = min(self._token_budget // width, self._num_slots)
        chunks = []
        for sequence in self._prefilling[:most]:
            start = sequence.num_prefilled
            count = min(len(sequence.request.prompt_token_ids) - start, width)
            chunks.append(Chunk(sequence, start, count))
            sequence.num_prefilled += count
            if sequence.is_prefilled:
                sequence.num_in_flight += 1
                self._decoding.append(sequence)
        self._prefilling = [s for s in self._prefilling if not s.is_prefilled]
        return PrefillPlan(tuple(chunks), 1 if len(chunks) == 1 else most, width)

    def _plan_decode(self, ready: list[Sequence]) -> DecodePlan:
        for sequence in ready:
            sequence.num_in_flight += 1
        batch = _at_least(self._decode_batches, len(ready))
        return DecodePlan(tuple(ready), batch, self.policy.choose(len(ready)))


def _at_least(sizes: SequenceOf[int], least: int) -> int:
    return next(size for size in sizes if size >= least)
