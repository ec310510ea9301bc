"""Who runs next. Plain Python over ints: no device, no clock, no randomness.

A request waits, then owns a slot and its pages, is prefilled in chunks, decodes, and finishes. The
scheduler plans step N + 1 before it knows what step N gave, so it counts on what is certain: every
step of a decoding request gives at least one token.
"""

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from specjax.host.pages import PageAllocator
from specjax.host.sequence import RowOutput, Sequence
from specjax.host.speculation.policy import Policy
from specjax.request import Request


@dataclass
class _Waiting:
    """A sample without a slot, and the pages of its prompt that an earlier one has filled."""

    request: Request
    index: int = 0
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, start + count) of a sequence's prompt."""

    sequence: Sequence
    start: int
    count: int
    is_first: bool  # of the sequence: its slot is new to it

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

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """Whose chunks they are, in order."""
        return tuple(chunk.sequence for chunk in self.chunks)


@dataclass(frozen=True)
class DecodePlan:
    """A round of speculation, run in a shape of `batch` rows and `k` drafts."""

    sequences: tuple[Sequence, ...]
    batch: int
    k: int
    num_drafts: int  # of the k, those that may stand


StepPlan = PrefillPlan | DecodePlan


class Scheduler:
    """Continuous batching, first come first served, prefill and decode steps in turn.

    Pages for a request's longest possible run are taken when it is admitted, so that a request
    that has started always finishes. The first sample of a request prefills the prompt; the others
    follow it, share the pages that it filled, and run only what is left of the prompt.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        pages: PageAllocator,
        page_size: int,
        decode_batches: SequenceOf[int],
        prefill_shapes: SequenceOf[tuple[int, int]],
        policy: Policy,
        fixed_k: int | None = None,
        shares_prompts: bool = True,
    ):
        """`prefill_shapes` are (batch, width); `fixed_k` is the K of shapes, however many stand.

        Without `shares_prompts`, where pages are not all that a prompt leaves, every sample runs
        the whole prompt.
        """
        self.policy = policy
        self.pages = pages
        self._page_size = page_size
        self._decode_batches = decode_batches
        self._prefill_widths = sorted({width for _, width in prefill_shapes})
        self._prefill_shapes = prefill_shapes
        self.fixed_k = fixed_k
        self._shares_prompts = shares_prompts
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._waiting: deque[_Waiting] = deque()  # first samples
        self._following: deque[_Waiting] = deque()  # the others, of prompts that have been run
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._was_prefill = False

    @property
    def has_work(self) -> bool:
        """Whether any request has not finished."""
        return bool(self._waiting or self._following or self._prefilling or self._decoding)

    @property
    def num_running(self) -> int:
        """Samples that own a slot."""
        return len(self._prefilling) + len(self._decoding)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(_Waiting(request))

    def drop_all(self) -> None:
        """Forget every request and free what they own."""
        for sequence in [*self._prefilling, *self._decoding]:
            self._release(sequence)
        self._forget_shared(list(self._following))
        self._following.clear()
        self._waiting.clear()
        self._prefilling, self._decoding = [], []

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to launch until results arrive."""
        self._admit()
        ready = [sequence for sequence in self._decoding if sequence.may_go_on]
        self._was_prefill = bool(self._prefilling) and not (ready and self._was_prefill)
        if self._was_prefill:
            return self._plan_prefill()
        return self._plan_decode(ready) if ready else None

    def commit(
        self, plan: StepPlan, outputs: SequenceOf[RowOutput]
    ) -> tuple[list[int], list[Sequence]]:
        """Give each row of `plan` its output: how many tokens stand, and who finished.

        A sequence may have finished on the host, by its text, with a step in flight: what that step
        gave it is dropped.
        """
        num_kept, finished = [], []
        for sequence, row in zip(plan.sequences, outputs, strict=True):
            num_kept.append(0 if sequence.is_finished else sequence.append(row))
            if num_kept[-1]:
                sequence.num_in_flight -= 1
                if sequence.is_finished:
                    finished.append(sequence)
        for sequence in finished:
            self._decoding.remove(sequence)
            self._release(sequence)
        return num_kept, finished

    def _admit(self) -> None:
        while self._free_slots and (queue := self._following or self._waiting):
            waiting = queue[0]
            request, shared = waiting.request, waiting.pages
            # The last token is never run through the target: its key and value need no room.
            num_pages = -(-(request.max_length - 1) // self._page_size)
            pages = self.pages.allocate(num_pages - len(shared))
            if pages is None:
                if self.num_running:
                    return
                # Nobody will free pages but those who wait: they do without what they share.
                self._forget_shared([other for other in self._following if other is not waiting])
                pages = self.pages.allocate(num_pages - len(shared))
                assert pages is not None, "one request always fits"
            queue.popleft()
            slot = self._free_slots.pop()
            sequence = Sequence.of(request, waiting.index, slot, [*shared, *pages])
            sequence.num_prefilled = len(shared) * self._page_size
            self._prefilling.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._free_slots.append(sequence.slot)
        self.pages.release(sequence.pages)

    def _plan_prefill(self) -> PrefillPlan:
        first = self._prefilling[0]
        remaining = len(first.request.prompt_token_ids) - first.num_prefilled
        width = _at_least(self._prefill_widths, min(remaining, self._prefill_widths[-1]))
        batches = sorted(b for b, w in self._prefill_shapes if w == width)
        chunks = []
        for sequence in self._prefilling[: batches[-1]]:
            start = sequence.num_prefilled
            count = min(len(sequence.request.prompt_token_ids) - start, width)
            chunks.append(Chunk(sequence, start, count, not sequence.was_planned))
            sequence.was_planned = True
            sequence.num_prefilled += count
            if sequence.is_prefilled:
                sequence.num_in_flight += 1
                self._decoding.append(sequence)
                self._queue_samples(sequence)
        self._prefilling = [s for s in self._prefilling if not s.is_prefilled]
        return PrefillPlan(tuple(chunks), _at_least(batches, len(chunks)), width)

    def _queue_samples(self, sequence: Sequence) -> None:
        """Let the other samples of a prompt follow, now that its pages will be filled."""
        request = sequence.request
        if sequence.index or len(request.seeds) == 1:
            return
        # The last token of the prompt is run by every sample, which needs its logits.
        num_shared = (len(request.prompt_token_ids) - 1) // self._page_size
        num_shared *= self._shares_prompts
        for index in range(1, len(request.seeds)):
            shared = sequence.pages[:num_shared]
            self.pages.share(shared)
            self._following.append(_Waiting(request, index, shared))

    def _forget_shared(self, waiting: list[_Waiting]) -> None:
        for sample in waiting:
            self.pages.release(sample.pages)
            sample.pages = []

    def _plan_decode(self, ready: list[Sequence]) -> DecodePlan:
        for sequence in ready:
            sequence.num_in_flight += 1
        batch = _at_least(self._decode_batches, len(ready))
        num_drafts = self.policy.choose(len(ready))
        k = num_drafts if self.fixed_k is None else self.fixed_k
        num_drafts = min(num_drafts, k)
        return DecodePlan(tuple(ready), batch, k, num_drafts)


def _at_least(sizes: SequenceOf[int], least: int) -> int:
    return next(size for size in sizes if size >= least)
