"""The page allocator: owners of pages, and how long a page is found by its name."""

from collections import Counter

import numpy as np
import pytest

from specjax.host.pages import PageAllocator


def named(num_pages, *names):
    """Return an allocator, and its first pages, which have an owner and these names."""
    pages = PageAllocator(num_pages)
    owned = pages.allocate(len(names))
    for page, name in zip(owned, names, strict=True):
        pages.name(page, name)
    return pages, owned


@pytest.mark.parametrize("call", [lambda p: p.release([1]), lambda p: p.name(1, "b")])
def test_only_what_somebody_owns_is_released_or_named(call):
    pages, _ = named(2, "a")
    with pytest.raises(AssertionError):
        call(pages)


def test_pages_are_taken_in_the_order_of_their_release():
    """The last page of a sequence is evicted first: it is useless without the pages before."""
    pages, owned = named(4, "a", "b", "c")
    pages.release(owned[1:2])
    pages.release(owned[0::2])
    pages.share(owned[1:2])  # used again, so released last
    pages.release(owned[1:2])
    assert pages.allocate(1) == [3], "it has no name"
    assert pages.num_evictions == 0
    assert pages.allocate(3) == [owned[2], owned[0], owned[1]] and pages.num_evictions == 3


def test_a_name_is_that_of_one_page_and_a_page_has_one_name():
    """If two sequences compute the same page at the same time, the second page gets no name."""
    pages, (a, b) = named(4, "a", "b")
    (other,) = pages.allocate(1)
    for page, name in (b, "a"), (a, "c"), (other, "a"):
        pages.name(page, name)
    assert [pages.find(name) for name in "abc"] == [a, b, None]
    pages.release([a])
    pages.release([other])
    assert pages.allocate(2) == [other, 3] and pages.find("a") == a and not pages.num_evictions
    assert pages.allocate(1) == [a] and pages.find("a") is None and pages.num_evictions == 1


def test_forgotten_names_find_nothing_and_change_no_owner():
    pages, (a, b) = named(3, "a", "b")
    pages.release([b])
    pages.forget_names()
    assert pages.find("a") is None and pages.find("b") is None
    assert sorted(pages.allocate(2)) == [b, 2] and pages.num_evictions == 0
    pages.name(a, "a")
    assert pages.find("a") == a


def test_what_is_released_to_be_forgotten_is_not_found_again():
    pages, (a, b) = named(2, "a", "b")
    pages.share([b])
    pages.release([a, b], forgets=True)
    assert pages.find("a") is None and pages.find("b") == b, "it has another owner"


def test_random_traffic_against_a_list():
    """Owners are counted. A name gives the page that got the name, or None."""
    rng = np.random.default_rng(0)
    pages, owned, contents, num_taken_named = PageAllocator(40), [], {}, 0
    for i in range(8000):
        owners = Counter(page for taken in owned for page in taken)
        assert pages.num_free == 40 - len(owners)
        choice = rng.random()
        if owned and choice < 0.45:
            pages.release(owned.pop(rng.integers(len(owned))))
        elif contents and choice < 0.7:
            page, name = list(contents.items())[rng.integers(len(contents))]
            assert pages.find(name) == page
            pages.share([page])
            owned.append([page])
        elif (taken := pages.allocate(int(rng.integers(0, 12)))) is not None:
            assert owners.keys().isdisjoint(taken) and len(set(taken)) == len(taken)
            num_taken_named += sum(contents.pop(page, None) is not None for page in taken)
            owned.append(taken)
            if rng.random() < 0.5:
                for page in taken:
                    pages.name(page, (i, page))
                    contents[page] = i, page
    assert pages.num_evictions == num_taken_named > 100
