"""A baseline for `gated_delta_rule`: the same recurrence, storing the state after every token.

    S <- e^g S      u = beta (v - S k)      S <- S + u k^T      o = S q

A step reads the snapshot after the last accepted token, and writes the states after all its T
tokens. This moves 1 + T states, where `gated_delta_rule` moves two. The inputs are q, k, v, g and
beta. There are no convolution, gates, norms or rings, so this is less work than `gated_delta_rule`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from problems import CACHE_BYTES, Problem, normal

from pallas_kernels.gated_delta_rule import Heads
from pallas_kernels.triton_call import triton_call

BLOCK_VALUES, NUM_WARPS = 32, 4


def snapshot_rule(heads: Heads, batch: int, num_rows: int) -> Problem:
    """Return the baseline's problem for steps of T = `num_rows` tokens.

    The state of the problem has the snapshots f32[L, B, T, H_v, D_v, D_k].
    """
    size = heads.num_values, heads.value_dim, heads.key_dim
    state_bytes = 4 * batch * int(np.prod(size))
    layers = int(min(max(2, CACHE_BYTES // (num_rows * state_bytes)), 16))
    snapshots = 0.1 * normal(1, (layers, batch, num_rows, *size), "float32")
    accepted = np.random.default_rng(0).integers(0, num_rows, batch).astype(np.int32)
    tokens = (batch, num_rows, heads.num_values)
    items = tuple(
        (
            jnp.full((1,), i, jnp.int32),
            accepted,
            normal(10 + i, (*tokens, heads.key_dim), "float32") / heads.key_dim,
            normal(50 + i, (*tokens, heads.key_dim), "float32") / heads.key_dim**0.5,
            normal(90 + i, (*tokens, heads.value_dim), "float32"),
            -jnp.abs(normal(130 + i, tokens, "float32")),
            jax.nn.sigmoid(normal(170 + i, tokens, "float32")),
        )
        for i in range(layers)
    )
    inputs = 4 * batch * num_rows * heads.num_values * (2 * heads.key_dim + 2 * heads.value_dim)
    return Problem(snapshots, items, _call, (1 + num_rows) * state_bytes + inputs)


def _call(snapshots: jax.Array, item: Any, kernels: str, config: Any) -> tuple[Any, Any]:
    _, batch, num_rows, num_heads, value_dim, _ = snapshots.shape
    block = min(BLOCK_VALUES, value_dim)
    snapshots, out = triton_call(
        partial(_kernel, block=block),
        [snapshots, *item],
        [
            jax.ShapeDtypeStruct(snapshots.shape, snapshots.dtype),
            jax.ShapeDtypeStruct((batch, num_rows, num_heads, value_dim), jnp.float32),
        ],
        name="snapshot_rule",
        grid=(value_dim // block, num_heads, batch),
        num_warps=NUM_WARPS,
        aliases={0: 0},
        interpret=kernels == "interpret",
    )
    return snapshots, out


def _kernel(
    _, layer_ref, accepted_ref, q_ref, k_ref, v_ref, g_ref, beta_ref, states_ref, out_ref, *, block
):
    num_rows, key_dim = q_ref.shape[1], q_ref.shape[3]
    head, row = pl.program_id(1), pl.program_id(2)
    values = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
    keys = jnp.arange(key_dim, dtype=jnp.int32)
    own = values[:, None], keys[None, :]
    layer = layer_ref[0]
    state = states_ref[layer, row, accepted_ref[row], head, *own]  # [block, D_k]
    for t in range(num_rows):
        q, k, v = q_ref[row, t, head, keys], k_ref[row, t, head, keys], v_ref[row, t, head, values]
        state = state * jnp.exp(g_ref[row, t, head])
        u = beta_ref[row, t, head] * (v - jnp.sum(state * k[None], axis=1))
        state = state + u[:, None] * k[None]
        states_ref[layer, row, t, head, *own] = state
        out_ref[row, t, head, values] = jnp.sum(state * q[None], axis=1)
