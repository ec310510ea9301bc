"""The scaled products of heads on tensor cores: one program per tile of a head's result."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul.tiles import GroupedMatmulTuning, Tile
from pallas_kernels.grouped_scaled_matmul.triton import check, choose_config, product_kernel
from pallas_kernels.triton_call import store, triton_call


def batched_scaled_matmul_triton(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    *,
    block: tuple[int, int],
    config: GroupedMatmulTuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `batched_scaled_matmul`.

    Raises:
        UnsupportedError: a dtype or the block size is not supported.
    """
    (num_rows, num_heads, depth), num_columns = x.shape, values.shape[1]
    config = config or choose_config(num_rows * num_heads, num_heads, x.dtype, block, depth)
    check(x, values, block, config)
    if num_rows == 0:
        return jnp.zeros((0, num_heads, num_columns), x.dtype)
    (out,) = triton_call(
        partial(_kernel, block=block, config=config, interpret=interpret),
        (x.reshape(-1, depth), values, scales.astype(jnp.float32)),
        [jax.ShapeDtypeStruct((num_rows * num_heads, num_columns), x.dtype)],
        name="batched_scaled_matmul",
        # Adjacent programs read the same matrix.
        grid=(
            pl.cdiv(num_rows, config.block_rows),
            pl.cdiv(num_columns, config.block_columns),
            num_heads,
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    return out.reshape(num_rows, num_heads, num_columns)


def _kernel(x_ref, values_ref, scales_ref, out_ref, *, config: GroupedMatmulTuning, **options):
    row_block, column_block, head = (pl.program_id(i) for i in range(3))
    num_heads, num_columns, _ = values_ref.shape
    rows = (row_block * config.block_rows + jnp.arange(config.block_rows))[:, None]
    places = rows * num_heads + head
    columns = column_block * config.block_columns + jnp.arange(config.block_columns)
    is_row, is_column = places < x_ref.shape[0], (columns < num_columns)[None]
    tile = Tile(head, places, columns, is_row, is_column)
    total = product_kernel(tile, x_ref, values_ref, scales_ref, config=config, **options)
    at = out_ref.at[places, columns[None]]
    store(at, total.astype(out_ref.dtype), mask=is_row & is_column)
