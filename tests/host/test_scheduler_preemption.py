"""Preemption: which request is preempted, and what it keeps."""

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
    two_decoding,
)


def test_slot_and_pages_of_a_preempted_request_are_free_in_the_same_step():
    """K 8: 17 tokens are 3 pages of 5, for which the second has to give up its 3."""
    config = make_config(
        max_model_len=40, num_pages=5, max_num_seqs=2, shapes=((2, 32),), max_num_batched_tokens=90
    )
    scheduler = make_scheduler(config, 8)
    (first,), (second,) = add(scheduler, 0, 8, 30), add(scheduler, 1, 24, 9)
    scheduler.schedule()
    residency, (third,) = second.residency, add(scheduler, 2, 3, priority=-1)
    step = scheduler.schedule()
    assert rounds(step) == [0] and chunks(step) == [(2, 0, 3)]
    assert second.residency is None and second.num_in_flight == 1
    assert third.residency.slot == residency.slot
    assert {*first.residency.pages, *third.residency.pages} & {*residency.pages}


def test_the_later_one_is_preempted_when_pages_run_out_and_runs_its_tokens_again():
    """4 pages: 12 and 16 tokens are 2 pages each, 20 are 3.

    Again it runs all tokens but the last, which a round runs: 16 of 17. Nothing is sampled.
    """
    scheduler, first, second = two_decoding(4)
    for _ in range(2):
        step = scheduler.schedule()
        assert rounds(step) == [0, 1]
        give(scheduler, step, 4)
    assert (len(second.token_ids), scheduler.pages.num_free) == (17, 0)
    step = scheduler.schedule()
    assert rounds(step) == [0] and chunks(step) == []
    assert scheduler.num_preemptions == 1 and second.residency is None
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert num_pages(first) == [3] and scheduler.pages.num_free == 1
    scheduler.abort(0)
    step = scheduler.schedule()
    (chunk,) = step.prefill.chunks
    assert chunk.sequence is second and chunk.start + chunk.count == 16
    assert second.residency.num_to_prefill == 16
    assert chunk.is_first and chunk.is_last and chunk.is_resumed and not chunk.samples
    assert second.num_in_flight == 0 and rounds(step) == []
    following = scheduler.schedule()
    assert rounds(following) == [1]
    assert commit(scheduler, step.prefill, []) == ([0], [])
    assert commit(scheduler, following.decode, [30, 31]) == ([2], [second])
    assert second.token_ids[16:] == [9, 30, 31]


def test_tokens_in_flight_at_a_preemption_are_delivered_once():
    """A third round is planned with the second in flight: 20 tokens at most, for 4 pages."""
    scheduler, _, second = two_decoding(4)
    give(scheduler, scheduler.schedule(), 4)
    in_flight, later = scheduler.schedule(), scheduler.schedule()
    assert rounds(in_flight) == [0, 1] and rounds(later) == [0] and second.residency is None
    assert (second.num_in_flight, second.num_output) == (1, 5)
    add(scheduler, 2, 3)
    scheduler.abort(0)
    assert scheduler.schedule() is None, "not overtaken, and not readmitted before they are there"
    num_kept, touched = commit(scheduler, in_flight.decode, [20], [21, 22])
    assert num_kept == [0, 2] and touched == [second]
    assert second.output == [9] * 5 + [21, 22]
    assert second.num_in_flight == second.max_tokens_in_flight == 0
    assert [i for i, _, _ in chunks(scheduler.schedule())] == [1, 2]
    assert second.residency.num_to_prefill == 8 + 7 - 1
    assert commit(scheduler, later.decode, [23]) == ([0], [])
    assert second.output == [9] * 5 + [21, 22]


def test_a_request_may_finish_while_it_is_preempted():
    scheduler, first, second = two_decoding(4)
    give(scheduler, scheduler.schedule(), 4)
    in_flight, _ = scheduler.schedule(), scheduler.schedule()
    assert second.residency is None
    add(scheduler, 2, 3)
    num_kept, touched = commit(scheduler, in_flight.decode, [20], [21, STOP])
    assert num_kept == [1, 2] and touched == [first, second]
    assert second.finish_reason == "stop" and scheduler.num_waiting == 1
    scheduler.abort(0)
    assert chunks(scheduler.schedule()) == [(2, 0, 3)]
    add(scheduler, 1, 3)  # the id is free again


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
    assert rounds(step) == [0] and second.residency is None and scheduler.num_preemptions == 1
    give(scheduler, start)
    scheduler.abort(0)
    again = scheduler.schedule()
    (chunk,) = again.prefill.chunks
    assert chunk.is_first and not chunk.is_resumed and second.residency.num_to_prefill == 32
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
    assert second.residency is None
    scheduler.abort(0)
    assert scheduler.schedule() is None
    give(scheduler, prompts)
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
                if i not in lost and sequence.residency is None and not sequence.is_finished:
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
    assert rounds(step) == [0, 1] and num_pages(first, second, third) == [1, 3, 2]
    commit(scheduler, step.decode, [9], [9] * 8)
    scheduler.abort(0)
    step = scheduler.schedule()
    assert rounds(step) == [2] and num_pages(second, third) == [3, 3]
    assert scheduler.num_preemptions == 0


def test_an_older_one_never_gives_way_to_a_younger():
    """5 pages: at 20 tokens the first takes the last one, and the second waits with its 2."""
    scheduler, first, second = two_decoding(5)
    for _ in range(2):
        give(scheduler, scheduler.schedule(), 4)
    for _ in range(2):  # the second time the second's turn comes first; it takes no budget
        step = scheduler.schedule()
        assert rounds(step) == [0] and num_pages(first, second) == [3, 2]
        assert step.num_tokens == 4 and scheduler.num_preemptions == 0
        give(scheduler, step, 4)
    step = scheduler.schedule()  # 28 tokens are 4 pages
    assert rounds(step) == [0] and num_pages(first) == [4] and second.residency is None


def test_a_preempted_request_goes_back_to_its_place_in_the_queue():
    """Before those that came later, and behind those more urgent."""
    for priority, order in [(0, [1, 2]), (-1, [2, 1])]:
        scheduler, _, second = two_decoding(4)
        for _ in range(2):
            give(scheduler, scheduler.schedule(), 4)
        add(scheduler, 2, 3, priority=priority)
        give(scheduler, scheduler.schedule(), 1)
        assert second.residency is None
        scheduler.abort(0)
        steps = run_to_the_end(scheduler)
        assert list(dict.fromkeys(i for i, _ in admissions(steps))) == order


def test_exact_never_preempts_and_keeps_no_page_back():
    """24 tokens are 3 pages of 6: two fit, for neither can ever need the other's."""
    scheduler = make_scheduler(make_config(max_model_len=40, num_pages=6, exact=True), 3)
    for i in range(5):
        add(scheduler, i, 8, 17)
    steps = run_to_the_end(scheduler)
    assert chunks(steps[1]) == [(1, 0, 8)] and max(len(rounds(step)) for step in steps) == 2
    assert scheduler.num_preemptions == 0 and scheduler.pages.num_free == 6
