"""The scaled product on tensor cores.

A program computes a tile of the result, over the whole depth (all inputs) or a part of the depth.
The program widens numbers in registers, multiplies a tile of the matrix, and applies the tile's
scales to the product. If several programs share the depth, XLA sums their results in order.
"""

from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.scaled_matmul.reference import scaled_matmul_reference
from pallas_kernels.triton_call import dot, load, store, triton_call, widen

DTYPES = "bfloat16", "float16", "float32"
STORED = "float8_e4m3fn", "int8"


@dataclass(frozen=True)
class ScaledMatmulTuning:
    """Tile sizes (powers of two of at least 16) and launch parameters of the kernel."""

    block_rows: int
    block_columns: int  # of the result: rows of the stored matrix
    block_depth: int
    num_splits: int  # number of programs that share the depth
    num_warps: int
    num_stages: int
    unroll: int = 1  # tiles of the depth that are loaded together


# Keys are maximum numbers of rows. `with_splits` replaces the number of splits.
BFLOAT16 = {
    16: ScaledMatmulTuning(16, 64, 128, 1, 4, 4),
    32: ScaledMatmulTuning(32, 64, 128, 1, 4, 4),
    64: ScaledMatmulTuning(64, 128, 128, 1, 4, 3),
    None: ScaledMatmulTuning(128, 128, 128, 1, 8, 3),
}
FLOAT32 = ScaledMatmulTuning(16, 32, 32, 1, 4, 2)
MAX_PROGRAMS = 400  # if they share the depth: three for each of an H100's multiprocessors
MIN_DEPTH = 16  # smallest depth of a product on tensor cores
MIN_TILES = 4  # of the depth, for each program
# With more rows, as prompts have, XLA multiplies by the dequantised matrix. On an H100 the kernel
# that dequantises takes as long as reading the matrix four times. The number of rows from which XLA
# is faster is an estimate.
MAX_ROWS = 512


def choose_config(num_rows: int, num_columns: int, depth: int, dtype: Any) -> ScaledMatmulTuning:
    """Return the tuning for x [num_rows, depth] and a matrix [num_columns, depth]."""
    if jnp.dtype(dtype) == jnp.float32:
        return FLOAT32
    (config, *_) = (x for most, x in BFLOAT16.items() if most is None or num_rows <= most)
    return with_splits(config, num_rows, num_columns, depth)


def with_splits(
    config: ScaledMatmulTuning, num_rows: int, num_columns: int, depth: int
) -> ScaledMatmulTuning:
    """Return `config` with `num_splits`, the number of programs that compute one tile together.

    If there are few tiles, several programs share a tile, so that the whole GPU has work. Each of
    these programs sums over a part of the `depth` inputs.
    """
    blocks = pl.cdiv(num_rows, config.block_rows) * pl.cdiv(num_columns, config.block_columns)
    tiles = pl.cdiv(depth, config.block_depth)
    fits = [n for n in (2, 4, 8) if n * blocks <= MAX_PROGRAMS and n * MIN_TILES <= tiles]
    return replace(config, num_splits=max(fits, default=1))


def within_blocks(
    config: ScaledMatmulTuning, block: tuple[int, int], depth: int
) -> ScaledMatmulTuning:
    """Return `config`, with a smaller tile depth if a tile would cross a border between blocks.

    If the tile depth is divided by n, `unroll` is multiplied by n, so that equally many inputs are
    loaded at a time.

    Raises:
        UnsupportedError: the tiles would have a depth below `MIN_DEPTH`.
    """
    if block[1] >= depth or block[1] % config.block_depth == 0:
        return config
    side = block[1] & -block[1]
    if side < MIN_DEPTH:
        raise UnsupportedError(
            f"block {block} must have a multiple of {MIN_DEPTH} columns, or all {depth}"
        )
    return replace(config, block_depth=side, unroll=config.unroll * config.block_depth // side)


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
        UnsupportedError: a dtype or the block size is not supported, or the matrix is too large.
    """
    num_rows, depth = x.shape
    num_columns, dtype = len(values) - first, dtype or x.dtype
    if x.dtype not in DTYPES or values.dtype not in STORED:
        raise UnsupportedError(
            f"x must have a dtype of {', '.join(DTYPES)} and values {' or '.join(STORED)}; "
            f"got {x.dtype} and {values.dtype}"
        )
    if values.size >= 2**31:  # Triton treats Pallas' 32-bit offsets as signed
        raise UnsupportedError(f"values must have fewer than 2^31 numbers; got {values.shape}")
    if config is None:
        if num_rows > MAX_ROWS:
            return scaled_matmul_reference(x, values, scales, block, dtype, first)
        config = choose_config(num_rows, num_columns, depth, x.dtype)
    config = within_blocks(config, block, depth)
    if num_rows == 0:
        return jnp.zeros((0, num_columns), dtype)
    parts = triton_call(
        partial(_kernel, block=block, first=first, config=config, interpret=interpret),
        (x, values, scales.astype(jnp.float32)),
        [jax.ShapeDtypeStruct((config.num_splits, num_rows, num_columns), dtype)],
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
    return sum_of_parts(parts)


def sum_of_parts(parts: jax.Array) -> jax.Array:
    """Return the sum over the first axis, computed in f32 and in order.

    Kernels write the parts in the result's dtype, which takes fewer bytes than f32. The rounding
    errors of all parts together are about as large as the error of rounding the sum.
    """
    if len(parts) == 1:
        return parts[0]
    return reduce(add, [part.astype(jnp.float32) for part in parts]).astype(parts.dtype)


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
    num_steps = pl.cdiv(depth, config.block_depth * config.num_splits * config.unroll)
    first_tile = split * num_steps * config.unroll
    is_scaled_after = block[1] >= depth

    def scales_of(tile):
        """Return a scale for each of the program's outputs, for the inputs in one tile.

        The scales are 0 past the last input.
        """
        at = jax.lax.div((first_tile + tile) * config.block_depth, jnp.int32(block[1]))
        places = jax.lax.div(outputs, jnp.int32(block[0])), jnp.broadcast_to(at, outputs.shape)
        mask = is_column & (at < scales_ref.shape[1])
        return load(scales_ref.at[places], mask=mask, other=0.0)

    def product_of(tile):
        k = ((first_tile + tile) * config.block_depth + jnp.arange(config.block_depth))[None]
        is_inside = k < depth
        x = load(x_ref.at[rows[:, None], k], mask=is_row[:, None] & is_inside, other=0.0)
        at = values_ref.at[outputs[:, None], k]
        other = 0 if values_ref.dtype == jnp.int8 else 0.0
        stored = load(at, mask=is_column[:, None] & is_inside, other=other)
        if x.dtype == jnp.bfloat16:
            matrix = widen(stored, interpret=interpret)
        else:
            matrix = stored.astype(x.dtype)
        return dot(x, matrix, trans_b=True, precision="highest")

    def of_step(function, step):
        return [function(step * config.unroll + i) for i in range(config.unroll)]

    def accumulate(step, carry):
        total, scales = carry
        if is_scaled_after:
            return sum(of_step(product_of, step), total), scales
        following = of_step(scales_of, step + 1)  # on their way while this step is computed
        for product, of_columns in zip(of_step(product_of, step), scales, strict=True):
            total = total + product * of_columns[None]
        return total, following

    total = jnp.zeros((config.block_rows, config.block_columns), jnp.float32)
    carry = total, of_step(scales_of, 0)
    total, scales = jax.lax.fori_loop(0, num_steps, accumulate, carry)
    if is_scaled_after:
        total = total * scales[0][None]
    mask = is_row[:, None] & is_column[None]
    store(out_ref.at[split, rows[:, None], columns[None]], total.astype(out_ref.dtype), mask=mask)
