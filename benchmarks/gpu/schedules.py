"""Runs the gated delta rule as in serving: a prompt, then steps with partly accepted tokens."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from problems import EPS, MAX_ROWS, TAPS, Problem, delta_rule_weights, normal

from pallas_kernels.gated_delta_rule import DeltaRuleCache, Heads, gated_delta_rule


def served_rule(heads: Heads, batch: int, num_prompt: int, num_rows: int, dtype: Any) -> Problem:
    """Return the problem of three calls: a prompt, a step of T tokens, and a second step.

    Each request accepts 1 to T tokens of the first step. The second step updates the state with
    these tokens. The results are the outputs of all three calls, and the states after the accepted
    tokens.
    """
    accepted = (1 + np.arange(batch) % num_rows).astype(np.int32)
    sizes = num_prompt, num_rows, num_rows
    item = *(normal(10 + i, (batch, n, heads.inputs), dtype) for i, n in enumerate(sizes)), accepted

    def call(weights, item, kernels, config):
        prompt, step, last, accepted = item
        serve = partial(_serve, weights, kernels)
        cache = _empty_cache(heads, batch, dtype)
        start, nothing = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32)
        first, cache = serve(cache, prompt, start, nothing, folds=True)
        second, cache = serve(cache, step, start + num_prompt, nothing)
        third, cache = serve(cache, last, start + num_prompt + accepted, accepted)
        return weights, (first, second, third, cache.state[0])

    return Problem(delta_rule_weights(heads, dtype), (item,), call, 0.0)


def split_states(
    heads: Heads, batch: int, num_rows: int, dtype: Any, kernels: str
) -> list[jax.Array]:
    """Return two arrays of states: after one step of T tokens, and after T steps of one token.

    They should have equal bits.
    """
    weights, states = delta_rule_weights(heads, dtype), []
    x = normal(10, (batch, num_rows + 1, heads.inputs), dtype)
    serve = jax.jit(partial(_serve, weights, kernels))
    for width in num_rows, 1:
        cache = _empty_cache(heads, batch, dtype)
        start, pending = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32)
        for at in range(0, num_rows, width):
            _, cache = serve(cache, x[:, at : at + width], start + at, pending)
            pending = jnp.full(batch, width, jnp.int32)
        _, cache = serve(cache, x[:, -1:], start + num_rows, pending)
        states.append(cache.state)
    return states


def _empty_cache(heads: Heads, batch: int, dtype: Any) -> DeltaRuleCache:
    """Return a cache of one layer, filled with NaN, because first tokens must not read it."""
    shapes = DeltaRuleCache.shapes(1, batch, heads, TAPS, MAX_ROWS, jnp.dtype(dtype))
    return DeltaRuleCache(*(jnp.full(x.shape, jnp.nan, x.dtype) for x in shapes))


def _serve(
    weights: Any,
    kernels: str,
    cache: DeltaRuleCache,
    x: jax.Array,
    start: jax.Array,
    pending: jax.Array,
    *,
    folds: bool = False,
) -> tuple[jax.Array, DeltaRuleCache]:
    """Run the rule on tokens x [B, T, inputs]. `start` i32[B] has their first positions."""
    batch, num_rows, _ = x.shape
    positions = start[:, None] + jnp.arange(num_rows, dtype=jnp.int32)[None]
    slots = jnp.arange(batch, dtype=jnp.int32)
    where = jnp.int32(0), slots, positions, pending
    return gated_delta_rule(x, weights, cache, *where, folds=folds, eps=EPS, kernels=kernels)
