"""A request that goes on from a snapshot and shared pages is the request that ran it all."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.device.cache.recurrent import (
    HybridCache,
    init_snapshots,
    restore_snapshots,
    take_snapshots,
)
from specjax.device.cache.rows import CachedRows
from specjax.train.target import demo_qwen3_5, init_params

PAGE, NUM_PAGES, CHUNK, MOST_ROWS = 8, 12, 16, 4
LENGTH = 56


@pytest.fixture(scope="module")
def model():
    small = demo_qwen3_5(64, 4, 128)
    return replace(small, head_dim=16, rope=replace(small.rope, head_dim=8))


@pytest.fixture(scope="module")
def params(model):
    noisy = init_params(model.specs(), jax.random.key(0))
    leaves, tree = jax.tree.flatten(noisy)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    pairs = zip(leaves, keys, strict=True)
    return jax.tree.unflatten(tree, [x + 0.1 * jax.random.normal(key, x.shape) for x, key in pairs])


@pytest.fixture(scope="module")
def extend(model, params):
    """Run a piece of one request: (hidden, cache)."""

    @jax.jit
    def run_chunk(cache, tokens, slot, table, start, count):
        return run(cache, tokens, slot, table, start, count, 0, folds=True)

    @jax.jit
    def run_step(cache, tokens, slot, table, start, count, pending):
        return run(cache, tokens, slot, table, start, count, pending, folds=False)

    def run(cache, tokens, slot, table, start, count, pending, folds):
        rows = CachedRows.starting_at(
            jnp.array([start]),
            jnp.array([count]),
            tokens.shape[0],
            table[None],
            slots=jnp.array([slot]),
            pending=jnp.array([pending]),
            folds=folds,
        )
        features, cache = model.extend(params, tokens, rows, cache)
        return features.hidden, cache

    def extend(cache, tokens, slot, pages, start, pending=None):
        table = jnp.array([*pages, *[-1] * (LENGTH // PAGE - len(pages))])
        count = len(tokens)
        if pending is None:
            padded = jnp.array([*tokens, *[0] * (CHUNK - count)])
            hidden, cache = run_chunk(cache, padded, slot, table, start, count)
        else:
            padded = jnp.array([*tokens, *[0] * (MOST_ROWS - count)])
            hidden, cache = run_step(cache, padded, slot, table, start, count, pending)
        return np.asarray(hidden)[:count], cache

    return extend


@pytest.mark.parametrize("shared", [8, 16, 32])
def test_going_on_from_a_snapshot(model, extend, shared):
    tokens = np.random.default_rng(shared).integers(0, 64, LENGTH).tolist()
    cache = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan),
        model.init_cache(4, NUM_PAGES, PAGE, MOST_ROWS, jnp.float32),
    )
    snapshots = init_snapshots(cache.delta, 3, model.conv_width)

    def rest(cache, slot, pages):
        """What follows the shared prefix: the prompt's rest, then steps with rejected drafts."""
        out = []
        for start in range(shared, 40, CHUNK):
            hidden, cache = extend(
                cache, tokens[start : min(start + CHUNK, 40)], slot, pages, start
            )
            out.append(hidden)
        start, pending = 40, 0
        for stands in (1, 3, 4, 2, 1):
            drafts = tokens[start : start + stands] + [63, 1, 2][: MOST_ROWS - stands]
            hidden, cache = extend(cache, drafts, slot, pages, start, pending)
            out.append(hidden[:stands])
            start, pending = start + stands, stands
        return np.concatenate(out), cache

    own = [3, 0, 5, 7, 1, 2, 9]
    for start in range(0, shared, CHUNK):
        piece = tokens[start : min(start + CHUNK, shared)]
        _, cache = extend(cache, piece, 1, own, start)
    ids, slots, ends = jnp.array([2]), jnp.array([1]), jnp.array([shared])
    snapshots = take_snapshots(snapshots, ids, cache.delta, slots, ends)
    expected, cache = rest(cache, 1, own)

    # The slot that goes on held another request, in the middle of a step.
    _, cache = extend(cache, tokens[:5], 0, [11], 0)
    _, cache = extend(cache, [1, 2, 3, 4], 0, [11], 5, 0)
    delta = restore_snapshots(cache.delta, jnp.array([0]), snapshots, ids, ends)
    pages = own[: shared // PAGE] + [10, 4, 6, 8, 11, 0][: 7 - shared // PAGE]
    found, _ = rest(HybridCache(cache.kv, delta), 0, pages)
    np.testing.assert_array_equal(found, expected)
    assert np.isfinite(expected).all()


def test_ids_and_slots_past_the_end_are_dropped(model):
    cache = model.init_cache(2, 1, PAGE, MOST_ROWS, jnp.float32).delta
    cache = jax.tree.map(jnp.ones_like, cache)
    snapshots = init_snapshots(cache, 2, model.conv_width)
    none, slots, ends = jnp.array([2, 2]), jnp.array([0, 1]), jnp.array([8, 8])
    kept = take_snapshots(snapshots, none, cache, slots, ends)
    jax.tree.map(np.testing.assert_array_equal, kept, snapshots)
    restored = restore_snapshots(cache, none, snapshots, slots, ends)
    jax.tree.map(np.testing.assert_array_equal, restored, cache)


def test_a_wrong_count_after_restoring_shows(model, extend):
    """A count of 1 where nothing is pending makes NaN, and not plausible text."""
    cache = model.init_cache(2, NUM_PAGES, PAGE, MOST_ROWS, jnp.float32)
    snapshots = init_snapshots(cache.delta, 1, model.conv_width)
    pages = list(range(7))
    _, cache = extend(cache, list(range(8)), 0, pages, 0)
    first, slots, ends = jnp.array([0]), jnp.array([0]), jnp.array([8])
    snapshots = take_snapshots(snapshots, first, cache.delta, slots, ends)
    delta = restore_snapshots(cache.delta, jnp.array([1]), snapshots, first, ends)
    cache = HybridCache(cache.kv, delta)
    right, _ = extend(cache, [8, 9], 1, pages, 8, 0)
    wrong, _ = extend(cache, [8, 9], 1, pages, 8, 1)
    assert np.isfinite(right).all()
    assert np.isnan(wrong).all()
