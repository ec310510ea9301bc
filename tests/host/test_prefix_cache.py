"""Which prefixes are found: keys, pages and snapshots. Pages hold 4 tokens."""

import numpy as np
import pytest

from specjax.host import prefix_cache
from specjax.host.pages import PageAllocator
from specjax.host.prefix_cache import PrefixCache, PromptIndex, SnapshotIndex, extend_keys


def keys_of(tokens, salt=b"", page_size=4):
    keys = []
    extend_keys(keys, list(tokens), page_size, salt)
    return keys


@pytest.mark.parametrize("num_tokens, num_keys", [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_page_has_a_key_once_the_token_after_it_is_known(num_tokens, num_keys):
    keys = keys_of(range(num_tokens))
    assert [key.next_token for key in keys] == [4, 8][:num_keys]


def test_a_key_depends_on_all_tokens_up_to_the_one_after_its_page():
    tokens = list(range(13))
    for changed in range(13):
        other = [*tokens[:changed], 50, *tokens[changed + 1 :]]
        same = [a == b for a, b in zip(keys_of(tokens), keys_of(other), strict=True)]
        assert same == [changed > 4, changed > 8, changed > 12]


@pytest.mark.parametrize("step", [1, 50])
def test_keys_are_made_step_by_step_and_each_page_is_hashed_once(monkeypatch, step):
    sizes, real = [], prefix_cache.blake2b

    def blake2b(data, **options):
        sizes.append(len(data))
        return real(data, **options)

    monkeypatch.setattr(prefix_cache, "blake2b", blake2b)
    keys, tokens = [], list(range(400))
    for end in range(0, 401, step):
        extend_keys(keys, tokens[:end], 4, b"s")
    assert len(sizes) == len(keys) == 99 and max(sizes) == 16 + 4 * 8
    assert keys == keys_of(tokens, b"s")
    assert not set(keys) & {*keys_of(tokens), *keys_of(tokens, b"st")}, "another salt, other keys"


def test_the_longest_run_of_pages_is_taken():
    pages = PageAllocator(8)
    cache, keys, owned = PrefixCache(pages), keys_of(range(13)), pages.allocate(3)
    cache.put(keys, owned, 1, 4)
    assert [pages.find(key) for key in keys] == [None, *owned[1:]], "only pages in the range"
    cache.put(keys, owned, 0, 1)
    pages.release(owned)
    prefix = cache.take(keys)
    assert prefix.pages == owned and prefix.snapshot is None
    assert pages.num_free == 5
    assert cache.take(keys[:1]).pages == owned[:1]
    assert cache.take(keys_of([50, *range(1, 13)])).pages == cache.take([]).pages == []
    cache.clear()
    assert cache.take(keys) == ([], None)


def test_a_run_ends_where_a_page_was_taken_for_something_else():
    pages = PageAllocator(3)
    cache, keys, owned = PrefixCache(pages), keys_of(range(13)), pages.allocate(3)
    cache.put(keys, owned, 0, 3)
    pages.release(owned[1:2])
    pages.allocate(1)
    assert cache.take(keys).pages == owned[:1]


def put(index, key):
    """Reserve a snapshot and add it to the index; return its id."""
    snapshot = index.reserve(key)
    index.put(key, snapshot)
    return snapshot


def test_a_prefix_ends_where_there_is_a_snapshot_and_its_pages():
    pages = PageAllocator(8)
    cache, keys, owned = PrefixCache(pages, SnapshotIndex(2)), keys_of(range(17)), pages.allocate(4)
    cache.put(keys, owned, 0, 4)
    assert cache.take(keys) == ([], None)
    first = put(cache.snapshots, keys[1])
    assert cache.take(keys) == (owned[:2], first)
    second = put(cache.snapshots, keys[3])
    assert cache.take(keys) == (owned, second)
    assert cache.take(keys[:3]) == (owned[:2], first)
    for shares in owned[:2], owned, owned[:2], owned:
        pages.release(shares)
    assert pages.num_free == 8
    pages.allocate(6)  # 4 that were never used, and the last of these
    assert cache.take(keys) == (owned[:2], first), "the longer one's pages are others' now"


def test_a_snapshot_is_reserved_before_it_is_put():
    index, keys = SnapshotIndex(1), keys_of(range(9))
    snapshot = index.reserve(keys[0])
    assert index.longest(keys) == (0, None) and index.reserve(keys[1]) is None
    index.put(keys[0], snapshot)
    assert index.longest(keys) == (1, snapshot) and index.reserve(keys[0]) is None
    assert SnapshotIndex(0).reserve(keys[0]) is None


def test_two_that_come_to_a_prefix_in_one_step_leave_one_snapshot():
    index, keys = SnapshotIndex(2), keys_of(range(9))
    first, second = index.reserve(keys[0]), index.reserve(keys[0])
    assert {first, second} == {0, 1}
    index.put(keys[0], first)
    index.put(keys[0], second)
    assert index.longest(keys) == (1, first) and len(index) == 1
    assert put(index, keys[1]) == second and index.num_evictions == 0
    index.clear()
    assert len(index) == 0 and index.longest(keys) == (0, None)
    assert {put(index, key) for key in keys_of(range(20, 29))} == {0, 1} and not index.num_evictions


def test_snapshots_are_wanted_where_prompts_end_and_where_they_branch():
    index = PromptIndex()
    assert index.points(keys_of(range(17))) == [4]
    assert index.points(keys_of(range(17))) == [4]
    assert index.points(keys_of([*range(10), 50, *range(11, 21)])) == [2, 5]
    assert index.points(keys_of([50, *range(12)])) == [3]
    assert index.points([]) == []
    index.clear()
    assert index.points(keys_of([*range(10), 50, *range(11, 21)])) == [5], "none has been seen"


def test_prompts_not_seen_for_long_are_forgotten(monkeypatch):
    """Only 4 keys are remembered, 2 per prompt. A third prompt displaces the least recent one."""
    monkeypatch.setattr(prefix_cache, "MAX_SEEN", 4)
    index = PromptIndex()
    first, second, third = (keys_of(range(start, start + 9)) for start in (0, 100, 200))
    for keys in first, second, first, third:
        assert index.points(keys) == [2]
    assert index.points([first[0], *keys_of(range(300, 305))]) == [1, 2]
    assert index.points([second[0], *keys_of(range(300, 305))]) == [2]


def test_random_use_against_a_list():
    rng = np.random.default_rng(0)
    index, kept, hits = SnapshotIndex(20), [], 0  # kept: (key, id), least recently used first
    for _ in range(3000):
        keys = keys_of(rng.integers(0, 2, rng.integers(5, 20)).tolist(), page_size=2)
        if rng.random() < 0.5:
            key = keys[rng.integers(len(keys))]
            snapshot = index.reserve(key)
            assert (snapshot is None) == (key in [k for k, _ in kept])
            if snapshot is not None:
                index.put(key, snapshot)
                kept = [*kept[-19:], (key, snapshot)]
            assert len({i for _, i in kept}) == len(kept) == len(index)
        else:
            ids = dict(kept)
            length = max((n for n, key in enumerate(keys, 1) if key in ids), default=0)
            found = index.longest(keys)
            assert found == (length, ids[keys[length - 1]] if length else None)
            if length:
                hits += 1
                kept.remove((keys[length - 1], found[1]))
                kept.append((keys[length - 1], found[1]))
    assert hits > 200 and index.num_evictions > 100
