"""The scaled product on tensor cores: one program per tile of the result and part of the depth.

A program widens numbers in registers, multiplies a tile of the matrix, and applies the tile's
scales to the product. If several programs share the depth, XLA sums their results in order.
"""

from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.triton_call import dot, load, store, triton_call, widen

DTYPES = "bfloat16", "float16", "float32"
STORED = "float8_e4m3fn"


@dataclass(frozen=True)
class ScaledMatmulTuning:
    """Tile sizes (powers of two of at least 16) and launch parameters."""

    block_rows: int
    block_columns: int  # of the result: rows of the stored matrix
    block_depth: int
    num_splits: int  # of the depth
    num_warps: int
    num_stages: int
    is_swapped: bool = False  # computes the tile's transpose, so that the matrix is the left factor
    is_cast: bool = False  # widens by Triton's conversion instead of `widen`


def choose_config(num_rows: int, num_columns: int, depth: int, dtype: Any) -> ScaledMatmulTuning:
    """Return the tiles for x [num_rows, depth] and a matrix [num_columns, depth]."""
    if jnp.dtype(dtype) == jnp.float32:
        return ScaledMatmulTuning(16, 32, 32, 1, 4, 2)
    if num_rows > 64:
        return ScaledMatmulTuning(128, 128, 128, 1, 8, 3)
    block_rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    return ScaledMatmulTuning(block_rows, 64, 128, 1, 4, 5)


def scaled_matmul_triton(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    block: tuple[int, int],
    dtype: Any = None,
    first: int = 0,
    *,
    config: ScaledMatmulTuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `scaled_matmul`.

    Raises:
        UnsupportedError: a dtype or the blocks' sizes.
    """
    num_rows, depth = x.shape
    num_columns, dtype = len(values) - first, dtype or x.dtype
    if x.dtype not in DTYPES or values.dtype != STORED:
        raise UnsupportedError(
            f"x must have a dtype of {', '.join(DTYPES)} and values {STORED}; "
            f"got {x.dtype} and {values.dtype}"
        )
    if values.size >= 2**31:  # Triton treats Pallas' 32-bit offsets as signed
        raise UnsupportedError(f"values must have fewer than 2^31 numbers; got {values.shape}")
    config = config or choose_config(num_rows, num_columns, depth, x.dtype)
    if block[1] < depth and block[1] % config.block_depth:
        raise UnsupportedError(
            f"block {block} must have a multiple of {config.block_depth} columns, or all {depth}"
        )
    if num_rows == 0:
        return jnp.zeros((0, num_columns), dtype)
    parts = triton_call(
        partial(_kernel, block=block, first=first, config=config, interpret=interpret),
        (x, values, scales.astype(jnp.float32)),
        [
            jax.ShapeDtypeStruct(
                (config.num_splits, num_rows, num_columns),
                dtype if config.num_splits == 1 else jnp.float32,
            )
        ],
        name="scaled_matmul",
        # Adjacent programs read the same columns.
        grid=(
            pl.cdiv(num_rows, config.block_rows),
            pl.cdiv(num_columns, config.block_columns),
            config.num_splits,
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )[0]
    return reduce(add, list(parts)).astype(dtype)


def _kernel(
    x_ref,
    values_ref,
    scales_ref,
    out_ref,
    *,
    block: tuple[int, int],
    first: int,
    config: ScaledMatmulTuning,
    interpret: bool,
):
    (num_rows, depth), num_outputs = x_ref.shape, values_ref.shape[0]
    row_block, column_block, split = (pl.program_id(i) for i in range(3))
    rows = row_block * config.block_rows + jnp.arange(config.block_rows)
    columns = column_block * config.block_columns + jnp.arange(config.block_columns)
    outputs = first + columns
    is_row, is_column = rows < num_rows, outputs < num_outputs
    num_tiles = pl.cdiv(pl.cdiv(depth, config.block_depth), config.num_splits)
    first_tile = split * num_tiles
    is_scaled_after = block[1] >= depth

    def scales_of(tile):
        """Return the scales of the tile's columns; 0 past the depth."""
        at = jax.lax.div((first_tile + tile) * config.block_depth, jnp.int32(block[1]))
        places = jax.lax.div(outputs, jnp.int32(block[0])), jnp.broadcast_to(at, outputs.shape)
        mask = is_column & (at < scales_ref.shape[1])
        return load(scales_ref.at[places], mask=mask, other=0.0)

    def product_of(tile):
        k = ((first_tile + tile) * config.block_depth + jnp.arange(config.block_depth))[None]
        is_inside = k < depth
        x = load(x_ref.at[rows[:, None], k], mask=is_row[:, None] & is_inside, other=0.0)
        at = values_ref.at[outputs[:, None], k]
        stored = load(at, mask=is_column[:, None] & is_inside, other=0.0)
        if config.is_cast or x.dtype != jnp.bfloat16:
            matrix = stored.astype(x.dtype)
        else:
            matrix = widen(stored, interpret=interpret)
        factors = (matrix, x) if config.is_swapped else (x, matrix)
        return dot(*factors, trans_b=True, precision="highest")

    def along_rows(scales):
        return scales[:, None] if config.is_swapped else scales[None]

    shape = config.block_rows, config.block_columns
    total = jnp.zeros(shape[::-1] if config.is_swapped else shape, jnp.float32)
    if is_scaled_after:
        total = jax.lax.fori_loop(0, num_tiles, lambda i, sum_: sum_ + product_of(i), total)
        total = total * along_rows(scales_of(0))
    else:

        def accumulate(tile, carry):
            total, scales = carry
            following = scales_of(tile + 1)  # on their way while this product is computed
            return total + product_of(tile) * along_rows(scales), following

        total, _ = jax.lax.fori_loop(0, num_tiles, accumulate, (total, scales_of(0)))
    if config.is_swapped:
        places, mask = (rows[None], columns[:, None]), is_row[None] & is_column[:, None]
    else:
        places, mask = (rows[:, None], columns[None]), is_row[:, None] & is_column[None]
    store(out_ref.at[(split, *places)], total.astype(out_ref.dtype), mask=mask)
