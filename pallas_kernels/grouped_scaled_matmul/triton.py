"""The grouped scaled product on tensor cores: one program per block of rows of the same group.

A program widens numbers in registers, multiplies a tile of the matrix, and applies the tile's
scales to the product.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.grouped_matmul.tiles import (
    GroupedMatmulTuning,
    Tile,
    fitting,
    multiply_tiles,
)
from pallas_kernels.triton_call import dot, load, widen

DTYPES = "bfloat16", "float16", "float32"
STORED = "float8_e4m3fn", "int8"
MIN_DEPTH = 16  # of a product of tensor cores

# Keys are explained in `fitting`.
BFLOAT16 = {
    16: GroupedMatmulTuning(16, 64, 128, 4, 4),
    64: GroupedMatmulTuning(64, 128, 128, 4, 3),
    None: GroupedMatmulTuning(128, 128, 128, 8, 3),
}
FLOAT32 = {16: GroupedMatmulTuning(16, 32, 32, 4, 2), None: GroupedMatmulTuning(64, 32, 32, 4, 2)}


def choose_config(
    num_rows: int, num_groups: int, dtype: Any, block: tuple[int, int], depth: int
) -> GroupedMatmulTuning:
    """Return the tile sizes for `num_rows` rows in `num_groups` groups.

    If a matrix [outputs, depth] has several blocks of columns, no tile spans two of them.
    """
    configs = FLOAT32 if jnp.dtype(dtype) == jnp.float32 else BFLOAT16
    config = fitting(configs, num_rows, num_groups)
    if block[1] >= depth:
        return config
    return replace(config, block_depth=min(config.block_depth, block[1] & -block[1]))


def check(
    x: jax.Array, values: jax.Array, block: tuple[int, int], config: GroupedMatmulTuning
) -> None:
    """Raise an UnsupportedError unless the kernel supports the dtypes and the size of a block."""
    if x.dtype not in DTYPES or values.dtype not in STORED:
        raise UnsupportedError(
            f"x must have a dtype of {', '.join(DTYPES)} and values one of {', '.join(STORED)}; "
            f"got {x.dtype} and {values.dtype}"
        )
    depth = x.shape[-1]
    if config.block_depth < MIN_DEPTH or (block[1] < depth and block[1] % config.block_depth):
        raise UnsupportedError(
            f"block {block} must have a multiple of {MIN_DEPTH} columns, or all {depth}"
        )


def grouped_scaled_matmul_triton(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    group_sizes: jax.Array,
    sources: jax.Array | None = None,
    targets: jax.Array | None = None,
    *,
    block: tuple[int, int],
    config: GroupedMatmulTuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `grouped_scaled_matmul`.

    Raises:
        UnsupportedError: a dtype or the block size is not supported, there are too many groups, or
            `values` has between 2^31 and 2^32 numbers.
    """
    num_groups, num_columns, depth = values.shape
    num_rows = x.shape[0] if sources is None else sources.shape[0]
    config = config or choose_config(num_rows, num_groups, x.dtype, block, depth)
    check(x, values, block, config)
    return multiply_tiles(
        partial(product_kernel, block=block, config=config, interpret=interpret),
        (x, values, scales.astype(jnp.float32)),
        group_sizes,
        sources,
        targets,
        num_columns=num_columns,
        config=config,
        name="grouped_scaled_matmul",
        interpret=interpret,
    )


def product_kernel(
    tile: Tile,
    x_ref,
    values_ref,
    scales_ref,
    *,
    block: tuple[int, int],
    config: GroupedMatmulTuning,
    interpret: bool,
):
    """Return a tile f32[rows, columns] of the product of x with the matrix of `tile.group`."""
    depth = x_ref.shape[1]
    is_column = tile.columns < values_ref.shape[1]
    is_scaled_after = block[1] >= depth

    def scales_of(i):
        """Return a scale for each column of the tile, for step i of the loop over x's columns.

        The scales are 0 after the last step.
        """
        at = jax.lax.div(i * config.block_depth, jnp.int32(block[1]))
        of_columns = jax.lax.div(tile.columns, jnp.int32(block[0]))
        places = tile.group, of_columns, jnp.broadcast_to(at, of_columns.shape)
        mask = is_column & (at < scales_ref.shape[2])
        return load(scales_ref.at[places], mask=mask, other=0.0)

    def product_of(i):
        k = (i * config.block_depth + jnp.arange(config.block_depth))[None]
        is_inside = k < depth
        x = load(x_ref.at[tile.sources, k], mask=tile.is_row & is_inside, other=0.0)
        at = values_ref.at[tile.group, tile.columns[:, None], k]
        other = 0 if values_ref.dtype == jnp.int8 else 0.0
        stored = load(at, mask=is_column[:, None] & is_inside, other=other)
        if x.dtype == jnp.bfloat16:
            matrix = widen(stored, interpret=interpret)
        else:
            matrix = stored.astype(x.dtype)
        return dot(x, matrix, trans_b=True, precision="highest")

    def accumulate(i, carry):
        total, scales = carry
        if is_scaled_after:
            return total + product_of(i), scales
        following = scales_of(i + 1)  # on its way while this tile is multiplied
        return total + product_of(i) * scales[None], following

    zero = jnp.zeros((config.block_rows, config.block_columns), jnp.float32)
    num_steps = pl.cdiv(depth, config.block_depth)
    total, scales = jax.lax.fori_loop(0, num_steps, accumulate, (zero, scales_of(0)))
    return total * scales[None] if is_scaled_after else total
