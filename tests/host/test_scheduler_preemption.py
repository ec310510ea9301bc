"""Preemption: which request is preempted, and what it keeps.

`tests/fuzz` checks that no token is lost or repeated, whenever preemption happens.
"""

from support.scheduling import (
    add,
    admissions,
    chunks,
    give,
    make_config,
    make_scheduler,
    num_pages,
    rounds,
    run_to_the_end,
    two_decoding,
)


def test_slot_and_pages_of_a_preempted_request_are_free_in_the_same_step():
    """With K = 8, the first request needs 3 of 5 pages, so the second gives up its 3 pages."""
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


def test_the_last_by_rank_loses():
    """Four requests of 8 tokens need more pages than there are. The lowest rank is preempted."""
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
                give(scheduler, step, [9] * 8)
            for i, sequence in enumerate(samples):
                if i not in lost and sequence.residency is None and not sequence.is_finished:
                    lost.append(i)
        assert lost == order


def test_an_older_one_never_gives_way_to_a_younger():
    """Of 5 pages, the first request gets the last one, and the second waits with its 2 pages."""
    scheduler, first, second = two_decoding(5)
    for _ in range(2):
        give(scheduler, scheduler.schedule(), [9] * 4)
    for _ in range(2):  # the second time the second's turn comes first; it takes no budget
        step = scheduler.schedule()
        assert rounds(step) == [0] and num_pages(first, second) == [3, 2]
        assert step.num_tokens == 4 and scheduler.num_preemptions == 0
        give(scheduler, step, [9] * 4)
    step = scheduler.schedule()  # 28 tokens are 4 pages
    assert rounds(step) == [0] and num_pages(first) == [4] and second.residency is None


def test_a_preempted_request_goes_back_to_its_place_in_the_queue():
    """Its place is before later requests, and behind more urgent ones."""
    for priority, order in [(0, [1, 2]), (-1, [2, 1])]:
        scheduler, _, second = two_decoding(4)
        for _ in range(2):
            give(scheduler, scheduler.schedule(), [9] * 4)
        add(scheduler, 2, 3, priority=priority)
        give(scheduler, scheduler.schedule())
        assert second.residency is None
        scheduler.abort(0)
        steps = run_to_the_end(scheduler)
        assert list(dict.fromkeys(i for i, _ in admissions(steps))) == order


def test_requests_after_a_preempted_one_still_have_their_turn():
    """The budget holds two of four rounds. In the 21st step, the turns are 1, 3, 0 and 2.

    Request 1 needs the pages of 3 and 2. Request 0 still runs.
    """
    config = make_config(max_num_seqs=5, max_num_batched_tokens=10, num_pages=9, max_model_len=32)
    scheduler = make_scheduler(config, 3)
    for i, sizes in enumerate([(8, 19), (12, 18), (1, 20), (1, 14), (8, 4)]):
        add(scheduler, i, *sizes)
    for _ in range(20):
        give(scheduler, step := scheduler.schedule())
    assert rounds(step) == [0, 2] and scheduler.num_preemptions == 0
    assert rounds(scheduler.schedule()) == [1, 0] and scheduler.num_preemptions == 2


def test_exact_never_preempts_and_keeps_no_page_back():
    """A request needs at most 3 of 6 pages, so two requests always fit."""
    scheduler = make_scheduler(make_config(max_model_len=40, num_pages=6, exact=True), 3)
    for i in range(5):
        add(scheduler, i, 8, 17)
    steps = run_to_the_end(scheduler)
    assert chunks(steps[1]) == [(1, 0, 8)] and max(len(rounds(step)) for step in steps) == 2
    assert scheduler.num_preemptions == 0 and scheduler.pages.num_free == 6
