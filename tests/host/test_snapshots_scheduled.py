"""Which snapshots of states the scheduler takes and restores. Pages hold 8 tokens."""

import pytest
from support.scheduling import add, roomy_scheduler, run


def taken(found):
    return [(c.start, c.count, c.restored, c.taken) for c in found]


def test_a_prompt_is_cut_at_its_last_page_for_a_snapshot():
    """A later request resumes at this page, because the output has no snapshot of the states.

    The last token of a prompt is always computed, so a prompt of one page needs no snapshot.
    """
    scheduler = roomy_scheduler(num_snapshots=3)
    (sample,) = add(scheduler, 0, range(100, 120), 14)
    assert taken(run(scheduler)) == [(0, 16, None, 0), (16, 4, None, None)]
    add(scheduler, 1, [*sample.token_ids, 200])
    assert taken(run(scheduler)) == [(16, 16, 0, 1), (32, 3, None, None)]
    assert (scheduler.num_looked_up, scheduler.num_found) == (55, 16)
    add(scheduler, 2, range(200, 208))
    assert taken(run(scheduler)) == [(0, 8, None, None)]


def test_a_snapshot_is_taken_where_a_second_prompt_branches_off():
    """The prompts share 20 tokens, that is 2 pages. The third prompt resumes at the branch."""
    scheduler = roomy_scheduler(num_snapshots=4)
    for i, expected in enumerate(
        [
            [(0, 32, None, 0), (32, 8, None, None)],
            [(0, 16, None, 1), (16, 16, None, 2), (32, 8, None, None)],
            [(16, 16, 1, 3), (32, 8, None, None)],
        ]
    ):
        add(scheduler, i, [*range(100, 120), *range(1000 * i, 1000 * i + 20)])
        assert taken(run(scheduler)) == expected


@pytest.mark.parametrize("caching", [True, False])
def test_samples_go_on_from_the_snapshot_of_the_first(caching):
    """Without prefix caching, a request with one sample takes no snapshot."""
    scheduler = roomy_scheduler(num_snapshots=1, enable_prefix_caching=caching)
    add(scheduler, 0, range(100, 120), num_samples=3)
    first = [(0, 16, None, 0), (16, 4, None, None)]
    assert taken(run(scheduler)) == [*first, (16, 4, 0, None), (16, 4, 0, None)]
    add(scheduler, 1, range(200, 220))
    assert taken(run(scheduler)) == (first if caching else [(0, 20, None, None)])


@pytest.mark.parametrize("length, snapshot", [(65, 0), (72, 0), (80, None)])
def test_exact_chunks_stay_on_their_grid(length, snapshot):
    """A snapshot is taken after 64 tokens, where a chunk ends in any case, but not after 72.

    Chunks of a request that resumes from it have the same borders.
    """
    scheduler = roomy_scheduler(num_snapshots=2, exact=True)
    add(scheduler, 0, range(100, 100 + length))
    expected = [(0, 32, None, None), (32, 32, None, snapshot), (64, length - 64, None, None)]
    assert taken(run(scheduler)) == expected
    add(scheduler, 1, range(100, 200))
    if length == 65:
        assert taken(run(scheduler)) == [(64, 32, 0, 1), (96, 4, None, None)]
