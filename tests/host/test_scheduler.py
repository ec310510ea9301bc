"""The scheduler's rules one by one, with numbers worked out by hand.

Pages hold 8 tokens. Where vLLM's tests have numbers (budgets of 20 and of 50), they are the same.
What a device would find in its pages is not checked here.
"""

import gc
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest

from specjax.config import EngineConfig
from specjax.host.plans import DecodePlan, PrefillPlan
from specjax.host.prefix_cache import extend_keys
from specjax.host.request import Request
from specjax.host.scheduler import Scheduler
from specjax.host.sequence import RowOutput
from specjax.host.speculation.policy import PolicyRule, StaticPolicy
from specjax.sampling_params import SamplingParams

STOP = 7


@dataclass(frozen=True)
class FewerWhenFull(PolicyRule):
    """K falls with the batch size, to see that it is asked with the right one."""

    choices: tuple[int, ...] = (0, 1, 2, 3)

    def choose(self, load):
        return max(0, 3 - load.num_sequences // 2)


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


@dataclass
class StrictMatcher:
    """Refuses one token."""

    refused: int
    is_finished: bool = False
    seen: list[int] = field(default_factory=list)

    def accept(self, tokens):
        if self.refused in tokens:
            raise RuntimeError(f"token {self.refused} is not in the grammar")
        self.seen += tokens


@dataclass(frozen=True, kw_only=True)
class Config(EngineConfig):
    """Takes any shapes for its chunks."""

    shapes: tuple[tuple[int, int], ...] = ()

    def __post_init__(self):
        super().__post_init__()
        if self.shapes:
            object.__setattr__(self, "prefill_shapes", self.shapes)


def make_config(**changes):
    sizes = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "page_size": 8,
        "num_pages": 32,
    }
    return Config(**(sizes | changes))


def make_scheduler(config, policy=0, **options):
    """`policy` may be the K of all steps."""
    return Scheduler(config, StaticPolicy(policy) if isinstance(policy, int) else policy, **options)


def add(scheduler, i, prompt_length, max_tokens=8, *, num_samples=1, cut=None, **fields):
    """Queue a request, by default with a prompt of its own; its samples.

    If `cut` is given, its text ends with that token of the output.
    """
    start = 1000 * i
    if cut:
        fields["watch_text"] = partial(CountingWatch, cut)
    request = Request(
        i,
        tuple(range(start, start + prompt_length)),
        SamplingParams(n=num_samples),
        max_tokens,
        tuple(range(num_samples)),
        (STOP,),
        **fields,
    )
    return scheduler.add(request)


def chunks(step):
    """(request, start, count) of each chunk."""
    plan = step and step.prefill
    return [(c.sequence.request.request_id, c.start, c.count) for c in plan.chunks] if plan else []


def rounds(step):
    """The requests that decode."""
    plan = step and step.decode
    return [s.request.request_id for s in plan.sequences] if plan else []


def commit(scheduler, part, *rows):
    return scheduler.commit(part, [RowOutput(list(tokens)) for tokens in rows])


def give(scheduler, step, num_tokens=1):
    """Commit a step: so many tokens of each round, and what chunks give; who got some."""
    touched = []
    for part in step.parts:
        if isinstance(part, PrefillPlan):
            rows = [[9] if chunk.samples else [] for chunk in part.chunks]
            touched += commit(scheduler, part, *rows)[1]
            continue
        left = [s.request.max_tokens - s.num_output for s in part.sequences]
        rows = [[9] * min(num_tokens, most) for most in left]
        touched += commit(scheduler, part, *rows)[1]
    return touched


def run_to_the_end(scheduler, is_async=True, num_tokens=1):
    """Every round gives so many tokens to everyone in it; returns all steps."""
    steps, in_flight, num_idle = [], None, 0
    while scheduler.has_work or in_flight:
        previous, in_flight = in_flight, scheduler.schedule()
        steps += [in_flight] if in_flight else []
        if is_async and previous:
            give(scheduler, previous, num_tokens)
        elif not is_async and in_flight:
            give(scheduler, in_flight, num_tokens)
            in_flight = None
        num_idle = 0 if previous or steps[-1:] == [in_flight] or not is_async else num_idle + 1
        assert num_idle < 3 and len(steps) < 2000, "it hangs"
    return steps


def decoding(num_requests, config, policy=0, **fields):
    """A scheduler whose requests have run prompts of 2 tokens in one step, and got a token."""
    scheduler = make_scheduler(config, policy)
    samples = [add(scheduler, i, 2, 30, **fields)[0] for i in range(num_requests)]
    step = scheduler.schedule()
    assert len(chunks(step)) == num_requests
    give(scheduler, step)
    return scheduler, samples


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheduled, batched, draft_slots, counts",
    [
        (20, 20, 0, [10, 10]),
        (20, 20, 3, [10, 4]),  # 10 + 3, then 4 + 3 of the 7 that are left; as in vLLM
        (18, 18, 3, [10, 2]),
        (17, 17, 3, [10, 1]),
        (16, 16, 3, [10]),  # 3 are left, all of them draft slots
        (13, 13, 3, [10]),
        (12, 20, 0, [10, 2]),
        (12, 20, 3, [10, 2]),
        (15, 20, 3, [10, 4]),
        (10, 20, 3, [10]),
    ],
)
def test_two_budgets_cut_chunks(scheduled, batched, draft_slots, counts):
    config = make_config(
        max_num_batched_tokens=batched, max_num_scheduled_tokens=scheduled, shapes=((2, 16),)
    )
    scheduler = make_scheduler(config, draft_slots=draft_slots)
    for i in range(2):
        add(scheduler, i, 10)
    step = scheduler.schedule()
    assert [count for _, _, count in chunks(step)] == counts
    assert step.num_tokens == sum(counts)
    assert scheduler.num_running == len(counts)


@pytest.mark.parametrize(
    "batched, num_admitted", [(4, 1), (7, 1), (8, 2), (11, 2), (12, 3), (15, 3), (16, 4)]
)
def test_nobody_is_planned_when_only_draft_slots_are_left(batched, num_admitted):
    """A token with 3 draft slots costs 4."""
    config = make_config(max_num_batched_tokens=batched, shapes=((4, 8),))
    scheduler = make_scheduler(config, draft_slots=3)
    for i in range(4):
        add(scheduler, i, 1)
    assert len(chunks(scheduler.schedule())) == num_admitted


def test_a_long_prompt_is_cut_and_its_last_chunk_has_no_drafts():
    """vLLM: budget 50, prompt 80, K 3 give 50, 30 and not 33, then a round of 4."""
    scheduler = make_scheduler(make_config(max_model_len=96, max_num_batched_tokens=50), 3)
    add(scheduler, 0, 80)
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert (chunks(first), rounds(first), first.num_tokens) == ([(0, 0, 50)], [], 50)
    assert (chunks(second), rounds(second), second.num_tokens) == ([(0, 50, 30)], [], 30)
    assert (chunks(third), rounds(third), third.num_tokens) == ([], [0], 4)
    (start,), (rest,) = first.prefill.chunks, second.prefill.chunks
    assert (start.is_first, start.is_last, start.samples) == (True, False, False)
    assert (rest.is_first, rest.is_last, rest.samples) == (False, True, True)


@pytest.mark.parametrize("draft_slots", [0, 3])
@pytest.mark.parametrize("scheduled, batched", [(4, 7), (7, 7), (15, 20), (20, 20), (33, 64)])
def test_no_step_exceeds_either_budget(scheduled, batched, draft_slots):
    config = make_config(
        max_num_batched_tokens=batched,
        max_num_scheduled_tokens=scheduled,
        shapes=((2, 8), (4, 4), (1, 32)),
        num_pages=14,
    )
    scheduler = make_scheduler(config, 3, draft_slots=draft_slots)
    for i in range(7):
        add(scheduler, i, 3 + 7 * i, 1 + 2 * i)
    used = []
    for step in run_to_the_end(scheduler, num_tokens=2):
        k = step.decode.k if step.decode else 0
        num_tokens = sum(n for _, _, n in chunks(step)) + (k + 1) * len(rounds(step))
        num_sequences = len(chunks(step)) + len(rounds(step))
        assert step.num_tokens == num_tokens <= scheduled
        assert num_tokens + draft_slots * num_sequences <= batched
        used.append(num_tokens + draft_slots * num_sequences)
    assert max(used) > min(batched, scheduled) - 4, "a budget was reached"


@pytest.mark.parametrize("budget, num_rows", [(7, 1), (8, 2), (10, 2), (11, 2), (12, 3)])
def test_a_round_is_run_whole_or_not_at_all(budget, num_rows):
    """Of 10 tokens two rounds of 4 take 8; vLLM would run the third with one draft.

    So what is drafted depends on nobody else.
    """
    scheduler, _ = decoding(3, make_config(max_num_batched_tokens=budget, shapes=((4, 8),)), 3)
    step = scheduler.schedule()
    assert len(rounds(step)) == num_rows and step.num_tokens == 4 * num_rows
    assert (step.decode.k, step.decode.num_drafts) == (3, 3)


@pytest.mark.parametrize("draft_slots, num_rows", [(0, 3), (1, 2), (2, 2), (3, 1)])
def test_rounds_pay_for_their_draft_slots(draft_slots, num_rows):
    """K 3 and a budget of 12: 3 of 4, 2 of 5, 2 of 6, 1 of 7."""
    config = make_config(max_num_batched_tokens=12, shapes=((4, 8),))
    scheduler = make_scheduler(config, 3, draft_slots=draft_slots)
    for i in range(3):
        add(scheduler, i, 1)
    assert len(chunks(scheduler.schedule())) == 3  # at most 4 each
    assert len(rounds(scheduler.schedule())) == num_rows


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_budget_too_small_for_all_goes_round(is_async):
    config = make_config(max_num_batched_tokens=8, shapes=((4, 8),))
    scheduler, _ = decoding(4, config, 3)
    turns = []
    for _ in range(4):
        step = scheduler.schedule()
        turns.append(rounds(step))
        if not is_async:
            give(scheduler, step)
    assert turns == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_a_budget_for_two_of_three_goes_round_behind_the_first():
    """Who was left out comes first, then who came first."""
    config = make_config(max_num_batched_tokens=8, shapes=((4, 8),))
    scheduler, _ = decoding(3, config, 3)
    turns = [rounds(scheduler.schedule()) for _ in range(6)]
    assert turns == [[0, 1], [2, 0], [1, 0], [2, 0], [1, 0], [2, 0]]


def test_a_long_prompt_and_decoders_share_a_step():
    """Of 32 tokens two rounds of 4 leave 24 for the chunk."""
    config = make_config(max_model_len=128, max_num_batched_tokens=32, shapes=((2, 32),))
    scheduler, _ = decoding(2, config, 3)
    add(scheduler, 2, 100)
    steps = [scheduler.schedule() for _ in range(6)]
    assert [chunks(step) for step in steps] == [
        *([(2, start, 24)] for start in (0, 24, 48, 72)),
        [(2, 96, 4)],
        [],
    ]
    assert [rounds(step) for step in steps] == [[0, 1]] * 5 + [[0, 1, 2]]
    assert [step.num_tokens for step in steps] == [32, 32, 32, 32, 12, 12]


def test_chunks_get_their_turn_when_rounds_take_the_whole_budget():
    config = make_config(max_num_batched_tokens=8, shapes=((4, 8),))
    scheduler = make_scheduler(config, 3)
    for i, length in enumerate([2, 2, 10]):
        add(scheduler, i, length)
    turns = []
    for _ in range(6):
        step = scheduler.schedule()
        turns.append((chunks(step), rounds(step)))
    assert turns == [
        ([(0, 0, 2), (1, 0, 2), (2, 0, 4)], []),
        ([], [0, 1]),
        ([(2, 4, 6)], []),  # 2 are left, too few for a round
        ([], [0, 1]),
        ([], [2, 0]),
        ([], [1, 0]),
    ]


def test_a_step_launches_its_chunks_before_its_rounds():
    scheduler, _ = decoding(1, make_config())
    add(scheduler, 1, 5)
    step = scheduler.schedule()
    assert step.parts == (step.prefill, step.decode)
    assert chunks(step) == [(1, 0, 5)] and rounds(step) == [0]


def test_a_prompt_decodes_in_the_step_after_its_last_chunk():
    scheduler = make_scheduler(make_config(), 2)
    add(scheduler, 0, 20)
    assert rounds(scheduler.schedule()) == [] and rounds(scheduler.schedule()) == [0]


# --- errors of the configuration ------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, max_drafts, draft_slots, parts",
    [
        ((3, 3), 3, 0, ["max_num_scheduled_tokens=3", "3 drafts", "(4 tokens)", "by 1,"]),
        ((2, 64), 7, 0, ["max_num_scheduled_tokens=2", "7 drafts", "(8 tokens)", "by 6,"]),
        ((6, 6), 3, 3, ["max_num_batched_tokens=6", "3 draft slots", "(7 tokens)", "by 1,"]),
        ((4, 5), 3, 3, ["max_num_batched_tokens=5", "3 draft slots", "(7 tokens)", "by 2,"]),
        ((1, 3), 0, 3, ["max_num_batched_tokens=3", "a chunk", "(4 tokens)", "by 1"]),
    ],
)
def test_budgets_that_hold_no_round_are_refused(sizes, max_drafts, draft_slots, parts):
    scheduled, batched = sizes
    config = make_config(max_num_scheduled_tokens=scheduled, max_num_batched_tokens=batched)
    with pytest.raises(ValueError) as error:
        config.check_budgets(max_drafts, draft_slots)
    for part in [*parts, "nothing could be scheduled", "raise " + parts[0].partition("=")[0]]:
        assert part in str(error.value)


@pytest.mark.parametrize("scheduled, batched, draft_slots", [(4, 4, 0), (4, 7, 3), (64, 64, 3)])
def test_budgets_that_just_hold_a_round_are_enough(scheduled, batched, draft_slots):
    config = make_config(max_num_scheduled_tokens=scheduled, max_num_batched_tokens=batched)
    config.check_budgets(3, draft_slots)
    scheduler = make_scheduler(config, 3, draft_slots=draft_slots)
    for i in range(3):
        add(scheduler, i, 20, 5)
    run_to_the_end(scheduler)


def test_an_exact_chunk_needs_its_whole_width():
    config = make_config(exact=True, max_num_batched_tokens=34)
    config.check_budgets(3, 2)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=34 cannot hold a chunk .* by 1"):
        config.check_budgets(3, 3)


@pytest.mark.parametrize(
    "changes, parts",
    [
        (
            {"max_num_scheduled_tokens": 30, "max_num_batched_tokens": 20},
            ["max_num_scheduled_tokens=30", "max_num_batched_tokens=20", "by 10"],
        ),
        (
            {"decode_batches": (1, 2)},
            ["decode_batches=(1, 2)", "max_num_seqs=4", "add 4", "lower max_num_seqs to 2"],
        ),
        ({"decode_batches": ()}, ["decode_batches=()", "(1, 4, 16)"]),
        ({"decode_batches": 4}, ["decode_batches=4", "(1, 4, 16)"]),
        ({"decode_batches": (4, 0)}, ["decode_batches[1]=0", "at least 1"]),
        (
            {"prefill_shapes": ((1, 16), (2, 8)), "max_num_batched_tokens": 60},
            ["hold 16 tokens of the 60", "add (4, 16)", "lower max_num_batched_tokens to 16"],
        ),
        ({"prefill_shapes": ((16,),)}, ["prefill_shapes=((16,),)", "(batch, width)"]),
        ({"prefill_shapes": ((1, 0),)}, ["prefill_shapes[0][1]=0", "at least 1"]),
        ({"exact": True, "decode_batches": (4,)}, ["decode_batches=(4,)", "exact=True"]),
        (
            {"num_pages": 7},
            ["num_pages=7", "max_model_len=64", "8 pages of 8 tokens", "raise num_pages"],
        ),
        ({"scheduling_policy": "lifo"}, ["scheduling_policy='lifo'", "fcfs, priority"]),
        ({"num_snapshots": -1}, ["num_snapshots=-1", "at least 0"]),
        ({"num_snapshots": 0.5}, ["num_snapshots=0.5", "an integer"]),
        ({"num_snapshots": True}, ["num_snapshots=True", "an integer"]),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(changes, parts):
    with pytest.raises(ValueError) as error:
        make_config(**changes)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True])
@pytest.mark.parametrize(
    "name",
    [
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "page_size",
        "num_pages",
    ],
)
def test_sizes_are_positive_integers(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} must be an integer of at least 1"):
        make_config(**{name: value})


def test_what_is_left_out_follows_from_the_rest():
    config = make_config(max_num_seqs=9)
    assert (config.max_num_scheduled_tokens, config.num_snapshots) == (64, 2)
    assert make_config(max_num_seqs=3).num_snapshots == 1
    assert make_config(num_snapshots=0).num_snapshots == 0
    assert make_config(max_num_scheduled_tokens=5).max_num_scheduled_tokens == 5


# --- order ----------------------------------------------------------------------------------------


def admissions(steps):
    """Names of samples by their first chunks."""
    return [
        (c.sequence.request.request_id, c.sequence.index)
        for step in steps
        if step.prefill
        for c in step.prefill.chunks
        if c.is_first
    ]


def test_first_come_first_served():
    scheduler = make_scheduler(make_config(max_num_seqs=2), 2)
    for i, length in enumerate([40, 3, 5]):
        add(scheduler, i, length, 4)
    first = scheduler.schedule()
    assert chunks(first) == [(0, 0, 40)], "the shape that it needs has one row"
    assert (first.prefill.batch, first.prefill.width) == (1, 64)
    assert scheduler.num_running == 1, "nobody comes in without a chunk"
    second = scheduler.schedule()
    assert chunks(second) == [(1, 0, 3)] and rounds(second) == [0]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    third = scheduler.schedule()
    assert chunks(third) == [] and rounds(third) == [0, 1]  # no slot for the third
    commit(scheduler, first.prefill, [STOP])
    assert chunks(scheduler.schedule()) == [(2, 0, 5)]


def test_the_least_priority_value_goes_first_and_equals_in_order_of_arrival():
    scheduler = make_scheduler(make_config(max_num_seqs=1, scheduling_policy="priority"))
    for i, priority in enumerate([1, 0, 1, -2, 0]):
        add(scheduler, i, 3, 2, priority=priority)
    order = [i for i, _ in admissions(run_to_the_end(scheduler))]
    assert order == [3, 1, 4, 0, 2]


def test_nobody_is_sent_away_for_a_more_urgent_request():
    scheduler = make_scheduler(make_config(max_num_seqs=1, scheduling_policy="priority"))
    add(scheduler, 0, 3, 3, priority=5)
    steps = [scheduler.schedule()]
    add(scheduler, 1, 3, 3, priority=0)
    give(scheduler, steps[0])
    steps += run_to_the_end(scheduler)
    assert admissions(steps) == [(0, 0), (1, 0)] and scheduler.num_preemptions == 0


def test_the_more_urgent_takes_every_turn():
    config = make_config(
        max_num_batched_tokens=4, shapes=((2, 4),), scheduling_policy="priority", max_num_seqs=2
    )
    scheduler = make_scheduler(config, 3)
    add(scheduler, 0, 2, 9, priority=1)
    (urgent,) = add(scheduler, 1, 2, 3, priority=0)
    steps = run_to_the_end(scheduler, is_async=False)
    assert [rounds(step) for step in steps[1:]] == [[1], [1]] + [[0]] * 8
    assert chunks(steps[0]) == [(1, 0, 2), (0, 0, 2)]
    assert urgent.finish_reason == "length"


def test_a_request_waits_for_its_pages_and_is_not_overtaken():
    """50 tokens take 7 pages of 10: there is room for the third request, but not for the second."""
    scheduler = make_scheduler(make_config(num_pages=10))
    for i, length in enumerate([50, 50, 2]):
        add(scheduler, i, length)
    step = scheduler.schedule()
    assert chunks(step) == [(0, 0, 50)] and scheduler.pages.num_free == 3
    later = scheduler.schedule()
    assert chunks(later) == [] and scheduler.num_running == 1
    (first,) = commit(scheduler, step.prefill, [STOP])[1]
    assert first.output == [STOP]
    assert chunks(scheduler.schedule()) == [(1, 0, 50)]


def test_a_long_prompt_is_not_starved_by_short_ones():
    """New short requests keep coming, and it still starts when the first four have finished."""
    config = make_config(num_pages=9)
    scheduler = make_scheduler(config)
    for i in range(2):
        add(scheduler, i, 2, 4)
    add(scheduler, 2, 60, 2)
    first_chunk = None
    for i in range(3, 20):
        add(scheduler, i, 2, 4)
        step = scheduler.schedule()
        if step and any(chunk[0] == 2 for chunk in chunks(step)):
            first_chunk = first_chunk or i
        assert first_chunk or not any(chunk[0] > 2 for chunk in chunks(step))
        if step:
            give(scheduler, step)
    assert first_chunk == 7, "prompts of 0 and 1 in step 3, their three rounds in steps 4 to 6"


def test_a_newcomer_leaves_a_page_for_each_that_runs():
    """Lest they preempt it at once: 8 tokens are one page, and one more for who is there."""
    for num_pages, num_admitted in [(8, 4), (7, 4), (6, 3), (5, 3), (4, 2), (3, 2), (2, 1)]:
        config = make_config(max_model_len=16, num_pages=num_pages, shapes=((4, 8),))
        scheduler = make_scheduler(config)
        for i in range(4):
            add(scheduler, i, 8)
        assert len(chunks(scheduler.schedule())) == num_admitted, num_pages


def test_no_step_is_launched_that_could_give_nothing():
    """With two tokens to come and a step in flight, the next step is the last one worth it."""
    scheduler = make_scheduler(make_config(), 3)
    add(scheduler, 0, 3, 2)
    assert chunks(scheduler.schedule()) == [(0, 0, 3)]  # gives one
    assert rounds(scheduler.schedule()) == [0]  # gives at least one
    assert scheduler.schedule() is None
    assert scheduler.has_work


def test_an_output_of_one_token_needs_no_round():
    scheduler = make_scheduler(make_config(), 3)
    add(scheduler, 0, 3, 1)
    step = scheduler.schedule()
    assert scheduler.schedule() is None
    num_kept, (sequence,) = commit(scheduler, step.prefill, [9])
    assert num_kept == [1] and sequence.output == [9] and not scheduler.has_work


def test_an_id_is_taken_until_its_request_has_finished():
    scheduler = make_scheduler(make_config())
    add(scheduler, 0, 3, 1)
    with pytest.raises(ValueError, match="request_id=0 belongs to a request that has not finished"):
        add(scheduler, 0, 5)
    assert scheduler.num_waiting == 1
    step = scheduler.schedule()
    with pytest.raises(ValueError, match="request_id=0"):
        add(scheduler, 0, 5)
    give(scheduler, step)
    add(scheduler, 0, 5)
    assert chunks(scheduler.schedule()) == [(0, 0, 5)]


# --- shapes ---------------------------------------------------------------------------------------


def test_chunks_take_the_shape_in_which_they_get_furthest():
    """Of several the narrowest. Shapes come in any order; not every width has a batch of 1."""
    shapes = ((1, 64), (4, 8), (2, 32), (1, 8), (2, 8), (3, 16))
    cases = [
        ([8], (1, 8), [8]),
        ([5, 8], (2, 8), [5, 8]),
        ([3, 3, 3], (4, 8), [3, 3, 3]),
        ([3, 40, 3, 3], (2, 32), [3, 32]),  # 35 tokens; 17, 22 and 3 in the others
        ([9], (3, 16), [9]),
        ([9, 2, 2, 2], (4, 8), [8, 2, 2, 2]),
        ([17, 50, 2], (2, 32), [17, 32]),
        ([33, 2, 2], (2, 32), [32, 2]),
        ([70, 2], (1, 64), [64]),
    ]
    for lengths, shape, counts in cases:
        config = make_config(
            max_model_len=80, num_pages=40, max_num_batched_tokens=256, shapes=shapes
        )
        scheduler = make_scheduler(config)
        for i, length in enumerate(lengths):
            add(scheduler, i, length, 4)
        plan = scheduler.schedule().prefill
        assert (plan.batch, plan.width) == shape, lengths
        assert [chunk.count for chunk in plan.chunks] == counts


def test_a_prompt_that_takes_every_page_has_its_shape():
    scheduler = make_scheduler(make_config(num_pages=8, shapes=((1, 8), (1, 64))))
    add(scheduler, 0, 64, 0)
    assert chunks(scheduler.schedule()) == [(0, 0, 64)]


def test_the_rest_of_a_prompt_goes_into_the_shape_that_holds_it():
    scheduler = make_scheduler(make_config(shapes=((1, 8), (1, 16))))
    add(scheduler, 0, 21)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (first.prefill.width, second.prefill.width) == (16, 8)
    assert chunks(first) + chunks(second) == [(0, 0, 16), (0, 16, 5)]


def test_rounds_take_the_least_batch_that_holds_them():
    for num_requests, batch in [(1, 1), (2, 2), (3, 4), (5, 8), (6, 8)]:
        config = make_config(max_num_seqs=8, shapes=((8, 2),))
        scheduler, _ = decoding(num_requests, config, 1)
        assert scheduler.schedule().decode.batch == batch


def test_k_is_chosen_by_who_decodes():
    """Not by who is being prefilled, nor by who only waits for its last token."""
    scheduler = make_scheduler(make_config(max_num_seqs=6, shapes=((6, 4),)), FewerWhenFull())
    for i in range(5):
        add(scheduler, i, 2, 2 if i else 8)
    add(scheduler, 5, 40)
    first = scheduler.schedule()
    assert len(chunks(first)) == 6
    second = scheduler.schedule()
    assert len(rounds(second)) == 5 and len(chunks(second)) == 1
    assert (second.decode.k, second.decode.num_drafts) == (1, 1)  # 3 - 5 // 2
    third = scheduler.schedule()  # for the others two steps in flight are enough
    assert rounds(third) == [0] and (third.decode.k, third.decode.num_drafts) == (3, 3)


def test_k_is_asked_for_once_a_step_whether_or_not_somebody_decodes():
    """Replicas in lock step have to ask together, those too that have nothing to decode."""
    asked = []

    def choose(load):
        asked.append(load)
        return 1

    policy = SimpleNamespace(choices=(1,), choose=choose)
    scheduler = make_scheduler(make_config(), policy)
    scheduler.schedule()
    add(scheduler, 0, 3)
    assert scheduler.schedule().decode is None
    scheduler.schedule()
    assert [load.num_sequences for load in asked] == [0, 0, 1]


def test_exact_steps_all_have_one_shape():
    config = make_config(exact=True)
    scheduler = make_scheduler(config, FewerWhenFull())
    (batch,), (prefill_shape,) = config.decode_batches, config.prefill_shapes
    assert batch >= 4 and scheduler.shapes.decode == ((batch, 3),) and prefill_shape == (1, 32)
    for i, length in enumerate([64 - 8, 1, 30]):
        add(scheduler, i, length, 8)
    steps = run_to_the_end(scheduler, is_async=False)
    for plan in (step.prefill for step in steps if step.prefill):
        assert (plan.batch, plan.width, len(plan.chunks)) == (*prefill_shape, 1)
    plans = [step.decode for step in steps if step.decode]
    assert all((plan.batch, plan.k) == (batch, 3) for plan in plans)
    assert {(len(p.sequences), p.num_drafts) for p in plans} == {(1, 3), (2, 2), (3, 2)}
    starts = {0: [(0, 32), (32, 24)], 1: [(0, 1)], 2: [(0, 30)]}
    for i, expected in starts.items():
        assert [c[1:] for step in steps for c in chunks(step) if c[0] == i] == expected


def test_an_exact_chunk_is_not_cut_to_the_budget():
    """Rounds of 4 leave 28 of 32, too few for a chunk of 32: it waits until its turn comes."""
    config = make_config(exact=True, max_num_batched_tokens=32)
    scheduler = make_scheduler(config, 3)
    add(scheduler, 0, 2, 20)
    scheduler.schedule()
    add(scheduler, 1, 40, 4)
    assert rounds(scheduler.schedule()) == [0] and scheduler.num_running == 1
    scheduler = make_scheduler(make_config(exact=True, max_num_batched_tokens=36), 3)
    add(scheduler, 0, 2, 20)
    scheduler.schedule()
    add(scheduler, 1, 40, 4)
    step = scheduler.schedule()
    assert rounds(step) == [0] and chunks(step) == [(1, 0, 32)]
    assert chunks(scheduler.schedule()) == [(1, 32, 8)]


def test_without_drafts_an_exact_round_still_has_room_for_them():
    scheduler = make_scheduler(make_config(exact=True), FewerWhenFull())
    scheduler.policy = StaticPolicy(0)
    add(scheduler, 0, 3)
    scheduler.schedule()
    step = scheduler.schedule()
    assert (step.decode.k, step.decode.num_drafts, step.num_tokens) == (3, 0, 4)


# --- pages ----------------------------------------------------------------------------------------


def test_pages_are_reserved_for_the_most_that_rounds_in_flight_may_write():
    """10 tokens of the prompt; with the first of the output each round of K 3 adds at most 4."""
    scheduler = make_scheduler(make_config(), 3)
    (sequence,) = add(scheduler, 0, 10, 40)
    steps, num_pages = [], []
    for _ in range(5):
        steps.append(scheduler.schedule())
        num_pages.append(len(sequence.pages))
    assert num_pages == [2, 2, 3, 3, 4]  # 10, 14, 18, 22, 26
    assert sequence.max_computed == 26 and sequence.num_in_flight == 5


def test_pages_are_trimmed_when_fewer_tokens_come():
    """Of 11, 12, 16, 17 and 18 tokens the last is not run; 16, 12, 8, 4 and 0 may be written."""
    scheduler = make_scheduler(make_config(), 3)
    (sequence,) = add(scheduler, 0, 10, 40)
    steps = [scheduler.schedule() for _ in range(5)]
    num_pages = []
    for step, num_tokens in zip(steps, [1, 1, 4, 1, 1], strict=True):
        give(scheduler, step, num_tokens)
        num_pages.append((sequence.max_computed, len(sequence.pages)))
        assert scheduler.pages.num_free == 32 - len(sequence.pages)
    assert num_pages == [(26, 4), (23, 3), (23, 3), (20, 3), (17, 3)]
    assert sequence.num_in_flight == sequence.max_tokens_in_flight == 0


def test_a_prompt_keeps_its_pages_while_it_is_being_run():
    """17 tokens are 3 pages, whichever chunks have been committed."""
    scheduler = make_scheduler(make_config(max_num_batched_tokens=8))
    (sequence,) = add(scheduler, 0, 17)
    for _ in range(3):
        give(scheduler, scheduler.schedule())
        assert len(sequence.pages) == 3
    assert sequence.output == [9]


@pytest.mark.parametrize("k, num_pages", [(4, 2), (5, 2), (6, 3)])
def test_a_round_that_just_fits_takes_no_further_page(k, num_pages):
    """10 + 5, 10 + 6, 10 + 7 tokens, in pages of 8."""
    scheduler = make_scheduler(make_config(), k)
    (sequence,) = add(scheduler, 0, 10, 40)
    scheduler.schedule()
    scheduler.schedule()
    assert len(sequence.pages) == num_pages


@pytest.mark.parametrize("max_tokens, num_pages", [(6, 2), (7, 2), (8, 3)])
def test_the_last_token_of_a_request_needs_no_page(max_tokens, num_pages):
    """10 + 7 tokens, of which 16 are run."""
    scheduler = make_scheduler(make_config(), 3)
    (sequence,) = add(scheduler, 0, 10, max_tokens)
    steps = [scheduler.schedule() for _ in range(5)]
    assert len(sequence.pages) == num_pages
    for step in steps[:-1]:
        give(scheduler, step)
        assert len(sequence.pages) <= num_pages


def test_rounds_in_flight_count_with_the_drafts_they_were_planned_with():
    """K 3, then K 1: 4 + 2 beyond the 10 of the prompt."""
    scheduler = make_scheduler(make_config(), 3)
    (sequence,) = add(scheduler, 0, 10, 40)
    prompt, wide = scheduler.schedule(), scheduler.schedule()
    scheduler.policy = StaticPolicy(1)
    narrow = scheduler.schedule()
    most = [sequence.max_tokens_in_flight]
    for step in prompt, wide, narrow:
        give(scheduler, step)
        most.append(sequence.max_tokens_in_flight)
    assert most == [7, 6, 2, 0]


def test_an_exact_request_owns_all_its_pages_from_the_start():
    scheduler = make_scheduler(make_config(exact=True), 3)
    (sequence,) = add(scheduler, 0, 10, 40)
    steps = [scheduler.schedule() for _ in range(3)]
    for step in steps:
        assert len(sequence.pages) == 7  # 49 tokens
        give(scheduler, step)


# --- preemption -----------------------------------------------------------------------------------


def two_decoding(num_pages, *, k=3, **fields):
    """Two requests of 8 tokens of prompt, a page each, with their first token."""
    config = make_config(max_model_len=8 * num_pages, num_pages=num_pages, shapes=((4, 64),))
    scheduler = make_scheduler(config, k)
    samples = [add(scheduler, i, 8, 8 * num_pages - 8, **fields)[0] for i in range(2)]
    step = scheduler.schedule()
    assert chunks(step) == [(0, 0, 8), (1, 0, 8)]
    give(scheduler, step)
    return scheduler, *samples


def test_the_later_one_is_preempted_when_pages_run_out():
    """4 pages: 12 and 16 tokens are 2 pages each, 20 are 3."""
    scheduler, first, second = two_decoding(4)
    for _ in range(2):
        step = scheduler.schedule()
        assert rounds(step) == [0, 1]
        give(scheduler, step, 4)
    assert (len(first.token_ids), scheduler.pages.num_free) == (17, 0)
    step = scheduler.schedule()
    assert rounds(step) == [0] and chunks(step) == []
    assert scheduler.num_preemptions == 1
    assert not second.is_resident and list(second.pages) == []
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert len(first.pages) == 3 and scheduler.pages.num_free == 1


def test_slot_and_pages_of_a_preempted_request_are_free_in_the_same_step():
    """K 8: 17 tokens are 3 pages of 5, for which the second has to give up its 3."""
    config = make_config(
        max_model_len=40, num_pages=5, max_num_seqs=2, shapes=((2, 32),), max_num_batched_tokens=90
    )
    scheduler = make_scheduler(config, 8)
    (first,), (second,) = add(scheduler, 0, 8, 30), add(scheduler, 1, 24, 9)
    scheduler.schedule()
    (slot, pages), (third,) = (second.slot, set(second.pages)), add(scheduler, 2, 3, priority=-1)
    step = scheduler.schedule()
    assert rounds(step) == [0] and chunks(step) == [(2, 0, 3)]
    assert not second.is_resident and second.num_in_flight == 1
    assert third.slot == slot and {*first.pages, *third.pages} & pages


def test_a_preempted_request_runs_its_tokens_again_and_goes_on():
    """All but the last, which a round runs: 16 of 17. Nothing is sampled."""
    scheduler, first, second = two_decoding(4)
    for _ in range(2):
        give(scheduler, scheduler.schedule(), 4)
    give(scheduler, scheduler.schedule())
    assert len(second.token_ids) == 17 and not second.is_resident
    scheduler.abort(0)
    step = scheduler.schedule()
    (chunk,) = step.prefill.chunks
    assert chunk.sequence is second and chunk.start + chunk.count == 16 == second.goal
    assert chunk.is_first and chunk.is_last and chunk.is_resumed and not chunk.samples
    assert second.num_in_flight == 0 and rounds(step) == []
    following = scheduler.schedule()
    assert rounds(following) == [1]
    assert commit(scheduler, step.prefill, []) == ([0], [])
    assert commit(scheduler, following.decode, [30, 31]) == ([2], [second])
    assert second.token_ids[16:] == [9, 30, 31]


def test_a_resumed_request_is_run_in_chunks_again():
    config = make_config(max_num_batched_tokens=8, shapes=((2, 8),), enable_prefix_caching=False)
    scheduler = make_scheduler(config)
    (sequence,) = add(scheduler, 0, 20, 30)
    for _ in range(3):
        give(scheduler, scheduler.schedule())
    give(scheduler, scheduler.schedule())
    scheduler.restart()
    steps = [scheduler.schedule() for _ in range(4)]
    assert [chunks(step) for step in steps] == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 5)], []]
    assert [s.prefill.chunks[0].is_resumed for s in steps[:3]] == [True] * 3
    assert [s.prefill.chunks[0].is_first for s in steps[:3]] == [True, False, False]
    assert [s.prefill.chunks[0].is_last for s in steps[:3]] == [False, False, True]
    assert not any(s.prefill.chunks[0].samples for s in steps[:3])
    assert rounds(steps[3]) == [0] and sequence.num_in_flight == 1


def test_tokens_in_flight_at_a_preemption_are_delivered_once():
    """A third round is planned with the second in flight: 20 tokens at most, for 4 pages."""
    scheduler, first, second = two_decoding(4)
    give(scheduler, scheduler.schedule(), 4)
    in_flight = scheduler.schedule()
    assert rounds(in_flight) == [0, 1]
    later = scheduler.schedule()
    assert rounds(later) == [0] and not second.is_resident
    assert (second.num_in_flight, second.num_output) == (1, 5)
    scheduler.abort(0)
    assert scheduler.schedule() is None, "not readmitted before its tokens are there"
    assert scheduler.num_running == 0
    num_kept, touched = commit(scheduler, in_flight.decode, [20], [21, 22])
    assert num_kept == [0, 2] and touched == [second]
    assert second.output == [9] * 5 + [21, 22] and second.num_in_flight == 0
    assert second.max_tokens_in_flight == 0
    step = scheduler.schedule()
    assert second.goal == 8 + 7 - 1 and step.prefill.chunks[0].sequence is second
    assert commit(scheduler, later.decode, [23]) == ([0], [])
    assert second.output == [9] * 5 + [21, 22]


def test_a_request_may_finish_while_it_is_preempted():
    scheduler, first, second = two_decoding(4)
    give(scheduler, scheduler.schedule(), 4)
    in_flight, later = scheduler.schedule(), scheduler.schedule()
    assert not second.is_resident
    add(scheduler, 2, 3)
    num_kept, touched = commit(scheduler, in_flight.decode, [20], [21, STOP])
    assert num_kept == [1, 2] and touched == [first, second]
    assert second.finish_reason == "stop" and second.output[-2:] == [21, STOP]
    assert scheduler.num_waiting == 1
    give(scheduler, later)
    scheduler.abort(0)
    assert chunks(scheduler.schedule()) == [(2, 0, 3)]
    add(scheduler, 1, 3)  # the id is free again
    scheduler.drop_all()
    assert scheduler.pages.num_free == 4 and not scheduler.has_work


def test_a_request_preempted_before_its_first_token_starts_anew():
    """K 8: a round after 8 tokens takes 3 pages, and 1 of 6 is free."""
    config = make_config(
        max_model_len=48, num_pages=6, max_num_batched_tokens=20, shapes=((2, 20),)
    )
    scheduler = make_scheduler(config, 8)
    _, (second,) = add(scheduler, 0, 8, 30), add(scheduler, 1, 32, 8)
    start = scheduler.schedule()
    assert chunks(start) == [(0, 0, 8), (1, 0, 12)]
    step = scheduler.schedule()
    assert rounds(step) == [0] and not second.is_resident and scheduler.num_preemptions == 1
    give(scheduler, start)
    scheduler.abort(0)
    again = scheduler.schedule()
    (chunk,) = again.prefill.chunks
    assert chunk.is_first and not chunk.is_resumed and second.goal == 32
    assert chunk.start == 8, "the page that the first chunk filled is still there"
    give(scheduler, again)
    assert second.output == []
    last = scheduler.schedule()
    assert last.prefill.chunks[0].samples and give(scheduler, last) == [second]
    assert second.output == [9]


def test_a_request_preempted_with_its_first_token_in_flight_is_resumed_behind_it():
    """K 8 again: the second's whole prompt is on its way when the first one needs its pages."""
    config = make_config(max_model_len=32, num_pages=4, shapes=((2, 64),))
    scheduler = make_scheduler(config, 8)
    _, (second,) = add(scheduler, 0, 8, 20), add(scheduler, 1, 15, 8)
    prompts = scheduler.schedule()
    assert chunks(prompts) == [(0, 0, 8), (1, 0, 15)]
    assert rounds(scheduler.schedule()) == [0] and second.num_in_flight == 1
    assert not second.is_resident
    scheduler.abort(0)
    assert scheduler.schedule() is None
    give(scheduler, prompts)
    assert second.output == [9]
    (chunk,) = scheduler.schedule().prefill.chunks
    assert chunk.is_resumed and chunk.is_last and chunk.start + chunk.count == 15


def test_the_last_by_rank_loses():
    """4 of 8 tokens each on 8 pages, and the first needs a second page with none free."""
    config = make_config(num_pages=8, shapes=((4, 64),), scheduling_policy="priority")
    for priorities, order in [
        ([0, 0, 0, 0], [3, 2, 1]),
        ([0, 3, 1, 2], [1, 3, 2]),
        ([0, 1, 1, 1], [3, 2, 1]),
    ]:
        scheduler = make_scheduler(config, 7)
        samples = [add(scheduler, i, 8, 50, priority=p)[0] for i, p in enumerate(priorities)]
        give(scheduler, scheduler.schedule())
        lost = []
        for _ in range(40):
            if step := scheduler.schedule():
                give(scheduler, step, 8)
            for i, sequence in enumerate(samples):
                if i not in lost and not sequence.is_resident and not sequence.is_finished:
                    lost.append(i)
        assert lost == order


def test_one_that_is_planned_already_is_no_victim():
    """K 7: each round needs a page more. The third waits for one, and then has its turn first.

    6 pages: 1, 2 and 2; the second takes the last, and when the first one goes the third does.
    """
    config = make_config(max_model_len=48, num_pages=6, shapes=((4, 8),))
    scheduler = make_scheduler(config, 7)
    first, second, third = (
        add(scheduler, i, length, most)[0]
        for i, (length, most) in enumerate([(1, 4), (8, 40), (8, 40)])
    )
    give(scheduler, scheduler.schedule())
    step = scheduler.schedule()
    assert rounds(step) == [0, 1, 2] and scheduler.pages.num_free == 1
    for part in step.parts:
        commit(scheduler, part, [9], [9] * 8, [9] * 8)
    step = scheduler.schedule()
    assert rounds(step) == [0, 1] and [len(s.pages) for s in (first, second, third)] == [1, 3, 2]
    commit(scheduler, step.decode, [9], [9] * 8)
    scheduler.abort(0)
    step = scheduler.schedule()
    assert rounds(step) == [2] and [len(s.pages) for s in (second, third)] == [3, 3]
    assert scheduler.num_preemptions == 0


def test_an_older_one_never_gives_way_to_a_younger():
    """5 pages: at 20 tokens the first takes the last one, and the second waits with its 2."""
    scheduler, first, second = two_decoding(5)
    for _ in range(2):
        give(scheduler, scheduler.schedule(), 4)
    step = scheduler.schedule()
    assert rounds(step) == [0] and (len(first.pages), len(second.pages)) == (3, 2)
    assert second.is_resident and scheduler.num_preemptions == 0
    give(scheduler, step, 4)
    step = scheduler.schedule()  # the second's turn comes first, and the older keeps its pages
    assert rounds(step) == [0] and (len(first.pages), len(second.pages)) == (3, 2)
    assert scheduler.num_preemptions == 0 and scheduler.pages.num_free == 0
    give(scheduler, step, 4)
    step = scheduler.schedule()  # 28 tokens are 4 pages
    assert rounds(step) == [0] and len(first.pages) == 4 and not second.is_resident


def test_a_round_that_waits_for_pages_takes_no_budget():
    scheduler, _, _ = two_decoding(5)
    for _ in range(2):
        give(scheduler, scheduler.schedule(), 4)
    step = scheduler.schedule()
    assert rounds(step) == [0] and step.num_tokens == 4


def test_a_preempted_request_goes_back_to_its_place_in_the_queue():
    """Before those that came later, and behind those more urgent."""
    for priority, order in [(0, [1, 2]), (-1, [2, 1])]:
        scheduler, _, second = two_decoding(4)
        for _ in range(2):
            give(scheduler, scheduler.schedule(), 4)
        add(scheduler, 2, 3, priority=priority)
        give(scheduler, scheduler.schedule(), 1)
        assert not second.is_resident
        scheduler.abort(0)
        steps = run_to_the_end(scheduler)
        assert list(dict.fromkeys(i for i, _ in admissions(steps))) == order


def test_a_preempted_request_is_not_overtaken_while_its_tokens_are_in_flight():
    scheduler, first, second = two_decoding(4)
    give(scheduler, scheduler.schedule(), 4)
    in_flight = scheduler.schedule()
    scheduler.schedule()
    add(scheduler, 2, 3)
    scheduler.abort(0)
    assert scheduler.schedule() is None
    give(scheduler, in_flight)
    assert [i for i, _, _ in chunks(scheduler.schedule())] == [1, 2]


def test_exact_never_preempts():
    """Nobody is admitted without pages to the end of its request."""
    config = make_config(max_model_len=40, num_pages=8, exact=True)
    scheduler = make_scheduler(config, 3)
    for i in range(5):
        add(scheduler, i, 8, 17 + i)
    steps = run_to_the_end(scheduler)
    assert scheduler.num_preemptions == 0 and scheduler.pages.num_free == 8
    assert max(len(rounds(step)) for step in steps) == 2


def test_exact_keeps_no_page_back():
    """24 tokens are 3 pages of 6: two fit, for neither can ever need the other's."""
    scheduler = make_scheduler(make_config(max_model_len=40, num_pages=6, exact=True), 3)
    for i in range(2):
        add(scheduler, i, 8, 17)
    scheduler.schedule()
    assert chunks(scheduler.schedule()) == [(1, 0, 8)]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_tokens", [1, 2, 4])
def test_a_pool_for_one_request_serves_many(num_tokens, is_async):
    """Each of the largest size there is; all finish, in order."""
    config = make_config(max_model_len=32, num_pages=4)
    scheduler = make_scheduler(config, 3)
    samples = [add(scheduler, i, 1 + 6 * i, 31 - 6 * i)[0] for i in range(5)]
    run_to_the_end(scheduler, is_async, num_tokens)
    assert [s.finish_reason for s in samples] == ["length"] * 5
    assert [len(s.token_ids) for s in samples] == [32] * 5
    assert scheduler.num_preemptions > 0
    assert scheduler.pages.num_free == 4


@pytest.mark.parametrize(
    "is_caching, num_snapshots, num_found",
    [(True, None, 4), (False, None, 0), (True, 4, 2)],
    ids=["found", "not-wanted", "without-a-snapshot"],
)
def test_which_pages_of_an_output_are_found(is_caching, num_snapshots, num_found):
    """Of 20 tokens and 20 more those that are full; of a hybrid only the prompt's, for its states
    are kept there alone."""
    config = make_config(enable_prefix_caching=is_caching)
    scheduler = make_scheduler(config, num_snapshots=num_snapshots)
    (sequence,) = add(scheduler, 0, 20, 20)
    run_to_the_end(scheduler)
    keys = []
    extend_keys(keys, sequence.token_ids, config.page_size, b"")
    assert len(keys) == 4
    assert sum(scheduler.pages.find(key) is not None for key in keys) == num_found


# --- samples --------------------------------------------------------------------------------------


def chunks_of(steps):
    return [chunk for step in steps if step.prefill for chunk in step.prefill.chunks]


@pytest.mark.parametrize("is_caching", [False, True])
def test_samples_share_the_prompt_that_the_first_one_ran(is_caching):
    scheduler = make_scheduler(make_config(enable_prefix_caching=is_caching), 1)
    samples = add(scheduler, 0, 20, 12, num_samples=3)
    prompt = scheduler.schedule()
    (first,) = prompt.prefill.chunks
    assert (first.start, first.count, first.is_first, first.sequence.index) == (0, 20, True, 0)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    second = scheduler.schedule()
    assert [s.index for s in second.decode.sequences] == [0]
    follow = second.prefill.chunks
    assert [(c.start, c.count, c.is_first, c.samples) for c in follow] == [(16, 4, True, True)] * 2
    assert [c.sequence for c in follow] == samples[1:] and scheduler.num_running == 3

    assert len({sample.slot for sample in samples}) == 3
    shared, *others = [list(sample.pages[:2]) for sample in samples]
    assert others == [shared] * 2
    rest = [page for sample in samples for page in sample.pages[2:]]
    assert len(set(rest)) == len(rest) == 3 and not set(rest) & set(shared)
    assert scheduler.pages.num_free == 32 - 2 - 3

    commit(scheduler, prompt.prefill, [9])
    commit(scheduler, second.prefill, [9], [STOP])
    commit(scheduler, second.decode, [STOP])
    assert scheduler.pages.num_free == 32 - 3, "the second sample's, two of which it shared"
    run_to_the_end(scheduler)
    assert scheduler.pages.num_free == 32


@pytest.mark.parametrize("prompt_length", [1, 7, 8, 9, 16, 17, 40])
def test_full_pages_are_shared_but_the_last_token_is_every_samples_own(prompt_length):
    """A page that ends with the prompt is not shared: its last token is run by all."""
    scheduler = make_scheduler(make_config(max_num_batched_tokens=256, shapes=((4, 64),)))
    add(scheduler, 0, prompt_length, 5, num_samples=4)
    starts = {1: 0, 7: 0, 8: 0, 9: 8, 16: 8, 17: 16, 40: 32}
    first, second = scheduler.schedule(), scheduler.schedule()
    found = chunks_of([first, second])
    assert [c.sequence.index for c in found] == [0, 1, 2, 3]
    assert [c.start for c in found] == [0, *[starts[prompt_length]] * 3]
    assert all(c.is_first and c.is_last for c in found)
    owners = Counter(page for c in found for page in c.sequence.pages)
    num_shared = starts[prompt_length] // 8
    assert sorted(owners.values())[::-1][:num_shared] == [4] * num_shared
    assert max(sorted(owners.values())[: len(owners) - num_shared]) == 1
    give(scheduler, first)
    give(scheduler, second)
    run_to_the_end(scheduler)
    assert scheduler.pages.num_free == 32


def test_shared_pages_are_found_when_the_first_sample_has_ended():
    """With one slot, its first token ends it; samples come before requests that came later."""
    scheduler = make_scheduler(make_config(max_num_seqs=1))
    add(scheduler, 0, 20, 1, num_samples=3)
    add(scheduler, 1, 30, 3)
    steps = run_to_the_end(scheduler)
    assert admissions(steps) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [c.start for c in chunks_of(steps)] == [0, 16, 16, 0]
    assert scheduler.pages.num_free == 32


def test_a_prompt_of_several_chunks_is_shared_once_it_is_complete():
    scheduler = make_scheduler(make_config(max_num_batched_tokens=32))
    add(scheduler, 0, 60, 2, num_samples=2)
    found = chunks_of(run_to_the_end(scheduler))
    assert [(c.sequence.index, c.start, c.count) for c in found] == [
        (0, 0, 32),
        (0, 32, 28),
        (1, 56, 4),
    ]


def test_samples_of_prompts_that_end_together_are_served_in_order():
    """First come, first served: the samples of the first request come first."""
    scheduler = make_scheduler(make_config(shapes=((4, 16),)))
    for i in range(3):
        add(scheduler, i, 10, 4, num_samples=3)
    names = [name for name in admissions(run_to_the_end(scheduler)) if name[1]]
    assert names == sorted(names)


def test_samples_follow_the_first_one_once():
    """It runs its prompt again after a preemption, and they are there already."""
    scheduler = make_scheduler(make_config(max_num_seqs=3))
    samples = add(scheduler, 0, 20, 8, num_samples=3)
    give(scheduler, scheduler.schedule())
    give(scheduler, scheduler.schedule())
    assert all(sample.is_resident for sample in samples)
    scheduler.restart()
    run_to_the_end(scheduler)
    assert [sample.num_output for sample in samples] == [8] * 3
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert scheduler.pages.num_free == 32 and scheduler.schedule() is None
    others = [add(scheduler, i, 3)[0] for i in range(3)]
    scheduler.schedule()
    scheduler.schedule()
    assert {other.slot for other in others} == {0, 1, 2}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_groups", [2, 3, 5])
@pytest.mark.parametrize("num_spare_pages", range(4))
def test_samples_that_wait_block_nobody(num_groups, num_spare_pages, is_async):
    """The pool just holds the prompts, and samples of all of them wait."""
    config = make_config(
        max_num_seqs=num_groups,
        max_num_batched_tokens=64 * num_groups,
        num_pages=8 * num_groups + num_spare_pages,
        shapes=((num_groups, 64),),
    )
    scheduler = make_scheduler(config)
    samples = []
    for i in range(num_groups):
        samples += add(scheduler, i, 40, 24, num_samples=4, cut=1 + i % 2)
    for i in range(num_groups):
        samples += add(scheduler, num_groups + i, 60, 4)
    run_to_the_end(scheduler, is_async)
    assert all(sample.is_finished for sample in samples)
    assert scheduler.pages.num_free == config.num_pages


# --- ends that only the host knows of, and errors -------------------------------------------------


def test_a_step_in_flight_for_a_finished_sample_is_dropped():
    """Its tokens count for nothing; its slot and its pages, shared ones too, come back once."""
    scheduler = make_scheduler(make_config(max_num_seqs=2), 3)
    sample, other = add(scheduler, 0, 20, 30, num_samples=2, cut=3)
    prompt, second = scheduler.schedule(), scheduler.schedule()
    assert commit(scheduler, prompt.prefill, [50]) == ([1], [sample])
    both = scheduler.schedule()
    assert [s.index for s in both.decode.sequences] == [0, 1]
    commit(scheduler, second.prefill, [60])
    num_kept, touched = commit(scheduler, second.decode, [51, 52, 53, 54])
    assert num_kept == [2] and touched == [sample] and sample.output == [50, 51, 52]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "text")
    assert scheduler.num_running == 1
    num_free = scheduler.pages.num_free
    assert num_free == 32 - 3  # the other sample's

    (newcomer,) = add(scheduler, 1, 10, 6)  # takes the slot while the step is in flight
    third = scheduler.schedule()
    assert chunks(third) == [(1, 0, 10)] and newcomer.is_resident
    assert {newcomer.slot, other.slot} == {0, 1}
    assert commit(scheduler, both.decode, [55, 56], [61]) == ([0, 1], [other])
    assert sample.output == [50, 51, 52]
    assert scheduler.pages.num_free == num_free - len(newcomer.pages) - (len(other.pages) - 3)
    assert commit(scheduler, third.prefill, [70]) == ([1], [newcomer])
    assert commit(scheduler, third.decode, [62, 63]) == ([1], [other]), "cut at three"
    assert other.is_finished
    run_to_the_end(scheduler)
    assert scheduler.pages.num_free == 32
    for i in range(3):
        add(scheduler, 2 + i, 10, 6)
    run = [scheduler.schedule() for _ in range(3)]
    assert len(chunks_of(step for step in run if step)) == 2, "no slot came back twice"


@pytest.mark.parametrize("num_in_flight", [1, 3])
def test_an_error_of_one_output_ends_it_alone(num_in_flight):
    scheduler = make_scheduler(make_config(shapes=((4, 8),)), 3)
    (good,) = add(scheduler, 0, 3, 20)
    (bad,) = add(scheduler, 1, 3, 20, follow_grammar=lambda: StrictMatcher(30))
    give(scheduler, scheduler.schedule())
    steps = [scheduler.schedule() for _ in range(num_in_flight)]
    num_kept, touched = commit(scheduler, steps[0].decode, [20, 21], [20, 30])
    assert num_kept == [2, 1] and touched == [good, bad]
    assert bad.finish_reason == "error" and "not in the grammar" in str(bad.error)
    assert bad.output == [9, 20] and not bad.is_resident
    for step in steps[1:]:
        assert commit(scheduler, step.decode, [22], [23]) == ([1, 0], [good])
    assert bad.output == [9, 20] and good.finish_reason is None
    assert scheduler.num_running == 1 and rounds(scheduler.schedule()) == [0]


def test_an_error_of_a_text_watch_ends_its_output():
    class Broken:
        stop_reason = None

        def append(self, tokens):
            raise KeyError("no such piece")

    scheduler = make_scheduler(make_config())
    (sample,) = add(scheduler, 0, 3, watch_text=Broken)
    assert give(scheduler, scheduler.schedule()) == [sample]
    assert sample.finish_reason == "error" and isinstance(sample.error, KeyError)
    assert not scheduler.has_work and scheduler.pages.num_free == 32


def test_a_sequence_may_be_failed_from_outside():
    scheduler = make_scheduler(make_config(shapes=((4, 8),)), 3)
    (good,), (bad,) = add(scheduler, 0, 3), add(scheduler, 1, 3)
    step, error = scheduler.schedule(), RuntimeError("its processor")
    scheduler.fail(bad, error)
    assert (bad.finish_reason, bad.error) == ("error", error)
    assert scheduler.num_running == 1 and give(scheduler, step) == [good]
    add(scheduler, 1, 3)


def test_samples_start_when_the_first_one_fails_before_its_prompt_has_been_run():
    scheduler = make_scheduler(make_config())
    first, *others = add(scheduler, 0, 20, 2, num_samples=3)
    scheduler.fail(first, RuntimeError("of the first"))
    run_to_the_end(scheduler)
    assert [s.finish_reason for s in others] == ["length"] * 2
    assert not scheduler.has_work and scheduler.pages.num_free == 32


# --- aborts ---------------------------------------------------------------------------------------


def test_nothing_is_aborted_twice_or_unknown():
    scheduler = make_scheduler(make_config())
    assert scheduler.abort("nobody") == []
    samples = add(scheduler, 0, 3)
    assert scheduler.abort(0) == samples and scheduler.abort(0) == []
    assert samples[0].finish_reason == "abort"
    assert scheduler.schedule() is None and not scheduler.has_work


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("is_read", [False, True], ids=["in-flight", "read"])
@pytest.mark.parametrize("num_steps", range(7))
def test_a_request_may_be_aborted_at_any_moment(num_steps, is_read, num_samples):
    """Waiting, in its chunks (20, 20 and 5 tokens), with its samples to come, or decoding."""
    config = make_config(max_num_batched_tokens=20, num_pages=20)
    scheduler = make_scheduler(config, 3)
    samples = add(scheduler, 0, 45, 12, num_samples=num_samples)
    steps = []
    for _ in range(num_steps):
        if step := scheduler.schedule():
            steps += [step]
            if is_read:
                give(scheduler, step)
    num_tokens = [sample.num_output for sample in samples]
    assert scheduler.abort(0) == samples
    assert [sample.finish_reason for sample in samples] == ["abort"] * num_samples
    assert not scheduler.has_work and scheduler.num_running == scheduler.num_waiting == 0
    assert scheduler.pages.num_free == 20
    (newcomer,) = add(scheduler, 0, 3)  # with the same id, while the old one's steps come back
    steps = [] if is_read else steps
    for step in steps:
        assert give(scheduler, step) == []
    assert [sample.num_output for sample in samples] == num_tokens
    assert chunks(scheduler.schedule()) == [(0, 0, 3)] and newcomer.num_in_flight == 1


def test_aborted_samples_are_those_that_have_not_finished():
    scheduler = make_scheduler(make_config(), 1)
    first, *others = add(scheduler, 0, 20, 12, num_samples=3)
    commit(scheduler, scheduler.schedule().prefill, [STOP])
    assert first.finish_reason == "stop"
    assert scheduler.abort(0) == others and first.finish_reason == "stop"


def test_a_preempted_request_may_be_aborted():
    scheduler, first, second = two_decoding(4)
    give(scheduler, scheduler.schedule(), 4)
    in_flight, later = scheduler.schedule(), scheduler.schedule()
    assert not second.is_resident
    assert scheduler.abort(1) == [second] and scheduler.num_waiting == 0
    num_kept, touched = commit(scheduler, in_flight.decode, [20], [21])
    assert num_kept == [1, 0] and touched == [first] and second.num_output == 5
    give(scheduler, later)
    assert [s.decode.sequences for s in (scheduler.schedule(),)] == [(first,)]


def test_an_abort_lets_the_next_one_in():
    scheduler = make_scheduler(make_config(max_num_seqs=1))
    add(scheduler, 0, 3)
    scheduler.schedule()
    for i in (1, 2):
        add(scheduler, i, 4)
    scheduler.abort(1)
    scheduler.abort(0)
    assert chunks(scheduler.schedule()) == [(2, 0, 4)]


# --- beginning anew -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_read", [False, True], ids=["in-flight", "read"])
@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("num_steps", range(8))
def test_drop_all_frees_everything(num_steps, num_samples, is_read):
    """Whether prompts are half prefilled, samples wait, or outputs are ending."""
    config = make_config(shapes=((4, 32),))
    scheduler = make_scheduler(config, 1)
    for i in range(9):
        add(scheduler, i, 20 + 30 * (i % 2), 5, num_samples=num_samples)
    for _ in range(num_steps):
        step = scheduler.schedule()
        if step and is_read:
            give(scheduler, step)
    scheduler.drop_all()
    assert not scheduler.has_work and scheduler.num_running == scheduler.num_waiting == 0
    assert scheduler.pages.num_free == config.num_pages and scheduler.schedule() is None
    samples = [add(scheduler, i, 10, 5)[0] for i in range(5)]
    scheduler.schedule()
    assert {sample.slot for sample in samples[:4]} == set(range(4))


@pytest.mark.parametrize("num_steps", range(7))
def test_restart_lets_everyone_run_again(num_steps):
    """What had come stays, what was in flight is lost; nothing is found in the pages."""
    config = make_config(max_num_batched_tokens=20, num_pages=24, shapes=((4, 20),))
    scheduler = make_scheduler(config, 3)
    samples = [*add(scheduler, 0, 25, 9, num_samples=2), *add(scheduler, 1, 4, 20)]
    step = None
    for _ in range(num_steps):
        previous, step = step, scheduler.schedule()
        if previous:
            give(scheduler, previous, 2)
    lengths = [len(sample.token_ids) for sample in samples]
    scheduler.restart()
    assert scheduler.num_running == 0 and scheduler.pages.num_free == 24
    assert all(s.num_in_flight == s.max_tokens_in_flight == 0 for s in samples)
    assert [len(sample.token_ids) for sample in samples] == lengths
    again = scheduler.schedule()
    assert all(start == 0 for _, start, _ in chunks(again))
    give(scheduler, again, 2)
    run_to_the_end(scheduler, num_tokens=2)
    assert [s.finish_reason for s in samples] == ["length"] * 3
    assert [s.num_output for s in samples] == [9, 9, 20]


def test_restart_brings_back_the_preempted_too():
    scheduler, first, second = two_decoding(4)
    give(scheduler, scheduler.schedule(), 4)
    scheduler.schedule()
    scheduler.schedule()
    assert not second.is_resident and second.num_in_flight == 1
    scheduler.restart()
    assert scheduler.num_waiting == 2 and [i for i, _, _ in chunks(scheduler.schedule())] == [0]
    scheduler.abort(0)
    assert chunks(scheduler.schedule()) == [(1, 0, 12)]


# --- what happens to be counted -------------------------------------------------------------------


def test_what_runs_and_what_waits_is_counted():
    scheduler = make_scheduler(make_config(max_num_seqs=2))
    for i in range(3):
        add(scheduler, i, 3, num_samples=2)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 6)
    scheduler.schedule()
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 4)
    assert scheduler.has_work


def test_plans_tell_their_kinds_apart():
    scheduler, _ = decoding(1, make_config())
    add(scheduler, 1, 3)
    step = scheduler.schedule()
    assert isinstance(step.prefill, PrefillPlan) and isinstance(step.decode, DecodePlan)


# --- cost -----------------------------------------------------------------------------------------


def count_lines(function):
    """Lines of Python that a call runs: its cost, whatever else the machine does."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # a collection runs lines of its own: JAX's callbacks
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def many_decoding(num_running, num_waiting=0, **changes):
    sizes = {
        "max_num_seqs": num_running,
        "max_num_batched_tokens": 32 * num_running,
        "num_pages": 8 * num_running,
    }
    scheduler = make_scheduler(make_config(**(sizes | changes)), 1)
    for i in range(num_running):
        add(scheduler, i, 20, 30)
    give(scheduler, scheduler.schedule())
    for i in range(num_waiting):
        add(scheduler, num_running + i, 20, 30)
    return scheduler


def test_cost_of_a_step_grows_linearly_with_what_runs():
    def cost(num_running):
        scheduler = many_decoding(num_running)
        rows = [RowOutput([9, 9]) for _ in range(num_running)]

        def step():
            plan = scheduler.schedule().decode
            assert len(plan.sequences) == num_running
            scheduler.commit(plan, rows)

        return count_lines(step)

    assert cost(64) > 64
    assert cost(512) < 8.5 * cost(64)


def test_cost_of_admissions_grows_linearly():
    def cost(num_running):
        config = make_config(
            max_num_seqs=num_running,
            max_num_batched_tokens=32 * num_running,
            num_pages=8 * num_running,
        )
        scheduler = make_scheduler(config)
        for i in range(num_running):
            add(scheduler, i, 20)
        lines = count_lines(scheduler.schedule)
        assert scheduler.num_running == num_running
        return lines

    assert cost(512) < 8.5 * cost(64)


def test_cost_of_a_step_does_not_grow_with_what_waits():
    assert count_lines(many_decoding(8, 10).schedule) == count_lines(
        many_decoding(8, 5000).schedule
    )
