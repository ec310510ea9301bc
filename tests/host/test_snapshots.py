"""Which prefixes have a snapshot: against a list of what was added, newest use last."""

import numpy as np
import pytest

from specjax.host.pages import PageAllocator
from specjax.host.snapshots import SnapshotIndex

PAGE = 4


def index(num_snapshots, num_pages=64):
    pages = PageAllocator(num_pages)
    return SnapshotIndex(num_snapshots, pages, PAGE), pages


def test_the_longest_prefix_is_found_with_its_pages():
    snapshots, pages = index(3)
    tokens = list(range(100, 120))
    owned = pages.allocate(5)
    short, long = (snapshots.add(tokens, length, owned) for length in (4, 12))
    assert snapshots.find(tokens) == long
    assert long.length == 12
    assert long.pages == tuple(owned[:3])
    assert snapshots.find(tokens[:13]) == long
    assert snapshots.find(tokens[:12]) == short  # the last token of a prompt is always run
    assert snapshots.find(tokens[:4]) is None
    assert snapshots.find([*tokens[:9], 7, *tokens[10:]]) == short
    assert snapshots.find([7, *tokens[1:]]) is None


def test_another_next_token_is_another_prefix():
    """The drafter's cache at the last position was made with the token that followed."""
    snapshots, pages = index(3)
    tokens = list(range(9))
    snapshots.add(tokens, 8, pages.allocate(3))
    assert snapshots.find([*tokens[:8], 50]) is None
    assert snapshots.find([*tokens[:8], 8, 50]).length == 8


def test_pages_live_as_long_as_the_snapshot():
    snapshots, pages = index(1, num_pages=4)
    owned = pages.allocate(4)
    snapshots.add(list(range(20)), 8, owned)
    pages.release(owned)
    assert pages.num_free == 2
    assert pages.allocate(3) is None
    other = pages.allocate(2)
    snapshots.add(list(range(50, 70)), 4, other)  # takes the place of the first
    assert snapshots.find(list(range(20))) is None
    assert pages.num_free == 2
    snapshots.drop_all()
    pages.release(other)
    assert pages.num_free == 4
    assert len(snapshots) == 0


@pytest.mark.parametrize("length", [0, -4, 6, 20, 24])
def test_lengths_that_cannot_be(length):
    snapshots, pages = index(1)
    with pytest.raises(ValueError, match=f"length={length}"):
        snapshots.add(list(range(20)), length, pages.allocate(5))


def test_a_budget_of_nothing():
    snapshots, pages = index(0)
    owned = pages.allocate(2)
    assert snapshots.add(list(range(9)), 4, owned) is None
    pages.release(owned)
    assert pages.num_free == 64


def test_random_use_against_a_list():
    rng = np.random.default_rng(0)
    snapshots, pages = index(20, num_pages=200)
    kept = []  # (tokens incl. the next, snapshot), least recently used first
    hits = 0
    for _ in range(2000):
        tokens = rng.integers(0, 2, rng.integers(5, 20)).tolist()
        if rng.random() < 0.5:
            length = int(rng.integers(1, (len(tokens) - 1) // PAGE + 1)) * PAGE
            owned = pages.allocate(length // PAGE)
            made = snapshots.add(tokens, length, owned)
            known = any(key == tokens[: length + 1] for key, _ in kept)
            assert (made is None) == known
            if made:
                kept = [*kept[-19:], (tokens[: length + 1], made)]
                assert len({snapshot.id for _, snapshot in kept}) == len(kept)
            pages.release(owned)
        else:
            fitting = [pair for pair in kept if pair[0] == tokens[: len(pair[0])]]
            best = max(fitting, key=lambda pair: len(pair[0]), default=None)
            assert snapshots.find(tokens) == (best and best[1])
            if best:
                hits += 1
                kept = [*(pair for pair in kept if pair is not best), best]
        assert pages.num_free == 200 - len({p for _, s in kept for p in s.pages})
    assert hits > 200
