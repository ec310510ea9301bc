"""Samples of one prompt, and ends that only the host sees: texts, grammars, aborts."""

import pytest
from support.scheduling import (
    STOP,
    StrictMatcher,
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

    assert len({sample.residency.slot for sample in samples}) == 3
    shared, *others = [list(sample.residency.pages[:2]) for sample in samples]
    assert others == [shared] * 2
    assert scheduler.pages.num_free == 32 - 2 - 3, "each has a third page of its own"
    commit(scheduler, prompt.prefill, [9])
    commit(scheduler, second.prefill, [9], [STOP])
    commit(scheduler, second.decode, [STOP])
    assert scheduler.pages.num_free == 32 - 3, "the second sample's, two of which it shared"


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
    for _ in range(2):
        give(scheduler, scheduler.schedule())
    assert scheduler.num_running == 3
    scheduler.restart()
    run_to_the_end(scheduler)
    assert [sample.num_output for sample in samples] == [8] * 3
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert scheduler.pages.num_free == 32 and scheduler.schedule() is None


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
    assert commit(scheduler, second.decode, [51, 52, 53, 54]) == ([2], [sample])
    assert sample.output == [50, 51, 52]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "text")
    assert scheduler.num_running == 1 and scheduler.pages.num_free == 32 - 3  # the other sample's

    (newcomer,) = add(scheduler, 1, 10, 6)  # takes the slot while the step is in flight
    assert chunks(scheduler.schedule()) == [(1, 0, 10)]
    assert {newcomer.residency.slot, other.residency.slot} == {0, 1}
    assert commit(scheduler, both.decode, [55, 56], [61]) == ([0, 1], [other])
    assert sample.output == [50, 51, 52]
    assert scheduler.pages.num_free == 32 - sum(num_pages(newcomer, other))


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
    assert bad.output == [9, 20] and bad.residency is None
    for step in steps[1:]:
        assert commit(scheduler, step.decode, [22], [23]) == ([1, 0], [good])
    assert bad.output == [9, 20] and good.finish_reason is None
    assert scheduler.num_running == 1 and rounds(scheduler.schedule()) == [0]


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


# --- aborts ---------------------------------------------------------------------------------------


def test_nothing_is_aborted_twice_or_unknown():
    scheduler = make_scheduler(make_config())
    assert scheduler.abort("nobody") == []
    samples = add(scheduler, 0, 3)
    assert scheduler.abort(0) == samples and scheduler.abort(0) == []
    assert samples[0].finish_reason == "abort"
    assert scheduler.schedule() is None and not scheduler.has_work


@pytest.mark.parametrize("is_read", [False, True], ids=["in-flight", "read"])
@pytest.mark.parametrize("num_steps", range(7))
def test_a_request_may_be_aborted_at_any_moment(num_steps, is_read):
    """Waiting, in its chunks (20, 20 and 5 tokens), with its samples to come, or decoding."""
    scheduler = make_scheduler(make_config(max_num_batched_tokens=20, num_pages=20), 3)
    samples, steps = add(scheduler, 0, 45, 12, num_samples=3), []
    for _ in range(num_steps):
        if step := scheduler.schedule():
            steps += [] if is_read else [step]
            if is_read:
                give(scheduler, step)
    assert scheduler.abort(0) == samples
    assert [sample.finish_reason for sample in samples] == ["abort"] * 3
    assert not scheduler.has_work and scheduler.num_running == scheduler.num_waiting == 0
    assert scheduler.pages.num_free == 20
    add(scheduler, 0, 3)  # with the same id, while the old one's steps come back
    assert all(give(scheduler, step) == [] for step in steps)
    assert chunks(scheduler.schedule()) == [(0, 0, 3)]


def test_aborted_samples_are_those_that_have_not_finished():
    scheduler = make_scheduler(make_config(), 1)
    first, *others = add(scheduler, 0, 20, 12, num_samples=3)
    commit(scheduler, scheduler.schedule().prefill, [STOP])
    assert first.finish_reason == "stop"
    assert scheduler.abort(0) == others and first.finish_reason == "stop"


def test_an_abort_lets_the_next_one_in():
    scheduler = make_scheduler(make_config(max_num_seqs=1))
    add(scheduler, 0, 3)
    scheduler.schedule()
    for i in (1, 2):
        add(scheduler, i, 4)
    scheduler.abort(1)
    scheduler.abort(0)
    assert chunks(scheduler.schedule()) == [(2, 0, 4)]
