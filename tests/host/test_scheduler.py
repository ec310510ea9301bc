"""The scheduler against a device that plays a script: plans are checked as they come."""

import sys
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from specjax.config import EngineConfig
from specjax.host.pages import PageAllocator
from specjax.host.scheduler import DecodePlan, PrefillPlan, Scheduler
from specjax.host.speculation.policy import StaticPolicy
from specjax.request import Request

STOP = 7


@dataclass(frozen=True)
class FewerWhenFull:
    """K falls with the batch size, to see that it is asked with the right one."""

    choices: tuple[int, ...] = (0, 1, 2, 3)

    def choose(self, batch_size):
        return max(0, 3 - batch_size // 2)


def make_scheduler(config, policy):
    return Scheduler(
        num_slots=config.max_num_seqs,
        pages=PageAllocator(config.num_pages),
        page_size=config.page_size,
        token_budget=config.max_num_batched_tokens,
        decode_batches=config.decode_batches,
        prefill_widths=config.prefill_widths,
        policy=policy,
    )


def small_config(**changes):
    sizes = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "page_size": 8,
        "num_pages": 32,
    }
    return EngineConfig(**(sizes | changes))


def make_request(i, prompt_length, max_tokens):
    return Request(i, tuple(range(100, 100 + prompt_length)), max_tokens, 0.0, 0, (STOP,))


@dataclass
class ScriptedDevice:
    """Gives each request the tokens of its script, a few at a time, and checks every plan.

    Like the device it knows what a step gave at once, while the scheduler learns it later.
    """

    config: EngineConfig
    scheduler: Scheduler
    scripts: dict[int, list[int]]
    rng: np.random.Generator
    num_given: Counter = field(default_factory=Counter)
    num_prefilled: Counter = field(default_factory=Counter)
    num_pending: Counter = field(default_factory=Counter)  # steps that give tokens, not committed
    resident: dict[int, object] = field(default_factory=dict)  # from first chunk to commit
    admitted: list[int] = field(default_factory=list)

    def run(self, plan):
        """The tokens of each row of the plan."""
        rows = plan.sequences if isinstance(plan, DecodePlan) else plan.chunks
        assert 0 < len(rows) <= plan.batch
        sequences = [getattr(row, "sequence", row) for row in rows]
        assert len({id(sequence) for sequence in sequences}) == len(sequences)
        for sequence in sequences:
            self._check_residence(sequence)
        run = self._decode if isinstance(plan, DecodePlan) else self._prefill
        outputs = run(plan)
        self.num_pending += self._giving(plan)
        return plan, outputs

    def commit(self, plan, outputs):
        """The scheduler learns what a step gave; returns the requests that finished."""
        finished = self.scheduler.commit(plan, outputs)
        self.num_pending -= self._giving(plan)
        for sequence in finished:
            assert sequence.output == self.scripts[sequence.request.request_id]
            del self.resident[sequence.request.request_id]
        return [sequence.request.request_id for sequence in finished]

    def may_go_on(self, sequence):
        """Whether a step more could give something: each one pending gives one token at least."""
        certain = len(sequence.output) + self.num_pending[sequence.request.request_id]
        return certain < sequence.request.max_tokens

    def expected_turn(self, last):
        """The kind of the next step: neither prompts nor outputs wait for two of the other kind."""
        residents = self.resident.values()
        may_decode = any(s.is_prefilled and self.may_go_on(s) for s in residents)
        if may_decode and isinstance(last, PrefillPlan):
            return DecodePlan
        if any(not s.is_prefilled for s in residents):
            return PrefillPlan
        # A request that is admitted just now is not among the residents yet.
        return DecodePlan | PrefillPlan if may_decode else PrefillPlan | None

    def _giving(self, plan):
        rows = plan.sequences if isinstance(plan, DecodePlan) else plan.chunks
        rows = [getattr(row, "sequence", row) for row in rows if getattr(row, "is_last", True)]
        return Counter(sequence.request.request_id for sequence in rows)

    def _check_residence(self, sequence):
        request = sequence.request
        if request.request_id not in self.resident:
            assert request.request_id not in self.admitted, "a finished request was scheduled"
            self.admitted.append(request.request_id)
            self.resident[request.request_id] = sequence
        assert self.resident[request.request_id] is sequence
        owners = Counter(page for s in self.resident.values() for page in s.pages)
        assert not owners or max(owners.values()) == 1
        assert set(owners) <= set(range(self.config.num_pages))
        slots = [s.slot for s in self.resident.values()]
        assert len(set(slots)) == len(slots) and set(slots) <= set(range(self.config.max_num_seqs))
        # The last token is put out without being run.
        room = len(sequence.pages) * self.config.page_size
        assert request.max_length - 1 <= room < request.max_length - 1 + self.config.page_size

    def _prefill(self, plan):
        assert (plan.batch, plan.width) in self.config.prefill_shapes
        budget = self.config.max_num_batched_tokens
        assert plan.batch == 1 or plan.batch * plan.width <= budget
        given = []
        for chunk in plan.chunks:
            i = chunk.sequence.request.request_id
            prompt = chunk.sequence.request.prompt_token_ids
            assert chunk.start == self.num_prefilled[i]
            assert 0 < chunk.count <= plan.width
            self.num_prefilled[i] += chunk.count
            assert self.num_prefilled[i] <= len(prompt)
            assert chunk.is_last == (self.num_prefilled[i] == len(prompt))
            given.append(self._give(i, 1) if chunk.is_last else [])
        return given

    def _decode(self, plan):
        assert plan.batch in self.config.decode_batches
        assert plan.batch < 2 * len(plan.sequences)
        assert plan.k == self.scheduler.policy.choose(len(plan.sequences))
        given = []
        for sequence in plan.sequences:
            i = sequence.request.request_id
            assert self.may_go_on(sequence), "a step that can give nothing"
            assert self.num_prefilled[i] == len(sequence.request.prompt_token_ids)
            given.append(self._give(i, int(self.rng.integers(1, plan.k + 2))))
        return given

    def _give(self, i, count):
        tokens = self.scripts[i][self.num_given[i] :][:count]
        self.num_given[i] += len(tokens)
        return tokens


def play(rng, is_async):
    """A random engine serves random requests that arrive at random times."""
    max_model_len = int(rng.integers(2, 90))
    page_size = int(rng.integers(1, 17))
    pages_per_seq = -(-max_model_len // page_size)
    max_num_seqs = int(rng.integers(1, 9))
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=int(rng.integers(32, 130)),
        page_size=page_size,
        num_pages=int(rng.integers(pages_per_seq, pages_per_seq * (max_num_seqs + 1) + 1)),
    )
    policy = [StaticPolicy(0), StaticPolicy(int(rng.integers(1, 5))), FewerWhenFull()]
    scheduler = make_scheduler(config, policy[rng.integers(3)])
    requests, scripts = [], {}
    for i in range(int(rng.integers(1, 13))):
        prompt_length = int(rng.integers(1, max_model_len))
        request = make_request(
            i, prompt_length, int(rng.integers(1, max_model_len - prompt_length + 1))
        )
        script = rng.integers(10, 50, request.max_tokens).tolist()
        if rng.random() < 0.5:  # ends early, by a stop id
            script = script[: rng.integers(1, len(script) + 1)]
            script[-1] = STOP
        requests.append(request)
        scripts[i] = script

    device = ScriptedDevice(config, scheduler, scripts, rng)
    arrivals = requests[::-1]
    finished, in_flight, last, num_steps = [], None, None, 0
    while arrivals or scheduler.has_work or in_flight:
        while arrivals and (rng.random() < 0.3 or not scheduler.has_work):
            scheduler.add(arrivals.pop())
        expected = device.expected_turn(last)
        last = plan = scheduler.schedule()
        assert isinstance(plan, expected)
        previous, in_flight = in_flight, device.run(plan) if plan else None
        due = [previous] if is_async else [in_flight]
        for launched in filter(None, due):
            finished += device.commit(*launched)
        if not is_async:
            in_flight = None
        num_steps += 1
        # Each prompt token and each output token takes at most one step of its own, and each of
        # those may wait for one of the other kind.
        assert num_steps <= 4 + 4 * sum(r.max_length for r in requests)
    assert sorted(finished) == [r.request_id for r in requests]
    assert device.admitted == sorted(device.admitted), "not first come, first served"
    assert scheduler.pages.num_free == config.num_pages
    assert scheduler.num_running == 0


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(10))
def test_random_schedules(seed, is_async):
    """100 schedules each: every request gets its script, and every plan keeps the rules."""
    rng = np.random.default_rng([seed, is_async])
    for _ in range(100):
        play(rng, is_async)


def test_prefill_and_decode_take_turns_from_admission_to_finish():
    scheduler = make_scheduler(small_config(max_num_seqs=2), StaticPolicy(2))
    for i, length in enumerate([40, 3, 5]):
        scheduler.add(make_request(i, length, 4))
    plan = scheduler.schedule()
    assert [(c.start, c.count) for c in plan.chunks] == [(0, 40)]
    assert (plan.batch, plan.width) == (1, 64)
    assert scheduler.num_running == 2  # the third waits for a slot
    scheduler.commit(plan, [[50]])
    plan = scheduler.schedule()
    assert isinstance(plan, DecodePlan) and (plan.batch, plan.k) == (1, 2)
    scheduler.commit(plan, [[51, 52, 53]])
    plan = scheduler.schedule()  # the freed slot goes to the third; both prompts fit one step
    assert [c.count for c in plan.chunks] == [3, 5] and (plan.batch, plan.width) == (2, 32)
    assert scheduler.num_running == 2


def test_no_step_is_launched_that_could_give_nothing():
    """With two tokens to come and a step in flight, the next step is the last one worth it."""
    scheduler = make_scheduler(small_config(), StaticPolicy(3))
    scheduler.add(make_request(0, 3, 2))
    assert isinstance(scheduler.schedule(), PrefillPlan)  # gives one
    assert isinstance(scheduler.schedule(), DecodePlan)  # gives at least one
    assert scheduler.schedule() is None
    assert scheduler.has_work


def test_an_output_of_one_token_needs_no_decode_step():
    scheduler = make_scheduler(small_config(), StaticPolicy(3))
    scheduler.add(make_request(0, 3, 1))
    plan = scheduler.schedule()
    assert scheduler.schedule() is None
    (sequence,) = scheduler.commit(plan, [[9]])
    assert sequence.output == [9] and not scheduler.has_work


def test_a_request_waits_for_its_pages_and_is_not_overtaken():
    scheduler = make_scheduler(small_config(num_pages=10), StaticPolicy(0))
    for i, length in enumerate([50, 50, 2]):
        scheduler.add(make_request(i, length, 8))
    plan = scheduler.schedule()
    assert [c.sequence.request.request_id for c in plan.chunks] == [0]
    assert scheduler.num_running == 1 and scheduler.pages.num_free == 2
    (first,) = scheduler.commit(plan, [[STOP]])
    assert first.output == [STOP]
    assert [c.sequence.request.request_id for c in scheduler.schedule().chunks] == [1]


@pytest.mark.parametrize("num_steps", range(5))
def test_drop_all_frees_everything(num_steps):
    config = small_config()
    scheduler = make_scheduler(config, StaticPolicy(1))
    for i in range(9):
        scheduler.add(make_request(i, 20, 5))
    for _ in range(num_steps):
        scheduler.schedule()
    scheduler.drop_all()
    assert not scheduler.has_work and scheduler.num_running == 0
    assert scheduler.pages.num_free == config.num_pages
    for i in range(4):
        scheduler.add(make_request(i, 10, 5))
    slots = {chunk.sequence.slot for _ in range(4) for chunk in prefills(scheduler)}
    assert slots == set(range(4))


def prefills(scheduler):
    plan = scheduler.schedule()
    return plan.chunks if isinstance(plan, PrefillPlan) else ()


def count_lines(function):
    """Lines of Python that a call runs: its cost, whatever else the machine does."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def decoding(num_running, num_waiting=0):
    config = small_config(
        max_num_seqs=num_running, max_num_batched_tokens=32 * num_running, num_pages=8 * num_running
    )
    scheduler = make_scheduler(config, StaticPolicy(1))
    for i in range(num_running):
        scheduler.add(make_request(i, 20, 30))
    plan = scheduler.schedule()
    scheduler.commit(plan, [[9]] * num_running)
    for i in range(num_waiting):
        scheduler.add(make_request(num_running + i, 20, 30))
    return scheduler


def test_cost_of_a_step_grows_linearly_with_what_runs():
    def cost(num_running):
        scheduler = decoding(num_running)

        def step():
            plan = scheduler.schedule()
            assert len(plan.sequences) == num_running
            scheduler.commit(plan, [[9, 9]] * num_running)

        return count_lines(step)

    assert cost(64) > 64
    assert cost(512) < 8.5 * cost(64)


def test_cost_of_a_step_does_not_grow_with_what_waits():
    assert count_lines(decoding(8, 10).schedule) == count_lines(decoding(8, 5000).schedule)
