"""Which requests run in a step, in which shape, and with which pages."""

from dataclasses import dataclass, field

import pytest
from support.scheduling import (
    STOP,
    add,
    admissions,
    chunks,
    commit,
    give,
    make_config,
    make_scheduler,
    num_pages,
    rounds,
    run_to_the_end,
)

from specjax.host.speculation.policy import DecodeLoad, PolicyRule


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
    """A running request is not preempted for a more urgent one."""
    scheduler = make_scheduler(make_config(max_num_seqs=1, scheduling_policy="priority"))
    add(scheduler, 5, 3, 3, priority=5)
    steps = [scheduler.schedule()]
    for i, priority in enumerate([1, 0, 1, -2, 0]):
        add(scheduler, i, 3, 2, priority=priority)
    give(scheduler, steps[0])
    steps += run_to_the_end(scheduler)
    assert [i for i, _ in admissions(steps)] == [5, 3, 1, 4, 0, 2]
    assert scheduler.num_preemptions == 0


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
    """50 tokens need 7 of the 10 pages. The third request would fit, but the second is first."""
    scheduler = make_scheduler(make_config(num_pages=10))
    for i, length in enumerate([50, 50, 2]):
        add(scheduler, i, length)
    step = scheduler.schedule()
    assert chunks(step) == [(0, 0, 50)] and scheduler.pages.num_free == 3
    assert chunks(scheduler.schedule()) == [] and scheduler.num_running == 1
    (first,) = commit(scheduler, step.prefill, [STOP])[1]
    assert first.output == [STOP]
    assert chunks(scheduler.schedule()) == [(1, 0, 50)]


@pytest.mark.parametrize("size, num_admitted", [(8, 4), (7, 4), (6, 3), (4, 2), (3, 2), (2, 1)])
def test_a_newcomer_leaves_a_page_for_each_that_runs(size, num_admitted):
    """Otherwise, it would soon be preempted. A prompt of 8 tokens has one page.

    One free page is left for each running request.
    """
    config = make_config(max_model_len=16, num_pages=size, shapes=((4, 8),))
    scheduler = make_scheduler(config)
    for i in range(4):
        add(scheduler, i, 8)
    assert len(chunks(scheduler.schedule())) == num_admitted


def test_an_id_is_taken_until_its_request_has_finished():
    scheduler = make_scheduler(make_config())
    add(scheduler, 0, 3, 1)
    step = scheduler.schedule()
    with pytest.raises(ValueError, match="request_id=0 belongs to a request that has not finished"):
        add(scheduler, 0, 5)
    assert scheduler.num_waiting == 0
    give(scheduler, step)
    add(scheduler, 0, 5)
    assert chunks(scheduler.schedule()) == [(0, 0, 5)]


def test_chunks_take_the_shape_in_which_they_get_furthest():
    """Of equally good shapes, the narrowest is used. Some widths have no shape of batch size 1."""
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


def test_a_prompt_that_takes_every_page_has_its_shape_and_so_has_its_rest():
    for num_tokens, width, expected in (64, 64, [(0, 0, 64)]), (21, 16, [(0, 0, 16), (0, 16, 5)]):
        scheduler = make_scheduler(make_config(num_pages=8, shapes=((1, 8), (1, width))))
        add(scheduler, 0, num_tokens, 0)
        steps = [scheduler.schedule() for _ in expected]
        assert [chunk for step in steps for chunk in chunks(step)] == expected
        assert [step.prefill.width for step in steps] == [width, 8][: len(steps)]


@dataclass
class Noting(PolicyRule):
    """A policy whose K falls with the batch size, and which records the loads."""

    weighs_requests: bool = True
    choices: tuple[int, ...] = (0, 1, 2, 3)
    loads: list[DecodeLoad] = field(default_factory=list)

    def choose(self, load):
        self.loads.append(load)
        return max(0, 3 - load.num_sequences // 2)


def test_k_is_chosen_once_a_step_by_who_decodes():
    """Requests that are prefilled, or only wait for their last token, do not count."""
    policy = Noting()
    scheduler = make_scheduler(make_config(max_num_seqs=6, shapes=((6, 4),)), policy)
    assert scheduler.schedule() is None
    for i in range(5):
        add(scheduler, i, 2, 2 if i else 8)
    add(scheduler, 5, 40)
    first = scheduler.schedule()
    assert len(chunks(first)) == 6 and first.decode is None
    second = scheduler.schedule()
    assert len(rounds(second)) == 5 and len(chunks(second)) == 1
    assert (second.decode.k, second.decode.num_drafts) == (1, 1)  # 3 - 5 // 2
    third = scheduler.schedule()  # for the others two steps in flight are enough
    assert rounds(third) == [0] and (third.decode.k, third.decode.num_drafts) == (3, 3)
    assert [load.num_sequences for load in policy.loads] == [0, 0, 5, 1]


@pytest.mark.parametrize("weighs", [True, False])
def test_a_policy_is_told_of_requests_if_it_weighs_them(weighs):
    """The load has groups, lengths and usable drafts: one, if a request lacks only two tokens."""
    policy = Noting(weighs)
    scheduler = make_scheduler(make_config(shapes=((4, 16),)), policy)
    for i, max_tokens in enumerate((9, 9, 3)):
        add(scheduler, i, 4 + i, max_tokens)
    give(scheduler, scheduler.schedule())
    scheduler.schedule()
    load = policy.loads[-1]
    if not weighs:
        assert load == DecodeLoad(3, 0, 64)
        return
    assert (load.num_sequences, load.num_context, load.max_tokens) == (3, 4 + 5 + 6 + 3, 64)
    assert load.requests[1:] == ([1.0] * 3, [5, 6, 7], [3, 3, 1], None)
    assert len(set(load.requests.keys)) == 3


def test_pages_are_reserved_for_the_most_that_rounds_in_flight_may_write():
    """The prompt has 10 tokens. With K = 3, each round in flight may add 4 tokens.

    When a round adds fewer tokens, pages are freed. At the end, the sequence has 11, 12, 16, 17 and
    18 tokens after each result, and rounds in flight may still add 16, 12, 8, 4 and 0.
    """
    scheduler = make_scheduler(make_config(), 3)
    (sequence,) = add(scheduler, 0, 10, 40)
    steps, grown, trimmed = [], [], []
    for _ in range(5):
        steps.append(scheduler.schedule())
        grown += num_pages(sequence)
    assert grown == [2, 2, 3, 3, 4]  # 10, 14, 18, 22, 26
    assert sequence.num_in_flight == 5
    for step, num_tokens in zip(steps, [1, 1, 4, 1, 1], strict=True):
        give(scheduler, step, [9] * num_tokens)
        most = len(sequence.token_ids) - 1 + sequence.max_tokens_in_flight
        trimmed.append((most, *num_pages(sequence)))
        assert scheduler.pages.num_free == 32 - trimmed[-1][1]
    assert trimmed == [(26, 4), (23, 3), (23, 3), (20, 3), (17, 3)]


@pytest.mark.parametrize("k, max_tokens, expected", [(5, 40, 2), (6, 40, 3), (3, 7, 2), (3, 8, 3)])
def test_no_further_page_is_taken_for_what_just_fits(k, max_tokens, expected):
    """A request has 10 + 6 or 10 + 7 tokens in pages of 8. Its last token is not computed."""
    scheduler = make_scheduler(make_config(), k)
    (sequence,) = add(scheduler, 0, 10, max_tokens)
    for _ in range(5 if max_tokens < 40 else 2):
        scheduler.schedule()
    assert num_pages(sequence) == [expected]
