"""The gated delta rule on Pallas' Triton backend: one kernel from one projection to the next.

A program owns the state of one value head of one request: it reads it once, folds the pending
tokens in, writes it once, and runs the new tokens on in registers. Every token goes through one
loop body, whether it is folded in or verified and however many there are: a token is the same
machine code, and has the same bits, in every step.

The programs of the value heads that share a key head are not synchronised, and one of them writes
the raw q and k of the new tokens to the ring. No other reads them there: a call takes new tokens
from x, and the ring has so many columns that those written are none of those read, which are of the
last W - 1 + M tokens (`num_ring_columns`). All else that a program writes is its own head's.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.gated_delta_rule.reference import EPSILON
from pallas_kernels.gated_delta_rule.types import DeltaRuleCache, DeltaRuleWeights
from pallas_kernels.triton_call import load, store, triton_call

DIMS = 16, 32, 64, 128
DTYPES = "bfloat16", "float32"


@dataclass(frozen=True)
class TuningConfig:
    """How a program's state [D_v, D_k] lies across its threads."""

    # Keys are taken apart into pieces so wide, and sums over them run over the pieces first, each
    # thread on its own: lanes lie across the keys of one piece only, and exchange that much less.
    piece: int = 32
    num_warps: int = 8


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
    config: TuningConfig | None = None,
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
    if folds:
        raise UnsupportedError("folds=True; the kernel takes folds=False")
    config = config or TuningConfig()
    conv, log_decay, decay_bias, norm = weights
    batch, length, _ = x.shape
    out = jax.ShapeDtypeStruct((batch, length, heads.num_values, heads.value_dim), x.dtype)
    operands = [
        *cache,
        *(x, jnp.asarray(layer, jnp.int32).reshape(1), slots, positions, pending),
        *(conv, log_decay, decay_bias, *(() if norm is None else (norm,))),
    ]
    state, ring, gates, out = triton_call(
        partial(_step_kernel, eps=eps, piece=min(config.piece, heads.key_dim)),
        operands,
        [*(jax.ShapeDtypeStruct(z.shape, z.dtype) for z in cache), out],
        name="gated_delta_rule",
        grid=(heads.num_values, batch),
        num_warps=config.num_warps,
        aliases={0: 0, 1: 1, 2: 2},
        interpret=interpret,
    )
    return out, DeltaRuleCache(state, ring, gates)


def _step_kernel(*refs, eps, piece):
    _, _, _, x_ref, layer_ref, slots_ref, positions_ref, pending_ref, *refs = refs
    conv_ref, log_decay_ref, decay_bias_ref, *norm_ref, state_ref, ring_ref, gates_ref, out_ref = (
        refs
    )
    _, num_slots, num_heads, value_dim, key_dim = state_ref.shape
    num_columns, channels = ring_ref.shape[2:]
    num_taps, length = conv_ref.shape[0], x_ref.shape[1]
    most_pending = (num_columns - num_taps + 1) // 2
    key_channels = (channels - num_heads * value_dim) // 2
    heads_per_key = num_heads * key_dim // key_channels
    gate_channels = channels + num_heads * value_dim

    head, row = pl.program_id(0), pl.program_id(1)
    layer, slot = layer_ref[0], slots_ref[row]
    t = jnp.arange(pl.next_power_of_2(length), dtype=jnp.int32)
    positions = load(positions_ref.at[row, t], mask=t < length, other=-1)
    count, start = jnp.sum((positions >= 0).astype(jnp.int32)), positions_ref[row, 0]
    is_live = (count > 0) & (slot >= 0) & (slot < num_slots)

    # q and k lie as [2, D_k / piece, piece], states as [D_k / piece, D_v, piece].
    parts = jnp.arange(key_dim // piece, dtype=jnp.int32) * piece
    lanes = jnp.arange(piece, dtype=jnp.int32)
    values = jnp.arange(value_dim, dtype=jnp.int32)
    either = jnp.arange(2, dtype=jnp.int32)[:, None, None]
    keys = parts[:, None] + lanes[None, :]
    qk_channels = either * key_channels + head // heads_per_key * key_dim + keys[None]
    kinds = qk_channels, 2 * key_channels + head * value_dim + values
    own = values[None, :, None], parts[:, None, None] + lanes[None, None, :]

    @pl.when(is_live)
    def _():
        taps = [[conv_ref[i, kind].astype(jnp.float32) for i in range(num_taps)] for kind in kinds]
        rate, bias = -jnp.exp(log_decay_ref[head]), decay_bias_ref[head]
        num_pending = jnp.clip(pending_ref[row], 0, jnp.minimum(start, most_pending))
        first, end = start - num_pending, start + count

        def column_of(place):
            return jax.lax.rem(place + num_columns, num_columns)

        def row_of(place):
            return jnp.clip(place - start, 0, length - 1)

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
            y = sum(z.astype(jnp.float32) * w for z, w in zip(window, taps[kind], strict=True))
            return _silu(y)

        def advance(place, carry):
            s, history, raw = carry
            following = read(place + 1)  # on its way while this token is computed
            windows = [(*past, z) for past, z in zip(history, raw, strict=True)]
            is_new, column, t = place >= start, column_of(place), row_of(place)

            @pl.when(place == start)
            def _():
                state_ref[layer, slot, head, *own] = s

            b, a = (
                x_ref[row, t, gate_channels + i * num_heads + head].astype(jnp.float32)
                for i in range(2)
            )
            g = jnp.where(is_new, rate * _softplus(a + bias), gates_ref[layer, slot, column, 0, head])
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
                if norm_ref:
                    z = x_ref[row, t, channels + head * value_dim + values]
                    o = _gated_norm(o, z, norm_ref[0][values], eps)
                out_ref[row, t, head, values] = o
                gates_ref[layer, slot, column, 0, head] = g
                gates_ref[layer, slot, column, 1, head] = beta
                ring_ref[layer, slot, column, kinds[1]] = raw[1]
                is_first = jnp.broadcast_to(head % heads_per_key == 0, qk_channels.shape)
                store(ring_ref.at[layer, slot, column, qk_channels], raw[0], mask=is_first)

            return s, tuple(window[1:] for window in windows), following

        known = jnp.broadcast_to(first > 0, (key_dim // piece, value_dim, piece))
        s = load(state_ref.at[layer, slot, head, *own], mask=known, other=0.0)
        past = [read(first - i) for i in range(num_taps - 1, 0, -1)]
        history = tuple(tuple(raw[kind] for raw in past) for kind in range(2))
        jax.lax.fori_loop(first, end, advance, (s, history, read(first)))

    def clear(t, _):
        out_ref[row, t, head, values] = jnp.zeros((value_dim,), out_ref.dtype)

    jax.lax.fori_loop(jnp.where(is_live, count, 0), length, clear, None)


def _over_keys(s, k):
    """Sums [D_v] over the keys of s [D_k / piece, D_v, piece] times k [D_k / piece, 1, piece]."""
    return jnp.sum(jnp.sum(s * k, axis=0), axis=1)


def _gated_norm(o, z, norm, eps):
    """See `reference.gated_norm`; rounds where that does."""
    y = o.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.sum(y * y, axis=0) / math.prod(y.shape) + eps)
    y = y.astype(o.dtype).astype(jnp.float32) * norm.astype(jnp.float32)
    y = y.astype(jnp.promote_types(o.dtype, norm.dtype)).astype(jnp.float32)
    return (y * _silu(z.astype(jnp.float32))).astype(o.dtype)


def _sigmoid(z):
    return 1 / (1 + jnp.exp(-z))


def _silu(z):
    return z / (1 + jnp.exp(-z))


def _softplus(z):
    return jnp.maximum(z, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(z)))
