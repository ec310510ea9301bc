"""The product with packed numbers on tensor cores.

One program computes a tile of the result, over a part of the depth. It widens numbers in registers,
which is exact. Then it multiplies one group of inputs at a time, and applies the group's scales to
the product. If several programs share the depth, XLA sums their results in order.
"""

from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.packed_matmul.four_bits import MAX_HALF, FourBits
from pallas_kernels.packed_matmul.reference import packed_matmul_reference
from pallas_kernels.scaled_matmul.triton import MAX_ROWS, ScaledMatmulTuning, with_splits
from pallas_kernels.triton_call import dot, load, store, triton_call, widen_e2m1, widen_nibbles

DTYPES = "bfloat16", "float32"
MIN_HALF = 16  # the depth of a tensor core's product

# Keys are the maximum of rows. The depth of a tile follows from the group, the splits from the
# matrix.
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
        UnsupportedError: the dtype of x or the size of a group is not supported, or the matrix is
            too large.
    """
    num_rows, depth = x.shape
    num_columns, dtype = len(values) - first, dtype or x.dtype
    if x.dtype not in DTYPES:
        raise UnsupportedError(f"x must have a dtype of {', '.join(DTYPES)}; got {x.dtype}")
    if form.half < MIN_HALF:
        raise UnsupportedError(f"groups of {form.group} must have a multiple of {MIN_HALF} numbers")
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
        [
            jax.ShapeDtypeStruct(
                (config.num_splits, num_rows, num_columns),
                dtype if config.num_splits == 1 else jnp.float32,
            )
        ],
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
    return reduce(add, list(parts)).astype(dtype)


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
    optional, half = dict(zip(given, optional, strict=True)), form.half
    (num_rows, depth), (num_outputs, num_bytes) = x_ref.shape, values_ref.shape
    row_block, column_block, split = (pl.program_id(i) for i in range(3))
    rows = row_block * config.block_rows + jnp.arange(config.block_rows)
    columns = column_block * config.block_columns + jnp.arange(config.block_columns)
    outputs = first + columns
    is_row, is_column = rows < num_rows, outputs < num_outputs
    unroll = config.unroll * MAX_HALF // half  # runs that are loaded together
    num_steps = pl.cdiv(num_bytes // half, unroll * config.num_splits)
    first_run = split * num_steps * unroll
    # The lower and the upper numbers of a run may be in different groups.
    starts = (0,) if form.group % (2 * half) == 0 else (0, half)

    def of_groups(ref, run, other):
        """Return the scales or zeros of the run's groups, or `other` for groups past the depth."""
        found = []
        for start in starts:
            at = jax.lax.div((first_run + run) * 2 * half + start, jnp.int32(form.group))
            mask = is_column & (at < ref.shape[0])
            places = jnp.broadcast_to(at, outputs.shape), outputs
            found.append(load(ref.at[places], mask=mask, other=other))
        return found

    def numbers_of(run):
        """Return the numbers [columns, half] in the lower and the upper bits, minus zero points."""
        byte = (first_run + run) * half + jnp.arange(half)[None]
        mask = is_column[:, None] & (byte < num_bytes)
        stored = load(values_ref.at[outputs[:, None], byte], mask=mask, other=0)
        widened = widen_e2m1 if form.is_float else widen_nibbles
        parts = widened(stored, x_ref.dtype, interpret=interpret)
        if "zeros" not in optional:
            return parts
        shifts = (zero.astype(jnp.int32) - 8 for zero in of_groups(optional["zeros"], run, 8))
        first, *others = [shift.astype(x_ref.dtype)[:, None] for shift in shifts]
        return parts[0] - first, parts[1] - (others[0] if others else first)

    def products_of(run):
        """Return the products with each group of the run."""
        products = []
        for start, part in zip((0, half), numbers_of(run), strict=True):
            k = (first_run + run) * 2 * half + start + jnp.arange(half)[None]
            x = load(x_ref.at[rows[:, None], k], mask=is_row[:, None] & (k < depth), other=0.0)
            products.append(dot(x, part, trans_b=True, precision="highest"))
        return products if len(starts) == 2 else [products[0] + products[1]]

    def of_step(function, step):
        return [function(step * unroll + i) for i in range(unroll)]

    def scales_of(run):
        return of_groups(scales_ref, run, 0.0)

    def accumulate(step, carry):
        total, scales = carry
        following = of_step(scales_of, step + 1)  # on their way while this step is computed
        for products, of_runs in zip(of_step(products_of, step), scales, strict=True):
            for product, scale in zip(products, of_runs, strict=True):
                total = total + product * scale.astype(jnp.float32)[None]
        return total, following

    zero = jnp.zeros((config.block_rows, config.block_columns), jnp.float32)
    total, _ = jax.lax.fori_loop(0, num_steps, accumulate, (zero, of_step(scales_of, 0)))
    if "factors" in optional:
        total = total * load(optional["factors"].at[outputs], mask=is_column, other=0.0)[None]
    mask = is_row[:, None] & is_column[None]
    store(out_ref.at[split, rows[:, None], columns[None]], total.astype(out_ref.dtype), mask=mask)
