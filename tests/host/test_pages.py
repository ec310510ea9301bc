"""The page allocator: a page is free when its last owner let go of it, and none gets lost."""

from collections import Counter

import numpy as np
import pytest

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


def test_a_shared_page_is_free_when_its_last_owner_lets_go():
    pages = PageAllocator(3)
    taken = pages.allocate(2)
    pages.share(taken)
    pages.share(taken[:1])
    pages.release(taken)
    assert pages.num_free == 1
    pages.release(taken)
    assert pages.num_free == 2
    assert set(pages.allocate(2)).isdisjoint(taken[:1]) and pages.allocate(1) is None
    pages.release(taken[:1])
    assert pages.allocate(1) == taken[:1]


def test_letting_go_of_what_nobody_owns_is_a_bug():
    pages = PageAllocator(2)
    taken = pages.allocate(1)
    pages.release(taken)
    with pytest.raises(AssertionError):
        pages.release(taken)


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


def test_random_sharing_counts_every_owner():
    """New pages never have an owner yet, and as many are free as have none."""
    rng = np.random.default_rng(1)
    pages, owned = PageAllocator(40), []
    for _ in range(5000):
        owners = Counter(page for taken in owned for page in taken)
        choice = rng.random()
        if owned and choice < 0.45:
            pages.release(owned.pop(rng.integers(len(owned))))
        elif owned and choice < 0.7:
            shared = owned[rng.integers(len(owned))]
            shared = shared[: rng.integers(len(shared) + 1)]
            pages.share(shared)
            owned.append(shared)
        elif (taken := pages.allocate(int(rng.integers(0, 12)))) is not None:
            assert owners.keys().isdisjoint(taken) and len(set(taken)) == len(taken)
            owned.append(taken)
        held = {page for taken in owned for page in taken}
        assert held <= set(range(40)) and pages.num_free == 40 - len(held)
