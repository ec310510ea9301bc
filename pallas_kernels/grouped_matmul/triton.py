"""The grouped product on tensor cores: one program per block of rows of the same group.

The number of blocks is known only on the device, so the grid has the maximum number. A program
finds its group from the cumulative group sizes; programs past the last block do nothing.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.triton_call import dot, load, store, triton_call

DTYPES = "bfloat16", "float16", "float32"
MAX_GROUPS = 4096  # every program sums the sizes of all groups


@dataclass(frozen=True)
class GroupedMatmulTuning:
    """Tuning of the grouped product: tile sizes (powers of two, at least 16), warps and stages."""

    block_rows: int
    block_columns: int
    block_depth: int
    num_warps: int
    num_stages: int


# A key is the upper limit of twice the average number of rows per group; None is for all other
# sizes. With few rows, reading the weights takes the most time.
BFLOAT16 = {
    16: GroupedMatmulTuning(16, 64, 128, 4, 4),
    64: GroupedMatmulTuning(64, 128, 64, 4, 4),
    None: GroupedMatmulTuning(128, 128, 64, 8, 4),
}
FLOAT32 = {16: GroupedMatmulTuning(16, 64, 32, 4, 3), None: GroupedMatmulTuning(64, 64, 32, 8, 3)}


def choose_config(num_rows: int, num_groups: int, dtype: Any) -> GroupedMatmulTuning:
    """Return the tile sizes for `num_rows` rows in `num_groups` groups."""
    configs = FLOAT32 if jnp.dtype(dtype) == jnp.float32 else BFLOAT16
    # Twice the average, so that a popular expert's rows fit in one block.
    fits = [
        max_rows
        for max_rows in configs
        if max_rows is None or 2 * num_rows <= max_rows * num_groups
    ]
    return configs[fits[0]]


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
    """See `grouped_matmul`. Each used matrix is read once per block, and no unused matrix is read.

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
    if num_groups > MAX_GROUPS:
        raise UnsupportedError(f"group_sizes must be {MAX_GROUPS} at most; got {num_groups}")
    if num_rows == 0:
        return jnp.zeros((0, num_columns), x.dtype)
    config = config or choose_config(num_rows, num_groups, x.dtype)
    places = {"sources": sources, "targets": targets}
    given = {name: rows.astype(jnp.int32) for name, rows in places.items() if rows is not None}
    kernel = partial(
        _kernel,
        given=tuple(given),
        config=config,
        depth=depth,
        num_columns=num_columns,
    )
    (out,) = triton_call(
        kernel,
        (x, weights, group_sizes.astype(jnp.int32), *given.values()),
        [jax.ShapeDtypeStruct((num_rows, num_columns), x.dtype)],
        name="grouped_matmul",
        # Blocks of a group are adjacent, so that all but the first find its matrix in the L2 cache.
        grid=(
            pl.cdiv(num_columns, config.block_columns),
            max_blocks(num_rows, num_groups, config.block_rows),
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    return out


def max_blocks(num_rows: int, num_groups: int, block_rows: int) -> int:
    """Return the maximum number of blocks for `num_rows` > 0 rows. No block spans two groups."""
    max_used = min(num_rows, num_groups)
    return max_used + (num_rows - max_used) // block_rows


def _kernel(
    x_ref,
    weights_ref,
    sizes_ref,
    *refs,
    given: tuple[str, ...],
    config: GroupedMatmulTuning,
    depth: int,
    num_columns: int,
):
    *place_refs, out_ref = refs
    places = dict(zip(given, place_refs, strict=True))
    column_block, row_block = pl.program_id(0), pl.program_id(1)
    num_groups = sizes_ref.shape[0]
    # Padded, because sizes in Triton must be powers of two.
    group = jnp.arange(pl.next_power_of_2(num_groups))
    sizes = load(sizes_ref.at[group], mask=group < num_groups, other=0)
    num_blocks = (sizes + config.block_rows - 1) // config.block_rows
    is_before = jnp.cumsum(num_blocks) <= row_block
    mine = jnp.sum(is_before.astype(jnp.int32))

    @pl.when(mine < num_groups)
    def _():
        first = jnp.sum(jnp.where(is_before, sizes, 0))
        end = first + jnp.sum(jnp.where(group == mine, sizes, 0))
        block = row_block - jnp.sum(jnp.where(is_before, num_blocks, 0))
        rows = first + block * config.block_rows + jnp.arange(config.block_rows)
        columns = column_block * config.block_columns + jnp.arange(config.block_columns)
        is_mine = rows < end

        def placed(name):
            # Masked rows point past the end: in interpret mode a masked store writes the old value,
            # which must not overwrite a row written by another lane.
            if name not in places:
                return rows
            return load(places[name].at[rows], mask=is_mine, other=out_ref.shape[0])

        sources, targets = placed("sources")[:, None], placed("targets")[:, None]
        is_row = is_mine[:, None]
        is_column = (columns < num_columns)[None]

        def accumulate(i, total):
            k = i * config.block_depth + jnp.arange(config.block_depth)
            is_inside = k < depth
            x = load(x_ref.at[sources, k[None]], mask=is_row & is_inside[None], other=0.0)
            tile = weights_ref.at[mine, k[:, None], columns[None]]
            weights = load(tile, mask=is_inside[:, None] & is_column, other=0.0)
            return total + dot(x, weights, allow_tf32=False)

        zero = jnp.zeros((config.block_rows, config.block_columns), jnp.float32)
        total = jax.lax.fori_loop(0, pl.cdiv(depth, config.block_depth), accumulate, zero)
        at = out_ref.at[targets, columns[None]]
        store(at, total.astype(out_ref.dtype), mask=is_row & is_column)
