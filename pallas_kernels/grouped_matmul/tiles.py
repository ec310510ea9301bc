"""The grid that all kernels of grouped products use, and the code that finds a program's rows.

A program computes a tile of the result: a block of rows of one group, and a block of columns. The
number of blocks of rows is known only on the device, so the grid has the maximum number. A program
finds its group from the cumulative group sizes; programs past the last block do nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.triton_call import load, store, triton_call

MAX_GROUPS = 4096  # every program sums the sizes of all groups


@dataclass(frozen=True)
class GroupedMatmulTuning:
    """Tuning of the grouped product: tile sizes (powers of two, at least 16), warps and stages."""

    block_rows: int
    block_columns: int
    block_depth: int
    num_warps: int
    num_stages: int


class Tile(NamedTuple):
    """The rows and columns of the result that a program computes.

    Some of these rows and columns can lie past the end of the result.
    """

    group: jax.Array  # i32[]
    sources: jax.Array  # i32[rows, 1], rows of x
    columns: jax.Array  # i32[columns]
    is_row: jax.Array  # bool[rows, 1]
    is_column: jax.Array  # bool[1, columns]


def fitting(configs: Any, num_rows: int, num_groups: int) -> Any:
    """Return the value of `configs` for `num_rows` rows in `num_groups` groups.

    The keys of `configs` are maximum numbers of rows per group, in ascending order. The last key is
    None, for any number. The function uses the first key that is at least twice the average number
    of rows per group. The factor of two lets the rows of a popular group fit in one block.
    """
    fits = [
        max_rows
        for max_rows in configs
        if max_rows is None or 2 * num_rows <= max_rows * num_groups
    ]
    return configs[fits[0]]


def multiply_tiles(
    product: Callable[..., jax.Array],
    operands: Sequence[jax.Array],
    group_sizes: jax.Array,
    sources: jax.Array | None,
    targets: jax.Array | None,
    *,
    num_columns: int,
    config: GroupedMatmulTuning,
    name: str,
    interpret: bool,
) -> jax.Array:
    """Run a kernel that computes the result [N, num_columns], one tile per program.

    Args:
        product: a function that takes a `Tile` and refs to `operands`, and returns the tile f32.
        operands: x, and the arrays of the groups' matrices.
        group_sizes: see `grouped_matmul`, which also explains `sources` and `targets`.

    Raises:
        UnsupportedError: there are too many groups, or an array of 8-bit numbers has between 2^31
            and 2^32 numbers. Pallas uses 32-bit offsets for such an array, which Triton treats as
            signed.
    """
    x, num_groups = operands[0], len(group_sizes)
    num_rows = x.shape[0] if sources is None else sources.shape[0]
    if num_groups > MAX_GROUPS:
        raise UnsupportedError(f"group_sizes must be {MAX_GROUPS} at most; got {num_groups}")
    for one in operands:
        # Triton treats Pallas' 32-bit offsets as signed; from 2^32 bytes on, offsets have 64 bits.
        if one.size > 2**31 and one.size * one.dtype.itemsize <= 2**32:
            raise UnsupportedError(
                f"matrices must have 2^31 numbers at most, or more than 2^32 bytes; got {one.shape}"
            )
    if num_rows == 0:
        return jnp.zeros((0, num_columns), x.dtype)
    places = {"sources": sources, "targets": targets}
    given = {name: rows.astype(jnp.int32) for name, rows in places.items() if rows is not None}
    kernel = partial(
        _kernel,
        product=product,
        num_operands=len(operands),
        given=tuple(given),
        config=config,
        num_columns=num_columns,
    )
    (out,) = triton_call(
        kernel,
        (*operands, group_sizes.astype(jnp.int32), *given.values()),
        [jax.ShapeDtypeStruct((num_rows, num_columns), x.dtype)],
        name=name,
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
    """Return the maximum number of blocks of rows, for `num_rows` > 0 rows in `num_groups` groups.

    A block has up to `block_rows` rows of one group.
    """
    max_used = min(num_rows, num_groups)
    return max_used + (num_rows - max_used) // block_rows


def _kernel(
    *refs,
    product: Callable[..., jax.Array],
    num_operands: int,
    given: tuple[str, ...],
    config: GroupedMatmulTuning,
    num_columns: int,
):
    operands, (sizes_ref, *place_refs, out_ref) = refs[:num_operands], refs[num_operands:]
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
        total = product(Tile(mine, sources, columns, is_row, is_column), *operands)
        at = out_ref.at[targets, columns[None]]
        store(at, total.astype(out_ref.dtype), mask=is_row & is_column)
