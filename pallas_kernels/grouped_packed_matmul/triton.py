"""The grouped product with 4-bit numbers on tensor cores: one program per block of a group's rows.

`multiply_packed` explains what a program does.
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
from pallas_kernels.packed_matmul.four_bits import FourBits
from pallas_kernels.packed_matmul.tile import PackedTile, multiply_packed
from pallas_kernels.packed_matmul.triton import DTYPES, MIN_HALF, check_form

# `fitting` explains the keys. The depth of a tile is at least a run (see `packed_matmul`).
BFLOAT16 = {
    16: GroupedMatmulTuning(16, 64, 128, 4, 6),
    64: GroupedMatmulTuning(64, 128, 128, 4, 3),
    None: GroupedMatmulTuning(128, 128, 64, 8, 3),
}
FLOAT32 = {16: GroupedMatmulTuning(16, 32, 64, 4, 2), None: GroupedMatmulTuning(64, 32, 64, 4, 2)}


def choose_config(
    num_rows: int, num_groups: int, dtype: Any, form: FourBits
) -> GroupedMatmulTuning:
    """Return the tile sizes for `num_rows` rows in `num_groups` groups.

    Tiles are smaller if few inputs share a scale, because more scales and partial products are then
    in registers.
    """
    configs = FLOAT32 if jnp.dtype(dtype) == jnp.float32 else BFLOAT16
    config = fitting(configs, num_rows, num_groups)
    if form.half > MIN_HALF:
        return config
    return replace(config, block_columns=min(64, config.block_columns), block_depth=64)


def grouped_packed_matmul_triton(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    factors: jax.Array | None,
    group_sizes: jax.Array,
    sources: jax.Array | None = None,
    targets: jax.Array | None = None,
    *,
    form: FourBits,
    config: GroupedMatmulTuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `grouped_packed_matmul`.

    Raises:
        UnsupportedError: the dtype of x or the number of inputs per scale is not supported, there
            are too many groups of rows, or `values` has between 2^31 and 2^32 bytes.
    """
    num_groups, num_columns, _ = values.shape
    num_rows = x.shape[0] if sources is None else sources.shape[0]
    if x.dtype not in DTYPES:
        raise UnsupportedError(f"x must have a dtype of {', '.join(DTYPES)}; got {x.dtype}")
    check_form(form)
    config = config or choose_config(num_rows, num_groups, x.dtype, form)
    optional = {"zeros": zeros, "factors": factors}
    given = {name: one for name, one in optional.items() if one is not None}
    options = {"form": form, "config": config, "interpret": interpret}
    return multiply_tiles(
        partial(_product_kernel, given=tuple(given), **options),
        (x, values, scales, *given.values()),
        group_sizes,
        sources,
        targets,
        num_columns=num_columns,
        config=config,
        name="grouped_packed_matmul",
        interpret=interpret,
    )


def _product_kernel(
    tile: Tile,
    x_ref,
    values_ref,
    scales_ref,
    *refs,
    given: tuple[str, ...],
    form: FourBits,
    config: GroupedMatmulTuning,
    interpret: bool,
):
    unroll = max(1, config.block_depth // (2 * form.half))
    num_steps = pl.cdiv(values_ref.shape[2] // form.half, unroll)
    is_column = tile.columns < values_ref.shape[1]
    rows = tile.sources, tile.is_row
    own = PackedTile((tile.group,), *rows, tile.columns, is_column, 0, num_steps, unroll)
    optional = dict(zip(given, refs, strict=True))
    return multiply_packed(own, x_ref, values_ref, scales_ref, optional, form, interpret)
