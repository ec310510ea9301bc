"""The scheduler as a whole: beginning anew, counters, and what a step costs."""

import gc
import sys

import pytest
from support.scheduling import (
    add,
    chunks,
    decoding,
    give,
    make_config,
    make_scheduler,
    run_to_the_end,
    two_decoding,
)

from specjax.host.plans import DecodePlan, PrefillPlan
from specjax.host.sequence import RowOutput

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
    assert {sample.residency.slot for sample in samples[:4]} == set(range(4))


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
    assert second.residency is None and second.num_in_flight == 1
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
