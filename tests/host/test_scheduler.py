"""Held requests, and the number of Python lines that a step executes."""

from dataclasses import replace

from support.cost import count_lines
from support.scheduling import add, chunks, give, make_config, make_scheduler

from specjax.host.sequence import RowOutput


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


def costs(num_running, num_waiting=0):
    """Return the lines that two steps execute: one that admits requests, and a round of them."""
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
