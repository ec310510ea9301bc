"""Computes the state-independent part of a prompt's chunks, for all chunks at once."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gated_delta_rule.reference import EPSILON
from pallas_kernels.gated_delta_rule.triton.arithmetic import (
    dot_f32,
    dot_f32_t,
    invert_unit_lower,
    sigmoid,
    silu,
    softplus,
)
from pallas_kernels.gated_delta_rule.triton.batch_row import BatchRow, column_of
from pallas_kernels.triton_call import load, triton_call


class Chunks(NamedTuple):
    """State-independent f32 arrays for the N chunks of a prompt, with C tokens per chunk.

    `reference.recur_chunks` defines the symbols in the comments below, except for T = (I + A)^-1.
    For each token and value head, the arrays take 4 (3 D_k + D_v + C) bytes.
    """

    u: Any  # [B, H_v, N C, D_v], T beta V
    w: Any  # [B, H_v, N C, D_k], T beta e^G K
    q: Any  # [B, H_v, N C, D_k], e^G Q
    k: Any  # [B, H_v, N C, D_k], e^(G_end - G) K
    inner: Any  # [B, H_v, N C, C], tril(e^(G_i - G_j) Q K^T)
    grown: Any  # [B, H_v, N], e^(G_end)


def prepare_chunks(x, weights, cache, where, *, chunk, config, interpret):
    """Return the cache's ring buffer of raw inputs, unchanged, and the `Chunks` of the new tokens.

    A chunk has `chunk` tokens. `where` is (layer, slots, positions). The kernel started here only
    reads the ring; a later kernel writes it. The ring is also an output, so that the later kernel
    waits for this kernel.
    """
    heads, (batch, length, _) = cache.heads, x.shape
    num_chunks = pl.cdiv(length, chunk)
    columns = heads.value_dim, *(heads.key_dim,) * 3, chunk
    wide = batch, heads.num_values, num_chunks * chunk
    chunks = [jax.ShapeDtypeStruct((*wide, n), jnp.float32) for n in columns]
    chunks += [jax.ShapeDtypeStruct((*wide[:2], num_chunks), jnp.float32)]
    piece = min(config.prepare_piece, heads.key_dim, heads.value_dim)
    ring, *chunks = triton_call(
        partial(_prepare_kernel, chunk=chunk, piece=piece),
        [cache.ring, x, *where, *weights[:3]],
        [jax.ShapeDtypeStruct(cache.ring.shape, cache.ring.dtype), *chunks],
        name="gated_delta_rule_prepare",
        grid=(num_chunks, heads.num_values, batch),
        num_warps=config.prepare_warps,
        aliases={0: 0},
        interpret=interpret,
    )
    return ring, Chunks(*chunks)


class _Tokens(NamedTuple):
    """The tokens of a chunk.

    The raw inputs of new tokens are in x, and those of earlier tokens are in the cache's ring
    buffer.
    """

    x: Any
    ring: Any
    row: BatchRow
    end: Any  # position after the last new token
    places: Any  # i32[C]

    def convolved(self, conv_ref, channel):
        """Return the channels with indices `channel` of all tokens, after convolution and silu."""
        start = self.row.start
        y = jnp.zeros((len(self.places), len(channel)), jnp.float32)
        num_taps = conv_ref.shape[0]
        for tap in range(num_taps):
            place = (self.places - (num_taps - 1 - tap))[:, None]
            in_x = jnp.broadcast_to((place >= start) & (place < self.end), y.shape)
            in_ring = jnp.broadcast_to((place >= 0) & (place < start), y.shape)
            t = jnp.clip(place - start, 0, self.x.shape[1] - 1)
            new = load(self.x.at[self.row.index, t, channel[None]], mask=in_x, other=0.0)
            column = column_of(place, self.ring.shape[2])
            at = self.row.layer, self.row.slot, column, channel[None]
            old = load(self.ring.at[at], mask=in_ring, other=0.0)
            raw = jnp.where(in_x, new.astype(old.dtype), old).astype(jnp.float32)
            y = y + raw * conv_ref[tap, channel].astype(jnp.float32)[None]
        return jnp.where(self.places[:, None] < self.end, silu(y), 0.0)

    def read_gates(self, head, log_decay_ref, decay_bias_ref):
        """Return g and beta of all tokens in one head. They are zero past the last token."""
        is_real, num_heads = self.places < self.end, log_decay_ref.shape[0]
        t = jnp.clip(self.places - self.row.start, 0, self.x.shape[1] - 1)
        first = self.x.shape[2] - 2 * num_heads + head
        b, a = (
            load(self.x.at[self.row.index, t, first + n * num_heads], mask=is_real, other=0.0)
            for n in range(2)
        )
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        g = -jnp.exp(log_decay_ref[head]) * softplus(a + decay_bias_ref[head])
        return jnp.where(is_real, g, 0.0), jnp.where(is_real, sigmoid(b), 0.0)


def _prepare_kernel(*refs, chunk, piece):
    """Compute the arrays of `Chunks` for one chunk of tokens and one value head.

    To save registers, `piece` channels are processed at a time. Channels of q and k are computed
    twice: first for sums over all channels, such as the norms of q and k, and then to write
    normalised q and k.
    """
    _, x_ref, layer_ref, slots_ref, positions_ref, conv_ref, *refs = refs
    log_decay_ref, decay_bias_ref, ring_ref, *chunks = refs
    chunks = Chunks(*chunks)
    num_slots, _, channels = ring_ref.shape[1:]
    num_heads, value_dim, key_dim = chunks.u.shape[1], chunks.u.shape[3], chunks.w.shape[3]
    key_channels = (channels - num_heads * value_dim) // 2
    heads_per_key = num_heads * key_dim // key_channels

    n, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row = BatchRow.read(row, layer_ref, slots_ref, positions_ref)
    end = row.start + row.count
    i = jnp.arange(chunk, dtype=jnp.int32)
    places = row.start + n * chunk + i
    tokens = _Tokens(x_ref, ring_ref, row, end, places)
    lanes = jnp.arange(piece, dtype=jnp.int32)
    q_channels = head // heads_per_key * key_dim
    k_channels = key_channels + q_channels
    v_channels = 2 * key_channels + head * value_dim

    def convolved(first):
        return tokens.convolved(conv_ref, first + lanes)

    def write(ref, columns, z):
        ref[row.index, head, (n * chunk + i)[:, None], columns[None]] = z

    @pl.when(row.is_live(num_slots) & (n * chunk < row.count))
    def _():
        def over_keys(p, sums):
            qk, kk, qq, norms = sums
            q, k = convolved(q_channels + p * piece), convolved(k_channels + p * piece)
            qq, norms = qq + jnp.sum(q * q, axis=1), norms + jnp.sum(k * k, axis=1)
            return qk + dot_f32_t(q, k), kk + dot_f32_t(k, k), qq, norms

        square, one = jnp.zeros((chunk, chunk), jnp.float32), jnp.zeros((chunk,), jnp.float32)
        sums = jax.lax.fori_loop(0, key_dim // piece, over_keys, (square, square, one, one))
        qk, kk, *norms = sums
        q_norm, k_norm = (jax.lax.rsqrt(z + EPSILON) for z in norms)
        q_norm = q_norm * key_dim**-0.5

        g, beta = tokens.read_gates(head, log_decay_ref, decay_bias_ref)
        is_before, is_before_strictly = i[None] <= i[:, None], i[None] < i[:, None]
        total, last = jnp.sum(jnp.where(is_before, g[None], 0.0), axis=1), jnp.sum(g, axis=0)
        # Above the diagonal the difference is positive, so exp could overflow.
        difference = jnp.where(is_before, total[:, None] - total[None], 0.0)
        decay = jnp.where(is_before, jnp.exp(difference), 0.0) * k_norm[None]
        write(chunks.inner, i, decay * qk * q_norm[:, None])
        lower = jnp.where(is_before_strictly, decay * kk, 0.0) * (beta * k_norm)[:, None]
        inverse = invert_unit_lower(lower, i)
        grown = jnp.exp(total)
        chunks.grown[row.index, head, n] = jnp.exp(last)

        def values(p, _):
            v = convolved(v_channels + p * piece)
            write(chunks.u, p * piece + lanes, dot_f32(inverse, beta[:, None] * v))

        def keys(p, _):
            q, k = convolved(q_channels + p * piece), convolved(k_channels + p * piece)
            columns = p * piece + lanes
            write(chunks.q, columns, (grown * q_norm)[:, None] * q)
            write(chunks.k, columns, (jnp.exp(last - total) * k_norm)[:, None] * k)
            write(chunks.w, columns, dot_f32(inverse, (beta * grown * k_norm)[:, None] * k))

        jax.lax.fori_loop(0, value_dim // piece, values, None)
        jax.lax.fori_loop(0, key_dim // piece, keys, None)
