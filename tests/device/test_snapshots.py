"""A request that resumes from a snapshot and shared pages gives the results of a full run."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.params import random_params

from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.rows import CachedRows
from specjax.device.models.model import init_caches
from specjax.device.models.qwen3_5 import ATTENTION, DELTA
from specjax.train.target import demo_qwen3_5

pytestmark = pytest.mark.every_jax

SLOTS, PAGE, NUM_PAGES, CHUNK, MAX_ROWS = 4, 8, 12, 16, 4
LENGTH, NUM_SNAPSHOTS = 56, 3


SMALL = demo_qwen3_5(64, 2, 128)
MODEL = replace(
    SMALL,
    layer_types=(DELTA, ATTENTION, DELTA),
    head_dim=16,
    rope=replace(SMALL.rope, head_dim=8),
)
take, restore = jax.jit(MODEL.delta_rule.take), jax.jit(MODEL.delta_rule.restore)


@pytest.fixture(scope="module")
def empty():
    """Return the caches and snapshots of an engine without requests."""

    @jax.jit
    def init():
        sizes = CacheSizes(SLOTS, NUM_PAGES, PAGE, MAX_ROWS)
        snapshots = MODEL.delta_rule.init_snapshots(NUM_SNAPSHOTS, jnp.float32)
        return init_caches(MODEL, sizes, jnp.float32), snapshots

    return jax.device_get(init())


def ints(x):
    return np.array(x, np.int32)


@pytest.fixture(scope="module")
def extend():
    """Return a function that runs some tokens of a request, and returns (hidden states, cache)."""
    params = jax.device_put(random_params(MODEL.specs(), 0))

    @partial(jax.jit, static_argnames="folds")
    def run(cache, tokens, *others, folds):
        slot, table, start, count, pending = (x[None] for x in others)
        where = {"slots": slot, "pending": pending, "folds": folds}
        rows = CachedRows.starting_at(start, count, tokens.shape[0], table, **where)
        features, cache = MODEL.extend(params, tokens, rows, cache)
        return features.hidden, cache

    def extend(cache, tokens, slot, pages, start, pending=None):
        folds, count = pending is None, len(tokens)
        padded = [*tokens, *[0] * ((CHUNK if folds else MAX_ROWS) - count)]
        table = [*pages, *[-1] * (LENGTH // PAGE - len(pages))]
        inputs = map(ints, (padded, slot, table, start, count, pending or 0))
        hidden, cache = run(cache, *inputs, folds=folds)
        return np.asarray(hidden)[:count], cache

    return extend


@pytest.mark.slow
@pytest.mark.parametrize("shared", [8, 16, 32])
def test_going_on_from_a_snapshot(empty, extend, shared):
    tokens = np.random.default_rng(shared).integers(0, 64, LENGTH).tolist()
    cache, snapshots = empty
    cache = jax.tree.map(lambda x: np.full_like(x, np.nan), cache)

    def rest(cache, slot, pages):
        """Run the rest of the prompt after the shared prefix, then rounds with rejected drafts."""
        out = []
        for start in range(shared, 40, CHUNK):
            hidden, cache = extend(
                cache, tokens[start : min(start + CHUNK, 40)], slot, pages, start
            )
            out.append(hidden)
        start, pending = 40, 0
        for stands in (1, 3, 4, 2, 1):
            drafts = tokens[start : start + stands] + [63, 1, 2][: MAX_ROWS - stands]
            hidden, cache = extend(cache, drafts, slot, pages, start, pending)
            out.append(hidden[:stands])
            start, pending = start + stands, stands
        return np.concatenate(out), cache

    own = [3, 0, 5, 7, 1, 2, 9]
    for start in range(0, shared, CHUNK):
        piece = tokens[start : min(start + CHUNK, shared)]
        _, cache = extend(cache, piece, 1, own, start)
    ids, slots, ends = ints([2]), ints([1]), ints([shared])
    snapshots = take(snapshots, ids, cache[1], slots, ends)
    expected, cache = rest(cache, 1, own)

    # The slot that goes on held another request, in the middle of a step.
    _, cache = extend(cache, tokens[:5], 0, [11], 0)
    _, cache = extend(cache, [1, 2, 3, 4], 0, [11], 5, 0)
    delta = restore(cache[1], ints([0]), snapshots, ids, ends)
    pages = own[: shared // PAGE] + [10, 4, 6, 8, 11, 0][: 7 - shared // PAGE]
    found, _ = rest((cache[0], delta), 0, pages)
    np.testing.assert_array_equal(found, expected)
    assert np.isfinite(expected).all()


def test_ids_and_slots_past_the_end_are_dropped(empty):
    cache, snapshots = empty
    delta = jax.tree.map(np.ones_like, cache[1])
    slots, ends = ints([0, 1]), ints([8, 8])
    kept = take(snapshots, ints([NUM_SNAPSHOTS] * 2), delta, slots, ends)
    jax.tree.map(np.testing.assert_array_equal, kept, snapshots)
    restored = restore(delta, ints([SLOTS] * 2), snapshots, slots, ends)
    jax.tree.map(np.testing.assert_array_equal, restored, delta)
