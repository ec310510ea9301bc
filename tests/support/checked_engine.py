"""An engine and a scheduler on a simulated device, with checks after every step.

The simulated device checks the contents of pages and states when it reads them. This module checks
the host: plans against budgets and shapes, and the records of slots, pages and snapshots against
each other. Some checks read private fields.
"""

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.schedules import AnyPolicy, Schedule, unchanged
from support.scripts import HashScript
from support.simulated_device import SimulatedPrograms

from specjax.config import SpeculativeConfig
from specjax.device.models.model import page_windows
from specjax.engine.engine import Engine
from specjax.host.drafts.suggester import Suggester
from specjax.host.plans import DecodePlan, PrefillPlan, StepPlan
from specjax.host.residency import slot_of
from specjax.host.scheduler import Scheduler
from specjax.host.sequence import Sequence
from specjax.host.speculation.rounds import SplitShape
from specjax.host.windows import pages_in_use


class CheckedScheduler(Scheduler):
    """A scheduler that checks every plan against the budgets and the compiled shapes."""

    def __init__(self, *arguments: Any, tally: Counter, **options: Any):
        super().__init__(*arguments, **options)
        self.tally = tally
        self.last_plan: StepPlan | None = None
        self._left_out: Counter = Counter()
        num_to_run = self.residents.num_to_run

        def counted(sequence: Sequence) -> int:
            num_tokens = num_to_run(sequence)
            tally["waits for pages"] += not num_tokens
            return num_tokens

        self.residents.num_to_run = counted

    def schedule(self) -> StepPlan | None:
        """See `Scheduler.schedule`."""
        plan = super().schedule()
        config, self.last_plan = self.config, plan
        self._check_windows(plan)
        if plan is None:
            return None
        sequences = [sequence for part in plan.parts for sequence in part.sequences]
        assert len(set(sequences)) == len(sequences) > 0, "a sequence is in a step twice"
        num_tokens = 0
        if plan.prefill:
            num_tokens += sum(chunk.count for chunk in plan.prefill.chunks)
            self._check_prefill(plan.prefill)
        if plan.decode:
            num_tokens += len(plan.decode.sequences) * (plan.decode.k + 1)
            self._check_decode(plan.decode, plan.rest)
        if plan.rest:
            num_tokens += len(plan.rest.sequences)
        assert plan.num_tokens == num_tokens <= config.max_num_scheduled_tokens
        assert num_tokens + len(sequences) * self._draft_slots <= config.max_num_batched_tokens
        self._check_turns(sequences)
        self.tally["mixed steps"] += plan.prefill is not None and plan.decode is not None
        return plan

    def _check_windows(self, plan: StepPlan | None) -> None:
        """Check that no request has more pages of a window than it can need.

        A request needs pages for the window's tokens, for two rounds, and for a chunk.
        """
        config, k = self.config, max(self.policy.choices)
        chunks = plan.prefill.chunks if plan and plan.prefill else ()
        counts = {chunk.sequence: chunk.count for chunk in chunks}
        for window in self.residents.windows:
            num_held = {
                s: int((window._table[slot_of(s)] >= 0).sum()) for s in self.residents.running
            }
            for sequence, count in num_held.items():
                rows = 2 * (k + 1) + counts.get(sequence, 0)
                most = window.reach + 2 + -(-rows // config.page_size)
                assert count <= most, f"{count} pages of a window of {window.window}"
                self.tally["windows that slid"] += bool(window._first[slot_of(sequence)])
            most = pages_in_use(config, window.window, k, config.max_num_seqs)
            assert sum(num_held.values()) <= most, "more than ever should be in use"

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

    def _check_decode(self, decode: DecodePlan, rest: DecodePlan | None) -> None:
        shape = decode.batch, decode.k
        if rest:
            is_whole = SplitShape(*shape, rest.batch) in self.splits
            assert is_whole or {shape, (rest.batch, 0)} <= {*self.shapes.decode}
            assert (rest.k, rest.num_drafts, rest.is_rest) == (0, 0, True)
            assert len(rest.sequences) <= rest.batch and not self.config.exact
            self.tally["split in two"] += not is_whole
        else:
            assert shape in self.shapes.decode and decode.sequences
        assert decode.better_shape is None or decode.better_shape in self.all_shapes.decode
        self.tally["rounds in another's shape"] += decode.better_shape not in (None, shape)
        assert len(decode.sequences) <= decode.batch
        assert decode.num_drafts in self.policy.choices and decode.num_drafts <= decode.k
        if self.config.exact:
            assert decode.k == max(self.policy.choices)
        elif self.shapes is self.all_shapes:
            assert decode.k == decode.num_drafts
        for sequence in (*decode.sequences, *(rest.sequences if rest else ())):
            certain = sequence.num_output + sequence.num_in_flight - 1
            assert certain < sequence.request.max_tokens, "a round that gives nothing"

    def _check_turns(self, sequences: list[Sequence]) -> None:
        """Check that a request that only needs a part of the token budget is not left out for long.

        The check is only for the policy "fcfs", under which all requests are equal.
        """
        if self.config.scheduling_policy != "fcfs":
            return
        before, self._left_out = self._left_out, Counter()
        k = max(self.policy.choices)
        for sequence in self.residents.running:
            furthest = len(sequence.token_ids) + sequence.max_tokens_in_flight + k
            needed = min(furthest, sequence.request.max_length - 1)
            if sequence.residency.is_prefilled:
                may_go_on = sequence.min_length < sequence.max_length
                may_run = may_go_on and sequence.residency.token_capacity >= needed
            else:  # a chunk has all pages except pages of windows
                may_run = not self.residents.windows
            if may_run and sequence not in sequences:
                self._left_out[sequence] = before[sequence] + 1
                assert self._left_out[sequence] <= self.config.max_num_seqs, "others go first"

    def _preempt_for(self, sequence: Sequence, num_tokens: int) -> bool:
        end = -(-min(num_tokens, sequence.max_length - 1) // self.config.page_size)
        self.tally["windows that ran out"] += any(
            window.num_missing(slot_of(sequence), end) > window.pages.num_free
            for window in self.residents.windows
        )
        return super()._preempt_for(sequence, num_tokens)

    def _preempt(self, sequence: Sequence) -> None:
        self.tally["preemptions"] += 1
        self.tally["preemptions in flight"] += sequence.num_in_flight > 0
        super()._preempt(sequence)


def suggester_of(schedule: Schedule) -> Suggester:
    """Return a suggester, whose corpora are outputs of the schedule's first requests."""
    if not schedule.has_texts:
        return Suggester()
    k = max(schedule.choices)
    suggester = Suggester.of(SpeculativeConfig(method="suffix", num_speculative_tokens=k))
    for arrival in schedule.arrivals[:2]:
        prompt = list(arrival.request.prompt_token_ids)
        texts = [prompt + expected.tokens for expected in arrival.expected]
        suggester.named("corpus").add(str(arrival.request.request_id), texts)
    return suggester


class CheckedEngine(Engine):
    """An engine on a simulated device, which is checked after every step."""

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
            weights=None,
        )
        script = HashScript(schedule.vocab_size, schedule.drafts_fewer)
        rng = np.random.default_rng([schedule.seed, 1])
        make = partial(SimulatedPrograms, script=script, tally=tally, rng=rng)
        nothing: Any = None
        suggester = suggester_of(schedule)
        super().__init__(
            config, target, drafter, nothing, policy, make_programs=make, suggester=suggester
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
            suggester=suggester,
        )
        self.scheduler.all_shapes = self.repertoire.all_shapes
        self.programs.is_slow = not config.compile_ahead
        self.repertoire.patience_ms = 0.0  # the simulated times are too short to measure

    def step(self) -> list[Sequence]:
        """Run a step as `Engine.step` does, then run all checks."""
        was_in_flight = bool(self._in_flight)
        self._tally["steps with requests held"] += bool(self.scheduler.held)
        touched = super().step()
        if was_in_flight and self.scheduler.last_plan:
            self._tally["steps launched over another"] += 1
        if self.scheduler.has_work:
            is_stuck = not (was_in_flight or self._in_flight or touched or self.scheduler.last_plan)
            self._num_idle = self._num_idle + 1 if is_stuck else 0
            # A request may wait for programs, one step for each program.
            most_idle = 100 if self.scheduler.held else 0
            assert self._num_idle <= most_idle, "requests wait, and nothing will ever run"
        self.check()
        return touched

    def check(self) -> None:
        """Check that slots, pages and snapshots have the right owners, and no request is lost."""
        scheduler, residents = self.scheduler, self.scheduler.residents
        running = residents.running
        assert running == sorted(running)
        slots = [slot_of(sequence) for sequence in running]
        assert sorted([*slots, *residents.free_slots]) == list(range(self.config.max_num_seqs))
        for pool, table in zip(residents.pools, residents.page_tables.swapaxes(0, 1), strict=True):
            assert (table[residents.free_slots] == -1).all()
            held = {s: [page for page in table[slot_of(s)].tolist() if page >= 0] for s in running}
            owners = Counter(page for pages in held.values() for page in pages)
            assert [owners[page] for page in range(pool.num_pages)] == pool._num_owners
            assert set(pool._free) == set(range(pool.num_pages)) - set(owners)
            assert {name: page for page, name in pool._names.items()} == pool._by_name
            pairs = {(page, s.request.request_id) for s, pages in held.items() for page in pages}
            is_shared = len(pairs) > len(owners)
            assert not is_shared or self.config.enable_prefix_caching, "two requests share a page"
            if pool is residents.pages:
                assert all([*s.residency.pages] == pages for s, pages in held.items())
        if (snapshots := scheduler.prefixes.snapshots) is not None:
            ids = [*snapshots._free, *snapshots._by_key.values()]
            assert sorted(ids) == list(range(self.config.num_snapshots)), f"snapshots {ids}"
        leaders = set(residents._pending.values())
        assert leaders <= {s for s in running if not s.residency.is_prefilled}, "waits for nothing"
        waiting = [s for s in scheduler._waiting if not s.is_finished]
        for samples in scheduler._live.values():
            for sequence in samples:
                assert not sequence.is_finished
                places = sum(s is sequence for s in (*running, *waiting))
                is_held = sequence.request.request_id in scheduler.held
                assert places == (not is_held), "lost, or twice"
        num_live = sum(map(len, scheduler._live.values()))
        assert num_live == scheduler.num_running + scheduler.num_waiting

    def _masked_slots(self) -> set[int]:
        """Return the slots of requests with a grammar."""
        return {
            slot_of(sequence)
            for sequence in self.scheduler.residents.running
            if sequence.matcher and not sequence.error and not sequence.is_finished
        }
