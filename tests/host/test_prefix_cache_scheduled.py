"""Prefixes through the scheduler, and what they cost. Pages hold 8 tokens."""

import pytest
from support.cost import count_lines
from support.prefixes import STOP, add, chunks, give, make_scheduler, run, spans

from specjax.host import prefix_cache


def test_a_later_request_begins_behind_what_is_there():
    scheduler = make_scheduler()
    add(scheduler, 0, range(100, 120))
    assert spans(run(scheduler)) == [(0, 20)]
    assert (scheduler.num_looked_up, scheduler.num_found) == (20, 0)
    add(scheduler, 1, range(100, 120))
    (chunk,) = run(scheduler)
    assert (chunk.start, chunk.count, chunk.is_first, chunk.restored) == (16, 4, True, None)
    assert (scheduler.num_looked_up, scheduler.num_found) == (40, 16)
    assert scheduler.pages.num_free == 64


@pytest.mark.parametrize("length, start", [(1, 0), (8, 0), (9, 8), (16, 8), (17, 16), (40, 32)])
def test_the_last_token_of_a_prompt_is_always_run(length, start):
    scheduler = make_scheduler()
    add(scheduler, 0, range(100, 160))
    run(scheduler)
    add(scheduler, 1, range(100, 100 + length))
    assert spans(run(scheduler)) == [(start, length - start)]


def test_requests_of_one_step_do_not_share():
    """The pages are not there yet; one that comes in the next step finds those of the first."""
    scheduler = make_scheduler(max_model_len=32)
    samples = [add(scheduler, i, range(100, 120)) for i in range(2)]
    assert chunks(scheduler.schedule()) == [(0, 0, 20), (1, 0, 20)]
    assert not set(samples[0].residency.pages) & set(samples[1].residency.pages)
    third = add(scheduler, 2, range(100, 120))
    assert chunks(scheduler.schedule()) == [(2, 16, 4)]
    assert third.residency.pages[:2] == samples[0].residency.pages[:2]


def test_a_chunk_lets_the_pages_be_found_that_it_fills():
    """12 tokens a step: 1 page of 12 tokens, 4 of 32."""
    scheduler = make_scheduler(max_num_batched_tokens=12)
    add(scheduler, 0, range(100, 133))
    assert chunks(scheduler.schedule()) == [(0, 0, 12)]
    scheduler.abort(0)
    add(scheduler, 1, range(100, 133))
    assert chunks(scheduler.schedule()) == [(1, 8, 12)]
    assert chunks(scheduler.schedule()) == [(1, 20, 12)]
    scheduler.abort(1)
    add(scheduler, 2, range(100, 133))
    assert chunks(scheduler.schedule()) == [(2, 32, 1)]


def test_whoever_wants_the_prompts_logprobs_runs_all_of_it():
    """And leaves it to others."""
    scheduler = make_scheduler()
    for i, (params, start) in enumerate(
        [({"prompt_logprobs": 0}, 0), ({"prompt_logprobs": 1}, 0), ({}, 16)]
    ):
        add(scheduler, i, range(100, 120), **params)
        assert spans(run(scheduler)) == [(start, 20 - start)]


def test_samples_share_without_prefix_caching_and_requests_do_not():
    scheduler = make_scheduler(enable_prefix_caching=False)
    for i in range(2):
        add(scheduler, i, range(100, 120), num_samples=3)
        assert spans(run(scheduler)) == [(0, 20), (16, 4), (16, 4)]


def test_a_prompt_that_contains_an_output_finds_its_pages():
    """20 tokens and 14 of output: 33 are run, in 4 full pages; of the prompt alone it were 2."""
    for caching, exact, start in [(True, False, 32), (False, False, 0), (True, True, 16)]:
        scheduler = make_scheduler(1, enable_prefix_caching=caching, exact=exact)
        sample = add(scheduler, 0, range(100, 120), 14)
        run(scheduler, tokens=[9])
        assert sample.num_output == 14
        add(scheduler, 1, [*sample.token_ids, *range(200, 210)])
        assert run(scheduler)[0].start == start


def test_output_is_found_while_its_request_still_runs():
    scheduler = make_scheduler(3)
    sample = add(scheduler, 0, range(100, 120), 40)
    for _ in range(3):
        give(scheduler, scheduler.schedule(), [9, 9, 9, 9])
    assert len(sample.token_ids) == 29
    add(scheduler, 1, [*sample.token_ids, 9, 200])
    step = scheduler.schedule()
    assert chunks(step) == [(1, 24, 7)]


@pytest.mark.parametrize("ends_with", [9, STOP])
def test_pages_that_the_last_round_filled_are_found_too(ends_with):
    """As in vLLM (finished requests cache completed blocks).

    Of 13 + 1 + 4 tokens 17 are run, and the last round fills the second page.
    """
    scheduler = make_scheduler(3)
    sample = add(scheduler, 0, range(100, 113), 5)
    run(scheduler, tokens=[9, 9, 9, ends_with])
    assert len(sample.token_ids) == 18 and sample.is_finished
    add(scheduler, 1, [*sample.token_ids, *range(200, 206)])
    assert spans(run(scheduler)) == [(16, 8)]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_tokens, start", [(16, 8), (17, 8), (18, 16)])
def test_a_preempted_request_finds_its_pages_and_runs_a_token_at_least(num_tokens, start, caching):
    """Of 17 tokens 16 are to be run, and one of them has to be, though both pages are there.

    Without prefix caching it finds those of its prompt.
    """
    scheduler = make_scheduler(enable_prefix_caching=caching)
    sample = add(scheduler, 0, range(100, 109), 30)
    while len(sample.token_ids) < num_tokens:
        give(scheduler, scheduler.schedule())
    scheduler._preempt(sample)  # nobody else is there to do it
    (chunk,) = scheduler.schedule().prefill.chunks
    start = start if caching else 8
    assert (chunk.start, chunk.count) == (start, num_tokens - 1 - start)
    assert chunk.is_resumed and chunk.is_last


def test_nothing_is_found_once_the_cache_is_cleared():
    scheduler = make_scheduler()
    add(scheduler, 0, range(100, 120))
    run(scheduler)
    scheduler.prefixes.clear()
    add(scheduler, 1, range(100, 120))
    assert spans(run(scheduler)) == [(0, 20)]


def test_a_request_that_waits_holds_no_pages():
    """It found 2, and there is no room for the 13 others."""
    scheduler = make_scheduler(num_pages=16)
    add(scheduler, 0, range(100, 120), 1)
    run(scheduler)
    add(scheduler, 1, range(200, 224), 8)
    scheduler.schedule()
    assert scheduler.pages.num_free == 16 - 3
    waiting = add(scheduler, 2, [*range(100, 120), *range(300, 400)], 4)
    assert chunks(scheduler.schedule()) == [] and waiting.residency is None
    assert scheduler.pages.num_free == 16 - 4  # what runs has grown to 25 tokens
    scheduler.abort(1)
    assert chunks(scheduler.schedule()) == [(2, 16, 104)]


# --- cost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_snapshots", [None, 4])
@pytest.mark.parametrize("is_there", [False, True], ids=["miss", "hit"])
def test_cost_of_an_admission_grows_linearly_with_the_prompt(is_there, num_snapshots):
    def cost(length):
        sizes = {"max_model_len": 5000, "max_num_batched_tokens": 5000, "num_pages": 1300}
        scheduler = make_scheduler(num_snapshots=num_snapshots, **sizes)
        if is_there:
            add(scheduler, 0, range(length), 1)
            run(scheduler)
        add(scheduler, 1, range(length), 1)
        return count_lines(scheduler.schedule)

    assert cost(4096) < 8.5 * cost(512)


def test_keys_are_made_once_per_page_of_a_request(monkeypatch):
    """16 tokens of 20 and 12 more of 14 + 20: 4 pages, however often it is looked up again."""
    made = []
    real = prefix_cache.blake2b

    def blake2b(data, **options):
        made.append(data)
        return real(data, **options)

    monkeypatch.setattr(prefix_cache, "blake2b", blake2b)
    scheduler = make_scheduler()
    sample = add(scheduler, 0, range(100, 120), 14)
    for _ in range(6):
        give(scheduler, scheduler.schedule())
        scheduler._preempt(sample)
    run(scheduler)
    assert sample.is_finished and len(made) == len(sample.keys) == 4
