"""Requests wait for the pages of a prompt that another request is prefilling."""

import random
from collections import Counter

import pytest
from support.scheduling import (
    add,
    chunks,
    chunks_of,
    give,
    make_config,
    make_scheduler,
    roomy_scheduler,
    rounds,
    run_to_the_end,
)

PROMPT = list(range(500, 560))


def test_equal_prompts_are_run_once_and_others_do_not_wait():
    scheduler = make_scheduler(make_config(max_num_batched_tokens=128, shapes=((8, 64),)))
    for i, prompt in enumerate([PROMPT, PROMPT, 20, PROMPT]):
        add(scheduler, i, prompt)
    assert chunks(scheduler.schedule()) == [(0, 0, 60), (2, 0, 20)]
    step = scheduler.schedule()
    assert (chunks(step), rounds(step)) == ([(1, 56, 4), (3, 56, 4)], [0, 2])


def test_a_request_waits_for_at_least_half_of_its_tokens():
    """It does not wait for 24 of its 64 tokens. It waits for 32 of them, and later runs the rest.

    The token after a page counts, too, since a drafter may have read it.
    """
    for num_shared, first, second in [(32, 64, []), (33, 0, [(1, 32, 32)])]:
        scheduler = roomy_scheduler()
        add(scheduler, 0, PROMPT)
        add(scheduler, 1, PROMPT[:num_shared] + list(range(64 - num_shared)))
        assert chunks(scheduler.schedule()) == [(0, 0, 60)] + ([(1, 0, first)] if first else [])
        assert chunks(scheduler.schedule()) == second


def test_a_request_that_waits_keeps_its_place_and_a_slot():
    scheduler = make_scheduler(make_config(max_num_seqs=2, shapes=((8, 64),)))
    for i, prompt in enumerate([PROMPT, PROMPT, 4]):
        add(scheduler, i, prompt)
    assert chunks(scheduler.schedule()) == [(0, 0, 60)]
    assert chunks(scheduler.schedule()) == [(1, 56, 4)]
    assert scheduler.num_waiting == 1


def test_an_urgent_request_does_not_wait_for_one_behind_it():
    config = make_config(max_num_batched_tokens=32, scheduling_policy="priority", shapes=((4, 32),))
    scheduler = make_scheduler(config)
    add(scheduler, 0, PROMPT, priority=1)
    assert chunks(scheduler.schedule()) == [(0, 0, 32)]
    add(scheduler, 1, PROMPT, priority=0)
    assert chunks(scheduler.schedule()) == [(0, 32, 28), (1, 32, 4)]


def test_the_most_urgent_of_two_is_waited_for():
    config = make_config(scheduling_policy="priority", shapes=((4, 16),))
    scheduler = make_scheduler(config)
    add(scheduler, 0, PROMPT, priority=2)
    assert chunks(scheduler.schedule()) == [(0, 0, 16)]
    add(scheduler, 1, PROMPT, priority=0)
    assert chunks(scheduler.schedule()) == [(0, 16, 16), (1, 16, 16)]
    scheduler.abort(0)
    add(scheduler, 2, PROMPT, priority=1)
    assert chunks(scheduler.schedule()) == [(1, 32, 16)]


def test_chunks_are_as_wide_as_suits_the_requests_that_join():
    """Six requests with 20 tokens left each run 8 of them. One wide chunk would run 20 in all."""
    config = make_config(max_num_seqs=8, max_num_batched_tokens=64, shapes=((2, 32), (8, 8)))
    scheduler = make_scheduler(config)
    add(scheduler, 0, PROMPT[:33])
    for i in range(1, 7):
        add(scheduler, i, PROMPT[:33] + [i] * 19)
    assert chunks(scheduler.schedule()) == [(0, 0, 32)]
    assert chunks(scheduler.schedule()) == [(0, 32, 1)] + [(i, 32, 8) for i in range(1, 7)]


def test_requests_that_wait_do_not_count_for_the_width_of_chunks():
    """Three narrow chunks, one of them of the first prompt, run as much as a wide one."""
    config = make_config(max_num_seqs=8, max_num_batched_tokens=24, shapes=((1, 32), (3, 8)))
    scheduler = make_scheduler(config)
    for i in range(3):
        add(scheduler, i, PROMPT[:48])
    assert chunks(scheduler.schedule()) == [(0, 0, 8)]
    add(scheduler, 3, 30)
    add(scheduler, 4, 30)
    assert chunks(scheduler.schedule()) == [(0, 8, 8), (3, 0, 8), (4, 0, 8)]


@pytest.mark.parametrize("ends", ["abort", "restart"])
def test_the_next_one_goes_on_when_the_first_one_leaves(ends):
    scheduler = make_scheduler(make_config(max_num_batched_tokens=32))
    for i in range(3):
        add(scheduler, i, PROMPT)
    assert chunks(scheduler.schedule()) == [(0, 0, 32)]
    if ends == "abort":
        scheduler.abort(0)
    else:  # pages are lost, too
        scheduler.restart()
        assert chunks(scheduler.schedule()) == [(0, 0, 32)]
    step = scheduler.schedule()
    assert chunks(step) == [(int(ends == "abort"), 32, 28)]
    give(scheduler, step)
    run_to_the_end(scheduler)
    assert scheduler.pages.num_free == 32


@pytest.mark.parametrize("num_snapshots, first", [(2, [0]), (0, [0, 1, 2])])
def test_a_recurrent_model_waits_only_for_states_that_are_kept(num_snapshots, first):
    config = make_config(max_num_batched_tokens=256, num_snapshots=num_snapshots)
    scheduler = make_scheduler(config, num_snapshots=num_snapshots)
    for i in range(3):
        add(scheduler, i, PROMPT)
    step = scheduler.schedule()
    assert [i for i, *_ in chunks(step)] == first
    give(scheduler, step)
    chunked = chunks_of([step, *run_to_the_end(scheduler)])
    assert sum(chunk.count for chunk in chunked) == (68 if num_snapshots else 180)


def test_windows_are_waited_for_where_they_stay():
    """The end of the first prompt stays cached, but not the page where the third one branches."""
    scheduler = roomy_scheduler(windows=(8,))
    add(scheduler, 0, PROMPT)
    add(scheduler, 1, PROMPT)
    add(scheduler, 2, PROMPT[:40] + list(range(20)))
    assert chunks(scheduler.schedule()) == [(0, 0, 60), (2, 0, 60)]
    assert chunks(scheduler.schedule()) == [(1, 56, 4)]


@pytest.mark.parametrize("seed", range(20))
def test_every_full_page_of_equal_prompts_is_run_once(seed):
    rng = random.Random(seed)
    prompts = [[rng.randrange(99) for _ in range(rng.randrange(1, 60))] for _ in range(3)]
    budget, slots = rng.choice([9, 24, 64]), rng.randrange(1, 13)
    config = make_config(max_num_batched_tokens=budget, max_num_seqs=slots, num_pages=200)
    scheduler = make_scheduler(config)
    asked = [rng.choice(prompts) for _ in range(12)]
    for i, prompt in enumerate(asked):
        add(scheduler, i, prompt, 3)
    pages = Counter()
    for chunk in chunks_of(run_to_the_end(scheduler)):
        prompt = chunk.sequence.request.prompt_token_ids
        end = chunk.start + chunk.count
        pages.update((prompt, n) for n in range(8, len(prompt), 8) if chunk.start < n <= end)
    assert not scheduler.residents._pending
    assert pages == {(tuple(p), n): 1 for p in asked for n in range(8, len(p), 8)}
