"""Runs the gated delta rule over a prompt in chunks of tokens, with three kernels.

The first kernel prepares the state-independent part of all chunks at once. In the second kernel,
each program owns some rows of a state. It updates its rows with the pending tokens (accepted tokens
that the state lacks), and then with the chunks, in order. The third kernel updates the ring
buffers. It runs last, because it writes NaN to columns that the other kernels read. The first two
kernels are separate because a joint kernel would need too many registers.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gated_delta_rule.triton.arithmetic import dot_f32, dot_f32_t
from pallas_kernels.gated_delta_rule.triton.batch_row import BatchRow
from pallas_kernels.gated_delta_rule.triton.prepare import Chunks, prepare_chunks
from pallas_kernels.gated_delta_rule.triton.rings import Rings
from pallas_kernels.gated_delta_rule.triton.tuning import has_one_owner
from pallas_kernels.gated_delta_rule.types import DeltaRuleCache
from pallas_kernels.triton_call import load, store, triton_call


def run_prompt(x, weights, cache, where, config, interpret):
    """Return outputs [B, T, H_v, D_v] before the norm, and the updated cache.

    `where` is (layer, slots, positions, pending).
    """
    heads, (batch, length, _) = cache.heads, x.shape
    chunk = max(16, min(config.chunk, pl.next_power_of_2(length)))
    ring, chunks = prepare_chunks(
        x, weights, cache, where[:3], chunk=chunk, config=config, interpret=interpret
    )
    tile, piece = min(config.chunk_values, heads.value_dim), min(config.chunk_piece, heads.key_dim)
    assert has_one_owner(tile * piece, config.chunk_warps), config
    state_shape, ring_shape, *kept_shapes = (jax.ShapeDtypeStruct(z.shape, z.dtype) for z in cache)
    out_shape = batch, length, heads.num_values, heads.value_dim
    state, *kept, out = triton_call(
        partial(
            _chunk_kernel,
            chunk=chunk,
            tile=tile,
            piece=piece,
            interpret=interpret,
        ),
        [cache.state, *cache[2:], *where, *chunks],
        [state_shape, *kept_shapes, jax.ShapeDtypeStruct(out_shape, x.dtype)],
        name="gated_delta_rule_chunks",
        grid=(heads.value_dim // tile, heads.num_values, batch),
        num_warps=config.chunk_warps,
        aliases={i: i for i in range(4)},
        interpret=interpret,
    )
    rings = triton_call(
        partial(_keep_kernel, tile=config.keep_channels),
        [ring, *kept, x, *where[:3]],
        [ring_shape, *kept_shapes],
        name="gated_delta_rule_keep",
        grid=(
            pl.cdiv(heads.channels, config.keep_channels),
            max(ring.shape[2], 2 * cache.max_pending),
            batch,
        ),
        num_warps=4,
        aliases={i: i for i in range(4)},
        interpret=interpret,
    )
    return out, DeltaRuleCache(state, *rings)


def _chunk_kernel(*refs, chunk, tile, piece, interpret):
    """Compute `reference.recur_chunks` for one tile of a state's rows.

    The rows of a state are independent, so each program owns one tile.
    """
    _, _, _, _, layer_ref, slots_ref, positions_ref, pending_ref, *refs = refs
    *chunks, state_ref, u_ref, k_ref, decay_ref, out_ref = refs
    chunks = Chunks(*chunks)
    _, num_slots, _, _, key_dim = state_ref.shape
    length = out_ref.shape[1]
    lanes = jnp.arange(piece, dtype=jnp.int32)
    pieces = [p * piece + lanes for p in range(key_dim // piece)]

    head, row = pl.program_id(1), pl.program_id(2)
    row = BatchRow.read(row, layer_ref, slots_ref, positions_ref)
    is_live = row.is_live(num_slots)

    values = pl.program_id(0) * tile + jnp.arange(tile, dtype=jnp.int32)
    i = jnp.arange(chunk, dtype=jnp.int32)

    def write_rows(is_written, t, o):
        # In interpret mode masked lanes store the old value, so they must point to no real row.
        at = row.index, jnp.where(is_written, t, length)[None], head, values[:, None]
        mask = jnp.broadcast_to(is_written[None], (tile, chunk))
        store(out_ref.at[at], o.astype(out_ref.dtype), mask=mask)

    @pl.when(is_live)
    def _():
        def fold(n, states):
            def read(ref, columns):
                return ref[row.index, head, (n * chunk + i)[:, None], columns[None]]

            # u is transposed like the state: both are left operands, and stay in registers.
            u = chunks.u[row.index, head, (n * chunk + i)[None], values[:, None]]
            o = jnp.zeros((tile, chunk), jnp.float32)
            for s, keys in zip(states, pieces, strict=True):
                u = u - dot_f32_t(s, read(chunks.w, keys))
                o = o + dot_f32_t(s, read(chunks.q, keys))
            o = o + dot_f32_t(u, read(chunks.inner, i))
            t = n * chunk + i
            write_rows(t < row.count, t, o)
            grown = chunks.grown[row.index, head, n]
            return [
                grown * s + dot_f32(u, read(chunks.k, keys))
                for s, keys in zip(states, pieces, strict=True)
            ]

        own = [(row.layer, row.slot, head, values[:, None], keys[None]) for keys in pieces]
        first = row.start - row.num_pending(pending_ref, u_ref.shape[2])
        known = jnp.broadcast_to(first > 0, (tile, piece))
        states = [load(state_ref.at[at], mask=known, other=0.0) for at in own]
        rings = Rings(u_ref, k_ref, decay_ref, row, head, values, pieces)
        states = rings.fold(states, first, tokens=1, interpret=interpret)
        num_chunks = (row.count + chunk - 1) // chunk
        states = jax.lax.fori_loop(0, num_chunks, fold, states)
        for at, s in zip(own, states, strict=True):
            state_ref[at] = s

    num_done = jnp.where(is_live, row.count, 0)

    def clear(n, _):
        t = n * chunk + i
        write_rows((t >= num_done) & (t < length), t, jnp.zeros((tile, chunk)))

    jax.lax.fori_loop(num_done // chunk, (length + chunk - 1) // chunk, clear, None)


def _keep_kernel(*refs, tile):
    """Write one column of each ring buffer after a prompt.

    Columns that no later call reads get NaN. A later call reads only the raw inputs of the last
    W - 1 tokens, for its convolution. The raw inputs of tokens from before this call are already in
    the ring buffer.
    """
    x_ref, layer_ref, slots_ref, positions_ref, ring_ref, *kept = refs[4:]
    num_slots, num_columns, channels = ring_ref.shape[1:]
    num_kept, length = num_columns - kept[0].shape[2], x_ref.shape[1]
    part, column, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row = BatchRow.read(row, layer_ref, slots_ref, positions_ref)
    channel = part * tile + jnp.arange(tile, dtype=jnp.int32)

    @pl.when(row.is_live(num_slots) & (column < num_columns))
    def _():
        end = row.start + row.count
        # The last position before the end that maps to this column.
        place = end - 1 - jax.lax.rem(end - 1 - column + num_columns, num_columns)
        is_kept = place >= end - num_kept
        t = jnp.clip(place - row.start, 0, length - 1)
        from_x = jnp.broadcast_to(is_kept & (place >= row.start), (tile,)) & (channel < channels)
        new = load(x_ref.at[row.index, t, channel], mask=from_x, other=0.0).astype(ring_ref.dtype)
        new = jnp.where(is_kept, new, jnp.full((tile,), jnp.nan, ring_ref.dtype))
        is_there = is_kept & (place >= 0) & (place < row.start)
        is_written = jnp.broadcast_to(~is_there, (tile,)) & (channel < channels)
        store(ring_ref.at[row.layer, row.slot, column, channel], new, mask=is_written)

    for ref in kept:
        # A ring without a last axis of channels has one value per head.
        dim = math.prod(ref.shape[4:])
        is_there = jnp.broadcast_to(column < ref.shape[2], (tile,)) & (channel < ref.shape[3] * dim)

        @pl.when(row.is_live(num_slots))
        def _(ref=ref, dim=dim, mask=is_there):
            at = row.layer, row.slot, column, channel // dim
            at = (*at, jax.lax.rem(channel, dim)) if ref.shape[4:] else at
            store(ref.at[at], jnp.full((tile,), jnp.nan, jnp.float32), mask=mask)
