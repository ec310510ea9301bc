"""Token budgets of a step, and configs under which nothing could be scheduled.

The numbers (budgets of 20 and 50) are those of vLLM's tests where these have any.
"""

import re
from dataclasses import replace

import pytest
from support.engines import simulated_engine
from support.refusals import label, refusal
from support.scheduling import (
    add,
    chunks,
    decoding,
    give,
    make_config,
    make_scheduler,
    rounds,
)

from specjax.host.budgets import explain_waiting
from specjax.host.speculation.policy import StaticPolicy


@pytest.mark.parametrize(
    "scheduled, batched, draft_slots, counts",
    [
        (20, 20, 0, [10, 10]),
        (20, 20, 3, [10, 4]),  # 10 + 3, then 4 + 3 of the 7 that are left; as in vLLM
        (17, 17, 3, [10, 1]),
        (16, 16, 3, [10]),  # 3 are left, all of them draft slots
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


def test_a_better_shape_has_no_more_of_the_budget_than_the_step_s_own():
    """Rounds of 4 rows are taken off: after four of them, two chunks run no more than one does."""
    config = make_config(
        max_num_seqs=8, max_num_batched_tokens=32, num_pages=64, shapes=((1, 64), (8, 16))
    )
    for num_rounds, expected in (4, 16), (1, 28):
        scheduler, _ = decoding(num_rounds, config, 3)
        scheduler.shapes = replace(scheduler.all_shapes, prefill=((1, 64),))
        for i in range(10, 14):
            add(scheduler, i, 16)
        plan = scheduler.schedule().prefill
        assert plan.num_tokens == 16 and plan.better_shape == (8, 16)
        assert plan.better_tokens == expected


@pytest.mark.parametrize(
    "budget, draft_slots, num_rows",
    [(7, 0, 1), (8, 0, 2), (11, 0, 2), (12, 0, 3), (12, 1, 2), (12, 2, 2), (12, 3, 1)],
)
def test_a_round_is_run_whole_or_not_at_all(budget, draft_slots, num_rows):
    """With a budget of 10, two rounds of 4 rows run; vLLM would also run the third, with one draft.

    So a request's drafts do not depend on other requests. Each round also pays for its draft slots.
    """
    config = make_config(max_num_batched_tokens=budget, shapes=((4, 8),))
    scheduler = make_scheduler(config, 3, draft_slots=draft_slots)
    for i in range(3):
        add(scheduler, i, 1)
    assert len(chunks(scheduler.schedule())) == 3
    step = scheduler.schedule()
    assert len(rounds(step)) == num_rows and step.num_tokens == 4 * num_rows
    assert (step.decode.k, step.decode.num_drafts) == (3, 3)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "num_requests, expected",
    [(4, [[0, 1], [2, 3], [0, 1], [2, 3]]), (3, [[0, 1], [2, 0], [1, 0], [2, 0], [1, 0], [2, 0]])],
)
def test_a_budget_too_small_for_all_goes_round(num_requests, expected, is_async):
    """Requests that were left out go first, then requests that arrived first."""
    config = make_config(max_num_batched_tokens=8, shapes=((4, 8),))
    scheduler, _ = decoding(num_requests, config, 3)
    turns = []
    for _ in expected:
        step = scheduler.schedule()
        turns.append(rounds(step))
        if not is_async:
            give(scheduler, step)
    assert turns == expected


def test_chunks_get_their_turn_when_rounds_take_the_whole_budget():
    config = make_config(max_num_batched_tokens=8, shapes=((4, 8),))
    scheduler = make_scheduler(config, 3)
    for i, length in enumerate([2, 2, 10]):
        add(scheduler, i, length)
    steps = [scheduler.schedule() for _ in range(6)]
    assert [(chunks(step), rounds(step)) for step in steps] == [
        ([(0, 0, 2), (1, 0, 2), (2, 0, 4)], []),
        ([], [0, 1]),
        ([(2, 4, 6)], []),  # 2 are left, too few for a round
        ([], [0, 1]),
        ([], [2, 0]),
        ([], [1, 0]),
    ]


@pytest.mark.parametrize(
    "scheduled, batched, exact, max_drafts, draft_slots, words",
    [
        (2, 64, False, 7, 0, ["max_num_scheduled_tokens=2", "7 drafts", "(8 tokens)", "by 6,"]),
        (4, 5, False, 3, 3, ["max_num_batched_tokens=5", "3 draft slots", "(7 tokens)", "by 2,"]),
        (1, 3, False, 0, 3, ["max_num_batched_tokens=3", "a chunk", "(4 tokens)", "by 1"]),
        (34, 34, True, 3, 3, ["max_num_batched_tokens=34", "cannot hold a chunk", "by 1"]),
        *(
            (*sizes, 3, slots, None)
            for sizes, slots in [((4, 4, False), 0), ((4, 7, False), 3), ((34, 34, True), 2)]
        ),
    ],
)
def test_budgets_have_to_hold_a_round_and_an_exact_chunk(
    scheduled, batched, exact, max_drafts, draft_slots, words
):
    """If `words` is empty, the budgets are large enough."""
    config = make_config(
        max_num_scheduled_tokens=scheduled, max_num_batched_tokens=batched, exact=exact
    )
    if not words:
        config.check_budgets(max_drafts, draft_slots)
        return
    advice = "nothing could be scheduled", "raise " + words[0].partition("=")[0]
    refusal(lambda: config.check_budgets(max_drafts, draft_slots), *words, *advice)


@pytest.mark.parametrize(
    "batched, draft_slots, together, needed",
    [(32, 0, 1, 44), (43, 0, 3, 44), (44, 0, 4, None), (45, 1, 3, 48), (48, 1, 4, None)],
)
def test_exact_budgets_that_let_few_run_together_say_so(batched, draft_slots, together, needed):
    """An engine warns of such budgets. The warning names how many requests run together."""
    sizes = {"max_num_seqs": 4, "num_pages": 64, "exact": True, "max_num_batched_tokens": batched}
    config = make_config(**sizes)
    told = explain_waiting(config, 3, draft_slots)
    if needed is None:
        assert told is None
    else:
        assert f"only {together} of max_num_seqs=4" in told and "raise max_num_" in told
        assert f"tokens to {needed}, or lower max_num_seqs to {together}" in told
        if draft_slots == 0:
            with pytest.warns(UserWarning, match=re.escape(told)):
                simulated_engine(config, StaticPolicy(3))
    scheduler = make_scheduler(config, 3, draft_slots=draft_slots)
    for i in range(4):
        add(scheduler, i, 20, 12)
    most = 0
    while scheduler.has_work:
        give(scheduler, scheduler.schedule())
        most = max(most, scheduler.num_running)
    assert most == together
    assert explain_waiting(replace(config, exact=False, prefill_shapes=None), 3, 0) is None


BUDGETS = {"max_num_scheduled_tokens": 30, "max_num_batched_tokens": 20}
NARROW = {"prefill_shapes": ((1, 16), (2, 8)), "max_num_batched_tokens": 60}
NUMBERS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "page_size",
    "num_pages",
)


@pytest.mark.parametrize(
    "changes, words",
    [
        (BUDGETS, ["max_num_scheduled_tokens=30", "max_num_batched_tokens=20", "by 10"]),
        (
            {"decode_batches": (1, 2)},
            ["decode_batches=(1, 2)", "max_num_seqs=4", "add 4", "lower max_num_seqs to 2"],
        ),
        ({"decode_batches": ()}, ["decode_batches=()", "(1, 4, 16)"]),
        ({"decode_batches": 4}, ["decode_batches=4", "(1, 4, 16)"]),
        ({"decode_batches": (4, 0)}, ["decode_batches[1]=0", "at least 1"]),
        (NARROW, ["16 tokens of the 60", "add (4, 16)", "lower max_num_batched_tokens to 16"]),
        ({"prefill_shapes": ((16,),)}, ["prefill_shapes=((16,),)", "(batch, width)"]),
        ({"prefill_shapes": ((1, 0),)}, ["prefill_shapes[0][1]=0", "at least 1"]),
        ({"exact": True, "decode_batches": (4,)}, ["decode_batches=(4,)", "exact=True"]),
        ({"num_pages": 7}, ["num_pages=7", "max_model_len=64", "8 pages of 8", "raise num_pages"]),
        ({"scheduling_policy": "lifo"}, ["scheduling_policy='lifo'", "fcfs, priority"]),
        *(
            ({name: value}, [f"{name}={value!r} must be an integer of at least 1"])
            for name in NUMBERS
            for value in (0, 1.5, "4", True)
        ),
        *(
            ({"num_snapshots": x}, [f"num_snapshots={x}", "an integer of at least 0"])
            for x in (-1, 0.5, True)
        ),
    ],
    ids=label,
)
def test_sizes_that_do_not_go_together_are_refused(changes, words):
    refusal(lambda: make_config(**changes), *words)


def test_what_is_left_out_follows_from_the_rest():
    config = make_config(max_num_seqs=9)
    assert (config.max_num_scheduled_tokens, config.num_snapshots) == (64, 2)
    assert make_config(max_num_seqs=3).num_snapshots == 1
    assert make_config(num_snapshots=0).num_snapshots == 0
    assert make_config(max_num_scheduled_tokens=5).max_num_scheduled_tokens == 5
