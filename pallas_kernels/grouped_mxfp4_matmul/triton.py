"""The grouped product with MXFP4 on tensor cores: one program per block of rows of a group.

A program widens numbers in registers and multiplies them by their scales, which is exact in bf16.
"""

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
from pallas_kernels.grouped_mxfp4_matmul.reference import BLOCK
from pallas_kernels.triton_call import dot, load, widen_e2m1

DTYPES = "bfloat16", "float32"

# Keys are explained in `fitting`. The depth of a tile is a multiple of a run.
BFLOAT16 = {
    16: GroupedMatmulTuning(16, 64, 128, 4, 6),
    64: GroupedMatmulTuning(64, 128, 128, 4, 3),
    None: GroupedMatmulTuning(128, 128, 64, 8, 3),
}
FLOAT32 = {16: GroupedMatmulTuning(16, 32, 64, 4, 2), None: GroupedMatmulTuning(64, 32, 64, 4, 2)}


def choose_config(num_rows: int, num_groups: int, dtype: Any) -> GroupedMatmulTuning:
    """Return the tile sizes for `num_rows` rows in `num_groups` groups."""
    configs = FLOAT32 if jnp.dtype(dtype) == jnp.float32 else BFLOAT16
    return fitting(configs, num_rows, num_groups)


def grouped_mxfp4_matmul_triton(
    x: jax.Array,
    values: jax.Array,
    exponents: jax.Array,
    group_sizes: jax.Array,
    sources: jax.Array | None = None,
    targets: jax.Array | None = None,
    *,
    config: GroupedMatmulTuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `grouped_mxfp4_matmul`.

    Raises:
        UnsupportedError: the dtype of x is not supported, or there are too many groups.
    """
    num_groups, num_columns, _ = values.shape
    num_rows = x.shape[0] if sources is None else sources.shape[0]
    if x.dtype not in DTYPES:
        raise UnsupportedError(f"x must have a dtype of {', '.join(DTYPES)}; got {x.dtype}")
    config = config or choose_config(num_rows, num_groups, x.dtype)
    return multiply_tiles(
        partial(_product_kernel, config=config, interpret=interpret),
        (x, values, exponents),
        group_sizes,
        sources,
        targets,
        num_columns=num_columns,
        config=config,
        name="grouped_mxfp4_matmul",
        interpret=interpret,
    )


def _product_kernel(
    tile: Tile, x_ref, values_ref, exponents_ref, *, config: GroupedMatmulTuning, interpret: bool
):
    depth, (_, num_columns, num_bytes) = x_ref.shape[1], values_ref.shape
    is_column = tile.columns < num_columns
    blocks_per_step = config.block_depth // BLOCK

    def scales_of(step):
        """Return the scales of the blocks in a step of the loop over the depth.

        Scales past the depth are arbitrary, because the numbers there are 0.
        """
        found = []
        for i in range(blocks_per_step):
            at = jnp.broadcast_to(step * blocks_per_step + i, tile.columns.shape)
            mask = is_column & (at < exponents_ref.shape[1])
            bits = load(exponents_ref.at[tile.group, at, tile.columns], mask=mask, other=0)
            found.append(_power(bits.astype(jnp.int32)))
        return found

    def add(step, scales, total):
        """Return `total` plus the products with a step's blocks, which have these scales."""
        for run in range(blocks_per_step // 2):
            first = step * config.block_depth // 2 + run * BLOCK
            byte = (first + jnp.arange(BLOCK))[None]
            at = values_ref.at[tile.group, tile.columns[:, None], byte]
            stored = load(at, mask=is_column[:, None] & (byte < num_bytes), other=0)
            for i, part in enumerate(widen_e2m1(stored, x_ref.dtype, interpret=interpret)):
                k = (2 * first + i * BLOCK + jnp.arange(BLOCK))[None]
                mask = tile.is_row & (k < depth)
                x = load(x_ref.at[tile.sources, k], mask=mask, other=0.0)
                matrix = part * scales[2 * run + i].astype(part.dtype)[:, None]  # exact
                total = total + dot(x, matrix, trans_b=True, precision="highest")
        return total

    def accumulate(step, carry):
        total, scales = carry
        following = scales_of(step + 1)  # on their way while this step is computed
        return add(step, scales, total), following

    zero = jnp.zeros((config.block_rows, config.block_columns), jnp.float32)
    num_steps = pl.cdiv(2 * num_bytes, config.block_depth)
    total, _ = jax.lax.fori_loop(0, num_steps, accumulate, (zero, scales_of(0)))
    return total


def _power(exponents: jax.Array) -> jax.Array:
    """Return 2^(exponents - 127) for i32 from 0 to 254, as f32."""
    bits = jnp.where(exponents > 0, exponents << 23, 1 << 22)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
