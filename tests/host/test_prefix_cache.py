"""Which prefixes are found: keys, pages and snapshots by themselves, then through the scheduler.

Pages hold 4 tokens in the first part, 8 where the scheduler plans.
"""

import gc
import sys

import numpy as np
import pytest

from specjax.config import EngineConfig
from specjax.host import prefix_cache
from specjax.host.pages import PageAllocator
from specjax.host.plans import PrefillPlan
from specjax.host.prefix_cache import PrefixCache, SnapshotIndex, extend_keys
from specjax.host.request import Request
from specjax.host.scheduler import Scheduler
from specjax.host.sequence import RowOutput
from specjax.host.speculation.policy import StaticPolicy
from specjax.sampling_params import SamplingParams

STOP = 7


def keys_of(tokens, salt=b"", page_size=4):
    keys = []
    extend_keys(keys, list(tokens), page_size, salt)
    return keys


def make_cache(num_pages=8, num_snapshots=None):
    pages = PageAllocator(num_pages)
    snapshots = None if num_snapshots is None else SnapshotIndex(num_snapshots)
    return PrefixCache(pages, snapshots), pages


# --- keys -----------------------------------------------------------------------------------------


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


def test_keys_can_be_made_one_token_after_another():
    keys, tokens = [], list(range(21))
    for end in range(22):
        extend_keys(keys, tokens[:end], 4, b"s")
    assert keys == keys_of(tokens, b"s") and len(keys) == 5


def test_another_salt_makes_other_keys():
    assert not set(keys_of(range(13))) & set(keys_of(range(13), b"1"))
    assert not set(keys_of(range(13), b"1")) & set(keys_of(range(13), b"12"))


def test_no_key_depends_on_the_type_of_a_number():
    assert keys_of(np.arange(9).tolist()) == keys_of(range(9))


def test_each_page_is_hashed_once(monkeypatch):
    sizes = []

    def blake2b(data, **options):
        sizes.append(len(data))
        return real(data, **options)

    real = prefix_cache.blake2b
    monkeypatch.setattr(prefix_cache, "blake2b", blake2b)
    keys, tokens = [], list(range(400))
    for end in range(0, 401, 50):
        extend_keys(keys, tokens[:end], 4, b"")
    assert len(sizes) == len(keys) == 99 and max(sizes) == 16 + 4 * 8


# --- pages ----------------------------------------------------------------------------------------


def test_the_longest_run_of_pages_is_taken():
    cache, pages = make_cache()
    keys, owned = keys_of(range(13)), pages.allocate(3)
    cache.put(keys, owned, 0, 2)
    pages.release(owned)
    prefix = cache.take(keys)
    assert prefix.pages == owned[:2] and prefix.snapshot is None
    assert pages.num_free == 6
    assert cache.take(keys[:1]).pages == owned[:1]
    assert cache.take(keys_of([50, *range(1, 13)])).pages == []
    assert cache.take([]).pages == []


def test_another_next_token_is_another_prefix():
    """A drafter's keys and values at a position are made with the token that follows."""
    cache, pages = make_cache()
    cache.put(keys_of(range(9)), owned := pages.allocate(2), 0, 2)
    assert cache.take(keys_of([*range(8), 50])).pages == owned[:1]
    assert cache.take(keys_of([*range(4), 50, 5, 6, 7, 8])).pages == []


def test_a_run_ends_where_a_page_was_taken_for_something_else():
    cache, pages = make_cache(3)
    keys, owned = keys_of(range(13)), pages.allocate(3)
    cache.put(keys, owned, 0, 3)
    pages.release(owned[1:2])
    pages.allocate(1)
    assert cache.take(keys).pages == owned[:1]


def test_only_pages_in_the_range_are_put_and_none_without_a_key():
    cache, pages = make_cache()
    keys, owned = keys_of(range(12)), pages.allocate(3)
    cache.put(keys, owned, 1, 3)
    assert [pages.find(key) for key in keys] == [None, owned[1]]
    cache.put(keys, owned, 0, 1)
    assert cache.take(keys).pages == owned[:2]


def test_nothing_is_found_after_clear():
    cache, pages = make_cache(num_snapshots=2)
    keys, owned = keys_of(range(13)), pages.allocate(3)
    cache.put(keys, owned, 0, 3)
    cache.snapshots.put(keys[2], cache.snapshots.reserve(keys[2]))
    assert cache.take(keys).pages == owned
    cache.clear()
    assert cache.take(keys) == ([], None) and len(cache.snapshots) == 0


# --- snapshots ------------------------------------------------------------------------------------


def put(index, key):
    """Reserve a snapshot and put it; its id."""
    snapshot = index.reserve(key)
    index.put(key, snapshot)
    return snapshot


def test_the_longest_snapshot_is_found():
    index, keys = SnapshotIndex(3), keys_of(range(21))
    short, long = put(index, keys[0]), put(index, keys[2])
    assert short != long and len(index) == 2
    assert index.longest(keys) == index.longest(keys[:3]) == (3, long)
    assert index.longest(keys[:2]) == (1, short)
    assert index.longest([]) == (0, None)
    assert index.longest(keys_of([50, *range(20)])) == (0, None)


def test_a_prefix_ends_where_there_is_a_snapshot_and_its_pages():
    cache, pages = make_cache(num_snapshots=2)
    keys, owned = keys_of(range(17)), pages.allocate(4)
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


def test_the_least_recently_used_snapshot_is_given_up():
    index, keys = SnapshotIndex(2), keys_of(range(21))
    first, second = put(index, keys[0]), put(index, keys[1])
    index.longest(keys[:1])
    assert put(index, keys[2]) == second and index.num_evictions == 1
    assert index.longest(keys[:2]) == (1, first)
    assert index.longest(keys) == (3, second) and len(index) == 2


def test_a_snapshot_is_found_once_it_is_put():
    index, keys = SnapshotIndex(2), keys_of(range(9))
    snapshot = index.reserve(keys[0])
    assert index.longest(keys) == (0, None)
    index.put(keys[0], snapshot)
    assert index.longest(keys) == (1, snapshot)


def test_what_has_a_snapshot_needs_no_other():
    index, keys = SnapshotIndex(2), keys_of(range(9))
    put(index, keys[0])
    assert index.reserve(keys[0]) is None and len(index) == 1


def test_two_that_come_to_a_prefix_in_one_step_leave_one_snapshot():
    index, keys = SnapshotIndex(2), keys_of(range(9))
    first, second = index.reserve(keys[0]), index.reserve(keys[0])
    assert {first, second} == {0, 1}
    index.put(keys[0], first)
    index.put(keys[0], second)
    assert index.longest(keys) == (1, first) and len(index) == 1
    assert put(index, keys[1]) == second and index.num_evictions == 0


def test_what_is_reserved_is_not_given_up():
    index, keys = SnapshotIndex(1), keys_of(range(9))
    index.reserve(keys[0])
    assert index.reserve(keys[1]) is None


def test_a_budget_of_no_snapshots():
    index, keys = SnapshotIndex(0), keys_of(range(9))
    assert index.reserve(keys[0]) is None and index.longest(keys) == (0, None)


def test_cleared_snapshots_can_be_had_again():
    index, keys = SnapshotIndex(2), keys_of(range(17))
    for key in keys[:2]:
        put(index, key)
    index.points(keys)
    index.clear()
    assert len(index) == 0 and index.longest(keys) == (0, None)
    branch = keys_of([*range(10), 50, *range(11, 21)])
    assert index.points(branch) == [5], "nothing has been seen before"
    assert {put(index, key) for key in keys[2:]} == {0, 1} and index.num_evictions == 0


def test_snapshots_are_wanted_where_prompts_end_and_where_they_branch():
    index = SnapshotIndex(4)
    assert index.points(keys_of(range(17))) == [4]
    assert index.points(keys_of(range(17))) == [4]
    assert index.points(keys_of([*range(10), 50, *range(11, 21)])) == [2, 5]
    assert index.points(keys_of([50, *range(12)])) == [3]
    assert index.points([]) == []


def test_prompts_not_seen_for_long_are_forgotten(monkeypatch):
    """4 keys are remembered, 2 of each prompt: when the third comes, the second goes."""
    monkeypatch.setattr(prefix_cache, "MAX_SEEN", 4)
    index = SnapshotIndex(4)
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


# --- through the scheduler ------------------------------------------------------------------------


def make_scheduler(k=0, num_snapshots=None, **changes):
    sizes = {
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "page_size": 8,
        "num_pages": 64,
    }
    config = EngineConfig(**(sizes | changes))
    return Scheduler(config, StaticPolicy(k), num_snapshots=num_snapshots)


def add(scheduler, i, prompt, max_tokens=4, *, num_samples=1, priority=0, **params):
    """Queue a request; its first sample."""
    params, seeds = SamplingParams(n=num_samples, **params), tuple(range(num_samples))
    request = Request(i, tuple(prompt), params, max_tokens, seeds, (STOP,), priority=priority)
    return scheduler.add(request)[0]


def chunks(step):
    """(request, start, count) of each chunk."""
    plan = step and step.prefill
    return [(c.sequence.request.request_id, c.start, c.count) for c in plan.chunks] if plan else []


def commit(scheduler, part, *rows):
    return scheduler.commit(part, [RowOutput(list(tokens)) for tokens in rows])


def give(scheduler, step, tokens=(9,)):
    """Commit a step: chunks give a token, each round these."""
    for part in step.parts:
        if isinstance(part, PrefillPlan):
            commit(scheduler, part, *[[9] if chunk.samples else [] for chunk in part.chunks])
        else:
            left = [s.request.max_tokens - s.num_output for s in part.sequences]
            commit(scheduler, part, *[tokens[:most] for most in left])


def run(scheduler, tokens=(9,)):
    """Let everything finish, with results read at once; all chunks."""
    found = []
    while scheduler.has_work:
        step = scheduler.schedule()
        assert step, "it hangs"
        found += step.prefill.chunks if step.prefill else []
        give(scheduler, step, tokens)
    return found


def spans(found):
    return [(c.start, c.count) for c in found]


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


def test_what_an_unfinished_request_has_run_is_shared():
    scheduler = make_scheduler()
    first = add(scheduler, 0, range(100, 120))
    scheduler.schedule()
    second = add(scheduler, 1, range(100, 120))
    step = scheduler.schedule()
    assert chunks(step) == [(1, 16, 4)]
    assert first.pages[:2] == second.pages[:2] and first.pages[2] != second.pages[2]
    assert scheduler.pages.num_free == 64 - 4


@pytest.mark.parametrize(
    "changed, start", [(0, 0), (7, 0), (8, 0), (9, 8), (15, 8), (16, 8), (17, 16), (19, 16)]
)
def test_a_page_is_shared_if_all_up_to_the_token_after_it_is_the_same(changed, start):
    scheduler = make_scheduler()
    tokens = list(range(100, 120))
    add(scheduler, 0, tokens)
    run(scheduler)
    tokens[changed] = 50
    add(scheduler, 1, tokens)
    assert spans(run(scheduler)) == [(start, 20 - start)]


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
    assert not set(samples[0].pages) & set(samples[1].pages)
    third = add(scheduler, 2, range(100, 120))
    assert chunks(scheduler.schedule()) == [(2, 16, 4)]
    assert third.pages[:2] == samples[0].pages[:2]


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


def test_what_later_chunks_will_fill_is_not_found():
    """The first of three chunks has come back, and 8 tokens of 20 are there."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, 0, range(100, 120))
    give(scheduler, scheduler.schedule())
    scheduler.abort(0)
    add(scheduler, 1, range(100, 120))
    assert chunks(scheduler.schedule()) == [(1, 8, 8)]


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


def test_output_in_flight_is_not_found():
    """28 tokens may be run by now, but 20 are known."""
    scheduler = make_scheduler(3)
    add(scheduler, 0, range(100, 120), 40)
    scheduler.schedule()
    scheduler.schedule()
    add(scheduler, 1, [*range(100, 120), *[9] * 20])
    assert chunks(scheduler.schedule()) == [(1, 16, 24)]


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


def test_the_least_recently_used_pages_are_taken_first():
    """16 pages hold 7 prompts of 2 full pages at most; the first one is asked for all the time."""
    scheduler = make_scheduler(num_pages=16)
    names = iter(range(100))

    def start_of(prompt):
        add(scheduler, next(names), range(100 * prompt, 100 * prompt + 17), 1)
        return run(scheduler)[0].start

    assert start_of(0) == 0
    for prompt in range(1, 12):
        assert (start_of(prompt), start_of(0)) == (0, 16)
    assert [start_of(prompt) for prompt in (11, 1)] == [16, 0]
    assert scheduler.pages.num_evictions >= 10


def test_nothing_is_given_up_while_there_are_pages_that_hold_nothing():
    """16 pages of a prompt that has finished, at most 32 of one that runs, and 16 to spare.

    Rounds take pages for 8 tokens ahead, and give them back when one token comes.
    """
    scheduler = make_scheduler(3, max_model_len=256)
    add(scheduler, 0, range(1000, 1129), 1)
    run(scheduler)
    add(scheduler, 1, range(9), 240)
    previous = None
    while scheduler.has_work:
        step = scheduler.schedule()
        if previous:
            give(scheduler, previous)
        previous = step
    assert scheduler.pages.num_evictions == 0


def test_pages_in_use_are_never_taken():
    scheduler = make_scheduler(num_pages=16, max_model_len=128)
    first = add(scheduler, 0, range(100, 117), 30)
    give(scheduler, scheduler.schedule())
    shared = list(first.pages[:2])
    for i in range(1, 13):
        add(scheduler, i, range(1000 * i, 1000 * i + 60), 1)
        for _ in range(2):
            give(scheduler, scheduler.schedule())
            assert list(first.pages[:2]) == shared
    assert scheduler.pages.num_evictions > 16
    follow = add(scheduler, 20, range(100, 117))
    scheduler.schedule()
    assert list(follow.pages[:2]) == shared


def test_a_page_named_twice_is_found_once():
    """Two that ran the same in one step: when the first one's page is gone, so is its name."""
    scheduler = make_scheduler(max_model_len=32, num_pages=8)
    samples = [add(scheduler, i, range(100, 117), 9) for i in range(2)]
    give(scheduler, scheduler.schedule())
    first, second = (list(sample.pages[:2]) for sample in samples)
    assert not set(first) & set(second)
    scheduler.abort(0)
    third = add(scheduler, 2, range(100, 117), 9)
    assert chunks(scheduler.schedule()) == [(2, 16, 1)]
    assert list(third.pages[:2]) == first
    scheduler.drop_all()
    assert scheduler.pages.num_free == 8


def test_a_preempted_request_finds_its_own_pages():
    """21 tokens in 3 pages, of which its prompt filled 2; whoever preempted it took the third."""
    for caching, start in [(True, 16), (False, 16)]:
        scheduler = make_scheduler(
            3, max_model_len=64, num_pages=8, enable_prefix_caching=caching, max_num_seqs=2
        )
        first = add(scheduler, 0, range(100, 130), 34, priority=-1)  # 4 pages
        second = add(scheduler, 1, range(200, 220), 30)  # 3 pages
        while second.is_resident or not second.num_output:
            give(scheduler, scheduler.schedule(), [9])
            assert not first.is_finished
        scheduler.abort(0)
        step = scheduler.schedule()
        assert step.prefill.chunks[0].is_resumed and step.prefill.chunks[0].start == start


@pytest.mark.parametrize("num_tokens, start", [(16, 8), (17, 8), (18, 16)])
def test_a_resumed_request_runs_a_token_at_least(num_tokens, start):
    """Of 17 tokens 16 are to be run, and one of them has to be, though both pages are there."""
    scheduler = make_scheduler()
    sample = add(scheduler, 0, range(100, 109), 30)
    while len(sample.token_ids) < num_tokens:
        give(scheduler, scheduler.schedule())
    scheduler._preempt(sample)  # nobody else is there to do it
    (chunk,) = scheduler.schedule().prefill.chunks
    assert (chunk.start, chunk.count) == (start, num_tokens - 1 - start) and chunk.is_last


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
    assert chunks(scheduler.schedule()) == [] and not waiting.is_resident
    assert scheduler.pages.num_free == 16 - 4  # what runs has grown to 25 tokens
    scheduler.abort(1)
    assert chunks(scheduler.schedule()) == [(2, 16, 104)]


# --- snapshots, through the scheduler -------------------------------------------------------------


def taken(found):
    return [(c.start, c.count, c.restored, c.taken) for c in found]


def test_a_prompt_is_cut_at_its_last_page_for_a_snapshot():
    """And whoever comes next goes on from there."""
    scheduler = make_scheduler(num_snapshots=3)
    add(scheduler, 0, range(100, 120))
    assert taken(run(scheduler)) == [(0, 16, None, 0), (16, 4, None, None)]
    add(scheduler, 1, range(100, 120))
    assert taken(run(scheduler)) == [(16, 4, 0, None)]
    assert (scheduler.num_looked_up, scheduler.num_found) == (40, 16)


@pytest.mark.parametrize("length", [1, 7, 8])
def test_a_prompt_of_a_page_leaves_no_snapshot(length):
    """Its last token is always run."""
    scheduler = make_scheduler(num_snapshots=3)
    add(scheduler, 0, range(100, 100 + length))
    assert taken(run(scheduler)) == [(0, length, None, None)]


def test_a_snapshot_is_taken_where_a_second_prompt_branches_off():
    """The first 20 tokens are the same: 2 pages. The third one finds the branch."""
    scheduler = make_scheduler(num_snapshots=4)
    for i, expected in enumerate(
        [
            [(0, 32, None, 0), (32, 8, None, None)],
            [(0, 16, None, 1), (16, 16, None, 2), (32, 8, None, None)],
            [(16, 16, 1, 3), (32, 8, None, None)],
        ]
    ):
        add(scheduler, i, [*range(100, 120), *range(1000 * i, 1000 * i + 20)])
        assert taken(run(scheduler)) == expected


def test_pages_without_a_snapshot_are_not_used():
    scheduler = make_scheduler(num_snapshots=2)
    add(scheduler, 0, range(100, 140))
    run(scheduler)
    add(scheduler, 1, range(100, 133))  # 4 pages, and the snapshot is there
    assert run(scheduler)[0].start == 32
    add(scheduler, 2, range(100, 132))  # 3 pages, and there is none
    assert taken(run(scheduler)) == [(0, 24, None, 1), (24, 8, None, None)]


def test_samples_go_on_from_the_snapshot_of_the_first():
    scheduler = make_scheduler(num_snapshots=1)
    add(scheduler, 0, range(100, 120), num_samples=3)
    assert taken(run(scheduler)) == [
        (0, 16, None, 0),
        (16, 4, None, None),
        (16, 4, 0, None),
        (16, 4, 0, None),
    ]


def test_a_snapshot_may_be_restored_and_replaced_in_one_step():
    """Within a step it is restored before others are taken, so its id may be used again."""
    scheduler = make_scheduler(num_snapshots=1, max_model_len=32)
    add(scheduler, 0, range(100, 120))
    assert taken(run(scheduler))[0] == (0, 16, None, 0)
    add(scheduler, 1, range(100, 120))
    add(scheduler, 2, range(200, 220))
    step = scheduler.schedule()
    assert taken(step.prefill.chunks) == [(16, 4, 0, None), (0, 16, None, 0)]
    assert scheduler.prefixes.snapshots.num_evictions == 1
    give(scheduler, step)
    run(scheduler)
    for i, first, expected in [(3, 200, (16, 4, 0, None)), (4, 100, (0, 16, None, 0))]:
        add(scheduler, i, range(first, first + 20))
        assert taken(run(scheduler))[0] == expected


def test_a_snapshot_is_not_restored_in_the_step_that_replaces_it():
    """The other way round: whoever is admitted behind the one that takes it does not find it."""
    scheduler = make_scheduler(num_snapshots=1, max_model_len=32)
    add(scheduler, 0, range(100, 120))
    run(scheduler)
    add(scheduler, 1, range(200, 220))
    add(scheduler, 2, range(100, 120))
    step = scheduler.schedule()
    assert taken(step.prefill.chunks) == [(0, 16, None, 0), (0, 16, None, None)]
    give(scheduler, step)
    run(scheduler)
    add(scheduler, 3, range(200, 220))
    assert taken(run(scheduler)) == [(16, 4, 0, None)]


def test_a_snapshot_is_restored_with_the_first_chunk_however_late_it_comes():
    """The prompt of 100 tokens needs a shape of one row."""
    scheduler = make_scheduler(num_snapshots=2, max_num_batched_tokens=128)
    add(scheduler, 0, range(100, 120))
    run(scheduler)
    add(scheduler, 1, range(200, 300))
    add(scheduler, 2, range(100, 120))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert taken(first.prefill.chunks) == [(0, 96, None, 1)]
    assert taken(second.prefill.chunks) == [(96, 4, None, None), (16, 4, 0, None)]


def test_two_of_a_kind_in_one_step_leave_one_snapshot():
    scheduler = make_scheduler(num_snapshots=2, max_model_len=32)
    for i in range(2):
        add(scheduler, i, range(100, 120))
    step = scheduler.schedule()
    assert taken(step.prefill.chunks) == [(0, 16, None, 0), (0, 16, None, 1)]
    assert len(scheduler.prefixes.snapshots) == 1
    give(scheduler, step)
    run(scheduler)
    add(scheduler, 2, range(100, 120))
    assert taken(run(scheduler)) == [(16, 4, 0, None)]


def test_without_snapshots_nothing_is_found_or_taken():
    scheduler = make_scheduler(num_snapshots=0)
    for i in range(3):
        add(scheduler, i, range(100, 120), num_samples=2)
        found = run(scheduler)
        assert {(c.restored, c.taken) for c in found} == {(None, None)}
        assert [c.start for c in found if c.is_first] == [0, 0]
    assert scheduler.num_found == 0


def test_output_of_recurrent_models_is_not_found():
    """There are no states where its pages end."""
    scheduler = make_scheduler(num_snapshots=2)
    sample = add(scheduler, 0, range(100, 120), 14)
    run(scheduler)
    add(scheduler, 1, [*sample.token_ids, *range(200, 210)])
    assert run(scheduler)[0].start == 16


def test_a_preempted_request_goes_on_from_its_snapshot():
    scheduler = make_scheduler(num_snapshots=2)
    sample = add(scheduler, 0, range(100, 120), 30)
    for _ in range(4):
        give(scheduler, scheduler.schedule())
    assert sample.num_output == 3
    scheduler._preempt(sample)  # nobody else is there to do it
    (chunk,) = scheduler.schedule().prefill.chunks
    assert (chunk.start, chunk.count, chunk.restored, chunk.is_resumed) == (16, 6, 0, True)


def test_a_preempted_prompt_is_not_cut_where_another_took_the_snapshot_meanwhile():
    scheduler = make_scheduler(
        num_snapshots=2, max_num_scheduled_tokens=8, scheduling_policy="priority"
    )
    sample = add(scheduler, 0, range(100, 120))
    step = scheduler.schedule()
    assert chunks(step) == [(0, 0, 8)] and sample.cuts == [2]
    give(scheduler, step)
    scheduler._preempt(sample)
    add(scheduler, 1, range(100, 120), priority=-1)
    found = [(c.sequence.request.request_id, *span) for c in run(scheduler) for span in spans([c])]
    assert found == [(1, 0, 8), (1, 8, 8), (1, 16, 4), (0, 16, 4)]


@pytest.mark.parametrize(
    "length, expected",
    [
        (65, [(0, 32, None, None), (32, 32, None, 0), (64, 1, None, None)]),
        (72, [(0, 32, None, None), (32, 32, None, 0), (64, 8, None, None)]),
        (80, [(0, 32, None, None), (32, 32, None, None), (64, 16, None, None)]),
    ],
)
def test_exact_chunks_stay_on_their_grid(length, expected):
    """A snapshot is taken after 64 tokens, where a chunk ends anyway, and not after 72."""
    scheduler = make_scheduler(num_snapshots=2, exact=True)
    add(scheduler, 0, range(100, 100 + length))
    assert taken(run(scheduler)) == expected


def test_exact_requests_restore_on_their_grid():
    scheduler = make_scheduler(num_snapshots=4, exact=True)
    add(scheduler, 0, range(100, 165))
    run(scheduler)
    add(scheduler, 1, range(100, 200))
    assert taken(run(scheduler)) == [(64, 32, 0, 1), (96, 4, None, None)]


# --- cost -----------------------------------------------------------------------------------------


def count_lines(function):
    """Lines of Python that a call runs: its cost, whatever else the machine does."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # a collection runs lines of its own: JAX's callbacks
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


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
