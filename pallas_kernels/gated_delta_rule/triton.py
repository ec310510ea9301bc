"""The gated delta rule on Pallas' Triton backend: a step in two kernels, a prompt in four.

Of a step, a program owns some rows of the state of one value head of one request, which need no
others: it reads them once, folds the pending tokens in, writes them once, and runs the new tokens
on in registers. Every token goes through one loop body, whether it is folded in or verified and
however many there are: a token is the same machine code, and has the same bits, in every step. The
output's norm is over all rows of a head, so a second kernel takes it.

The programs of the value heads that share a key head are not synchronised, and one of them writes
the raw q and k of the new tokens to the ring. No other reads them there: a call takes new tokens
from x, and the ring has so many columns that those written are none of those read, which are of the
last W - 1 + M tokens (`num_ring_columns`). So it is with the new tokens' gates, which one of a
head's programs writes. All else that a program writes is its own.

A prompt runs in chunks. What they are to any state is prepared for all of them at once; then each
program folds them into its rows of one, one by one; and a third kernel writes what stays in the
ring: without the first done, NaN would fill columns that a program has yet to read. In one kernel
the first two would take more registers than there are.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.gated_delta_rule.reference import EPSILON
from pallas_kernels.gated_delta_rule.types import DeltaRuleCache, DeltaRuleWeights
from pallas_kernels.triton_call import dot, load, store, triton_call

DIMS = 16, 32, 64, 128
DTYPES = "bfloat16", "float32"


@dataclass(frozen=True)
class DeltaRuleTuning:
    """How a program's state [D_v, D_k] lies across its threads."""

    # Keys are taken apart into pieces so wide, and sums over them run over the pieces first, each
    # thread on its own: lanes lie across the keys of one piece only, and exchange that much less.
    piece: int = 32
    # Rows of a state that are a program's own: so few that two programs run on a multiprocessor,
    # one of which computes while the other loads.
    values: int = 64
    num_warps: int = 8
    chunk: int = 32  # tokens of a prompt that are taken at a time
    prepare_piece: int = 16  # and channels, where a program prepares them
    prepare_warps: int = 4
    chunk_piece: int = 32  # and where it folds them into its state
    chunk_values: int = 16  # rows of which are its own
    chunk_warps: int = 4
    norm_heads: int = 8  # of a token, for a program that norms them
    keep_channels: int = 1024  # of the ring, for a program that writes what a prompt leaves there


class Chunks(NamedTuple):
    """What a prompt's chunks of C tokens are to the state, f32: with `reference.recur_chunks`'
    names and T = (I + A)^-1, 4 (3 D_k + D_v + C) bytes for each token and value head."""

    u: Any  # [B, H_v, N C, D_v], T beta V
    w: Any  # [B, H_v, N C, D_k], T beta e^G K
    q: Any  # [B, H_v, N C, D_k], e^G Q
    k: Any  # [B, H_v, N C, D_k], e^(G_end - G) K
    inner: Any  # [B, H_v, N C, C], tril(e^(G_i - G_j) Q K^T)
    grown: Any  # [B, H_v, N], e^(G_end)


def gated_delta_rule_triton(
    x: jax.Array,
    weights: DeltaRuleWeights,
    cache: DeltaRuleCache,
    layer: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    pending: jax.Array,
    *,
    folds: bool,
    eps: float,
    config: DeltaRuleTuning | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, DeltaRuleCache]:
    """See `gated_delta_rule`. Outputs of padding rows are zero.

    Raises:
        UnsupportedError: sizes or types that the kernels do not take.
    """
    heads = cache.heads
    for name, dim in ("D_k", heads.key_dim), ("D_v", heads.value_dim):
        if dim not in DIMS:
            raise UnsupportedError(
                f"cache.state has {name}={dim}; the kernel takes {', '.join(map(str, DIMS))}"
            )
    for name, dtype in ("x", x.dtype), ("cache.ring", cache.ring.dtype):
        if dtype.name not in DTYPES:
            raise UnsupportedError(f"{name} is {dtype}; the kernel takes {', '.join(DTYPES)}")
    config = config or DeltaRuleTuning()
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    run = _fold if folds else _step
    out, cache = run(x, weights, cache, (layer, slots, positions, pending), config, interpret)
    if weights.norm is not None:
        out = _norm(out, x, weights.norm, heads, eps, config, interpret)
    return out, cache


def _step(x, weights, cache, where, config, interpret):
    heads, batch = cache.heads, x.shape[0]
    tile = min(config.values, heads.value_dim)
    *cache, out = triton_call(
        partial(_step_kernel, piece=min(config.piece, heads.key_dim), tile=tile),
        [*cache, x, *where, *weights[:3]],
        [*_shapes(cache), _out_shape(x, heads)],
        name="gated_delta_rule",
        grid=(heads.value_dim // tile, heads.num_values, batch),
        num_warps=config.num_warps,
        aliases={0: 0, 1: 1, 2: 2},
        interpret=interpret,
    )
    return out, DeltaRuleCache(*cache)


def _fold(x, weights, cache, where, config, interpret):
    heads, (batch, length, _) = cache.heads, x.shape
    num_taps = weights.conv.shape[0]
    most_pending = cache.most_pending(num_taps)
    chunk = max(16, min(config.chunk, pl.next_power_of_2(most_pending + length)))
    num_chunks = pl.cdiv(most_pending + length, chunk)
    tile = min(config.chunk_values, heads.value_dim)
    piece = min(config.prepare_piece, heads.key_dim, heads.value_dim)
    columns = heads.value_dim, *(heads.key_dim,) * 3, chunk
    wide = batch, heads.num_values, num_chunks * chunk
    chunks = [jax.ShapeDtypeStruct((*wide, n), jnp.float32) for n in columns]
    chunks += [jax.ShapeDtypeStruct((*wide[:2], num_chunks), jnp.float32)]
    # The ring goes through every kernel: only when all programs have read it is it written.
    ring, gates, *chunks = triton_call(
        partial(_prepare_kernel, chunk=chunk, piece=piece),
        [*cache[1:], x, *where, *weights[:3]],
        [*_shapes(cache[1:]), *chunks],
        name="gated_delta_rule_prepare",
        grid=(num_chunks, heads.num_values, batch),
        num_warps=config.prepare_warps,
        aliases={0: 0, 1: 1},
        interpret=interpret,
    )
    state, out = triton_call(
        partial(
            _chunk_kernel,
            chunk=chunk,
            tile=tile,
            piece=min(config.chunk_piece, heads.key_dim),
            most_pending=most_pending,
        ),
        [cache.state, *where, *chunks],
        [*_shapes(cache[:1]), _out_shape(x, heads)],
        name="gated_delta_rule_chunks",
        grid=(heads.value_dim // tile, heads.num_values, batch),
        num_warps=config.chunk_warps,
        aliases={0: 0},
        interpret=interpret,
    )
    ring, gates = triton_call(
        partial(_keep_kernel, num_taps=num_taps, tile=config.keep_channels),
        [ring, gates, x, *where[:3]],
        _shapes(cache[1:]),
        name="gated_delta_rule_keep",
        grid=(pl.cdiv(heads.channels, config.keep_channels), ring.shape[2], batch),
        num_warps=4,
        aliases={0: 0, 1: 1},
        interpret=interpret,
    )
    return out, DeltaRuleCache(state, ring, gates)


def _norm(out, x, norm, heads, eps, config, interpret):
    (out,) = triton_call(
        partial(_norm_kernel, channels=heads.channels, tile=config.norm_heads, eps=eps),
        [out, x, norm],
        _shapes([out]),
        name="gated_delta_rule_norm",
        grid=(pl.cdiv(heads.num_values, config.norm_heads), *x.shape[:2]),
        num_warps=4,
        aliases={0: 0},
        interpret=interpret,
    )
    return out


def _shapes(arrays):
    return [jax.ShapeDtypeStruct(z.shape, z.dtype) for z in arrays]


def _out_shape(x, heads):
    return jax.ShapeDtypeStruct((*x.shape[:2], heads.num_values, heads.value_dim), x.dtype)


def _step_kernel(*refs, piece, tile):
    _, _, _, x_ref, layer_ref, slots_ref, positions_ref, pending_ref, *refs = refs
    conv_ref, log_decay_ref, decay_bias_ref, state_ref, ring_ref, gates_ref, out_ref = refs
    _, num_slots, num_heads, value_dim, key_dim = state_ref.shape
    num_columns, channels = ring_ref.shape[2:]
    num_taps, length = conv_ref.shape[0], x_ref.shape[1]
    most_pending = (num_columns - num_taps + 1) // 2
    key_channels = (channels - num_heads * value_dim) // 2
    heads_per_key = num_heads * key_dim // key_channels
    gate_channels = channels + num_heads * value_dim

    part, head, row = (pl.program_id(i) for i in range(3))
    layer, slot = layer_ref[0], slots_ref[row]
    count, start = _count(positions_ref, row), positions_ref[row, 0]
    is_live = (count > 0) & (slot >= 0) & (slot < num_slots)

    # q and k lie as [2, D_k / piece, piece], states as [D_k / piece, D_v, piece].
    parts = jnp.arange(key_dim // piece, dtype=jnp.int32) * piece
    lanes = jnp.arange(piece, dtype=jnp.int32)
    values = part * tile + jnp.arange(tile, dtype=jnp.int32)
    either = jnp.arange(2, dtype=jnp.int32)[:, None, None]
    keys = parts[:, None] + lanes[None, :]
    qk_channels = either * key_channels + head // heads_per_key * key_dim + keys[None]
    kinds = qk_channels, 2 * key_channels + head * value_dim + values
    own = values[None, :, None], parts[:, None, None] + lanes[None, None, :]

    @pl.when(is_live)
    def _():
        rate, bias = -jnp.exp(log_decay_ref[head]), decay_bias_ref[head]
        num_pending = jnp.clip(pending_ref[row], 0, jnp.minimum(start, most_pending))
        first, end = start - num_pending, start + count

        def column_of(place):
            return jax.lax.rem(place + num_columns, num_columns)

        def row_of(place):
            return jnp.clip(place, start, end - 1) - start

        def read(place):
            """Raw q | k and v of a token: of a new one from x, of one before it from the ring."""
            is_new, column, t = place >= start, column_of(place), row_of(place)

            def one(kind):
                in_x = jnp.broadcast_to(is_new & (place < end), kind.shape)
                in_ring = jnp.broadcast_to(~is_new & (place >= 0), kind.shape)
                new = load(x_ref.at[row, t, kind], mask=in_x, other=0.0)
                old = load(ring_ref.at[layer, slot, column, kind], mask=in_ring, other=0.0)
                return jnp.where(in_x, new.astype(old.dtype), old)

            return tuple(one(kind) for kind in kinds)

        def convolved(kind, window):
            taps = [conv_ref[i, kinds[kind]].astype(jnp.float32) for i in range(num_taps)]
            y = sum(z.astype(jnp.float32) * w for z, w in zip(window, taps, strict=True))
            return _silu(y)

        def advance(place, carry):
            s, history = carry
            raw = read(place)
            windows = [(*past, z) for past, z in zip(history, raw, strict=True)]
            is_new, column, t = place >= start, column_of(place), row_of(place)

            @pl.when(place == start)
            def _():
                state_ref[layer, slot, head, *own] = s

            b, a = (
                x_ref[row, t, gate_channels + i * num_heads + head].astype(jnp.float32)
                for i in range(2)
            )
            g = jnp.where(
                is_new, rate * _softplus(a + bias), gates_ref[layer, slot, column, 0, head]
            )
            beta = jnp.where(is_new, _sigmoid(b), gates_ref[layer, slot, column, 1, head])

            qk = convolved(0, windows[0])
            norms = jnp.sum(jnp.sum(qk * qk, axis=2), axis=1)[:, None, None]
            qk = qk * jax.lax.rsqrt(norms + EPSILON)
            k = jnp.sum(jnp.where(either == 1, qk, 0.0), axis=0)[:, None, :]
            s = s * jnp.exp(g)
            u = beta * (convolved(1, windows[1]) - _over_keys(s, k))
            s = s + u[None, :, None] * k

            @pl.when(is_new)
            def _():
                q = jnp.sum(jnp.where(either == 0, qk, 0.0), axis=0) * key_dim**-0.5
                o = _over_keys(s, q[:, None, :]).astype(out_ref.dtype)
                out_ref[row, t, head, values] = o
                ring_ref[layer, slot, column, kinds[1]] = raw[1]

                @pl.when(part == 0)
                def _():
                    gates_ref[layer, slot, column, 0, head] = g
                    gates_ref[layer, slot, column, 1, head] = beta
                    is_first = jnp.broadcast_to(head % heads_per_key == 0, qk_channels.shape)
                    store(ring_ref.at[layer, slot, column, qk_channels], raw[0], mask=is_first)

            return s, tuple(window[1:] for window in windows)

        known = jnp.broadcast_to(first > 0, (key_dim // piece, tile, piece))
        s = load(state_ref.at[layer, slot, head, *own], mask=known, other=0.0)
        past = [read(first - i) for i in range(num_taps - 1, 0, -1)]
        history = tuple(tuple(raw[kind] for raw in past) for kind in range(2))
        jax.lax.fori_loop(first, end, advance, (s, history))

    def clear(t, _):
        out_ref[row, t, head, values] = jnp.zeros((tile,), out_ref.dtype)

    jax.lax.fori_loop(jnp.where(is_live, count, 0), length, clear, None)


def _prepare_kernel(*refs, chunk, piece):
    """Of a chunk in one value head, all that needs no state: see `Chunks`. Pending tokens are the
    first of the first chunk. Channels are taken in pieces, twice over where they are normed: so
    few registers hold a chunk."""
    _, _, x_ref, layer_ref, slots_ref, positions_ref, pending_ref, *refs = refs
    conv_ref, log_decay_ref, decay_bias_ref, ring_ref, gates_ref, *chunks = refs
    chunks = Chunks(*chunks)
    num_slots, num_columns, channels = ring_ref.shape[1:]
    num_heads, value_dim, key_dim = gates_ref.shape[4], chunks.u.shape[3], chunks.w.shape[3]
    num_taps, length = conv_ref.shape[0], x_ref.shape[1]
    most_pending = (num_columns - num_taps + 1) // 2
    key_channels = (channels - num_heads * value_dim) // 2
    heads_per_key = num_heads * key_dim // key_channels
    gate_channels = channels + num_heads * value_dim

    n, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    layer, slot = layer_ref[0], slots_ref[row]
    count, start = _count(positions_ref, row), positions_ref[row, 0]
    num_pending = jnp.clip(pending_ref[row], 0, jnp.minimum(start, most_pending))
    end = start + count
    i = jnp.arange(chunk, dtype=jnp.int32)
    places = start - num_pending + n * chunk + i
    lanes = jnp.arange(piece, dtype=jnp.int32)
    q_channels = head // heads_per_key * key_dim
    k_channels = key_channels + q_channels
    v_channels = 2 * key_channels + head * value_dim
    is_live = (count > 0) & (slot >= 0) & (slot < num_slots)

    def column_of(place):
        return jax.lax.rem(place + num_columns, num_columns)

    def convolved(channel):
        """A piece of the channels from this one on."""
        channel = channel + lanes
        y = jnp.zeros((chunk, piece), jnp.float32)
        for tap in range(num_taps):
            place = (places - (num_taps - 1 - tap))[:, None]
            in_x = jnp.broadcast_to((place >= start) & (place < end), y.shape)
            in_ring = jnp.broadcast_to((place >= 0) & (place < start), y.shape)
            t = jnp.clip(place - start, 0, length - 1)
            new = load(x_ref.at[row, t, channel[None]], mask=in_x, other=0.0)
            at = layer, slot, column_of(place), channel[None]
            old = load(ring_ref.at[at], mask=in_ring, other=0.0)
            raw = jnp.where(in_x, new.astype(old.dtype), old).astype(jnp.float32)
            y = y + raw * conv_ref[tap, channel].astype(jnp.float32)[None]
        return jnp.where(places[:, None] < end, _silu(y), 0.0)

    def gates():
        in_x, in_ring = (places >= start) & (places < end), places < start
        t = jnp.clip(places - start, 0, length - 1)
        b, a = (
            load(
                x_ref.at[row, t, gate_channels + n * num_heads + head], mask=in_x, other=0.0
            ).astype(jnp.float32)
            for n in range(2)
        )
        g, beta = (
            load(
                gates_ref.at[layer, slot, column_of(places), jnp.int32(n), head],
                mask=in_ring,
                other=0.0,
            )
            for n in range(2)
        )
        rate, bias = -jnp.exp(log_decay_ref[head]), decay_bias_ref[head]
        g = jnp.where(in_x, rate * _softplus(a + bias), g)
        return g, jnp.where(in_x, _sigmoid(b), beta)

    def write(ref, columns, z):
        ref[row, head, (n * chunk + i)[:, None], columns[None]] = z

    @pl.when(is_live & (n * chunk < num_pending + count))
    def _():
        def over_keys(p, sums):
            qk, kk, qq, norms = sums
            q, k = convolved(q_channels + p * piece), convolved(k_channels + p * piece)
            qq, norms = qq + jnp.sum(q * q, axis=1), norms + jnp.sum(k * k, axis=1)
            return qk + _dot_t(q, k), kk + _dot_t(k, k), qq, norms

        square, one = jnp.zeros((chunk, chunk), jnp.float32), jnp.zeros((chunk,), jnp.float32)
        sums = jax.lax.fori_loop(0, key_dim // piece, over_keys, (square, square, one, one))
        qk, kk, *norms = sums
        q_norm, k_norm = (jax.lax.rsqrt(z + EPSILON) for z in norms)
        q_norm = q_norm * key_dim**-0.5

        g, beta = gates()
        is_before, is_before_strictly = i[None] <= i[:, None], i[None] < i[:, None]
        total, last = jnp.sum(jnp.where(is_before, g[None], 0.0), axis=1), jnp.sum(g, axis=0)
        # Above the diagonal the difference is positive, and may be too large for exp.
        difference = jnp.where(is_before, total[:, None] - total[None], 0.0)
        decay = jnp.where(is_before, jnp.exp(difference), 0.0) * k_norm[None]
        write(chunks.inner, i, decay * qk * q_norm[:, None])
        lower = jnp.where(is_before_strictly, decay * kk, 0.0) * (beta * k_norm)[:, None]
        inverse = _invert_unit_lower(lower, i)
        grown = jnp.exp(total)
        chunks.grown[row, head, n] = jnp.exp(last)

        def values(p, _):
            v = convolved(v_channels + p * piece)
            write(chunks.u, p * piece + lanes, _dot(inverse, beta[:, None] * v))

        def keys(p, _):
            q, k = convolved(q_channels + p * piece), convolved(k_channels + p * piece)
            columns = p * piece + lanes
            write(chunks.q, columns, (grown * q_norm)[:, None] * q)
            write(chunks.k, columns, (jnp.exp(last - total) * k_norm)[:, None] * k)
            write(chunks.w, columns, _dot(inverse, (beta * grown * k_norm)[:, None] * k))

        jax.lax.fori_loop(0, value_dim // piece, values, None)
        jax.lax.fori_loop(0, key_dim // piece, keys, None)


def _chunk_kernel(*refs, chunk, tile, piece, most_pending):
    """See `reference.recur_chunks`. A row of the state needs no other, so a program may own a tile
    of them."""
    _, layer_ref, slots_ref, positions_ref, pending_ref, *refs = refs
    *chunks, state_ref, out_ref = refs
    chunks = Chunks(*chunks)
    _, num_slots, _, _, key_dim = state_ref.shape
    length = out_ref.shape[1]
    pieces = range(key_dim // piece)

    head, row = pl.program_id(1), pl.program_id(2)
    layer, slot = layer_ref[0], slots_ref[row]
    count, start = _count(positions_ref, row), positions_ref[row, 0]
    num_pending = jnp.clip(pending_ref[row], 0, jnp.minimum(start, most_pending))
    is_live = (count > 0) & (slot >= 0) & (slot < num_slots)

    lanes = jnp.arange(piece, dtype=jnp.int32)
    values = pl.program_id(0) * tile + jnp.arange(tile, dtype=jnp.int32)
    i = jnp.arange(chunk, dtype=jnp.int32)

    def write_rows(is_written, t, o):
        # The interpreter stores what was there where the mask is false: then not to a real row.
        at = row, jnp.where(is_written, t, length)[None], head, values[:, None]
        mask = jnp.broadcast_to(is_written[None], (tile, chunk))
        store(out_ref.at[at], o.astype(out_ref.dtype), mask=mask)

    @pl.when(is_live)
    def _():
        def fold(n, states):
            def read(ref, columns):
                return ref[row, head, (n * chunk + i)[:, None], columns[None]]

            # Transposed, as the state is: both are then rows of products, which stay in registers.
            u = chunks.u[row, head, (n * chunk + i)[None], values[:, None]]
            o = jnp.zeros((tile, chunk), jnp.float32)
            for p, s in enumerate(states):
                u = u - _dot_t(s, read(chunks.w, p * piece + lanes))
                o = o + _dot_t(s, read(chunks.q, p * piece + lanes))
            o = o + _dot_t(u, read(chunks.inner, i))
            t = n * chunk + i - num_pending
            write_rows((t >= 0) & (t < count), t, o)
            grown = chunks.grown[row, head, n]
            return tuple(
                grown * s + _dot(u, read(chunks.k, p * piece + lanes)) for p, s in enumerate(states)
            )

        own = [(layer, slot, head, values[:, None], (p * piece + lanes)[None]) for p in pieces]
        known = jnp.broadcast_to(start > num_pending, (tile, piece))
        states = tuple(load(state_ref.at[at], mask=known, other=0.0) for at in own)
        num_chunks = (num_pending + count + chunk - 1) // chunk
        states = jax.lax.fori_loop(0, num_chunks, fold, states)
        for at, s in zip(own, states, strict=True):
            state_ref[at] = s

    num_done = jnp.where(is_live, count, 0)

    def clear(n, _):
        t = n * chunk + i
        write_rows((t >= num_done) & (t < length), t, jnp.zeros((tile, chunk)))

    jax.lax.fori_loop(num_done // chunk, (length + chunk - 1) // chunk, clear, None)


def _keep_kernel(*refs, num_taps, tile):
    """Of what a prompt leaves in the ring, one column: NaN, unless it holds one of the last W - 1
    tokens. Those older than the prompt are there already."""
    _, _, x_ref, layer_ref, slots_ref, positions_ref, ring_ref, gates_ref = refs
    num_slots, num_columns, channels = ring_ref.shape[1:]
    num_heads, length = gates_ref.shape[4], x_ref.shape[1]
    part, column, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    layer, slot = layer_ref[0], slots_ref[row]
    count, start = _count(positions_ref, row), positions_ref[row, 0]

    @pl.when((count > 0) & (slot >= 0) & (slot < num_slots))
    def _():
        end = start + count
        # The last place before the end that has this column.
        place = end - 1 - jax.lax.rem(end - 1 - column + num_columns, num_columns)
        is_kept = place >= end - (num_taps - 1)
        channel = part * tile + jnp.arange(tile, dtype=jnp.int32)
        t = jnp.clip(place - start, 0, length - 1)
        from_x = jnp.broadcast_to(is_kept & (place >= start), (tile,)) & (channel < channels)
        new = load(x_ref.at[row, t, channel], mask=from_x, other=0.0).astype(ring_ref.dtype)
        new = jnp.where(is_kept, new, jnp.full((tile,), jnp.nan, ring_ref.dtype))
        is_there = is_kept & (place >= 0) & (place < start)
        is_written = jnp.broadcast_to(~is_there, (tile,)) & (channel < channels)
        store(ring_ref.at[layer, slot, column, channel], new, mask=is_written)

        @pl.when(part == 0)
        def _():
            gate = jnp.arange(pl.next_power_of_2(2 * num_heads), dtype=jnp.int32)
            at = layer, slot, column, gate // num_heads, jax.lax.rem(gate, num_heads)
            nan = jnp.full(gate.shape, jnp.nan, jnp.float32)
            store(gates_ref.at[at], nan, mask=gate < 2 * num_heads)


def _norm_kernel(_, x_ref, norm_ref, out_ref, *, channels, tile, eps):
    """See `reference.gated_norm`; rounds where that does. Being a kernel of its own, it rounds the
    same in every shape."""
    num_heads, value_dim = out_ref.shape[2:]
    part, row, t = (pl.program_id(i) for i in range(3))
    head = (part * tile + jnp.arange(tile, dtype=jnp.int32))[:, None]
    value = jnp.arange(value_dim, dtype=jnp.int32)[None]
    # The interpreter stores what was there where the mask is false: to no head, then.
    at = out_ref.at[row, t, jnp.where(head < num_heads, head, num_heads), value]
    mask = jnp.broadcast_to(head < num_heads, (tile, value_dim))
    o = load(at, mask=mask, other=0.0)
    z = load(x_ref.at[row, t, channels + head * value_dim + value], mask=mask, other=0.0)
    norm = norm_ref[value]
    y = o.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.sum(y * y, axis=1, keepdims=True) / value_dim + eps)
    y = y.astype(o.dtype).astype(jnp.float32) * norm.astype(jnp.float32)
    y = y.astype(jnp.promote_types(o.dtype, norm.dtype)).astype(jnp.float32)
    # A row of padding is zero whatever its gate.
    y = jnp.where(o == 0, 0.0, y * _silu(z.astype(jnp.float32)))
    store(at, y.astype(o.dtype), mask=mask)


def _count(positions_ref, row):
    """Real rows of a request."""
    length = positions_ref.shape[1]
    t = jnp.arange(pl.next_power_of_2(length), dtype=jnp.int32)
    positions = load(positions_ref.at[row, t], mask=t < length, other=-1)
    return jnp.sum((positions >= 0).astype(jnp.int32))


def _invert_unit_lower(lower, i):
    """See `reference.invert_unit_lower`: blocks merge where they lie, in products of all of them,
    X - X C X with the corners C of the pairs."""
    i, j = i[:, None], i[None]

    def merge(level, inverse):
        size = jnp.left_shift(jnp.int32(1), level)
        block_i, block_j = i // size, j // size
        is_corner = (block_i // 2 == block_j // 2) & (block_i > block_j)
        corner = jnp.where(is_corner, lower, 0.0)
        return inverse - _dot(_dot(inverse, corner), inverse)

    num_levels = lower.shape[0].bit_length() - 1
    return jax.lax.fori_loop(0, num_levels, merge, jnp.where(i == j, 1.0, 0.0))


def _dot(a, b, **transposed):
    """a b in f32 on tensor cores, which take tf32: of both operands halves that it holds, without
    the product of the lower two, 2^-24 of the whole."""
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    small = dot(a_high, b_low, allow_tf32=True, **transposed)
    small = small + dot(a_low, b_high, allow_tf32=True, **transposed)
    return small + dot(a_high, b_high, allow_tf32=True, **transposed)


def _halves(a):
    high = _rounded(a)
    return high, _rounded(a - high)


def _rounded(a):
    """To tf32, which has ten bits after the first; the product itself would cut the others off."""
    bits = jax.lax.bitcast_convert_type(a, jnp.int32) + 0x1000
    return jax.lax.bitcast_convert_type(bits & ~0x1FFF, jnp.float32)


def _dot_t(a, b):
    return _dot(a, b, trans_b=True)


def _over_keys(s, k):
    """Sums [D_v] over the keys of s [D_k / piece, D_v, piece] times k [D_k / piece, 1, piece]."""
    return jnp.sum(jnp.sum(s * k, axis=0), axis=1)


def _sigmoid(z):
    return 1 / (1 + jnp.exp(-z))


def _silu(z):
    return z / (1 + jnp.exp(-z))


def _softplus(z):
    return jnp.maximum(z, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(z)))
