"""Prefixes that the scheduler finds, and the counts of computed tokens. Pages hold 8 tokens."""

import pytest
from support.cost import count_lines
from support.scheduling import STOP, add, chunks, give, roomy_scheduler, run, spans


@pytest.mark.parametrize("length, start", [(1, 0), (8, 0), (9, 8), (16, 8), (17, 16), (40, 32)])
def test_a_later_request_begins_behind_what_is_there(length, start):
    """The last token of a prompt is always computed."""
    scheduler = roomy_scheduler()
    add(scheduler, 0, range(100, 160))
    assert spans(run(scheduler)) == [(0, 60)]
    add(scheduler, 1, range(100, 100 + length))
    (chunk,) = run(scheduler)
    assert (chunk.start, chunk.count, chunk.is_first) == (start, length - start, True)
    assert (scheduler.num_looked_up, scheduler.num_found) == (60 + length, start)
    assert scheduler.pages.num_free == 64
    scheduler.prefixes.clear()
    add(scheduler, 2, range(100, 120))
    assert spans(run(scheduler)) == [(0, 20)]


def test_a_chunk_lets_the_pages_be_found_that_it_fills():
    """With 12 tokens per step, 1 page is found after 12 tokens, and 4 pages after 32 tokens."""
    scheduler = roomy_scheduler(max_num_batched_tokens=12)
    add(scheduler, 0, range(100, 133))
    assert chunks(scheduler.schedule()) == [(0, 0, 12)]
    scheduler.abort(0)
    add(scheduler, 1, range(100, 133))
    assert chunks(scheduler.schedule()) == [(1, 8, 12)]
    assert chunks(scheduler.schedule()) == [(1, 20, 12)]
    scheduler.abort(1)
    add(scheduler, 2, range(100, 133))
    assert chunks(scheduler.schedule()) == [(2, 32, 1)]


def test_samples_share_without_prefix_caching_and_requests_do_not():
    scheduler = roomy_scheduler(enable_prefix_caching=False)
    for i in range(2):
        add(scheduler, i, range(100, 120), num_samples=3)
        assert spans(run(scheduler)) == [(0, 20), (16, 4), (16, 4)]


@pytest.mark.parametrize("ends_with", [9, STOP])
@pytest.mark.parametrize(
    "options, start", [({}, 32), ({"enable_prefix_caching": False}, 0), ({"exact": True}, 16)]
)
def test_a_prompt_that_contains_an_output_finds_its_pages(options, start, ends_with):
    """As in vLLM, full pages of finished outputs are cached, including those of the last round.

    Of the 33 tokens, 32 are computed and fill 4 pages. The prompt alone would fill 2 pages.
    """
    scheduler = roomy_scheduler(3, **options)
    (sample,) = add(scheduler, 0, range(100, 120), 13)
    while not sample.is_finished:
        left = sample.request.max_tokens - sample.num_output
        give(scheduler, scheduler.schedule(), [9, 9, 9, 9 if left > 4 else ends_with])
    assert len(sample.token_ids) == 33
    add(scheduler, 1, [*sample.token_ids, *range(200, 210)])
    assert run(scheduler)[0].start == start


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_tokens, start", [(16, 8), (17, 8), (18, 16)])
def test_a_preempted_request_finds_its_pages_and_runs_a_token_at_least(num_tokens, start, caching):
    """With 17 tokens, 16 must be computed. Both pages are found, but a token must run.

    Without prefix caching, the request finds only the pages of its prompt.
    """
    scheduler = roomy_scheduler(enable_prefix_caching=caching)
    (sample,) = add(scheduler, 0, range(100, 109), 30)
    while len(sample.token_ids) < num_tokens:
        give(scheduler, scheduler.schedule())
    scheduler._preempt(sample)  # nobody else is there to do it
    (chunk,) = scheduler.schedule().prefill.chunks
    start = start if caching else 8
    assert (chunk.start, chunk.count) == (start, num_tokens - 1 - start)
    assert chunk.is_resumed and chunk.is_last


@pytest.mark.parametrize("num_snapshots", [None, 4])
@pytest.mark.parametrize("is_there", [False, True], ids=["miss", "hit"])
def test_cost_of_an_admission_grows_linearly_with_the_prompt(is_there, num_snapshots):
    def cost(length):
        sizes = {"max_model_len": 5000, "max_num_batched_tokens": 5000, "num_pages": 1300}
        scheduler = roomy_scheduler(num_snapshots=num_snapshots, **sizes)
        if is_there:
            add(scheduler, 0, range(length), 1)
            run(scheduler)
        add(scheduler, 1, range(length), 1)
        return count_lines(scheduler.schedule)

    assert cost(4096) < 8.5 * cost(512)
