"""The engine's own loop around a simulated device, checked after every step.

The host must be right about the device, whose state is at hand here: how far each request has come,
what pages and snapshots hold, and who may write where. Some of that is read from private fields.
"""

from collections import Counter
from collections.abc import Sequence as SequenceOf
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.schedules import AnyPolicy, Schedule, unchanged
from support.scripts import EMPTY, HashScript, fold
from support.simulated_device import SimulatedPrograms

from specjax.device.models.model import page_windows
from specjax.engine.batch import Part
from specjax.engine.engine import Engine
from specjax.host.plans import DecodePlan, PrefillPlan, StepPlan
from specjax.host.prefix_cache import PageKey, SnapshotIndex
from specjax.host.residency import Residency, slot_of
from specjax.host.residents import Residents
from specjax.host.scheduler import Scheduler
from specjax.host.sequence import RowOutput, Sequence
from specjax.host.windows import WindowPages, pages_in_use


class CheckedResidents(Residents):
    """Checks that no name of a page is given to two histories."""

    def __init__(self, *arguments: Any, tally: Counter):
        super().__init__(*arguments)
        self.tally = tally
        self.named: dict[PageKey, tuple[int, int]] = {}  # the digests that end a page, by its name
        self._digests: dict[Sequence, list[int]] = {}

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """See `Residents.grow`."""
        has_grown = super().grow(sequence, num_tokens)
        if not has_grown:
            end = -(-min(num_tokens, sequence.max_length - 1) // self._config.page_size)
            self.tally["windows that ran out"] += any(
                window.num_missing(slot_of(sequence), end) > window.pages.num_free
                for window in self.windows
            )
        return has_grown

    def _name(self, sequence: Sequence, residency: Residency, num_pages: int) -> None:
        super()._name(sequence, residency, num_pages)
        digests = self._digests.setdefault(sequence, [EMPTY])
        for token in sequence.token_ids[len(digests) - 1 :]:
            digests.append(fold(digests[-1], [token]))
        for number, key in enumerate(sequence.keys[:num_pages], start=1):
            end = number * self._config.page_size
            held = digests[end], digests[end + 1]
            assert self.named.setdefault(key, held) == held, "one name for two histories"


class CheckedScheduler(Scheduler):
    """Checks every plan against the budgets and shapes that it was made for."""

    residents: CheckedResidents

    def __init__(self, *arguments: Any, tally: Counter, **options: Any):
        super().__init__(*arguments, **options)
        sizes = options["num_snapshots"], options["windows"], max(self.policy.choices)
        self.residents = CheckedResidents(self.config, *sizes, tally=tally)
        self.tally = tally
        self.last_plan: StepPlan | None = None
        self._left_out: Counter = Counter()

    def schedule(self) -> StepPlan | None:
        """See `Scheduler.schedule`."""
        plan = super().schedule()
        config, self.last_plan = self.config, plan
        self._check_windows(plan)
        if plan is None:
            return None
        sequences = [sequence for part in plan.parts for sequence in part.sequences]
        assert len(set(map(id, sequences))) == len(sequences) > 0, "a sequence is in a step twice"
        num_tokens = 0
        if plan.prefill:
            num_tokens += sum(chunk.count for chunk in plan.prefill.chunks)
            self._check_prefill(plan.prefill)
        if plan.decode:
            num_tokens += len(plan.decode.sequences) * (plan.decode.k + 1)
            self._check_decode(plan.decode)
        assert plan.num_tokens == num_tokens <= config.max_num_scheduled_tokens
        assert num_tokens + len(sequences) * self._draft_slots <= config.max_num_batched_tokens
        self._check_turns(plan, sequences)
        self.tally["mixed steps"] += len(plan.parts) == 2
        return plan

    def _check_windows(self, plan: StepPlan | None) -> None:
        """Nobody has more of a window than the window, two rounds, and a chunk."""
        size, rows = self.config.page_size, 2 * (max(self.policy.choices) + 1)
        chunks = plan.prefill.chunks if plan and plan.prefill else ()
        counts = {chunk.sequence: chunk.count for chunk in chunks}
        for window in self.residents.windows:
            for sequence in self.residents.running:
                num_held = int((window._table[slot_of(sequence)] >= 0).sum())
                most = window.reach + 2 + -(-(rows + counts.get(sequence, 0)) // size)
                assert num_held <= most, f"{num_held} pages of a window of {window.window}"
                self.tally["windows that slid"] += bool(window._first[slot_of(sequence)])

    def _check_prefill(self, prefill: PrefillPlan) -> None:
        assert (prefill.batch, prefill.width) in self.shapes.prefill
        assert prefill.better_shape is None or prefill.better_shape in self.config.prefill_shapes
        assert 0 < len(prefill.chunks) <= prefill.batch
        for chunk in prefill.chunks:
            assert 0 < chunk.count <= prefill.width
            if self.config.exact:
                num_left = chunk.sequence.residency.num_to_prefill - chunk.start
                assert chunk.count == min(num_left, prefill.width)
        self.tally["chunks side by side"] += len(prefill.chunks) > 1

    def _check_decode(self, decode: DecodePlan) -> None:
        assert (decode.batch, decode.k) in self.shapes.decode
        assert decode.better_shape is None or decode.better_shape in self.all_shapes.decode
        self.tally["rounds in another's shape"] += decode.better_shape not in (
            None,
            (decode.batch, decode.k),
        )
        assert 0 < len(decode.sequences) <= decode.batch
        assert decode.num_drafts in self.policy.choices and decode.num_drafts <= decode.k
        if self.config.exact:
            assert decode.k == max(self.policy.choices)
        elif self.shapes is self.all_shapes:
            assert decode.k == decode.num_drafts
        for sequence in decode.sequences:
            certain = sequence.num_output + sequence.num_in_flight - 1
            assert certain < sequence.request.max_tokens, "a round that gives nothing"

    def _check_turns(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        """Among equals, nobody who needs nothing but a part of the budget is left out for long."""
        if self.config.scheduling_policy != "fcfs":
            return
        before, self._left_out = self._left_out, Counter()
        k = max(self.policy.choices)
        for sequence in self.residents.running:
            needed = min(_max_computed(sequence) + k + 1, sequence.request.max_length - 1)
            if sequence.residency.is_prefilled:
                may_run = sequence.may_go_on and sequence.residency.token_capacity >= needed
            else:  # chunks have pages, but for those of windows
                may_run = not self.residents.windows
            if may_run and sequence not in sequences:
                self._left_out[sequence] = before[sequence] + 1
                assert self._left_out[sequence] <= self.config.max_num_seqs, "others go first"

    def commit(
        self, part: Part, outputs: SequenceOf[RowOutput]
    ) -> tuple[list[int], list[Sequence]]:
        """See `Scheduler.commit`; of those that go on, nothing is lost."""
        before = [sequence.is_finished for sequence in part.sequences]
        num_kept, touched = super().commit(part, outputs)
        for sequence, had_finished, row, kept in zip(
            part.sequences, before, outputs, num_kept, strict=True
        ):
            assert sequence.is_finished or kept == len(row.tokens), "tokens are lost"
            assert not had_finished or (kept == 0 and sequence not in touched)
        return num_kept, touched

    def _preempt(self, sequence: Sequence) -> None:
        self.tally["preemptions"] += 1
        self.tally["preemptions in flight"] += sequence.num_in_flight > 0
        super()._preempt(sequence)


class CheckedEngine(Engine):
    """The engine's own loop around a simulated device."""

    programs: SimulatedPrograms

    def __init__(self, schedule: Schedule, tally: Counter):
        config = schedule.config
        config.check_budgets(max(schedule.choices), schedule.draft_slots)
        policy = AnyPolicy(schedule.choices, np.random.default_rng([schedule.seed, 2]))
        kinds = tuple(
            SimpleNamespace(is_recurrent=schedule.is_recurrent, num_layers=1, window=window)
            for window in (None, *schedule.windows)
        )
        target: Any = SimpleNamespace(vocab_size=schedule.vocab_size, cache_kinds=kinds)
        drafter: Any = SimpleNamespace(
            draft_slots=lambda k: schedule.draft_slots,
            is_recurrent=False,
            may_defer=schedule.may_defer,
        )
        nothing: Any = None
        super().__init__(
            config,
            target,
            drafter,
            nothing,
            policy,
            make_programs=partial(
                SimulatedPrograms,
                script=HashScript(schedule.vocab_size, schedule.drafts_fewer),
                tally=tally,
                rng=np.random.default_rng([schedule.seed, 1]),
            ),
        )
        self.programs.masked_slots = self._masked_slots
        self.repertoire.number_of((unchanged,))
        self._tally = tally
        self._num_idle = 0  # steps in which nothing ran
        self.scheduler = CheckedScheduler(
            config,
            policy,
            draft_slots=schedule.draft_slots,
            num_snapshots=config.num_snapshots if schedule.is_recurrent else None,
            windows=page_windows(target, config),
            tally=tally,
        )
        self.scheduler.all_shapes = self.repertoire.all_shapes
        self.programs.is_slow = not config.compile_ahead
        self.repertoire.patience_ms = 0.0  # of times that are too short to say anything

    def step(self) -> list[Sequence]:
        """See `Engine.step`; then everything is checked."""
        was_in_flight = bool(self._in_flight)
        self._tally["steps with requests held"] += bool(self.scheduler.held)
        touched = super().step()
        if was_in_flight and self.scheduler.last_plan:
            self._tally["steps launched over another"] += 1
        if self.scheduler.has_work:
            is_stuck = not (was_in_flight or self._in_flight or touched or self.scheduler.last_plan)
            self._num_idle = self._num_idle + 1 if is_stuck else 0
            # Those that wait for programs may do so for as many steps as there are programs.
            most_idle = 100 if self.scheduler.held else 0
            assert self._num_idle <= most_idle, "requests wait, and nothing will ever run"
        self.check()
        return touched

    def check(self) -> None:
        """Check who owns what, and what the host believes of the device."""
        scheduler, config = self.scheduler, self.config
        running, pages = scheduler.residents.running, scheduler.pages
        owners = Counter(page for sequence in running for page in sequence.residency.pages)
        assert [owners[page] for page in range(config.num_pages)] == pages._num_owners
        assert set(pages._free) == set(range(config.num_pages)) - set(owners)
        assert {name: page for page, name in pages._names.items()} == pages._by_name
        if not config.enable_prefix_caching:
            pairs = {(page, s.request.request_id) for s in running for page in s.residency.pages}
            assert len(pairs) == len(owners), "two requests share a page"
        slots = [slot_of(sequence) for sequence in running]
        assert sorted([*slots, *scheduler.residents.free_slots]) == list(range(config.max_num_seqs))
        table = np.full((config.max_num_seqs, config.pages_per_seq), -1)
        for sequence in running:
            residency = sequence.residency
            table[residency.slot, : len(residency.pages)] = residency.pages
            self._check_resident(sequence, residency)
        np.testing.assert_array_equal(scheduler.residents.page_tables[:, 0], table)
        for window in scheduler.residents.windows:
            self._check_window(window)
        assert running == sorted(running)
        waiting = [s for s in scheduler._waiting if not s.is_finished]
        for samples in scheduler._live.values():
            has_started = samples[0].index > 0 or samples[0].has_started_siblings
            for sequence in samples:
                assert not sequence.is_finished
                places = sum(s is sequence for s in (*running, *waiting))
                is_held = sequence.request.request_id in scheduler.held
                is_there = not is_held and (sequence.index == 0 or has_started)
                assert places == is_there, "lost, or twice"
        assert sum(map(len, scheduler._live.values())) == scheduler.num_running + (
            scheduler.num_waiting
        )
        self._check_names()
        if (snapshots := scheduler.prefixes.snapshots) is not None:
            self._check_snapshots(snapshots)

    def _check_window(self, window: WindowPages) -> None:
        """What a slot has of a window: not less than is read, and no more than was planned for."""
        scheduler, config = self.scheduler, self.config
        held = {
            sequence: [page for page in window._table[slot_of(sequence)].tolist() if page >= 0]
            for sequence in scheduler.residents.running
        }
        owners = Counter(page for pages in held.values() for page in pages)
        num_pages = window.pages.num_pages
        assert [owners[page] for page in range(num_pages)] == window.pages._num_owners
        assert window.pages.num_free == num_pages - len(owners)
        for slot in scheduler.residents.free_slots:
            assert (window._table[slot] == -1).all()
        for sequence, pages in held.items():
            assert len(set(pages)) == len(pages) <= len(sequence.residency.pages)
        if not config.enable_prefix_caching:
            pairs = {(page, s.request.request_id) for s, pages in held.items() for page in pages}
            assert len(pairs) == len(owners), "two requests share a page"
        k = max(scheduler.policy.choices)
        most = pages_in_use(config, window.window, k, config.max_num_seqs)
        assert sum(map(len, held.values())) <= most, "more than ever should be in use"
        named = scheduler.residents.named
        pool = self.programs.windows[window.window]
        for page, key in window.pages._names.items():
            last = (page + 1) * config.page_size - 1
            assert int(pool[last]) == named[key][0], f"page {page} does not hold what it is called"

    def _check_resident(self, sequence: Sequence, residency: Residency) -> None:
        slot = self.programs.slots[residency.slot]
        assert len(set(residency.pages)) == len(residency.pages) <= self.config.pages_per_seq
        if not residency.is_on_device:
            return
        assert slot.seed == sequence.request.seeds[sequence.index], "another's slot"
        known = min(len(slot.tokens), len(sequence.token_ids))
        assert slot.tokens[:known] == sequence.token_ids[:known]
        assert slot.length is not None
        if not residency.is_prefilled:
            assert slot.length == residency.num_computed and not slot.is_active
            return
        assert slot.length <= _max_computed(sequence), "further than the host thinks possible"
        if slot.is_active:
            least = len(sequence.token_ids) - 1 + sequence.num_in_flight
            assert least <= slot.length, "not as far as the host thinks certain"

    def _check_names(self) -> None:
        """What can be found is what it is called; other cells are looked at when they are read."""
        device, named = self.programs, self.scheduler.residents.named
        later = dict(device.deferred.values())
        for page, key in self.scheduler.pages._names.items():
            last = (page + 1) * self.config.page_size - 1
            held = int(device.target[last]), later.get(last, int(device.drafter[last]))
            assert held == named[key], f"page {page} does not hold what it is called"

    def _check_snapshots(self, snapshots: SnapshotIndex) -> None:
        for key, snapshot in snapshots._by_key.items():
            state = self.programs.snapshots[snapshot]
            assert state == self.scheduler.residents.named[key][0], (
                "a snapshot is not what it is called"
            )
        ids = [*snapshots._free, *snapshots._by_key.values()]
        assert sorted(ids) == list(range(self.config.num_snapshots)), f"snapshots {ids}"

    def _masked_slots(self) -> set[int]:
        """Of the requests that have a grammar to follow."""
        return {
            slot_of(sequence)
            for sequence in self.scheduler.residents.running
            if sequence.matcher and not sequence.error and not sequence.is_finished
        }

    def _launch(self, parts: SequenceOf[Part]) -> Any:
        for plan in parts:
            self._check_writable(plan)
        return super()._launch(parts)

    def _check_writable(self, plan: Part) -> None:
        """Where a step writes, nobody else may look."""
        owners = self.scheduler.pages._num_owners
        for row, sequence in enumerate(plan.sequences):
            assert sequence.residency is not None
            if isinstance(plan, PrefillPlan):
                start = plan.chunks[row].start
            else:
                start = self.programs.slots[slot_of(sequence)].length or 0
            for page in sequence.residency.pages[start // self.config.page_size :]:
                assert owners[page] == 1, f"page {page} is written to, and has other owners"
            for window in self.scheduler.residents.windows:
                for page in window._table[slot_of(sequence), start // self.config.page_size :]:
                    is_own = page < 0 or window.pages._num_owners[page] == 1
                    assert is_own, f"page {page} is written to, and has other owners"


def _max_computed(sequence: Sequence) -> int:
    """The most tokens in the caches after the rounds in flight."""
    return len(sequence.token_ids) - 1 + sequence.max_tokens_in_flight
