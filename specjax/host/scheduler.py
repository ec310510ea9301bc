"""Plans each step. The code is plain Python over ints, without a device, clock or randomness.

A sequence waits, is admitted (it gets a slot, and pages for its tokens), is prefilled in chunks,
decodes, and finishes. If pages run out, the last sequence in order of rank is preempted: it gives
up its slot and pages at once, and recomputes its tokens when there is room. The scheduler plans
step N + 1 before it has the results of step N. At that time, it knows only that a round with n
drafts gives a sequence 1 to n + 1 tokens.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Hashable
from collections.abc import Sequence as SequenceOf
from itertools import chain
from operator import attrgetter

from specjax.config import EngineConfig
from specjax.host.budgets import Budget
from specjax.host.drafts.suggester import Suggester
from specjax.host.loads import load_of
from specjax.host.pages import PageAllocator
from specjax.host.plans import Chunk, DecodePlan, OpenRound, OpenStep, PrefillPlan, StepPlan
from specjax.host.prefix_cache import PrefixCache
from specjax.host.request import Demands, Request
from specjax.host.residency import Residency
from specjax.host.residents import Residents
from specjax.host.sequence import RowOutput, Sequence
from specjax.host.shapes import Shapes
from specjax.host.speculation.policy import Policy
from specjax.host.speculation.rounds import SplitShape


class Scheduler:
    """Continuous batching, with prefill chunks and a decode round in the same step.

    Sequences with the lowest priority value go first, then sequences that ran least recently, then
    sequences that arrived first. So sequences of equal priority take turns if a budget is too
    small. A chunk gets as many tokens as the budget still allows. A sequence's round runs with all
    its drafts or not at all, so that its drafts do not depend on other requests.

    Waiting sequences are admitted in order, with one exception: a sequence is passed over while a
    sequence ahead of it is prefilling most of the same prompt. Later, it finds the prompt's pages
    in the prefix cache. So the samples of a request, and requests with the same prompt, prefill the
    prompt once.
    """

    def __init__(
        self,
        config: EngineConfig,
        policy: Policy,
        *,
        draft_slots: int = 0,
        num_snapshots: int | None = None,
        windows: SequenceOf[int] = (),
        suggester: Suggester | None = None,
    ):
        """`num_snapshots` is None unless the model is recurrent.

        `draft_slots` is the number of extra rows per sequence for drafting. `windows` are sizes
        of sliding windows, in tokens. `suggester` is None if all drafts come from the drafter.
        """
        self.policy, self.suggester = policy, suggester or Suggester()
        self.num_preemptions = 0
        self.num_looked_up = 0  # number of tokens of admitted sequences
        self.num_found = 0  # how many of these tokens were cached
        self.config = config
        self.residents = Residents(config, num_snapshots, windows, max(policy.choices))
        self._draft_slots = draft_slots
        ks = (max(policy.choices),) if config.exact else policy.choices
        self.shapes = self.all_shapes = Shapes.all_of(config, ks)
        self.splits: Collection[SplitShape] = ()  # shapes of split rounds that are compiled
        self._num_steps = 0
        self._num_arrivals = 0
        self._forget_all()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._live)

    @property
    def unfinished_ids(self) -> Collection[Hashable]:
        """The ids of unfinished requests."""
        return self._live.keys()

    @property
    def pages(self) -> PageAllocator:
        """The allocator of all pages except window pages."""
        return self.residents.pages

    @property
    def prefixes(self) -> PrefixCache:
        """The prefix cache."""
        return self.residents.prefixes

    @property
    def num_running(self) -> int:
        """The number of resident samples."""
        return len(self.residents.running)

    @property
    def num_waiting(self) -> int:
        """The number of waiting samples."""
        # Another thread may read this while a step is planned.
        return max(0, self.num_unfinished - len(self.residents.running))

    def add(
        self, request: Request, samples: list[Sequence] | None = None, *, is_held: bool = False
    ) -> list[Sequence]:
        """Queue a request, and return its samples.

        If `is_held`, the request is queued only by a later call of `let_in`. `samples` are the
        request's unfinished samples, if another scheduler has handed the request over.

        Raises:
            ValueError: an unfinished request has the same id.
        """
        if request.request_id in self._live:
            raise ValueError(
                f"request_id={request.request_id!r} belongs to a request that has not finished; "
                "give each request a separate id"
            )
        arrival, self._num_arrivals = self._num_arrivals, self._num_arrivals + 1
        samples = samples or [Sequence.of(request, i, 0) for i in range(len(request.seeds))]
        for sequence in samples:
            sequence.arrive(arrival)
        self._live[request.request_id] = list(samples)
        self.num_unfinished += len(samples)
        self.held[request.request_id] = request
        if not is_held:
            self.let_in(request)
        return samples

    def let_in(self, request: Request) -> None:
        """Move a held request to the queue."""
        del self.held[request.request_id]
        self.demands[request.demands] += 1
        for sequence in self._live[request.request_id]:
            heapq.heappush(self._waiting, sequence)

    def abort(self, request_id: Hashable) -> list[Sequence]:
        """End a request now. Return its unfinished samples, or an empty list for an unknown id."""
        aborted = list(self._live.get(request_id, ()))
        for sequence in aborted:
            sequence.finish_reason = "abort"
            self._leave(sequence)
        return aborted

    def drop_all(self) -> list[Sequence]:
        """End every request and free all pages, even if an interrupt left an inconsistent state.

        Return the samples that were unfinished.
        """
        unfinished = [sequence for _, samples in self.hand_over() for sequence in samples]
        for sequence in unfinished:
            sequence.finish_reason = "abort"
        return unfinished

    def hand_over(self) -> list[tuple[Request, list[Sequence]]]:
        """Remove all requests and free all pages, without ending the requests.

        Return each request with its unfinished samples, for a call of another scheduler's `add`.
        """
        live = [[s for s in samples if not s.is_finished] for samples in self._live.values()]
        self.residents.drop_all()
        self._forget_all()
        for sequence in chain(*live):
            sequence.residency = None
            sequence.num_in_flight = sequence.max_tokens_in_flight = 0
        return [(samples[0].request, samples) for samples in live if samples]

    def _forget_all(self) -> None:
        self._live: dict[Hashable, list[Sequence]] = {}  # unfinished samples, by request
        self.num_unfinished = 0  # the number of these samples
        self.held: dict[Hashable, Request] = {}  # requests that wait for `let_in`
        self.demands: Counter[Demands] = Counter()  # counts requests that are not held
        self._waiting: list[Sequence] = []  # a heap; finished sequences are dropped at its top

    def restart(self) -> None:
        """Preempt all sequences and clear the prefix cache, because caches are lost or outdated."""
        for sequence in list(self.residents.running):
            self._preempt(sequence)
        for sequence in chain(*self._live.values()):
            sequence.num_in_flight = sequence.max_tokens_in_flight = 0
        self.prefixes.clear()

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None if there is nothing to launch until results arrive."""
        self._num_steps += 1
        self.residents.slide()
        config, max_tokens = self.config, self.config.max_num_scheduled_tokens
        budget = Budget(max_tokens, config.max_num_batched_tokens, self._draft_slots)
        prefilling: list[Sequence] = []
        ready: list[Sequence] = []
        remaining: list[int] = []  # tokens left to prefill, by sequence
        last_steps: set[int] = set()
        for sequence in self.residents.running:
            # Attributes instead of properties: these loops take most of the host's time.
            residency = sequence.residency
            assert residency is not None
            last_steps.add(residency.last_step)
            if num_left := residency.num_to_prefill - residency.num_computed:
                prefilling.append(sequence)
                remaining.append(num_left)
            elif len(sequence.token_ids) + sequence.num_in_flight < sequence.max_length:
                ready.append(sequence)
        has_all = self.shapes is self.all_shapes
        remaining += self._joining()
        width = self.shapes.best_width(remaining, max_tokens)
        splits = None if remaining or config.exact else self.splits  # no split next to chunks
        load = load_of(ready, self.policy, max_tokens, self.shapes, splits, self.suggester)
        wanted_k = self.policy.choose(load)
        split, wish = self.policy.split, self.policy.wish
        k = wanted_k if split else self.shapes.round(len(ready), wanted_k)[1]
        step = OpenStep(budget, width, self.shapes.max_chunks(width))
        # The sequences that draft; and those that do not, if the round is split.
        drafting, others = OpenRound(k, min(wanted_k, k)), OpenRound(0, 0)
        resting = set(ready).difference(ready[i] for i in split.drafting) if split else ()
        turns = ready  # residents are in order of rank; usually, all ran in the same step
        if prefilling or len(last_steps) > 1:
            turns = sorted(ready + prefilling, key=_turn)  # stable
        for sequence in turns:
            residency = sequence.residency
            if residency is None:  # preempted by a sequence before it
                continue
            if residency.num_computed < residency.num_to_prefill:
                self._plan_chunk(step, sequence, residency)
            else:
                part = others if sequence in resting else drafting
                self._plan_round(step.budget, part, sequence, residency)
        self._admit(step)
        for chunk in step.chunks:
            self.residents.publish(chunk)
        prefill = decode = rest = None
        if step.chunks:
            shape = self.shapes.chunks(len(step.chunks), width)
            room = step.num_tokens + step.budget.fitting(max_tokens)  # left by the rounds
            best = (None, 0) if has_all else self.all_shapes.best_chunks(remaining, room)
            prefill = PrefillPlan(tuple(step.chunks), *shape, *best)
        decoding, suggested = tuple(drafting.sequences), ()
        if decoding and self.suggester.sources:
            suggested = self.suggester.suggest(decoding, drafting.num_drafts)
        if split and (decoding or others.sequences):  # a part may have only padding rows
            decode = DecodePlan(decoding, split.shape.drafting, k, k, None, suggested, wish=wish)
            rest = DecodePlan(tuple(others.sequences), split.shape.others, 0, 0, is_rest=True)
        elif count := len(decoding):
            batch = self.shapes.batch(count, k)
            wanted = None if has_all else self.all_shapes.round(count, wanted_k)
            sizes = batch, k, drafting.num_drafts
            decode = DecodePlan(decoding, *sizes, wanted, suggested, wish=wish)
        return StepPlan(prefill, decode, step.budget.num_spent, rest) if prefill or decode else None

    def commit(
        self, part: PrefillPlan | DecodePlan, outputs: SequenceOf[RowOutput]
    ) -> tuple[list[int], list[Sequence]]:
        """Append the outputs of a step's chunks or round to their sequences.

        Return the number of tokens that each sequence gained, and the sequences that changed. If a
        sequence has finished while the step was in flight, its output of the step is dropped. If it
        was preempted instead, the output is kept.
        """
        part.land()
        num_kept, touched = [], []
        for sequence, row in zip(part.sequences, outputs, strict=True):
            if sequence.finish_reason is not None:
                num_kept.append(0)
                continue
            kept = sequence.append(row)
            num_kept.append(kept)
            if sequence.residency is not None:
                self.residents.tidy(sequence, sequence.residency)
            if sequence.finish_reason is not None:
                self._leave(sequence)
                touched.append(sequence)
            elif kept:
                touched.append(sequence)
        if part.suggested:
            self.suggester.learn(part.sequences, part.suggested, outputs, num_kept)
        return num_kept, touched

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """End a sequence because of an error that concerns no other request."""
        sequence.fail(error)
        self._leave(sequence)

    def fail_all(self, request: Request, error: Exception) -> list[Sequence]:
        """End all unfinished samples of a request because of `error`, and return them."""
        failed = list(self._live[request.request_id])
        for sequence in failed:
            self.fail(sequence, error)
        return failed

    def _joining(self) -> list[int]:
        """Return, for each waiting sequence that could be admitted, how many tokens to prefill.

        Sequences are left out if they do not fit in the free slots, pages and chunks, or if they
        wait for another sequence's pages.
        """
        joining = []
        num_free = self.pages.num_free - len(self.residents.running)
        for sequence in self._waiting[: len(self.residents.free_slots)]:
            num_left = self.residents.num_to_run(sequence)
            num_free -= -(-num_left // self.config.page_size)
            if num_free < 0 or len(joining) == self.all_shapes.most_chunks:
                break
            if num_left:
                joining.append(num_left)
        return joining

    def _plan_round(
        self, budget: Budget, part: OpenRound, sequence: Sequence, residency: Residency
    ) -> None:
        if not budget.take(part.k + 1):
            return
        max_tokens = sequence.max_tokens_in_flight + part.num_drafts + 1
        num_tokens = len(sequence.token_ids) - 1 + max_tokens
        if (
            num_tokens <= residency.token_capacity  # in most steps
            or self.residents.grow(sequence, num_tokens)
            or self._preempt_for(sequence, num_tokens)
        ):
            part.sequences.append(sequence)
            residency.last_step = self._num_steps
            sequence.num_in_flight += 1
            sequence.max_tokens_in_flight = max_tokens
        else:
            budget.give_back(part.k + 1)

    def _plan_chunk(
        self,
        step: OpenStep,
        sequence: Sequence,
        residency: Residency,
        restored: int | None = None,
    ) -> None:
        """Plan a chunk with as many of a sequence's tokens as the step has room for."""
        start = residency.num_computed
        count = step.budget.fitting(min(residency.num_to_prefill - start, step.width))
        if residency.snapshot_points:
            count = min(count, residency.snapshot_points[0] * self.config.page_size - start)
        if not count or len(step.chunks) == step.max_chunks:
            return
        end = start + count
        if not (self.residents.grow(sequence, end) or self._preempt_for(sequence, end)):
            return
        step.budget.take(count)
        residency.num_computed += count
        chunk = Chunk(
            sequence,
            start,
            count,
            is_first=not residency.is_on_device,
            is_last=residency.is_prefilled,
            is_resumed=sequence.num_output > 0,
            restored=restored,
            taken=self.residents.reserve_snapshot(sequence, residency),
        )
        step.chunks.append(chunk)
        residency.is_on_device = True
        residency.last_step = self._num_steps
        if chunk.samples:
            sequence.num_in_flight += 1
            sequence.max_tokens_in_flight += 1

    def _admit(self, step: OpenStep) -> None:
        """Admit waiting sequences while their first chunk fits in the step.

        If a sequence waits for another sequence's pages, it keeps its place, and one slot is kept
        free for it.
        """
        width, following = self.shapes.widths[0], []
        min_tokens = width if self.config.exact else 1
        while len(self.residents.free_slots) > len(following) and (sequence := self._head()):
            if sequence.num_in_flight or step.budget.fitting(min_tokens) < min_tokens:
                break
            if len(step.chunks) == step.max_chunks:
                break
            self.residents.extend_keys(sequence)
            if not self.residents.num_to_run(sequence):
                following.append(heapq.heappop(self._waiting))
                continue
            first_chunk = step.budget.fitting(step.width)
            admitted = self.residents.admit(sequence, width, first_chunk)
            if admitted is None:
                break
            residency, snapshot = admitted
            heapq.heappop(self._waiting)
            self.num_looked_up += residency.num_to_prefill
            self.num_found += residency.num_computed
            self._plan_chunk(step, sequence, residency, snapshot)
        for sequence in following:
            heapq.heappush(self._waiting, sequence)

    def _head(self) -> Sequence | None:
        """Return the first waiting sequence, or None."""
        while self._waiting and self._waiting[0].is_finished:
            heapq.heappop(self._waiting)
        return self._waiting[0] if self._waiting else None

    def _preempt_for(self, sequence: Sequence, num_tokens: int) -> bool:
        """Preempt later sequences until `sequence` has pages for `num_tokens` tokens.

        A later sequence follows `sequence` in order of rank; the last one goes first. Sequences
        that this step already runs are not preempted. Return whether `sequence` has these pages. If
        not, it keeps its present pages and waits.
        """
        running = self.residents.running
        while True:
            may_go = (s for s in running if s > sequence and _last_step(s) != self._num_steps)
            victim = max(may_go, default=None)
            if victim is None:
                return False
            self._preempt(victim)
            if self.residents.grow(sequence, num_tokens):
                return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self.residents.vacate(sequence)
        heapq.heappush(self._waiting, sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Remove a finished sequence, and free its slot and pages."""
        self.suggester.finish(sequence)
        if sequence.residency is not None:
            self.residents.vacate(sequence)
        samples = self._live[sequence.request.request_id]
        samples.remove(sequence)
        self.num_unfinished -= 1
        if not samples:
            self._forget(sequence.request)

    def _forget(self, request: Request) -> None:
        """Remove a request that has no unfinished samples."""
        del self._live[request.request_id]
        if self.held.pop(request.request_id, None) is None:
            self.demands -= Counter((request.demands,))


_last_step = attrgetter("residency.last_step")  # of a resident sequence
# Sort key of the order in a step, lowest first.
_turn = attrgetter("request.priority", "residency.last_step")
