"""The product with packed numbers on tensor cores.

One program computes a tile of the result, over a part of the depth (the inputs); see
`multiply_packed`. If several programs share the depth, XLA sums their results in order.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.packed_matmul.four_bits import MAX_HALF, FourBits
from pallas_kernels.packed_matmul.reference import packed_matmul_reference
from pallas_kernels.packed_matmul.tile import PackedTile, multiply_packed
from pallas_kernels.scaled_matmul.triton import (
    MAX_ROWS,
    ScaledMatmulTuning,
    sum_of_parts,
    with_splits,
)
from pallas_kernels.triton_call import store, triton_call

DTYPES = "bfloat16", "float32"
MIN_HALF = 16  # the depth of a tensor core's product

# Keys are maximum numbers of rows. The depth of a tile follows from the size of a group, and the
# number of splits from the size of the matrix.
BFLOAT16 = {
    16: ScaledMatmulTuning(16, 64, 128, 1, 4, 4),
    32: ScaledMatmulTuning(32, 64, 128, 1, 4, 4),
    64: ScaledMatmulTuning(64, 64, 128, 1, 4, 3),
    None: ScaledMatmulTuning(128, 128, 128, 1, 8, 3),
}
FLOAT32 = ScaledMatmulTuning(16, 32, 32, 1, 4, 2)


def choose_config(num_rows: int, num_columns: int, depth: int, dtype: Any) -> ScaledMatmulTuning:
    """Return the tiles for x [num_rows, depth] and `num_columns` outputs."""
    if jnp.dtype(dtype) == jnp.float32:
        return FLOAT32
    (config, *_) = (x for most, x in BFLOAT16.items() if most is None or num_rows <= most)
    return with_splits(config, num_rows, num_columns, depth)


def check_form(form: FourBits) -> None:
    """Raise an UnsupportedError if the kernels do not support groups of this size."""
    if form.half < MIN_HALF:
        raise UnsupportedError(f"groups of {form.group} must have a multiple of {MIN_HALF} numbers")


def packed_matmul_triton(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    factors: jax.Array | None,
    form: FourBits,
    dtype: Any = None,
    first: int = 0,
    *,
    config: ScaledMatmulTuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `packed_matmul`.

    Raises:
        UnsupportedError: the dtype of x or the number of inputs per scale is not supported, or the
            matrix is too large.
    """
    num_rows, depth = x.shape
    num_columns, dtype = len(values) - first, dtype or x.dtype
    if x.dtype not in DTYPES:
        raise UnsupportedError(f"x must have a dtype of {', '.join(DTYPES)}; got {x.dtype}")
    check_form(form)
    if values.size >= 2**31:  # Triton treats Pallas' 32-bit offsets as signed
        raise UnsupportedError(f"values must have fewer than 2^31 bytes; got {values.shape}")
    if config is None:
        if num_rows > MAX_ROWS:
            given = x, values, scales, zeros, factors, form, dtype, first
            return packed_matmul_reference(*given)
        config = choose_config(num_rows, num_columns, depth, x.dtype)
    if num_rows == 0:
        return jnp.zeros((0, num_columns), dtype)
    optional = {"zeros": zeros, "factors": factors}
    given = {name: x for name, x in optional.items() if x is not None}
    parts = triton_call(
        partial(
            _kernel,
            given=tuple(given),
            form=form,
            first=first,
            config=config,
            interpret=interpret,
        ),
        (x, values, scales, *given.values()),
        [jax.ShapeDtypeStruct((config.num_splits, num_rows, num_columns), dtype)],
        name="packed_matmul",
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


def _kernel(
    x_ref,
    values_ref,
    scales_ref,
    *refs,
    given: tuple[str, ...],
    form: FourBits,
    first: int,
    config: ScaledMatmulTuning,
    interpret: bool,
):
    *optional, out_ref = refs
    num_rows, num_outputs = x_ref.shape[0], values_ref.shape[0]
    row_block, column_block, split = (pl.program_id(i) for i in range(3))
    rows = row_block * config.block_rows + jnp.arange(config.block_rows)
    columns = column_block * config.block_columns + jnp.arange(config.block_columns)
    outputs = first + columns
    is_row, is_column = rows < num_rows, outputs < num_outputs
    unroll = config.unroll * MAX_HALF // form.half
    num_steps = pl.cdiv(values_ref.shape[1] // form.half, unroll * config.num_splits)
    tile = PackedTile(
        (),
        rows[:, None],
        is_row[:, None],
        outputs,
        is_column,
        split * num_steps * unroll,
        num_steps,
        unroll,
    )
    refs = dict(zip(given, optional, strict=True))
    total = multiply_packed(tile, x_ref, values_ref, scales_ref, refs, form, interpret)
    mask = is_row[:, None] & is_column[None]
    store(out_ref.at[split, rows[:, None], columns[None]], total.astype(out_ref.dtype), mask=mask)
