"""One recurrent state per slot, and the ring from which the next step brings it up to date."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule import DeltaRuleCache, Heads, num_ring_columns


class HybridCache(NamedTuple):
    """What a model of attention and recurrent layers keeps of its requests."""

    kv: Any  # see `paged.init_pool`; one entry per attention layer
    delta: Any  # a DeltaRuleCache; one entry per recurrent layer


def init_delta(
    num_layers: int, num_slots: int, heads: Heads, conv_width: int, most_rows: int, dtype: Any
) -> DeltaRuleCache:
    """Empty states f32 and rings for steps of up to `most_rows` tokens that may be rejected.

    The ring has columns for them, for as many that the next step runs, and for the conv_width - 1
    before: no step writes a column that it reads (see `pallas_kernels.gated_delta_rule`).
    """
    num_columns = num_ring_columns(conv_width, most_rows)
    shape = (num_layers, num_slots)
    return DeltaRuleCache(
        state=jnp.zeros((*shape, heads.num_values, heads.value_dim, heads.key_dim), jnp.float32),
        ring=jnp.zeros((*shape, num_columns, heads.channels), dtype),
        gates=jnp.zeros((*shape, num_columns, 2, heads.num_values), jnp.float32),
    )


class Snapshots(NamedTuple):
    """Copies of N states, with what the convolution still reads of the tokens before them.

    A snapshot serves requests that begin with its tokens, together with the pages that hold their
    keys and values: neither is of use without the other.
    """

    state: jax.Array  # f32[L, N, H_v, D_v, D_k]
    tail: jax.Array  # [L, N, W - 1, C], raw inputs


def init_snapshots(cache: DeltaRuleCache, num_snapshots: int, conv_width: int) -> Snapshots:
    """Room for `num_snapshots` states of slots of `cache`."""
    num_layers, _, *state = cache.state.shape
    shape = num_layers, num_snapshots
    return Snapshots(
        jnp.zeros((*shape, *state), jnp.float32),
        jnp.zeros((*shape, conv_width - 1, cache.ring.shape[3]), cache.ring.dtype),
    )


def take_snapshots(
    snapshots: Snapshots, ids: jax.Array, cache: DeltaRuleCache, slots: jax.Array, ends: jax.Array
) -> Snapshots:
    """Snapshots `ids` i32[B] of `slots` i32[B], which hold `ends` tokens with none pending.

    An id past the last is dropped.
    """
    columns = _tail_columns(snapshots, cache, ends)
    tail = cache.ring[:, slots[:, None], columns]
    tail = jnp.where((_tail_places(snapshots, ends) >= 0)[..., None], tail, 0)
    return Snapshots(
        snapshots.state.at[:, ids].set(cache.state[:, slots], mode="drop"),
        snapshots.tail.at[:, ids].set(tail, mode="drop"),
    )


def restore_snapshots(
    cache: DeltaRuleCache, slots: jax.Array, snapshots: Snapshots, ids: jax.Array, ends: jax.Array
) -> DeltaRuleCache:
    """The cache with `slots` as they were when `ids` were taken, `ends` tokens in; none pending.

    A slot past the last is dropped.
    """
    columns = _tail_columns(snapshots, cache, ends)
    # As after a prompt: what no step should look at is NaN.
    ring = cache.ring.at[:, slots].set(jnp.nan, mode="drop")
    return DeltaRuleCache(
        cache.state.at[:, slots].set(snapshots.state[:, ids], mode="drop"),
        ring.at[:, slots[:, None], columns].set(snapshots.tail[:, ids], mode="drop"),
        cache.gates.at[:, slots].set(jnp.nan, mode="drop"),
    )


def _tail_places(snapshots: Snapshots, ends: jax.Array) -> jax.Array:
    length = snapshots.tail.shape[2]
    return ends[:, None] - length + jnp.arange(length)


def _tail_columns(snapshots: Snapshots, cache: DeltaRuleCache, ends: jax.Array) -> jax.Array:
    return _tail_places(snapshots, ends) % cache.ring.shape[2]
