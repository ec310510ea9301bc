"""The scheduler as a whole: beginning anew, counters, and what a step costs."""

from dataclasses import replace

import pytest
from support.cost import count_lines
from support.scheduling import add, chunks, give, make_config, make_scheduler, run_to_the_end

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


# --- held requests --------------------------------------------------------------------------------


def test_a_held_request_waits_until_it_is_let_in():
    scheduler = make_scheduler(make_config())
    (sample,) = add(scheduler, 0, 3)
    held = replace(sample.request, request_id=1)
    scheduler.add(held, is_held=True)
    assert scheduler.held == {1: held} and scheduler.num_waiting == 2
    assert chunks(scheduler.schedule()) == [(0, 0, 3)] and scheduler.demands.total() == 1
    scheduler.let_in(held)
    assert not scheduler.held and scheduler.demands == {held.demands: 2}
    assert chunks(scheduler.schedule()) == [(1, 0, 3)]
    scheduler.abort(1)
    assert scheduler.demands.total() == 1


# --- what happens to be counted -------------------------------------------------------------------


def test_what_runs_and_what_waits_is_counted():
    scheduler = make_scheduler(make_config(max_num_seqs=2))
    for i in range(3):
        add(scheduler, i, 3, num_samples=2)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 6)
    scheduler.schedule()
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 4)
    assert scheduler.has_work


# --- cost -----------------------------------------------------------------------------------------


def costs(num_running, num_waiting=0):
    """Lines of a step that admits everybody who can run, and of a round of these."""
    config = make_config(
        max_num_seqs=num_running,
        max_num_batched_tokens=32 * num_running,
        num_pages=8 * num_running,
    )
    scheduler = make_scheduler(config, 1)
    for i in range(num_running + num_waiting):
        add(scheduler, i, 20, 30)
    rows, steps = [RowOutput([9, 9]) for _ in range(num_running)], []
    admissions = count_lines(lambda: steps.append(scheduler.schedule()))
    give(scheduler, steps[0])

    def step():
        plan = scheduler.schedule().decode
        assert len(plan.sequences) == num_running
        scheduler.commit(plan, rows)

    return admissions, count_lines(step)


def test_cost_of_a_step_grows_linearly_with_what_runs():
    for few, many in zip(costs(64), costs(512), strict=True):
        assert 64 < few and many < 8.5 * few


def test_cost_of_a_step_does_not_grow_with_what_waits():
    assert costs(8, 10)[1] == costs(8, 5000)[1]
