"""The grouped product on tensor cores: one program per block of rows of the same group."""

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
from pallas_kernels.triton_call import dot, load

DTYPES = "bfloat16", "float16", "float32"

# Keys are explained in `fitting`. With few rows, reading the weights takes the most time.
BFLOAT16 = {
    16: GroupedMatmulTuning(16, 64, 128, 4, 4),
    64: GroupedMatmulTuning(64, 128, 64, 4, 4),
    None: GroupedMatmulTuning(128, 128, 64, 8, 4),
}
FLOAT32 = {16: GroupedMatmulTuning(16, 64, 32, 4, 3), None: GroupedMatmulTuning(64, 64, 32, 8, 3)}


def choose_config(num_rows: int, num_groups: int, dtype: Any) -> GroupedMatmulTuning:
    """Return the tile sizes for `num_rows` rows in `num_groups` groups."""
    configs = FLOAT32 if jnp.dtype(dtype) == jnp.float32 else BFLOAT16
    return fitting(configs, num_rows, num_groups)


def grouped_matmul_triton(
    x: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    sources: jax.Array | None = None,
    targets: jax.Array | None = None,
    *,
    config: GroupedMatmulTuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute `grouped_matmul` on tensor cores.

    Each used matrix is read once per block of rows, and no unused matrix is read.

    Raises:
        UnsupportedError: dtypes differ or are not in DTYPES, or there are too many groups.
    """
    num_groups, depth, num_columns = weights.shape
    num_rows = x.shape[0] if sources is None else sources.shape[0]
    if x.dtype not in DTYPES or weights.dtype != x.dtype:
        raise UnsupportedError(
            f"x and weights must share a dtype of {', '.join(DTYPES)}; "
            f"got {x.dtype} and {weights.dtype}"
        )
    config = config or choose_config(num_rows, num_groups, x.dtype)
    return multiply_tiles(
        partial(_product, config=config, depth=depth),
        (x, weights),
        group_sizes,
        sources,
        targets,
        num_columns=num_columns,
        config=config,
        name="grouped_matmul",
        interpret=interpret,
    )


def _product(tile: Tile, x_ref, weights_ref, *, config: GroupedMatmulTuning, depth: int):
    def accumulate(i, total):
        k = i * config.block_depth + jnp.arange(config.block_depth)
        is_inside = k < depth
        at = x_ref.at[tile.sources, k[None]]
        x = load(at, mask=tile.is_row & is_inside[None], other=0.0)
        at = weights_ref.at[tile.group, k[:, None], tile.columns[None]]
        weights = load(at, mask=is_inside[:, None] & tile.is_column, other=0.0)
        return total + dot(x, weights, allow_tf32=False)

    zero = jnp.zeros((config.block_rows, config.block_columns), jnp.float32)
    return jax.lax.fori_loop(0, pl.cdiv(depth, config.block_depth), accumulate, zero)
