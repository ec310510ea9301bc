"""Samples of one prompt, and requests that are ended from outside.

`tests/fuzz` checks that no token is lost then, whenever it happens.
"""

import pytest
from support.scheduling import (
    STOP,
    add,
    admissions,
    chunks_of,
    commit,
    give,
    make_config,
    make_scheduler,
    run_to_the_end,
)


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
    shared, *others = [list(sample.residency.pages[:2]) for sample in samples]
    assert others == [shared] * 2
    assert scheduler.pages.num_free == 32 - 2 - 3, "each has a third page of its own"


def test_samples_come_before_requests_that_came_later():
    """There is one slot. A sample ends with its first token, and the next one finds its pages."""
    scheduler = make_scheduler(make_config(max_num_seqs=1))
    for i in range(2):
        add(scheduler, i, 20, 1, num_samples=3)
    steps = run_to_the_end(scheduler)
    assert admissions(steps) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [chunk.start for chunk in chunks_of(steps)] == [0, 16, 16] * 2


def test_a_prompt_of_several_chunks_is_shared_once_it_is_complete():
    scheduler = make_scheduler(make_config(max_num_batched_tokens=32))
    add(scheduler, 0, 60, 2, num_samples=2)
    found = chunks_of(run_to_the_end(scheduler))
    expected = [(0, 0, 32), (0, 32, 28), (1, 56, 4)]
    assert [(c.sequence.index, c.start, c.count) for c in found] == expected


def test_a_sequence_or_a_request_may_be_failed_from_outside():
    scheduler = make_scheduler(make_config(shapes=((4, 8),)), 3)
    (good,), (bad,) = add(scheduler, 0, 3), add(scheduler, 1, 3)
    step, error = scheduler.schedule(), RuntimeError("its processor")
    samples = add(scheduler, 2, 3, num_samples=2)
    assert scheduler.fail_all(samples[0].request, error) == samples
    assert [sample.error for sample in samples] == [error] * 2
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


def test_aborted_samples_are_those_that_have_not_finished():
    scheduler = make_scheduler(make_config(), 1)
    assert scheduler.abort("nobody") == []
    first, *others = add(scheduler, 0, 20, 12, num_samples=3)
    commit(scheduler, scheduler.schedule().prefill, [STOP])
    assert scheduler.abort(0) == others and scheduler.abort(0) == []
    assert [s.finish_reason for s in (first, *others)] == ["stop", "abort", "abort"]
    assert scheduler.schedule() is None and not scheduler.has_work
