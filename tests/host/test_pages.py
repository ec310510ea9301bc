"""The page allocator: every page has at most one owner, and none gets lost."""

import numpy as np

from specjax.host.pages import PageAllocator


def test_allocates_all_or_nothing():
    pages = PageAllocator(5)
    first = pages.allocate(3)
    assert pages.allocate(3) is None
    assert pages.num_free == 2
    second = pages.allocate(2)
    assert sorted(first + second) == list(range(5))
    assert pages.num_free == 0 and pages.allocate(1) is None


def test_nothing_can_be_had_when_all_is_taken():
    pages = PageAllocator(1)
    pages.allocate(1)
    assert pages.allocate(0) == []


def test_released_pages_can_be_had_again():
    pages = PageAllocator(4)
    pages.allocate(1)
    taken = pages.allocate(3)
    pages.release(taken[:2])
    assert pages.num_free == 2
    assert sorted(pages.allocate(2)) == sorted(taken[:2])


def test_random_traffic_keeps_pages_apart():
    rng = np.random.default_rng(0)
    pages, owned = PageAllocator(40), []
    for _ in range(5000):
        if owned and rng.random() < 0.5:
            pages.release(owned.pop(rng.integers(len(owned))))
        elif (taken := pages.allocate(int(rng.integers(0, 12)))) is not None:
            owned.append(taken)
        held = [page for taken in owned for page in taken]
        assert len(held) == len(set(held)) and set(held) <= set(range(40))
        assert pages.num_free == 40 - len(held)
