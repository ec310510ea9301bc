"""The rows of unrolled chains, compared with a direct computation in float64.

The models in `tests/oracle` test `CausalRows`, also with windows and sinks.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rope_write import HeadWeights
from specjax.device.cache.paged import PagedAttention, ProjectedHeads
from specjax.train.context import UnrolledRows

B, T, H, H_KV, D = 2, 7, 4, 2, 8
KIND = PagedAttention(num_layers=1, num_heads=H, num_kv_heads=H_KV, head_dim=D, rms_norm_eps=1e-6)

SINKS = np.linspace(-2, 2, H, dtype=np.float32)


def _draw(rng, heads):
    return rng.standard_normal((B * T, heads, D)).astype(np.float32)


def _heads(q, k, v):
    """Return heads as from a projection, without norms, and with a rotation by zero."""
    qkv = jnp.concatenate([q, k, v], axis=1).reshape(B * T, -1)
    rotation = np.ones((B * T, D // 2)), np.zeros((B * T, D // 2))
    return ProjectedHeads(qkv, HeadWeights(), rotation, SINKS)


def _attend(query, keys, values, sink):
    scores = np.array([query @ key for key in keys], np.float64) / np.sqrt(D)
    weights = np.exp(scores)
    return (weights / (weights.sum() + np.exp(sink))) @ np.array(values, np.float64)


def _expected(q, steps, window):
    """Return the expected attention, by the definition.

    Row t of a chain sees rows 0 to t of step 0, and row t of every later step; of these, only those
    in the last `window` positions.
    """
    out = np.zeros((B * T, H, D))
    for row in range(B * T):
        first = row - row % T
        for head in range(H):
            shared = head // (H // H_KV)
            seen = [(steps[0], i) for i in range(first, row + 1)]
            seen += [(step, row) for step in steps[1:]]
            seen = seen[-window:]  # they are at consecutive positions
            keys = [k[i, shared] for (k, _), i in seen]
            values = [v[i, shared] for (_, v), i in seen]
            out[row, head] = _attend(q[row, head], keys, values, SINKS[head])
    return out


# Of four steps, two are further back than the shorter window from the last.
@pytest.mark.parametrize("window", [None, 5, 2])
def test_unrolled_rows_see_the_verified_rows_and_their_own_drafts_only(window):
    rng, kind = np.random.default_rng(1), replace(KIND, window=window)
    drawn = [(_draw(rng, H), _draw(rng, H_KV), _draw(rng, H_KV)) for _ in range(4)]

    @jax.jit
    def unroll(steps):
        kv, found = (), []
        for step, qkv in enumerate(steps):
            rows = UnrolledRows.of(B, T, step)
            out, kv = rows.mix(kind, kv, jnp.int32(0), _heads(*qkv))
            found.append((rows.positions, out))
        return found

    for step, (positions, out) in enumerate(unroll(drawn)):
        np.testing.assert_array_equal(positions, np.tile(np.arange(T) + step, B))
        seen = [(k, v) for _, k, v in drawn[: step + 1]]
        np.testing.assert_allclose(out, _expected(drawn[step][0], seen, window or 2 * T), atol=2e-6)
