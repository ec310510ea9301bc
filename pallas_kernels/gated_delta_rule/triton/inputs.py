"""Computes the state-independent part of a decode step, in a kernel before the recurrence.

A program processes some tokens, for one key head and its value heads. All tokens run in the same
loop body, so a token's result has the same bits at any index in a step. Programs may run in any
order, because no program reads a column of a ring buffer that another program writes (see
`pallas_kernels.gated_delta_rule`).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gated_delta_rule.reference import EPSILON
from pallas_kernels.gated_delta_rule.triton.arithmetic import sigmoid, silu, softplus
from pallas_kernels.gated_delta_rule.triton.batch_row import BatchRow, column_of
from pallas_kernels.triton_call import load, store, triton_call


class Inputs(NamedTuple):
    """Values of the new tokens in f32, which only the current step needs.

    The values of padding rows are undefined.
    """

    q: Any  # [B, T, H_k, D_k]
    v: Any  # [B, T, H_v, D_v]
    beta: Any  # [B, T, H_v]


def prepare_inputs(x, weights, cache, where, *, config, interpret):
    """Return the new tokens' `Inputs`, and the cache with the new tokens' raw inputs, k and e^g.

    `where` is (layer, slots, positions).
    """
    heads, (batch, length, _) = cache.heads, x.shape
    per_head = (heads.num_keys, heads.key_dim), (heads.num_values, heads.value_dim)
    shapes = *per_head, (heads.num_values,)
    inputs = [jax.ShapeDtypeStruct((batch, length, *shape), jnp.float32) for shape in shapes]
    kept = cache.ring, cache.k, cache.decay
    tokens = min(config.inputs_tokens, length)
    ring, k, decay, *inputs = triton_call(
        partial(_inputs_kernel, tokens=tokens),
        [*kept, x, *where, *weights[:3]],
        [*(jax.ShapeDtypeStruct(z.shape, z.dtype) for z in kept), *inputs],
        name="gated_delta_rule_inputs",
        grid=(heads.num_keys, pl.cdiv(length, tokens), batch),
        num_warps=config.inputs_warps,
        aliases={0: 0, 1: 1, 2: 2},
        interpret=interpret,
    )
    return Inputs(*inputs), cache._replace(ring=ring, k=k, decay=decay)


def _inputs_kernel(*refs, tokens):
    _, _, _, x_ref, layer_ref, slots_ref, positions_ref, conv_ref, *refs = refs
    log_decay_ref, decay_bias_ref, ring_ref, k_ref, decay_ref, *inputs = refs
    inputs = Inputs(*inputs)
    num_keys, key_dim = inputs.q.shape[2:]
    num_values, value_dim = inputs.v.shape[2:]
    heads_per_key, num_taps = num_values // num_keys, conv_ref.shape[0]

    key_head, part, row = (pl.program_id(i) for i in range(3))
    row = BatchRow.read(row, layer_ref, slots_ref, positions_ref)
    first, heads = part * tokens, [key_head * heads_per_key + i for i in range(heads_per_key)]
    keys, values = (jnp.arange(n, dtype=jnp.int32) for n in (key_dim, value_dim))
    kinds = [(n * num_keys + key_head) * key_dim + keys for n in range(2)]  # channels of q, of k
    kinds += [2 * num_keys * key_dim + head * value_dim + values for head in heads]

    @pl.when(row.is_live(ring_ref.shape[1]) & (first < row.count))
    def _():
        taps = [[conv_ref[i, kind].astype(jnp.float32) for i in range(num_taps)] for kind in kinds]
        gates = _Gates.read(log_decay_ref, decay_bias_ref, key_head, heads_per_key)

        def run(t, history):
            raw = [x_ref[row.index, t, kind].astype(ring_ref.dtype) for kind in kinds]
            a, b = gates.read_token(x_ref, row, t)  # before the stores, which delay loads
            windows = [[*past, z.astype(jnp.float32)] for past, z in zip(history, raw, strict=True)]
            q, k, *vs = (
                silu(sum(z * w for z, w in zip(*pair, strict=True)))
                for pair in zip(windows, taps, strict=True)
            )
            for kind, z in zip(kinds, raw, strict=True):
                ring_ref[*_column(ring_ref, row, t), kind] = z
            inputs.q[row.index, t, key_head, keys] = _normed(q) * key_dim**-0.5
            k_ref[*_column(k_ref, row, t), key_head, keys] = _normed(k)
            for head, v in zip(heads, vs, strict=True):
                inputs.v[row.index, t, head, values] = v
            gates.write(a, b, row, t, decay_ref, inputs.beta)
            return [window[1:] for window in windows]

        # Issue all loads before the first use, which waits for memory.
        places = [first - back for back in range(num_taps - 1, 0, -1)]
        loaded = [[_load_raw(x_ref, ring_ref, row, t, kind) for t in places] for kind in kinds]
        history = [
            [_pick_raw(*pair, t) for pair, t in zip(pairs, places, strict=True)] for pairs in loaded
        ]
        jax.lax.fori_loop(first, jnp.minimum(first + tokens, row.count), run, history)


def _column(ring, row, t):
    return row.layer, row.slot, column_of(row.start + t, ring.shape[2])


def _load_raw(x_ref, ring_ref, row, t, kind):
    """Read the raw inputs of token t in the channels `kind` from x and from the ring; return both.

    The ring is the cache's ring buffer of raw inputs. New tokens (t >= 0) are only in x, and
    earlier tokens (t < 0) are only in the ring. The other result is 0. `_pick_raw` selects one.
    """
    in_x = jnp.broadcast_to(t >= 0, kind.shape)
    in_ring = jnp.broadcast_to((t < 0) & (row.start + t >= 0), kind.shape)
    new = load(x_ref.at[row.index, jnp.maximum(t, 0), kind], mask=in_x, other=0.0)
    old = load(ring_ref.at[*_column(ring_ref, row, t), kind], mask=in_ring, other=0.0)
    return new, old


def _pick_raw(new, old, t):
    return jnp.where(t >= 0, new.astype(old.dtype), old).astype(jnp.float32)


def _normed(z):
    return z * jax.lax.rsqrt(jnp.sum(z * z) + EPSILON)


class _Gates(NamedTuple):
    """Gate weights of one key head's value heads. The arrays are padded to a power of two."""

    num_heads: int  # H_v, over all key heads
    heads: Any
    is_head: Any
    rate: Any
    bias: Any

    @classmethod
    def read(cls, log_decay_ref, decay_bias_ref, key_head, count):
        i = jnp.arange(pl.next_power_of_2(count), dtype=jnp.int32)
        # In interpret mode masked lanes store the old value, so they must point out of range.
        is_head = i < count
        num_heads = log_decay_ref.shape[0]
        heads = jnp.where(is_head, key_head * count + i, num_heads)
        log_decay, bias = (
            load(ref.at[heads], mask=is_head, other=0.0) for ref in (log_decay_ref, decay_bias_ref)
        )
        return cls(num_heads, heads, is_head, -jnp.exp(log_decay), bias)

    def read_token(self, x_ref, row, t):
        """Return the decay a and the write gate b of a new token."""
        first = x_ref.shape[2] - 2 * self.num_heads
        places = [first + n * self.num_heads + self.heads for n in (1, 0)]
        at = [x_ref.at[row.index, t, place] for place in places]
        return [load(ref, mask=self.is_head, other=0.0).astype(jnp.float32) for ref in at]

    def write(self, a, b, row, t, decay_ref, beta_ref):
        """Compute and store e^g and beta of a new token."""
        store(beta_ref.at[row.index, t, self.heads], sigmoid(b), mask=self.is_head)
        decay = jnp.exp(self.rate * softplus(a + self.bias))
        store(decay_ref.at[*_column(decay_ref, row, t), self.heads], decay, mask=self.is_head)
