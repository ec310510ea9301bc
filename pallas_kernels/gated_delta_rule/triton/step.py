"""A decode step of the gated delta rule: fold pending tokens into the state, then run new ones.

A program owns some rows of the state of one value head of one request, which are independent of
other rows: it reads them once, folds the pending tokens in, writes them once, and runs the new
tokens in registers. All tokens, folded or verified, go through the same loop body, so that a token
runs the same machine code and gives the same bits in every step.

The programs of value heads that share a key head are not synchronised, and one of them writes the
new tokens' raw q and k to the ring. No program reads these columns: new tokens are read from x, and
the ring has enough columns that those of the last W - 1 + M tokens, which are read, are not written
(`num_ring_columns`). The same holds for the new tokens' gates, written by one program per head. All
other data that a program writes is its own.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gated_delta_rule.reference import EPSILON
from pallas_kernels.gated_delta_rule.triton.arithmetic import sigmoid, silu, softplus
from pallas_kernels.gated_delta_rule.triton.batch_row import BatchRow, column_of
from pallas_kernels.gated_delta_rule.types import DeltaRuleCache
from pallas_kernels.triton_call import load, store, triton_call


def run_step(x, weights, cache, where, config, interpret):
    """Return outputs [B, T, H_v, D_v] before the norm, and the cache.

    `where` is (layer, slots, positions, pending).
    """
    heads, (batch, length, _) = cache.heads, x.shape
    tile = min(config.values, heads.value_dim)
    out = jax.ShapeDtypeStruct((batch, length, heads.num_values, heads.value_dim), x.dtype)
    *cache, out = triton_call(
        partial(_step_kernel, piece=min(config.piece, heads.key_dim), tile=tile),
        [*cache, x, *where, *weights[:3]],
        [*(jax.ShapeDtypeStruct(z.shape, z.dtype) for z in cache), out],
        name="gated_delta_rule",
        grid=(heads.value_dim // tile, heads.num_values, batch),
        num_warps=config.num_warps,
        aliases={0: 0, 1: 1, 2: 2},
        interpret=interpret,
    )
    return out, DeltaRuleCache(*cache)


class _Tokens(NamedTuple):
    """A request's tokens by position: new ones are in x, earlier ones in the ring."""

    x: Any
    ring: Any
    gates: Any
    row: BatchRow
    end: Any  # position after the last token

    def find(self, place):
        """Return whether a token is new, its column in the ring, and its row in x."""
        start = self.row.start
        is_new, column = place >= start, column_of(place, self.ring.shape[2])
        return is_new, column, jnp.clip(place, start, self.end - 1) - start

    def raw(self, place, kinds):
        """Load a token's raw inputs (before the convolution) in the channels of each kind."""
        is_new, column, t = self.find(place)

        def one(kind):
            in_x = jnp.broadcast_to(is_new & (place < self.end), kind.shape)
            in_ring = jnp.broadcast_to(~is_new & (place >= 0), kind.shape)
            new = load(self.x.at[self.row.index, t, kind], mask=in_x, other=0.0)
            at = self.row.layer, self.row.slot, column, kind
            old = load(self.ring.at[at], mask=in_ring, other=0.0)
            return jnp.where(in_x, new.astype(old.dtype), old)

        return tuple(one(kind) for kind in kinds)

    def read_gates(self, found, head, rate, bias):
        """Return g and beta, in one head, of a token located by `find`."""
        is_new, column, t = found
        num_heads = self.gates.shape[4]
        first = self.x.shape[2] - 2 * num_heads
        b, a = (
            self.x[self.row.index, t, first + i * num_heads + head].astype(jnp.float32)
            for i in range(2)
        )
        at = self.row.layer, self.row.slot, column
        g = jnp.where(is_new, rate * softplus(a + bias), self.gates[*at, 0, head])
        return g, jnp.where(is_new, sigmoid(b), self.gates[*at, 1, head])


def _step_kernel(*refs, piece, tile):
    _, _, _, x_ref, layer_ref, slots_ref, positions_ref, pending_ref, *refs = refs
    conv_ref, log_decay_ref, decay_bias_ref, state_ref, ring_ref, gates_ref, out_ref = refs
    cache = DeltaRuleCache(state_ref, ring_ref, gates_ref)
    heads, num_taps, length = cache.heads, conv_ref.shape[0], x_ref.shape[1]
    key_dim, heads_per_key = heads.key_dim, heads.num_values // heads.num_keys
    key_channels = heads.num_keys * key_dim

    part, head, row = (pl.program_id(i) for i in range(3))
    row = BatchRow.read(row, layer_ref, slots_ref, positions_ref)
    is_live = row.is_live(state_ref.shape[1])

    # q and k are laid out as [2, D_k / piece, piece], states as [D_k / piece, D_v, piece].
    parts = jnp.arange(key_dim // piece, dtype=jnp.int32) * piece
    lanes = jnp.arange(piece, dtype=jnp.int32)
    values = part * tile + jnp.arange(tile, dtype=jnp.int32)
    either = jnp.arange(2, dtype=jnp.int32)[:, None, None]
    keys = parts[:, None] + lanes[None, :]
    qk_channels = either * key_channels + head // heads_per_key * key_dim + keys[None]
    kinds = qk_channels, 2 * key_channels + head * heads.value_dim + values
    in_state = values[None, :, None], parts[:, None, None] + lanes[None, None, :]
    own = row.layer, row.slot, head, *in_state

    @pl.when(is_live)
    def _():
        rate, bias = -jnp.exp(log_decay_ref[head]), decay_bias_ref[head]
        num_pending = row.num_pending(pending_ref, cache.max_pending(num_taps))
        first, end = row.start - num_pending, row.start + row.count
        tokens = _Tokens(x_ref, ring_ref, gates_ref, row, end)

        def advance(place, carry):
            s, history = carry
            raw = tokens.raw(place, kinds)
            windows = [(*past, z) for past, z in zip(history, raw, strict=True)]
            found = tokens.find(place)

            @pl.when(place == row.start)
            def _():
                state_ref[own] = s

            g, beta = tokens.read_gates(found, head, rate, bias)
            qk = _normed(_convolved(conv_ref, kinds[0], windows[0]))
            k = jnp.sum(jnp.where(either == 1, qk, 0.0), axis=0)[:, None, :]
            s = s * jnp.exp(g)
            u = beta * (_convolved(conv_ref, kinds[1], windows[1]) - _over_keys(s, k))
            s = s + u[None, :, None] * k
            is_new, column, t = found

            @pl.when(is_new)
            def _():
                q = jnp.sum(jnp.where(either == 0, qk, 0.0), axis=0) * key_dim**-0.5
                o = _over_keys(s, q[:, None, :]).astype(out_ref.dtype)
                out_ref[row.index, t, head, values] = o
                at = row.layer, row.slot, column
                ring_ref[*at, kinds[1]] = raw[1]

                @pl.when(part == 0)
                def _():
                    gates_ref[*at, 0, head] = g
                    gates_ref[*at, 1, head] = beta
                    is_first = jnp.broadcast_to(head % heads_per_key == 0, qk_channels.shape)
                    store(ring_ref.at[*at, qk_channels], raw[0], mask=is_first)

            return s, tuple(window[1:] for window in windows)

        known = jnp.broadcast_to(first > 0, (key_dim // piece, tile, piece))
        s = load(state_ref.at[own], mask=known, other=0.0)
        past = [tokens.raw(first - i, kinds) for i in range(num_taps - 1, 0, -1)]
        history = tuple(tuple(raw[kind] for raw in past) for kind in range(2))
        jax.lax.fori_loop(first, end, advance, (s, history))

    def clear(t, _):
        out_ref[row.index, t, head, values] = jnp.zeros((tile,), out_ref.dtype)

    jax.lax.fori_loop(jnp.where(is_live, row.count, 0), length, clear, None)


def _convolved(conv_ref, channels, window):
    """Convolve a window of W tokens in these channels."""
    num_taps = conv_ref.shape[0]
    taps = [conv_ref[i, channels].astype(jnp.float32) for i in range(num_taps)]
    y = sum(z.astype(jnp.float32) * w for z, w in zip(window, taps, strict=True))
    return silu(y)


def _normed(qk):
    norms = jnp.sum(jnp.sum(qk * qk, axis=2), axis=1)[:, None, None]
    return qk * jax.lax.rsqrt(norms + EPSILON)


def _over_keys(s, k):
    """Contract s [D_k / piece, D_v, piece] with k [D_k / piece, 1, piece] over D_k: [D_v]."""
    return jnp.sum(jnp.sum(s * k, axis=0), axis=1)
