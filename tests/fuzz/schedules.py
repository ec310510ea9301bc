"""Random schedules: an engine on a simulated device, under all that may happen to it.

A schedule is made from its seed alone: an engine's sizes and modes, requests that share what they
can, and when they come, are aborted, fail, or find the device failing. Running it checks, after
every step, what the scheduler did against the device and what came out against each request run
alone, which is a function of two lines here.
"""

from collections import Counter, deque
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from simulated_device import EMPTY, SimulatedDevice, fold, mask_of, next_token

from specjax.batch import Layout, Part
from specjax.config import EXACT_CHUNK, EngineConfig
from specjax.engine import Engine
from specjax.host.prefix_cache import Key, SnapshotIndex
from specjax.host.scheduler import DecodePlan, PrefillPlan, Scheduler, StepPlan
from specjax.host.sequence import RowOutput, Sequence
from specjax.metrics import Recorder
from specjax.request import Logprob, Request
from specjax.sampling_params import SamplingParams, StructuredOutputs

PROGRAMS = ("admit", "prefill", "begin", "decode", "propose", "extend", "settle", "restore", "read")
Rng = np.random.Generator


@dataclass(frozen=True)
class Policy:
    """Any of `choices`, by a generator of its own."""

    choices: tuple[int, ...]
    rng: Rng

    def choose(self, batch_size: int) -> int:
        """K, whatever the batch size."""
        return int(self.rng.choice(self.choices))


@dataclass
class Watch:
    """Looks at an output token by token: ends it with the `last` one, or fails there."""

    last: int
    fails: bool
    stop_reason: str | None = None
    text: str = ""
    seen: list[int] = field(default_factory=list)

    def append(self, tokens: Iterable[int]) -> int | None:
        """See `TextWatch.append`."""
        self.seen += tokens
        if len(self.seen) != self.last:
            return None
        if self.fails:
            raise RuntimeError("a text that cannot be read")
        self.stop_reason = "text"
        return 1


@dataclass
class Grammar:
    """Follows an output, which is complete with the `last` token, or cannot go on from there."""

    last: int
    fails: bool
    num_words: int
    fails_late: bool = False  # when masks are asked for, which may be never
    seen: list[int] = field(default_factory=list)
    is_finished: bool = False
    has_failed_late: bool = False

    def accept(self, tokens: Iterable[int]) -> None:
        """See `Matcher.accept`."""
        self.seen += tokens
        if len(self.seen) == self.last and self.fails:
            raise ValueError("a token that the grammar does not permit")
        self.is_finished = len(self.seen) >= self.last and not self.fails_late

    def masks(self, drafts: list[int]) -> np.ndarray:
        """What tells the histories apart after which masks are wanted."""
        if self.fails_late and len(self.seen) >= self.last:
            self.has_failed_late = True
            raise ValueError("a grammar that has come to nothing")
        digest = fold(EMPTY, self.seen)
        words = [mask_of(fold(digest, drafts[:i])) for i in range(len(drafts) + 1)]
        return np.array([[word] * self.num_words for word in words], np.int32)


@dataclass(frozen=True)
class Expected:
    """What a sample comes to if it is not aborted."""

    tokens: list[int]
    reason: str


@dataclass(frozen=True)
class Arrival:
    """A request, when it comes, and what its samples come to."""

    step: int
    request: Request
    expected: list[Expected]


@dataclass(frozen=True)
class Schedule:
    """All of a run that is not the engine's own doing."""

    seed: int
    config: EngineConfig
    choices: tuple[int, ...]
    draft_slots: int
    is_recurrent: bool
    drafts_fewer: bool
    vocab_size: int
    arrivals: list[Arrival]
    disturbances: dict[str, float]  # how likely each is before a step

    @property
    def is_undisturbed(self) -> bool:
        """Whether all that comes out is the device's doing, K included."""
        requests = [arrival.request for arrival in self.arrivals]
        host_ends = any(r.watch_text or r.follow_grammar for r in requests)
        return len(self.choices) == 1 and not host_ends and not self.disturbances

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples, prompts included."""
        return sum(a.request.max_length * len(a.request.seeds) for a in self.arrivals)

    def __str__(self) -> str:
        lines = [
            f"schedule {self.seed}: {self.config}",
            f"K of {self.choices}, draft_slots={self.draft_slots}, "
            f"is_recurrent={self.is_recurrent}, {self.disturbances}",
        ]
        for arrival in self.arrivals:
            r = arrival.request
            lines.append(
                f"step {arrival.step}: request {r.request_id}, {len(r.prompt_token_ids)} tokens, "
                f"max_tokens={r.max_tokens}, seeds={r.seeds}, priority={r.priority}: "
                + ", ".join(f"{len(e.tokens)} {e.reason}" for e in arrival.expected)
            )
        return "\n".join(lines)


def run_alone(request: Request, seed: int, vocab_size: int) -> Expected:
    """A sample without anything beside it, and without an engine."""
    digest, tokens = fold(EMPTY, request.prompt_token_ids), []
    watches = [make() for make in (request.watch_text, request.follow_grammar) if make]
    lasts = {w.last: w.fails for w in watches if not getattr(w, "fails_late", False)}
    while len(tokens) < request.max_tokens:
        tokens.append(next_token(digest, seed, vocab_size))
        digest = fold(digest, tokens[-1:])
        if lasts.get(len(tokens)):
            return Expected(tokens, "error")
        if tokens[-1] in request.stop_ids or len(tokens) in lasts:
            return Expected(tokens, "stop")
    return Expected(tokens, "length")


def make_schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = np.random.default_rng(seed)
    is_recurrent = chance(rng, 0.45)
    choices = (int(rng.integers(0, 6)),)
    if chance(rng, 0.5):
        choices = tuple(sorted({int(k) for k in rng.integers(0, 6, 3)}))
    draft_slots = int(rng.integers(0, 4)) * chance(rng, 0.5)
    config = make_config(rng, max(choices) + 1, draft_slots, is_recurrent)
    vocab_size = int(rng.choice([2, 3, 8, 40]))
    likely = {"abort": 0.05, "preempt": 0.1, "clear": 0.02, "fail": 0.05, "reset": 0.01}
    disturbances = {}
    if chance(rng, 0.6):
        disturbances = {name: p for name, p in likely.items() if chance(rng, 0.4)}
    arrivals = make_arrivals(rng, config, vocab_size, "fail" in disturbances)
    return Schedule(
        seed,
        config,
        choices,
        draft_slots,
        is_recurrent,
        chance(rng, 0.2),
        vocab_size,
        arrivals,
        disturbances,
    )


def make_config(rng: Rng, least: int, draft_slots: int, is_recurrent: bool) -> EngineConfig:
    """An engine in which rounds of `least` tokens fit, more often than not just so."""
    max_model_len = int(rng.integers(2, 80))
    page_size = int(rng.integers(1, 17 if chance(rng, 0.5) else 5))
    pages_per_seq = -(-max_model_len // page_size)
    max_num_seqs = int(rng.integers(1, 9))
    num_pages = pages_per_seq + int(rng.integers(0, 4))
    if chance(rng, 0.4):
        num_pages = int(rng.integers(pages_per_seq, pages_per_seq * (max_num_seqs + 1) + 1))
    exact = chance(rng, 0.2)
    if exact:
        least = max(least, min(EXACT_CHUNK, max_model_len))
    scheduled = least + int(rng.integers(0, rng.choice([8, 40, 160])))
    batched = scheduled + draft_slots + int(rng.integers(0, 40)) * chance(rng, 0.5)
    return EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        max_num_scheduled_tokens=scheduled,
        page_size=page_size,
        num_pages=num_pages,
        enable_prefix_caching=chance(rng, 0.8),
        num_snapshots=int(rng.integers(0, 4)) if is_recurrent else None,
        scheduling_policy="priority" if chance(rng, 0.3) else "fcfs",
        async_scheduling=chance(rng, 0.75),
        steps_per_dispatch=int(rng.integers(1, 5)) if chance(rng, 0.5) and not exact else 1,
        exact=exact,
        max_logprobs=0,
    )


def make_arrivals(rng: Rng, config: EngineConfig, vocab_size: int, fails: bool) -> list[Arrival]:
    """Requests in the order in which they come, many of which begin alike."""
    arrivals: list[Arrival] = []
    step, gap = 0, float(rng.choice([0, 1, 1, 5]))
    families = [rng.integers(0, vocab_size, config.max_model_len).tolist() for _ in range(2)]
    for number in range(int(rng.integers(1, 11))):
        prompt = make_prompt(rng, config, vocab_size, families, arrivals)
        request = make_request(rng, config, vocab_size, number, prompt, fails)
        if arrivals and chance(rng, 0.3):  # the same draws, so that outputs are shared as well
            seeds = rng.permutation(arrivals[-1].request.seeds)[: len(request.seeds)]
            others = request.seeds[len(seeds) :]
            request = replace(request, seeds=(*map(int, seeds), *others))
        expected = [run_alone(request, seed, vocab_size) for seed in request.seeds]
        arrivals.append(Arrival(step, request, expected))
        step += int(rng.poisson(gap))
    return arrivals


def make_prompt(
    rng: Rng,
    config: EngineConfig,
    vocab_size: int,
    families: list[list[int]],
    arrivals: list[Arrival],
) -> list[int]:
    """A prompt of its own, or one that begins as another does, or as prompt and output did."""
    most = config.max_model_len - 1
    # Where pages are few, short prompts get in side by side, and outputs then run out of them.
    is_tight = config.num_pages < 2 * config.pages_per_seq
    part = rng.choice([1, 4, 8] if is_tight else [1, 1, 4])
    length = int(rng.integers(0, max(most // part, 1))) + 1
    fresh = rng.integers(0, vocab_size, length).tolist()
    how = rng.choice(["fresh", "family", "branch", "longer", "same", "same"])
    if how == "fresh" or (how != "family" and not arrivals):
        return fresh
    if how == "family":
        shared = families[rng.integers(len(families))][: rng.integers(1, length + 1)]
        return [*shared, *fresh][:length]
    earlier = arrivals[rng.integers(len(arrivals))]
    known = list(earlier.request.prompt_token_ids)
    if how == "longer":
        known += earlier.expected[0].tokens
        known += fresh[: rng.integers(0, 4)]
    if how == "branch":  # as like as not where a page ends
        size = config.page_size if chance(rng, 0.5) else 1
        known = known[: int(rng.integers(0, len(known) + 1)) // size * size] + fresh
    return known[:most]


def make_request(
    rng: Rng,
    config: EngineConfig,
    vocab_size: int,
    number: int,
    prompt: list[int],
    fails: bool,
) -> Request:
    """A request for a continuation of `prompt`."""
    room = config.max_model_len - len(prompt)
    max_tokens = room if chance(rng, 0.5) else int(rng.integers(1, room + 1))
    count = int(rng.integers(2, 5)) if chance(rng, 0.25) else 1
    ends = partial(int, rng.integers(1, max_tokens + 1)), chance(rng, 0.3)
    watch = grammar = structured = None
    if chance(rng, 0.15):
        watch = partial(Watch, ends[0](), ends[1])
    elif chance(rng, 0.1):
        fails_late = not ends[1] and chance(rng, 0.3)
        grammar = partial(Grammar, ends[0](), ends[1], -(-vocab_size // 32), fails_late)
        structured = StructuredOutputs(choice=["a"])
    wants_prompt = chance(rng, 0.1) and not config.exact
    params = SamplingParams(
        n=count,
        logprobs=0 if chance(rng, 0.2) else None,
        prompt_logprobs=0 if wants_prompt else None,
        structured_outputs=structured,
        logits_processors=[_unchanged] if fails and chance(rng, 0.5) else (),
    )
    return Request(
        number,
        tuple(prompt),
        params,
        max_tokens,
        tuple(int(seed) for seed in rng.integers(0, 2**32, count)),
        tuple({int(i) for i in rng.integers(0, vocab_size, rng.integers(1, 3))})
        if chance(rng, 0.3)
        else (),
        processor=0 if params.logits_processors else -1,
        watch_text=watch,
        follow_grammar=grammar,
        priority=int(rng.integers(-1, 2)) if config.scheduling_policy == "priority" else 0,
    )


def chance(rng: Rng, probability: float) -> bool:
    """Whether something happens."""
    return bool(rng.random() < probability)


def _unchanged(tokens: Any, length: Any, logits: Any) -> Any:
    return logits


class CheckedScheduler(Scheduler):
    """Checks every plan against the budgets and shapes that it was made for."""

    def __init__(self, *arguments: Any, tally: Counter, **options: Any):
        super().__init__(*arguments, **options)
        self.tally = tally
        self.last_plan: StepPlan | None = None
        self.named: dict[Key, tuple[int, int]] = {}  # the digests that end a page, by its name
        self._digests: dict[Sequence, list[int]] = {}
        self._left_out: Counter = Counter()

    def schedule(self) -> StepPlan | None:
        """See `Scheduler.schedule`."""
        num_preemptions = self.num_preemptions
        plan = super().schedule()
        config, self.last_plan = self.config, plan
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
            if plan.decode.num_rounds > 1:
                is_alone = not plan.prefill and num_preemptions == self.num_preemptions
                assert is_alone, "rounds at the cost of others"
        assert plan.num_tokens == num_tokens <= config.max_num_scheduled_tokens
        assert num_tokens + len(sequences) * self._draft_slots <= config.max_num_batched_tokens
        self._check_turns(plan, sequences)
        self.tally["mixed steps"] += len(plan.parts) == 2
        return plan

    def _check_prefill(self, prefill: PrefillPlan) -> None:
        assert (prefill.batch, prefill.width) in self.config.prefill_shapes
        assert 0 < len(prefill.chunks) <= prefill.batch
        for chunk in prefill.chunks:
            assert 0 < chunk.count <= prefill.width
            if self.config.exact:
                assert chunk.count == min(chunk.sequence.goal - chunk.start, prefill.width)
        self.tally["chunks side by side"] += len(prefill.chunks) > 1

    def _check_decode(self, decode: DecodePlan) -> None:
        assert decode.batch in self.config.decode_batches
        assert 0 < len(decode.sequences) <= decode.batch
        assert decode.num_drafts in self.policy.choices and decode.num_drafts <= decode.k
        assert decode.k == (max(self.policy.choices) if self.config.exact else decode.num_drafts)
        assert 1 <= decode.num_rounds <= self.config.steps_per_dispatch
        for sequence in decode.sequences:
            certain = sequence.num_output + sequence.num_in_flight - decode.num_rounds
            assert certain < sequence.request.max_tokens, "a round that gives nothing"
        if decode.num_rounds > 1:
            assert not any(sequence.matcher for sequence in decode.sequences)
            assert not (self._free_slots and any(not s.is_finished for s in self._waiting))
            self.tally["rounds in one dispatch"] += 1

    def _check_turns(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        """Among equals, nobody who needs nothing but a part of the budget is left out for long."""
        if self.config.scheduling_policy != "fcfs":
            return
        before, self._left_out = self._left_out, Counter()
        k = max(self.policy.choices)
        for sequence in self._running:
            room = len(sequence.pages) * self.config.page_size
            has_room = room >= min(sequence.most_computed + k + 1, sequence.request.max_length - 1)
            may_run = not sequence.is_prefilled or (sequence.may_go_on and has_room)
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

    def _name(self, sequence: Sequence, num_pages: int) -> None:
        super()._name(sequence, num_pages)
        digests = self._digests.setdefault(sequence, [EMPTY])
        for token in sequence.token_ids[len(digests) - 1 :]:
            digests.append(fold(digests[-1], [token]))
        for number, key in enumerate(sequence.keys[:num_pages], start=1):
            end = number * self.config.page_size
            held = digests[end], digests[end + 1]
            assert self.named.setdefault(key, held) == held, "one name for two histories"

    def _preempt(self, sequence: Sequence) -> None:
        self.tally["preemptions"] += 1
        self.tally["preemptions in flight"] += sequence.num_in_flight > 0
        super()._preempt(sequence)


class SimulatedEngine(Engine):
    """The engine's own loop around a simulated device."""

    def __init__(self, schedule: Schedule, tally: Counter):
        config = schedule.config
        self.config = config
        self.params: Any = None
        self._schedule = schedule
        self._tally = tally
        self._rng = np.random.default_rng([schedule.seed, 1])
        self._num_snapshots = config.num_snapshots if schedule.is_recurrent else None
        config.check_budgets(max(schedule.choices), schedule.draft_slots)
        self.scheduler = CheckedScheduler(
            config,
            Policy(schedule.choices, np.random.default_rng([schedule.seed, 2])),
            draft_slots=schedule.draft_slots,
            num_snapshots=self._num_snapshots,
            tally=tally,
        )
        self.layout = Layout(
            config.max_num_seqs, config.max_model_len, config.pages_per_seq, schedule.vocab_size
        )
        self._state: Any = self._init_state()
        self._executables: Any = SimpleNamespace(
            variants=[],
            variant_for=lambda needed: needed,
            get=lambda *arguments: self._state.program(*arguments),
            num_compilations=0,
            num_late=0,
            compile_seconds=0.0,
        )
        self._processors = [(_unchanged,)]
        self._max_logprobs = 0
        self._recorder = Recorder()
        self._in_flight = []
        self._result_time = None
        self._num_steps = 0

    @property
    def device(self) -> SimulatedDevice:
        """The device as it is now."""
        return self._state

    def step(self) -> list[Sequence]:
        """See `Engine.step`; then everything is checked."""
        was_in_flight = bool(self._in_flight)
        touched = super().step()
        if was_in_flight and self.scheduler.last_plan:
            self._tally["steps launched over another"] += 1
        if self.scheduler.has_work:
            is_stuck = not (was_in_flight or self._in_flight or touched or self.scheduler.last_plan)
            assert not is_stuck, "requests wait, and nothing will ever run"
        self.check()
        return touched

    def check(self) -> None:
        """Check who owns what, and what the host believes of the device."""
        scheduler, config = self.scheduler, self.config
        running, pages = scheduler._running, scheduler.pages
        owners = Counter(page for sequence in running for page in sequence.pages)
        assert [owners[page] for page in range(config.num_pages)] == pages._num_owners
        assert set(pages._free) == set(range(config.num_pages)) - set(owners)
        assert {name: page for page, name in pages._names.items()} == pages._by_name
        if not config.enable_prefix_caching:
            sharers = {page: s.request.request_id for s in running for page in s.pages}
            assert all(sharers[page] == s.request.request_id for s in running for page in s.pages)
        slots = [sequence.slot for sequence in running]
        assert sorted([*slots, *scheduler._free_slots]) == list(range(config.max_num_seqs))
        for sequence in running:
            self._check_resident(sequence)
        waiting = [s for s in scheduler._waiting if not s.is_finished]
        for samples in scheduler._live.values():
            is_followed = samples[0].index > 0 or samples[0].is_followed
            for sequence in samples:
                assert not sequence.is_finished
                places = sum(s is sequence for s in (*running, *waiting))
                assert places == (sequence.index == 0 or is_followed), "lost, or twice"
        assert sum(map(len, scheduler._live.values())) == scheduler.num_running + (
            scheduler.num_waiting
        )
        self._check_names()
        if (snapshots := scheduler.prefixes.snapshots) is not None:
            self._check_snapshots(snapshots)

    def _check_resident(self, sequence: Sequence) -> None:
        slot = self.device.slots[sequence.slot]
        assert len(set(sequence.pages)) == len(sequence.pages) <= self.config.pages_per_seq
        if not sequence.was_told:
            return
        assert slot.seed == sequence.request.seeds[sequence.index], "another's slot"
        known = min(len(slot.tokens), len(sequence.token_ids))
        assert slot.tokens[:known] == sequence.token_ids[:known]
        assert slot.length is not None
        if not sequence.is_prefilled:
            assert slot.length == sequence.num_computed and not slot.is_active
            return
        assert slot.length <= sequence.most_computed, "further than the host thinks possible"
        if slot.is_active:
            least = len(sequence.token_ids) - 1 + sequence.num_in_flight
            assert least <= slot.length, "not as far as the host thinks certain"

    def _check_names(self) -> None:
        """What can be found is what it is called; other cells are looked at when they are read."""
        device, named = self.device, self.scheduler.named
        for page, key in self.scheduler.pages._names.items():
            last = (page + 1) * self.config.page_size - 1
            held = int(device.target[last]), int(device.drafter[last])
            assert held == named[key], f"page {page} does not hold what it is called"

    def _check_snapshots(self, snapshots: SnapshotIndex) -> None:
        for key, snapshot in snapshots._by_key.items():
            state = self.device.snapshots[snapshot]
            assert state == self.scheduler.named[key][0], "a snapshot is not what it is called"
        ids = [*snapshots._free, *snapshots._by_key.values()]
        assert sorted(ids) == list(range(self.config.num_snapshots)), f"snapshots {ids}"

    def _init_state(self) -> Any:
        schedule = self._schedule
        return SimulatedDevice(
            self.config,
            self.layout,
            self._num_snapshots,
            schedule.drafts_fewer,
            self._tally,
            self._rng,
        )

    def _put(self, array: np.ndarray) -> Any:
        return array.copy()

    def _launch(self, plan: Part) -> Any:
        self._check_writable(plan)
        return super()._launch(plan)

    def _check_writable(self, plan: Part) -> None:
        """Where a step writes, nobody else may look."""
        owners = self.scheduler.pages._num_owners
        for row, sequence in enumerate(plan.sequences):
            assert sequence.is_resident
            if isinstance(plan, PrefillPlan):
                start = plan.chunks[row].start
            else:
                start = self.device.slots[sequence.slot].length or 0
            for page in sequence.pages[start // self.config.page_size :]:
                assert owners[page] == 1, f"page {page} is written to, and has other owners"


@dataclass
class Run:
    """A schedule on its way: who has come, what has been delivered, and what is still expected."""

    schedule: Schedule
    engine: SimulatedEngine
    tally: Counter
    rng: Rng
    samples: dict[Sequence, Expected] = field(default_factory=dict)
    delivered: dict[Sequence, tuple[int, bool]] = field(default_factory=dict)
    ended_by_us: set[Sequence] = field(default_factory=set)

    def add(self, arrival: Arrival) -> None:
        """A request comes; an id that is free again may be taken a second time."""
        request = arrival.request
        live = self.engine.scheduler._live
        others = [s.request.request_id for s in self.samples if s.request.request_id not in live]
        if others and chance(self.rng, 0.1):
            request = replace(request, request_id=others[self.rng.integers(len(others))])
        if request.request_id in live:
            request = replace(request, request_id=("again", arrival.request.request_id))
        for sequence, expected in zip(self.engine.add(request), arrival.expected, strict=True):
            self.samples[sequence] = expected
            self.delivered[sequence] = 0, False
        self.tally["requests"] += 1

    def disturb(self) -> None:
        """Do, perhaps, what may happen between steps."""
        engine = self.engine
        for name, probability in self.schedule.disturbances.items():
            if not chance(self.rng, probability):
                continue
            if name == "abort":
                ids: list[Hashable] = sorted({s.request.request_id for s in self.samples}, key=str)
                if ids:
                    self.end(engine.abort(ids[self.rng.integers(len(ids))]))
            elif name == "preempt":  # as if pages had run out; they keep what they hold
                running = list(engine.scheduler._running)
                if chance(self.rng, 0.5):  # with a prompt half run
                    running = [s for s in running if not s.is_prefilled] or running
                if running:
                    engine.scheduler._preempt(running[self.rng.integers(len(running))])
            elif name == "clear":
                engine.scheduler.prefixes.clear()
            elif name == "fail":
                engine.device.failures.append(str(self.rng.choice(PROGRAMS)))
            elif name == "reset":
                live = [s for samples in engine.scheduler._live.values() for s in samples]
                engine.reset()
                self.end(live)
            self.tally[name] += 1
            engine.check()

    def end(self, sequences: Iterable[Sequence]) -> None:
        """These are not to get any further."""
        for sequence in sequences:
            assert sequence.finish_reason == "abort" and not sequence.is_resident
            assert sequence not in self.ended_by_us
            self.ended_by_us.add(sequence)
            self.delivered[sequence] = sequence.num_output, True
            self.check_output(sequence)
            self.tally["aborted"] += 1

    def step(self) -> None:
        """One step of the engine, and all that it delivered."""
        live = [s for samples in self.engine.scheduler._live.values() for s in samples]
        has_failed = False
        try:
            touched = self.engine.step()
        except jax.errors.JaxRuntimeError:
            has_failed = True
            # Tokens that were read before the failure have not been told of.
            self.end([s for s in live if s.finish_reason == "abort"])
            touched = [s for s in live if s.finish_reason != "abort"]
            assert all(s.is_finished for s in touched)
        has_failed |= any(map(self._has_failed, touched))
        self.tally["failures met"] += has_failed
        assert self.tally["failures met"] <= self.tally["fail"], "a failure out of nothing"
        assert len(set(touched)) == len(touched) or "fail" in self.schedule.disturbances
        for sequence in live:
            if sequence in self.ended_by_us:
                continue
            now = sequence.num_output, sequence.is_finished
            has_changed = now != self.delivered[sequence]
            assert has_changed == (sequence in set(touched)), "told of nothing, or not told"
            self.delivered[sequence] = now
            if has_changed:
                self.check_output(sequence)
        self.tally["steps"] += 1

    def check_output(self, sequence: Sequence) -> None:
        """What has come so far must be what the request alone comes to."""
        expected, output = self.samples[sequence], sequence.output
        reason = sequence.finish_reason
        assert output == expected.tokens[: len(output)], f"output of {_name(sequence)}"
        if sequence.request.params.logprobs is not None:
            start = sequence.num_prompt_tokens
            assert sequence.logprobs == [_told(start + i, t) for i, t in enumerate(output)]
        if reason in ("abort", None) or (reason == "error" and self._has_failed(sequence)):
            return
        if getattr(sequence.matcher, "has_failed_late", False):
            assert reason == "error" and isinstance(sequence.error, ValueError)
            return
        assert reason == expected.reason, f"{_name(sequence)} ended by {reason}: {sequence.error}"
        if reason == "error":
            assert isinstance(sequence.error, RuntimeError | ValueError)
            assert len(output) < len(expected.tokens)
        else:
            assert output == expected.tokens, f"{_name(sequence)} has {len(output)} tokens"
            for watch in (sequence.watch, sequence.matcher):
                assert watch is None or watch.seen == output
        if sequence.request.params.prompt_logprobs is not None:
            prompt = sequence.request.prompt_token_ids
            told = [_told(i, token) for i, token in enumerate(prompt)]
            assert sequence.prompt_logprobs == [None, *told[1:]]
        self.tally["finished"] += 1
        self.tally["tokens"] += len(output)

    def _has_failed(self, sequence: Sequence) -> bool:
        return isinstance(sequence.error, jax.errors.JaxRuntimeError)

    def check_end(self) -> None:
        """Nobody owns anything, and everybody has got what was theirs."""
        scheduler, config = self.engine.scheduler, self.engine.config
        self.engine.drain()
        assert not self.engine._in_flight
        assert not scheduler.has_work and not scheduler._running and not scheduler._live
        assert scheduler.pages.num_free == config.num_pages
        assert len(scheduler._free_slots) == config.max_num_seqs
        assert all(sequence.is_finished for sequence in self.samples)
        metrics = self.engine.metrics()
        assert metrics.num_generation_tokens == sum(s.num_output for s in self.samples)
        if {"fail", "reset"} & self.schedule.disturbances.keys():
            return  # what was in flight was lost
        assert not any(s.num_in_flight or s.most_in_flight for s in self.samples)
        reasons = Counter(sequence.finish_reason for sequence in self.samples)
        assert metrics.requests_finished == reasons
        assert metrics.num_prompt_tokens == self.tally["prompt tokens run"]


def run_schedule(schedule: Schedule) -> Run:
    """Run a schedule to its end.

    Raises:
        AssertionError: something is not as it should be.
    """
    tally: Counter = Counter()
    engine = SimulatedEngine(schedule, tally)
    run = Run(schedule, engine, tally, np.random.default_rng([schedule.seed, 3]))
    coming = deque(schedule.arrivals)
    most = coming[-1].step + 50 + 4 * schedule.num_tokens
    step = 0
    while coming or engine.has_work:
        while coming and coming[0].step <= step:
            run.add(coming.popleft())
        if not engine.has_work and chance(run.rng, 0.5):
            step = coming[0].step
            continue
        run.disturb()
        run.step()
        step += 1
        assert step <= most, f"{most} steps were not enough"
    run.check_end()
    tally["prefix hits"] += engine.scheduler.num_found
    tally["schedules"] += 1
    return run


def check_schedule(seed: int) -> Counter:
    """Run the schedule of a seed, and count what happened.

    Where all that comes out is the device's doing it is run a second time, in step with the device
    or ahead of it: rounds must be the same ones.
    """
    schedule = make_schedule(seed)
    try:
        run = run_schedule(schedule)
        if schedule.is_undisturbed:
            is_async = not schedule.config.async_scheduling
            config = replace(schedule.config, async_scheduling=is_async)
            other = run_schedule(replace(schedule, config=config))
            assert _totals(run) == _totals(other), "rounds differ with steps in flight"
    except Exception as error:
        error.add_note(
            f"{schedule}\nAgain: python benchmarks/fuzz_schedules.py --seed {seed} --schedules 1 "
            "--real 0"
        )
        raise
    return run.tally


def _totals(run: Run) -> tuple[int, ...]:
    metrics = run.engine.metrics()
    return (
        metrics.num_generation_tokens,
        metrics.num_drafts,
        metrics.num_draft_tokens,
        metrics.num_accepted_tokens,
    )


def _told(position: int, token: int) -> dict[int, Logprob]:
    return {token: Logprob(-float(position), token)}


def _name(sequence: Sequence) -> str:
    return f"request {sequence.request.request_id}.{sequence.index}"
