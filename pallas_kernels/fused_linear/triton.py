"""Triton kernel of the projection: a program per block of columns, with all rows.

The norm takes no pass of its own. Its weight is applied to the tiles of x on their way into the
product, and its scale, which is one number per row, to the rows of the sum after the last tile.
"""

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.fused_linear.reference import Norm
from pallas_kernels.triton_call import dot, load, store, triton_call

# Not float16: rows that are not yet normed, times the norm's weight, may exceed its range.
DTYPES = "bfloat16", "float32"
MAX_ROWS = 16  # the fewest that tensor cores multiply

# All that follows is an estimate, from an H100's bandwidth and latencies and from the cycles that
# the compiler gives each instruction of the loop.
NUM_SMS = 132  # multiprocessors of an H100 or H200
MIN_PROGRAMS = NUM_SMS * 7 // 8  # with fewer, blocks are narrower, though they read shorter pieces
SHARED_BYTES = 220 * 1024  # of 227 KiB per SM; a program takes some KiB besides its buffers
IN_FLIGHT_BYTES = 64 * 1024  # per SM; twice its share of the bandwidth times the latency
# Numbers of the weight that an iteration reads: 64 columns of 128 rows, or fewer columns of more
# rows, in several tiles. A tile's product is a chain of sums, each of which waits for the one
# before; few columns alone would take longer for that than the memory takes to read them.
NUMBERS = 64 * 128
# A norm's (block_depth, num_warps): all warps repeat its work on x, and Triton copies its weight
# ahead, as it does the rest, only where a thread has 4 bytes of it.
WITH_NORM, WITHOUT_NORM = (128, 2), (64, 4)


@dataclass(frozen=True)
class FusedLinearTuning:
    """Tile sizes (powers of two of at least 16) and launch parameters."""

    block_columns: int  # of the result
    block_depth: int
    num_tiles: int  # of the depth per iteration, each with a sum of its own
    num_warps: int
    num_stages: int  # of Triton, whose loop has one buffer fewer


# Without tensor cores, which do not multiply f32 exactly.
FLOAT32 = FusedLinearTuning(32, 32, 1, 4, 6)


def choose_config(
    depth: int, num_columns: int, is_gated: bool, has_norm: bool, dtype: Any
) -> FusedLinearTuning:
    """Choose the tiles for a weight [D, F], or [D, 2 F] if it is gated.

    What counts is that the memory is never idle: all SMs have a program, all programs run at once,
    and each has as much on the way as its share of the bandwidth takes.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return FLOAT32
    num_parts = 1 + is_gated
    widths = [width for width in (64, 32, 16) if width * num_parts <= 64]
    fills = [width for width in widths if num_columns >= width * MIN_PROGRAMS]
    block_columns = fills[0] if fills else widths[-1]
    block_depth, num_warps = WITH_NORM if has_norm else WITHOUT_NORM
    rows = NUMBERS // (block_columns * num_parts)
    programs = pl.cdiv(num_columns, block_columns)
    buffer_bytes = 2 * (NUMBERS + rows * (MAX_ROWS + has_norm))
    fits = SHARED_BYTES // pl.cdiv(programs, NUM_SMS) // buffer_bytes
    wanted = 1 + pl.cdiv(IN_FLIGHT_BYTES, 2 * NUMBERS * max(1, programs // NUM_SMS))
    num_buffers = max(2, min(fits, wanted, pl.cdiv(depth, rows)))
    return FusedLinearTuning(
        block_columns, block_depth, rows // block_depth, num_warps, 1 + num_buffers
    )


def fused_linear_triton(
    x: jax.Array,
    weight: jax.Array,
    *,
    norm: Norm | None = None,
    is_gated: bool = False,
    residual: jax.Array | None = None,
    config: FusedLinearTuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `fused_linear`. Nothing but the result is rounded, and with a norm x times its weight.

    Raises:
        UnsupportedError: dtypes differ or are not in DTYPES, or there are too many rows.
    """
    num_rows, depth = x.shape
    num_columns = weight.shape[1] // (1 + is_gated)
    given = {"norm": norm and norm.weight, "residual": residual}
    given = {name: one for name, one in given.items() if one is not None}
    dtypes = {x.dtype, weight.dtype, *(one.dtype for one in given.values())}
    if x.dtype not in DTYPES or len(dtypes) > 1:
        raise UnsupportedError(
            f"x and all weights must share a dtype of {', '.join(DTYPES)}; "
            f"got {', '.join(sorted(map(str, dtypes)))}"
        )
    if num_rows > MAX_ROWS:
        raise UnsupportedError(f"x must be {MAX_ROWS} rows at most; got {num_rows}")
    if num_rows == 0:
        return jnp.zeros((0, num_columns), x.dtype)
    config = config or choose_config(depth, num_columns, is_gated, norm is not None, x.dtype)
    (out,) = triton_call(
        partial(_kernel, given=tuple(given), norm=norm and norm[1:], config=config),
        (x, weight, *given.values()),
        [jax.ShapeDtypeStruct((num_rows, num_columns), x.dtype)],
        name="fused_linear",
        grid=(pl.cdiv(num_columns, config.block_columns),),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    return out


def _kernel(x_ref, weight_ref, *refs, given, norm, config: FusedLinearTuning):
    """`norm` is its eps and is_centred; gated is a weight with twice the result's columns."""
    *given_refs, out_ref = refs
    optional = dict(zip(given, given_refs, strict=True))
    (num_rows, depth), num_columns = x_ref.shape, out_ref.shape[1]
    rows = jnp.arange(MAX_ROWS)[:, None]
    columns = pl.program_id(0) * config.block_columns + jnp.arange(config.block_columns)[None]
    is_row, is_column = rows < num_rows, columns < num_columns
    parts = range(0, weight_ref.shape[1], num_columns)  # the first columns of gate and up

    def accumulate(i, carry):
        squares, totals = carry
        made = []
        for tile, sums in enumerate(totals):
            k = (i * config.num_tiles + tile) * config.block_depth + jnp.arange(config.block_depth)
            is_inside = k < depth
            x = load(x_ref.at[rows, k[None]], mask=is_row & is_inside[None], other=0.0)
            if norm:
                scale = load(optional["norm"].at[k], mask=is_inside, other=0.0)
                y = x.astype(jnp.float32)
                squares += y * y
                x = _scaled(x, scale[None], *norm[1:])
            made.append(())
            for first, total in zip(parts, sums, strict=True):
                at = weight_ref.at[k[:, None], first + columns]
                weight = load(at, mask=is_inside[:, None] & is_column, other=0.0)
                made[tile] += (total + dot(x, weight, allow_tf32=False),)
        return squares, tuple(made)

    zero = jnp.zeros((MAX_ROWS, config.block_columns), jnp.float32)
    residual = None
    if "residual" in optional:  # read now, so that it is here when the product is
        at = optional["residual"].at[rows, columns]
        residual = load(at, mask=is_row & is_column, other=0.0)
    squares = jnp.zeros((MAX_ROWS, config.block_depth), jnp.float32)
    carry = squares, ((zero,) * len(parts),) * config.num_tiles
    num_iterations = pl.cdiv(depth, config.num_tiles * config.block_depth)
    squares, totals = jax.lax.fori_loop(0, num_iterations, accumulate, carry)
    y, *up = (reduce(jnp.add, sums) for sums in zip(*totals, strict=True))
    if norm:
        inverse = jax.lax.rsqrt(jnp.sum(squares, axis=1, keepdims=True) / depth + norm[0])
        y, *up = (one * inverse for one in (y, *up))
    if up:
        y = y / (1.0 + jnp.exp(-y)) * up[0]
    if residual is not None:
        y += residual.astype(jnp.float32)
    store(out_ref.at[rows, columns], y.astype(out_ref.dtype), mask=is_row & is_column)


def _scaled(x: jax.Array, scale: jax.Array, is_centred: bool) -> jax.Array:
    """Return x times the norm's weight, rounded once."""
    if not is_centred:
        return x * scale  # of bfloat16 two at a time
    return (x.astype(jnp.float32) * (1.0 + scale.astype(jnp.float32))).astype(x.dtype)
