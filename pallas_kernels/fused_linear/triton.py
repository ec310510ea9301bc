"""Triton kernel of the projection: a program per block of columns, with all rows.

The norm takes no pass of its own. Its weight is applied to the tiles of x on their way into the
product, and its scale, which is one number per row, to the rows of the sum after the last tile.
"""

from dataclasses import dataclass
from functools import partial
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
ALIGNMENT = 16  # of D and F, for loads of 16 bytes; others work, in smaller loads
NUM_SMS = 132  # multiprocessors of an H100 or H200


@dataclass(frozen=True)
class FusedLinearTuning:
    """Tile sizes (powers of two of at least 16) and launch parameters."""

    block_columns: int
    block_depth: int
    num_warps: int
    num_stages: int


def choose_config(depth: int, num_columns: int, is_gated: bool, dtype: Any) -> FusedLinearTuning:
    """Choose the tiles for a product that is bound by reading its weight [D, F]."""
    return FusedLinearTuning(32, 128, 4, 4)


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
    config = config or choose_config(depth, num_columns, is_gated, x.dtype)
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
    """`norm` is its eps and is_centred; it is gated if the weight has twice the result's columns."""
    *given_refs, out_ref = refs
    optional = dict(zip(given, given_refs, strict=True))
    num_rows, depth = x_ref.shape
    num_columns = out_ref.shape[1]
    rows = jnp.arange(MAX_ROWS)[:, None]
    columns = pl.program_id(0) * config.block_columns + jnp.arange(config.block_columns)[None]
    is_row, is_column = rows < num_rows, columns < num_columns
    firsts = range(0, weight_ref.shape[1], num_columns)  # columns of gate and up

    def accumulate(i, carry):
        squares, totals = carry
        k = i * config.block_depth + jnp.arange(config.block_depth)
        is_inside = k < depth
        x = load(x_ref.at[rows, k[None]], mask=is_row & is_inside[None], other=0.0)
        if norm:
            scale = load(optional["norm"].at[k], mask=is_inside, other=0.0).astype(jnp.float32)
            y = x.astype(jnp.float32)
            squares += y * y
            x = (y * (1.0 + scale if norm[1] else scale)[None]).astype(x.dtype)

        def product(first):
            at = weight_ref.at[k[:, None], first + columns]
            tile = load(at, mask=is_inside[:, None] & is_column, other=0.0)
            return dot(x, tile, allow_tf32=False)

        return squares, tuple(
            total + product(first) for total, first in zip(totals, firsts, strict=True)
        )

    zero = jnp.zeros((MAX_ROWS, config.block_columns), jnp.float32)
    squares = jnp.zeros((MAX_ROWS, config.block_depth), jnp.float32)
    carry = squares, (zero,) * len(firsts)
    squares, totals = jax.lax.fori_loop(0, pl.cdiv(depth, config.block_depth), accumulate, carry)
    if norm:
        mean = jnp.sum(squares, axis=1, keepdims=True) / depth
        totals = tuple(total * jax.lax.rsqrt(mean + norm[0]) for total in totals)
    y = totals[0]
    if len(totals) == 2:
        y = y / (1.0 + jnp.exp(-y)) * totals[1]
    if "residual" in optional:
        at = optional["residual"].at[rows, columns]
        y += load(at, mask=is_row & is_column, other=0.0).astype(jnp.float32)
    store(out_ref.at[rows, columns], y.astype(out_ref.dtype), mask=is_row & is_column)
