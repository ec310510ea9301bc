"""Pages of sliding windows: which are kept, and which prefixes are found. Pages hold 8 tokens.

`tests/fuzz/test_schedules.py` runs random schedules, and checks every cell that a row reads.
"""

import numpy as np
from support.scheduling import add, chunks, give, roomy_scheduler, run, spans

from specjax.host.windows import WindowPages

WINDOW = 20  # 3 pages before a page


def held(scheduler, sequence):
    """Return the places in the page table at which a sequence has window pages."""
    (window,) = scheduler.residents.page_tables[sequence.residency.slot, 1:]
    return [place for place, page in enumerate(window.tolist()) if page >= 0]


def test_a_chunk_has_pages_and_those_behind_the_window_go_with_the_next():
    scheduler = roomy_scheduler(windows=(WINDOW,), max_num_batched_tokens=40)
    (first,) = add(scheduler, 0, range(100), 20)
    for span, places in ((0, 40), range(5)), ((40, 40), range(1, 10)), ((80, 20), range(6, 13)):
        step = scheduler.schedule()
        assert chunks(step) == [(0, *span)] and held(scheduler, first) == [*places]
        assert len(first.residency.pages) == 13, "of the other layers it has all"
        give(scheduler, step)
    scheduler.schedule()  # a round of the token at 100, which needs those from 81 on
    assert held(scheduler, first) == [9, 10, 11, 12]


def test_a_prefix_shorter_than_the_window_needs_all_its_pages():
    window = WindowPages(WINDOW, 8, 8, np.full((1, 8), -1))
    window.extend(0, 3)
    window.name(0, "abc", 1, 3)
    assert window.longest("abc", 3) == 0
    window.name(0, "abc", 0, 1)
    assert window.longest("abc", 3) == 3


def test_a_window_keeps_what_can_be_continued():
    """A request can resume at the prompt's end and at the output's end, but nowhere else."""
    scheduler = roomy_scheduler(windows=(WINDOW,))
    (first,) = add(scheduler, 0, range(64), 50)
    run(scheduler)
    known = first.token_ids
    for length, found in (114, 112), (90, 56), (50, 0):
        (other,) = add(scheduler, length, [*known[:length], 99], 1)
        run(scheduler)
        assert other.num_cached_tokens == found, length


def test_where_prompts_branch_the_third_goes_on():
    scheduler = roomy_scheduler(windows=(WINDOW,))
    found = []
    for i in range(3):
        add(scheduler, i, [*range(48), *range(100 * i + 100, 100 * i + 140)], 3)
        found += spans(run(scheduler))
    assert found == [(0, 88), (0, 88), (40, 48)]  # another token follows 48
