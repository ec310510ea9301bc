"""The page allocator: who owns a page, and how long its contents are found by their name."""

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


def test_only_what_somebody_owns_gets_a_name():
    pages = PageAllocator(2)
    with pytest.raises(AssertionError):
        pages.name(0, "a")


# --- names ----------------------------------------------------------------------------------------


def named(num_pages, *names):
    """An allocator whose first pages have an owner, and names."""
    pages = PageAllocator(num_pages)
    owned = pages.allocate(len(names))
    for page, name in zip(owned, names, strict=True):
        pages.name(page, name)
    return pages, owned


def test_a_page_is_found_with_and_without_an_owner():
    pages, (a,) = named(2, "a")
    assert pages.find("a") == a and pages.find("b") is None
    pages.release([a])
    assert pages.find("a") == a and pages.num_free == 2
    pages.share([a])
    assert pages.num_free == 1 and pages.allocate(2) is None
    assert pages.find("a") == a and pages.num_evictions == 0


def test_a_page_is_found_until_it_is_taken_for_something_else():
    pages, (a,) = named(1, "a")
    pages.release([a])
    assert pages.allocate(1) == [a]
    assert pages.find("a") is None and pages.num_evictions == 1


def test_a_page_that_has_an_owner_is_never_taken():
    pages, (a, b) = named(3, "a", "b")
    pages.share([a])
    pages.release([a, b])
    assert set(pages.allocate(2)) == {b, 2} and pages.allocate(1) is None
    assert pages.find("a") == a and pages.find("b") is None


def test_what_was_let_go_first_is_taken_first():
    pages, owned = named(3, "a", "b", "c")
    for page in owned[1], owned[0], owned[2]:
        pages.release([page])
    assert pages.allocate(1) == [owned[1]]
    pages.share([owned[0]])  # used again, so let go last
    pages.release([owned[0]])
    assert pages.allocate(2) == [owned[2], owned[0]]
    assert pages.num_evictions == 3


def test_the_end_of_a_sequence_is_taken_before_its_beginning():
    """A page is of no use without those before it."""
    pages, owned = named(3, "a", "b", "c")
    pages.release(owned)
    assert pages.allocate(2) == [owned[2], owned[1]]
    assert pages.find("a") == owned[0]


def test_a_page_without_a_name_is_no_eviction():
    pages = PageAllocator(2)
    pages.release(pages.allocate(2))
    pages.allocate(2)
    assert pages.num_evictions == 0


def test_a_name_is_that_of_one_page():
    """Two sequences that ran the same at the same time: the second's page stays unnamed."""
    pages, (a, b) = named(2, "a", "b")
    pages.name(b, "a")
    assert pages.find("a") == a and pages.find("b") == b
    pages, (a,) = named(2, "a")
    (other,) = pages.allocate(1)
    pages.name(other, "a")
    assert pages.find("a") == a
    pages.release([other])
    pages.release([a])
    assert pages.allocate(1) == [other] and pages.find("a") == a and not pages.num_evictions
    assert pages.allocate(1) == [a] and pages.find("a") is None and pages.num_evictions == 1


def test_a_page_keeps_its_first_name():
    pages, (a,) = named(1, "a")
    pages.name(a, "b")
    assert pages.find("a") == a and pages.find("b") is None


def test_forgotten_names_find_nothing_and_change_no_owner():
    pages, (a, b) = named(3, "a", "b")
    pages.release([b])
    pages.forget_names()
    assert pages.find("a") is None and pages.find("b") is None
    assert pages.num_free == 2
    assert sorted(pages.allocate(2)) == [b, 2] and pages.num_evictions == 0
    pages.name(a, "a")
    assert pages.find("a") == a


# --- traffic --------------------------------------------------------------------------------------


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


def test_random_names_are_of_what_was_put_there_last():
    """Against a list of pages: a name is found on its page or not at all, never on another."""
    rng = np.random.default_rng(2)
    pages, owned, contents = PageAllocator(20), [], {}
    num_taken_named = 0
    for i in range(5000):
        choice = rng.random()
        if owned and choice < 0.5:
            pages.release([owned.pop(rng.integers(len(owned)))])
        elif choice < 0.6 and contents:
            page, name = list(contents.items())[rng.integers(len(contents))]
            assert pages.find(name) == page
            pages.share([page])
            owned.append(page)
        elif taken := pages.allocate(1):
            num_taken_named += taken[0] in contents
            contents.pop(taken[0], None)
            owned += taken
            if rng.random() < 0.5:
                pages.name(taken[0], i)
                contents[taken[0]] = i
        assert pages.num_free == 20 - len(set(owned))
    assert pages.num_evictions == num_taken_named > 100
