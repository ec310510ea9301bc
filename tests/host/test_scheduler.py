"""The scheduler against a device that plays a script: plans are checked as they come.

The device keeps a pool, and knows of every place in it who wrote it last; whoever reads it must
find the tokens of its own prompt and output there.
"""

import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from specjax.config import EngineConfig
from specjax.host.pages import PageAllocator
from specjax.host.scheduler import DecodePlan, PrefillPlan, Scheduler
from specjax.host.sequence import RowOutput
from specjax.host.speculation.policy import StaticPolicy
from specjax.metrics import Recorder
from specjax.request import Request
from specjax.sampling_params import SamplingParams

STOP = 7


@dataclass(frozen=True)
class FewerWhenFull:
    """K falls with the batch size, to see that it is asked with the right one."""

    choices: tuple[int, ...] = (0, 1, 2, 3)

    def choose(self, batch_size):
        return max(0, 3 - batch_size // 2)


@dataclass
class CountingWatch:
    """Ends an output with its `last`-th token, as a text might: only the host knows."""

    last: int
    num_seen: int = 0
    stop_reason: str | None = None

    def append(self, tokens):
        assert self.stop_reason is None, "it was shown more after it had stopped"
        self.num_seen += len(tokens)
        if self.num_seen < self.last:
            return None
        self.stop_reason = "text"
        return self.last - (self.num_seen - len(tokens))


def make_scheduler(config, policy, prefill_shapes=None):
    return Scheduler(
        num_slots=config.max_num_seqs,
        pages=PageAllocator(config.num_pages),
        page_size=config.page_size,
        decode_batches=config.decode_batches,
        prefill_shapes=prefill_shapes or config.prefill_shapes,
        policy=policy,
        fixed_k=max(policy.choices) if config.exact else None,
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


def make_request(i, prompt_length, max_tokens, *, num_samples=1, cut=None):
    """A request whose text, if `cut` is given, ends with that token of the output."""
    return Request(
        i,
        tuple(range(100, 100 + prompt_length)),
        SamplingParams(n=num_samples),
        max_tokens,
        tuple(range(num_samples)),
        (STOP,),
        watch_text=cut and partial(CountingWatch, cut),
    )


def commit(scheduler, plan, *rows):
    return scheduler.commit(plan, [RowOutput(list(tokens)) for tokens in rows])


def name_of(sequence):
    return sequence.request.request_id, sequence.index


@dataclass
class ScriptedDevice:
    """Gives each sample the tokens of its script, a few at a time, and checks every plan.

    Like the device it knows what a step gave at once, while the scheduler learns it later. Samples
    go by (request id, index).
    """

    config: EngineConfig
    prefill_shapes: tuple[tuple[int, int], ...]
    scheduler: Scheduler
    scripts: dict[tuple[int, int], list[int]]
    cuts: dict[int, int | None]
    rng: np.random.Generator
    kv: np.ndarray  # i64[pages, page_size], who wrote there
    recorder: Recorder = field(default_factory=Recorder)
    num_given: Counter = field(default_factory=Counter)
    num_prefilled: Counter = field(default_factory=Counter)
    num_pending: Counter = field(default_factory=Counter)  # steps that give tokens, not committed
    resident: dict[tuple[int, int], object] = field(default_factory=dict)  # first chunk to commit
    admitted: list[tuple[int, int]] = field(default_factory=list)
    prompt_pages: dict[int, list[int]] = field(default_factory=dict)  # of the first samples
    num_partners: Counter = field(default_factory=Counter)  # samples that are still to come
    num_dropped: int = 0  # tokens that came after the host had seen the end

    def run(self, plan):
        """The tokens of each row of the plan."""
        assert 0 < len(plan.sequences) <= plan.batch
        assert len({name_of(sequence) for sequence in plan.sequences}) == len(plan.sequences)
        for sequence in plan.sequences:
            self._check_residence(sequence)
        self._check_pages()
        run = self._decode if isinstance(plan, DecodePlan) else self._prefill
        outputs = run(plan)
        self.num_pending += self._giving(plan)
        return plan, outputs

    def commit(self, plan, outputs):
        """The scheduler learns what a step gave; returns the samples that finished."""
        num_before = [len(sequence.output) for sequence in plan.sequences]
        num_kept, finished = commit(self.scheduler, plan, *outputs)
        self.recorder.record_step(plan, num_kept)
        self.num_pending -= self._giving(plan)
        for i, sequence in enumerate(plan.sequences):
            given, kept = outputs[i], num_kept[i]
            assert len(sequence.output) - num_before[i] == kept <= len(given)
            self.num_dropped += len(given) - kept
            if kept < len(given):
                assert num_before[i] + kept == self.cuts[sequence.request.request_id]
        for sequence in finished:
            cut = self.cuts[sequence.request.request_id]
            assert sequence.output == self.scripts[name_of(sequence)][:cut]
            del self.resident[name_of(sequence)]
        return [name_of(sequence) for sequence in finished]

    def may_go_on(self, sequence):
        """Whether a step more could give something: each one pending gives one token at least."""
        certain = len(sequence.output) + self.num_pending[name_of(sequence)]
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

    def num_shared(self, request):
        """Prompt tokens that lie in pages of all samples: full pages, but for the last token."""
        last = len(request.prompt_token_ids) - 1
        return last - last % self.config.page_size

    def _giving(self, plan):
        rows = plan.sequences if isinstance(plan, DecodePlan) else plan.chunks
        rows = [getattr(row, "sequence", row) for row in rows if getattr(row, "is_last", True)]
        return Counter(map(name_of, rows))

    def _check_residence(self, sequence):
        request, name = sequence.request, name_of(sequence)
        if name not in self.resident:
            assert name not in self.admitted, "a finished sample was scheduled"
            self.admitted.append(name)
            self.resident[name] = sequence
            self._check_start(sequence)
        assert self.resident[name] is sequence
        slots = [s.slot for s in self.resident.values()]
        assert len(set(slots)) == len(slots) and set(slots) <= set(range(self.config.max_num_seqs))
        # The last token is put out without being run.
        room = len(sequence.pages) * self.config.page_size
        assert request.max_length - 1 <= room < request.max_length - 1 + self.config.page_size

    def _check_start(self, sequence):
        """The first sample runs the whole prompt, the others what does not lie in shared pages."""
        request = sequence.request
        if sequence.index == 0:
            self.prompt_pages[request.request_id] = list(sequence.pages)
            return
        self.num_partners[request.request_id] -= 1
        num_shared = self.num_shared(request)
        self.num_prefilled[name_of(sequence)] = num_shared
        num_pages = num_shared // self.config.page_size
        assert sequence.pages[:num_pages] == self.prompt_pages[request.request_id][:num_pages]

    def _check_pages(self):
        """Every page has one owner, or samples of one prompt that share it in the same place."""
        owners = {}
        for sequence in self.resident.values():
            assert len(set(sequence.pages)) == len(sequence.pages)
            for place, page in enumerate(sequence.pages):
                owners.setdefault(page, []).append((sequence.request, place))
        for page, who in owners.items():
            assert 0 <= page < self.config.num_pages
            request, place = who[0]
            assert len(who) == 1 or (place + 1) * self.config.page_size <= self.num_shared(request)
            assert all(other is request and where == place for other, where in who)
        num_free = self.scheduler.pages.num_free
        assert num_free <= self.config.num_pages - len(owners)
        # Pages are also held for those without a step so far, and for samples that wait.
        if self.scheduler.num_running == len(self.resident) and not self.num_partners.total():
            assert num_free == self.config.num_pages - len(owners)

    def _prefill(self, plan):
        assert (plan.batch, plan.width) in self.prefill_shapes
        widths = {width for _, width in self.prefill_shapes}
        prompt = plan.chunks[0].sequence.request.prompt_token_ids
        remaining = min(len(prompt) - plan.chunks[0].start, max(widths))
        assert plan.width == min(width for width in widths if width >= remaining)
        batches = [batch for batch, width in self.prefill_shapes if width == plan.width]
        assert plan.batch == min(batch for batch in batches if batch >= len(plan.chunks))
        given = []
        for chunk in plan.chunks:
            name, request = name_of(chunk.sequence), chunk.sequence.request
            length = len(request.prompt_token_ids)
            assert chunk.start == self.num_prefilled[name]
            first = self.num_shared(request) if chunk.sequence.index else 0
            assert chunk.is_first == (chunk.start == first)
            assert chunk.count == min(length - chunk.start, plan.width) > 0
            self._read(chunk.sequence, chunk.start)
            self._write(chunk.sequence, chunk.start, chunk.count)
            self.num_prefilled[name] += chunk.count
            assert chunk.is_last == (self.num_prefilled[name] == length)
            if chunk.is_last and not chunk.sequence.index:
                self.num_partners[request.request_id] = len(request.seeds) - 1
            given.append(self._give(name, 1) if chunk.is_last else [])
        return given

    def _decode(self, plan):
        batches, num_rows = self.config.decode_batches, len(plan.sequences)
        assert plan.batch == min(batch for batch in batches if batch >= num_rows)
        policy = self.scheduler.policy
        assert plan.num_drafts == policy.choose(num_rows)
        assert plan.k == (max(policy.choices) if self.config.exact else plan.num_drafts)
        given = []
        for sequence in plan.sequences:
            name = name_of(sequence)
            assert self.may_go_on(sequence), "a step that can give nothing"
            length = len(sequence.request.prompt_token_ids)
            assert self.num_prefilled[name] == length
            if self.num_given[name] < len(self.scripts[name]):  # or the device knows of its end
                last = length + self.num_given[name] - 1
                self._read(sequence, last)
                self._write(sequence, last, plan.k + 1)
            given.append(self._give(name, int(self.rng.integers(1, plan.num_drafts + 2))))
        return given

    def _give(self, name, count):
        tokens = self.scripts[name][self.num_given[name] :][:count]
        self.num_given[name] += len(tokens)
        return tokens

    def _writers(self, sequence, positions):
        """A number for each position: the same for the prompt of all samples of a request."""
        request_id, index = name_of(sequence)
        is_output = positions >= len(sequence.request.prompt_token_ids)
        return (100 * request_id + (index + 1) * is_output) * 1000 + positions

    def _read(self, sequence, count):
        found = self.kv[sequence.pages].reshape(-1)[:count]
        np.testing.assert_array_equal(found, self._writers(sequence, np.arange(count)))

    def _write(self, sequence, start, count):
        size = self.config.page_size
        positions = np.arange(start, min(start + count, len(sequence.pages) * size))
        pages = np.array(sequence.pages)[positions // size]
        self.kv[pages, positions % size] = self._writers(sequence, positions)


def random_engine(rng):
    """(config, prefill shapes, scheduler) of a random engine."""
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
        exact=rng.random() < 0.2,
    )
    shapes = config.prefill_shapes
    for batch, width in () if config.exact else shapes:
        assert batch == 1 or batch * width <= config.max_num_batched_tokens
    if rng.random() < 0.2:  # any other will do
        shapes = {tuple(rng.integers(1, [6, 70]).tolist()) for _ in range(rng.integers(1, 6))}
        shapes = tuple(shapes)
    policies = [StaticPolicy(0), StaticPolicy(int(rng.integers(1, 5))), FewerWhenFull()]
    return config, shapes, make_scheduler(config, policies[rng.integers(3)], shapes)


def random_requests(rng, max_model_len):
    """Requests, some of several samples, and the script of each sample."""
    requests, scripts, cuts = [], {}, {}
    for i in range(int(rng.integers(1, 13))):
        prompt_length = int(rng.integers(1, max_model_len))
        max_tokens = int(rng.integers(1, max_model_len - prompt_length + 1))
        cuts[i] = int(rng.integers(1, max_tokens + 1)) if rng.random() < 0.3 else None
        num_samples = int(rng.integers(2, 6)) if rng.random() < 0.3 else 1
        request = make_request(i, prompt_length, max_tokens, num_samples=num_samples, cut=cuts[i])
        requests.append(request)
        for index in range(num_samples):
            script = rng.integers(10, 50, max_tokens).tolist()
            if rng.random() < 0.5:  # ends early, by a stop id
                script = script[: rng.integers(1, len(script) + 1)]
                script[-1] = STOP
            scripts[i, index] = script
    return requests, scripts, cuts


def play(rng, is_async):
    """A random engine serves random requests that arrive at random times; the device afterwards."""
    config, shapes, scheduler = random_engine(rng)
    requests, scripts, cuts = random_requests(rng, config.max_model_len)
    kv = np.full((config.num_pages, config.page_size), -1)
    device = ScriptedDevice(config, shapes, scheduler, scripts, cuts, rng, kv)
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
        assert num_steps <= 4 + 4 * sum(r.max_length * len(r.seeds) for r in requests)
    assert sorted(finished) == sorted(scripts)
    firsts = [i for i, index in device.admitted if index == 0]
    assert firsts == sorted(firsts), "not first come, first served"
    for i in range(len(requests)):
        indices = [index for request_id, index in device.admitted if request_id == i]
        assert indices == sorted(indices)
    assert scheduler.pages.num_free == config.num_pages
    assert scheduler.num_running == 0
    metrics = device.recorder.snapshot(num_compilations=0, num_late=0, compile_seconds=0.0)
    num_tokens = sum(len(scripts[i, index][: cuts[i]]) for i, index in scripts)
    assert metrics.num_generation_tokens == num_tokens
    return device


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(10))
def test_random_schedules(seed, is_async):
    """100 schedules each: every sample gets its script, and every plan keeps the rules."""
    rng = np.random.default_rng([seed, is_async])
    devices = [play(rng, is_async) for _ in range(100)]
    # What the schedules are to show did happen.
    assert sum(device.num_dropped > 0 for device in devices) > 10
    assert sum(any(index for _, index in device.admitted) for device in devices) > 10


def test_prefill_and_decode_take_turns_from_admission_to_finish():
    scheduler = make_scheduler(small_config(max_num_seqs=2), StaticPolicy(2))
    for i, length in enumerate([40, 3, 5]):
        scheduler.add(make_request(i, length, 4))
    plan = scheduler.schedule()
    assert [(c.start, c.count) for c in plan.chunks] == [(0, 40)]
    assert (plan.batch, plan.width) == (1, 64)
    assert scheduler.num_running == 2  # the third waits for a slot
    commit(scheduler, plan, [50])
    plan = scheduler.schedule()
    assert isinstance(plan, DecodePlan) and (plan.batch, plan.k, plan.num_drafts) == (1, 2, 2)
    commit(scheduler, plan, [51, 52, 53])
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
    num_kept, (sequence,) = commit(scheduler, plan, [9])
    assert num_kept == [1] and sequence.output == [9] and not scheduler.has_work


def test_a_request_waits_for_its_pages_and_is_not_overtaken():
    scheduler = make_scheduler(small_config(num_pages=10), StaticPolicy(0))
    for i, length in enumerate([50, 50, 2]):
        scheduler.add(make_request(i, length, 8))
    plan = scheduler.schedule()
    assert [c.sequence.request.request_id for c in plan.chunks] == [0]
    assert scheduler.num_running == 1 and scheduler.pages.num_free == 2
    _, (first,) = commit(scheduler, plan, [STOP])
    assert first.output == [STOP]
    assert [c.sequence.request.request_id for c in scheduler.schedule().chunks] == [1]


# --- shapes ---------------------------------------------------------------------------------------


def test_prefill_takes_the_least_shape_that_holds_the_first_prompt():
    """Shapes come in any order, with several batches to a width, and not every width has a 1."""
    shapes = [(1, 64), (4, 8), (2, 32), (1, 8), (2, 8), (3, 16)]
    cases = [
        ([8], (1, 8), [8]),
        ([5, 8], (2, 8), [5, 8]),
        ([3, 3, 3], (4, 8), [3, 3, 3]),
        ([3, 40, 3, 3], (4, 8), [3, 8, 3, 3]),  # as much of a longer one as fits
        ([9], (3, 16), [9]),
        ([9, 2, 2, 2], (3, 16), [9, 2, 2]),
        ([17, 50, 2], (2, 32), [17, 32]),
        ([33, 2, 2], (1, 64), [33]),
        ([70, 2], (1, 64), [64]),
    ]
    for lengths, shape, counts in cases:
        config = small_config(max_model_len=80, num_pages=40)
        scheduler = make_scheduler(config, StaticPolicy(0), shapes)
        for i, length in enumerate(lengths):
            scheduler.add(make_request(i, length, 4))
        plan = scheduler.schedule()
        assert (plan.batch, plan.width) == shape, lengths
        assert [chunk.count for chunk in plan.chunks] == counts


def test_the_rest_of_a_prompt_goes_into_the_shape_that_holds_it():
    scheduler = make_scheduler(small_config(), StaticPolicy(0), [(1, 8), (1, 16)])
    scheduler.add(make_request(0, 21, 4))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (first.width, second.width) == (16, 8)
    (start,), (rest,) = first.chunks, second.chunks
    assert (start.start, start.count, start.is_first, start.is_last) == (0, 16, True, False)
    assert (rest.start, rest.count, rest.is_first, rest.is_last) == (16, 5, False, True)


def test_exact_steps_all_have_one_shape():
    config = small_config(exact=True)
    scheduler = make_scheduler(config, FewerWhenFull())
    (batch,), (prefill_shape,) = config.decode_batches, config.prefill_shapes
    assert batch >= 4 and scheduler.fixed_k == 3
    for i, length in enumerate([64 - 8, 1, 30]):
        scheduler.add(make_request(i, length, 8))
    decodes = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        if isinstance(plan, PrefillPlan):
            assert (plan.batch, plan.width) == prefill_shape
        else:
            assert (plan.batch, plan.k) == (batch, 3)
            decodes.append((len(plan.sequences), plan.num_drafts))
        commit(scheduler, plan, *[[9]] * len(plan.sequences))
    assert set(decodes) == {(1, 3), (2, 2), (3, 2)}


def test_without_drafts_an_exact_step_still_has_room_for_them():
    scheduler = make_scheduler(small_config(exact=True), FewerWhenFull())
    scheduler.policy = StaticPolicy(0)
    scheduler.add(make_request(0, 3, 8))
    scheduler.schedule()
    plan = scheduler.schedule()
    assert (plan.k, plan.num_drafts) == (3, 0)


# --- samples --------------------------------------------------------------------------------------


def run_to_the_end(scheduler, is_async=True):
    """Every step gives a token to everyone it can; returns all plans."""
    plans, in_flight = [], None
    while scheduler.has_work or in_flight:
        plan = scheduler.schedule()
        previous, in_flight = in_flight, plan
        for done in [previous] if is_async else [plan]:
            if done is not None:
                rows = done.chunks if isinstance(done, PrefillPlan) else done.sequences
                commit(scheduler, done, *[[9] if getattr(r, "is_last", True) else [] for r in rows])
        in_flight = in_flight if is_async else None
        plans.append(plan)
        assert len(plans) < 1000, "it hangs"
    return [plan for plan in plans if plan is not None]


def chunks_of(plans):
    return [chunk for plan in plans if isinstance(plan, PrefillPlan) for chunk in plan.chunks]


def test_samples_share_the_prompt_that_the_first_one_ran():
    config = small_config()
    scheduler = make_scheduler(config, StaticPolicy(1))
    scheduler.add(make_request(0, 20, 12, num_samples=3))
    prompt = scheduler.schedule()
    (first,) = prompt.chunks
    assert (first.start, first.count, first.is_first, first.sequence.index) == (0, 20, True, 0)
    decode = scheduler.schedule()
    assert [s.index for s in decode.sequences] == [0] and scheduler.num_running == 3
    follow = scheduler.schedule()
    assert [(c.start, c.count, c.is_first) for c in follow.chunks] == [(16, 4, True)] * 2
    assert [c.sequence.index for c in follow.chunks] == [1, 2]

    samples = [first.sequence, *follow.sequences]
    assert len({sample.slot for sample in samples}) == 3
    shared, *own = [sample.pages[:2] for sample in samples]
    assert own == [shared] * 2
    rest = [page for sample in samples for page in sample.pages[2:]]
    assert len(set(rest)) == len(rest) == 3 * 2 and not set(rest) & set(shared)
    assert scheduler.pages.num_free == config.num_pages - 2 - 6

    commit(scheduler, prompt, [9])
    _, (done,) = commit(scheduler, decode, [STOP])
    assert done is samples[0] and scheduler.pages.num_free == config.num_pages - 2 - 4
    commit(scheduler, follow, [9], [STOP])
    assert scheduler.pages.num_free == config.num_pages - 2 - 2
    run_to_the_end(scheduler)
    assert scheduler.pages.num_free == config.num_pages


@pytest.mark.parametrize("prompt_length", [1, 7, 8, 9, 16, 17, 40])
def test_full_pages_are_shared_but_the_last_token_is_every_samples_own(prompt_length):
    """A page that ends with the prompt is not shared: its last token is run by all."""
    config = small_config()
    scheduler = make_scheduler(config, StaticPolicy(0))
    scheduler.add(make_request(0, prompt_length, 5, num_samples=4))
    starts = {1: 0, 7: 0, 8: 0, 9: 8, 16: 8, 17: 16, 40: 32}
    chunks = chunks_of(run_to_the_end(scheduler))
    assert [c.sequence.index for c in chunks] == [0, 1, 2, 3]
    assert [c.start for c in chunks] == [0, *[starts[prompt_length]] * 3]
    assert all(c.is_first and c.is_last for c in chunks)
    owners = Counter(page for c in chunks for page in c.sequence.pages)
    num_shared = starts[prompt_length] // 8
    assert sorted(owners.values())[::-1][:num_shared] == [4] * num_shared
    assert max(sorted(owners.values())[: len(owners) - num_shared]) == 1
    assert scheduler.pages.num_free == config.num_pages


def test_shared_pages_outlive_the_first_sample():
    """It may end before any other sample has a slot, or with its first token."""
    config = small_config(max_num_seqs=1)
    scheduler = make_scheduler(config, StaticPolicy(0))
    scheduler.add(make_request(0, 20, 1, num_samples=3))
    scheduler.add(make_request(1, 30, 3))
    plan = scheduler.schedule()
    commit(scheduler, plan, [9])
    assert scheduler.num_running == 0 and scheduler.pages.num_free == config.num_pages - 2
    chunks = chunks_of(run_to_the_end(scheduler))
    names = [name_of(c.sequence) for c in chunks]
    assert names == [(0, 1), (0, 2), (1, 0)], "samples come before requests that wait"
    assert [c.start for c in chunks] == [16, 16, 0]
    assert scheduler.pages.num_free == config.num_pages


def test_a_prompt_of_several_chunks_is_shared_once_it_is_complete():
    scheduler = make_scheduler(small_config(max_num_batched_tokens=32), StaticPolicy(0))
    scheduler.add(make_request(0, 60, 2, num_samples=2))
    chunks = [(c.sequence.index, c.start, c.count) for c in chunks_of(run_to_the_end(scheduler))]
    assert chunks == [(0, 0, 32), (0, 32, 28), (1, 56, 4)]


def test_samples_of_prompts_that_end_together_are_served_in_order():
    """First come, first served: the samples of the first request come first."""
    scheduler = make_scheduler(small_config(), StaticPolicy(0))
    for i in range(3):
        scheduler.add(make_request(i, 10, 4, num_samples=3))
    chunks = chunks_of(run_to_the_end(scheduler))
    names = [name_of(c.sequence) for c in chunks if c.sequence.index]
    assert names == sorted(names)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_groups", [2, 3, 5])
@pytest.mark.parametrize("num_spare_pages", range(4))
def test_pages_that_wait_to_be_shared_block_nobody(num_groups, num_spare_pages, is_async):
    """The pool just holds the prompts; the samples of all of them wait with what they share."""
    config = small_config(
        max_num_seqs=num_groups,
        max_num_batched_tokens=64 * num_groups,
        num_pages=8 * num_groups + num_spare_pages,
    )
    scheduler = make_scheduler(config, StaticPolicy(0))
    for i in range(num_groups):
        scheduler.add(make_request(i, 40, 24, num_samples=4, cut=1 + i % 2))
    for i in range(num_groups):
        scheduler.add(make_request(num_groups + i, 60, 4))
    plan = scheduler.schedule()
    assert len(plan.chunks) == num_groups and scheduler.pages.num_free == num_spare_pages
    commit(scheduler, plan, *[[9]] * num_groups)
    names = {
        name_of(sequence) for p in run_to_the_end(scheduler, is_async) for sequence in p.sequences
    }
    assert len(names | {(i, 0) for i in range(num_groups)}) == 5 * num_groups
    assert scheduler.pages.num_free == config.num_pages


# --- ends that only the host knows of -------------------------------------------------------------


def test_a_step_in_flight_for_a_finished_sample_is_dropped():
    """Its tokens count for nothing; its slot and its pages, shared ones too, come back once."""
    config = small_config(max_num_seqs=2)
    scheduler, recorder = make_scheduler(config, StaticPolicy(3)), Recorder()
    scheduler.add(make_request(0, 20, 30, num_samples=2, cut=3))

    def run(plan, *rows):
        num_kept, finished = commit(scheduler, plan, *rows)
        recorder.record_step(plan, num_kept)
        return num_kept, finished

    prompt, first, follow = (scheduler.schedule() for _ in range(3))
    assert run(prompt, [50]) == ([1], [])
    both = scheduler.schedule()
    assert [s.index for s in both.sequences] == [0, 1]
    num_kept, (sample,) = run(first, [51, 52, 53, 54])
    assert num_kept == [2] and sample.output == [50, 51, 52]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "text")
    assert scheduler.num_running == 1
    num_free = scheduler.pages.num_free
    assert num_free == config.num_pages - 7  # the other sample's

    scheduler.add(make_request(1, 10, 6))  # takes the slot while the step is in flight
    third = scheduler.schedule()
    newcomer = third.chunks[0].sequence
    assert newcomer.slot == sample.slot and not newcomer.output
    assert run(follow, [60]) == ([1], [])
    assert run(both, [55, 56], [61]) == ([0, 1], [])
    assert sample.output == [50, 51, 52]
    assert scheduler.pages.num_free == num_free - len(newcomer.pages)
    assert scheduler.num_running == 2
    assert run(third, [70]) == ([1], [])

    metrics = recorder.snapshot(num_compilations=0, num_late=0, compile_seconds=0.0)
    assert metrics.num_generation_tokens == 3 + 2 + 1
    assert metrics.num_drafts == 2 and metrics.num_accepted_tokens_per_pos == (1, 0, 0)
    run_to_the_end(scheduler)
    assert scheduler.pages.num_free == config.num_pages
    for i in range(3):
        scheduler.add(make_request(2 + i, 10, 6))
    scheduler.schedule()
    assert scheduler.num_running == 2, "no slot came back twice"


# --- dropping everything --------------------------------------------------------------------------


@pytest.mark.parametrize("is_read", [False, True], ids=["in-flight", "read"])
@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("num_steps", range(12))
def test_drop_all_frees_everything(num_steps, num_samples, is_read):
    """Whether prompts are half prefilled, samples wait with shared pages, or outputs are ending."""
    config = small_config()
    scheduler = make_scheduler(config, StaticPolicy(1))
    for i in range(9):
        scheduler.add(make_request(i, 20 + 30 * (i % 2), 5, num_samples=num_samples))
    for _ in range(num_steps):
        plan = scheduler.schedule()
        if is_read:
            rows = plan.chunks if isinstance(plan, PrefillPlan) else plan.sequences
            commit(scheduler, plan, *[[9] if getattr(r, "is_last", True) else [] for r in rows])
    scheduler.drop_all()
    assert not scheduler.has_work and scheduler.num_running == 0
    assert scheduler.pages.num_free == config.num_pages
    for i in range(4):
        scheduler.add(make_request(i, 10, 5))
    slots = {chunk.sequence.slot for _ in range(4) for chunk in prefills(scheduler)}
    assert slots == set(range(4))


def test_shared_pages_that_wait_are_dropped_too():
    config = small_config(max_num_seqs=1)
    scheduler = make_scheduler(config, StaticPolicy(1))
    scheduler.add(make_request(0, 40, 1, num_samples=3))
    commit(scheduler, scheduler.schedule(), [9])
    assert scheduler.num_running == 0 and scheduler.pages.num_free < config.num_pages
    scheduler.drop_all()
    assert scheduler.pages.num_free == config.num_pages and scheduler.schedule() is None


def prefills(scheduler):
    plan = scheduler.schedule()
    return plan.chunks if isinstance(plan, PrefillPlan) else ()


# --- cost -----------------------------------------------------------------------------------------


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
    commit(scheduler, plan, *[[9]] * num_running)
    for i in range(num_waiting):
        scheduler.add(make_request(num_running + i, 20, 30))
    return scheduler


def test_cost_of_a_step_grows_linearly_with_what_runs():
    def cost(num_running):
        scheduler = decoding(num_running)
        rows = [RowOutput([9, 9]) for _ in range(num_running)]

        def step():
            plan = scheduler.schedule()
            assert len(plan.sequences) == num_running
            scheduler.commit(plan, rows)

        return count_lines(step)

    assert cost(64) > 64
    assert cost(512) < 8.5 * cost(64)


def test_cost_of_a_step_does_not_grow_with_what_waits():
    assert count_lines(decoding(8, 10).schedule) == count_lines(decoding(8, 5000).schedule)
