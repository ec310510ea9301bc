"""The product with a matrix of 4-bit numbers, one scale for each output and 128 numbers.

A byte of a group of 128 has numbers j and j + 64, each plus 8, the first in the lower bits.
"""

from functools import partial, reduce
from operator import add

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.scaled_matmul.triton import ScaledMatmulTuning
from pallas_kernels.triton_call import dot, load, store, triton_call

GROUP = 128


def pack(numbers: jax.Array) -> jax.Array:
    """Return u8[O, I / 2] from whole numbers [O, I] from -8 to 7."""
    groups = (numbers + 8).astype(jnp.uint8).reshape(len(numbers), -1, 2, GROUP // 2)
    return (groups[:, :, 0] | (groups[:, :, 1] << 4)).reshape(len(numbers), -1)


def four_bit_matmul(
    x: jax.Array,
    packed: jax.Array,
    scales: jax.Array,
    *,
    config: ScaledMatmulTuning,
    interpret: bool = False,
) -> jax.Array:
    """Return x [N, I] times packed u8[O, I / 2], with scales f32[I / 128, O]."""
    num_rows, num_columns = len(x), len(packed)
    (parts,) = triton_call(
        partial(_kernel, config=config, interpret=interpret),
        (x, packed, scales),
        [
            jax.ShapeDtypeStruct(
                (config.num_splits, num_rows, num_columns),
                x.dtype if config.num_splits == 1 else jnp.float32,
            )
        ],
        name="four_bit_matmul",
        grid=(
            pl.cdiv(num_rows, config.block_rows),
            pl.cdiv(num_columns, config.block_columns),
            config.num_splits,
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    return reduce(add, list(parts)).astype(x.dtype)


def _kernel(x_ref, packed_ref, scales_ref, out_ref, *, config, interpret):
    (num_rows, depth), num_columns = x_ref.shape, packed_ref.shape[0]
    row_block, column_block, split = (pl.program_id(i) for i in range(3))
    rows = row_block * config.block_rows + jnp.arange(config.block_rows)
    columns = column_block * config.block_columns + jnp.arange(config.block_columns)
    is_row, is_column = rows < num_rows, columns < num_columns
    num_groups = pl.cdiv(depth // GROUP, config.num_splits)
    first = split * num_groups
    half = jnp.arange(GROUP // 2)[None]

    def scales_of(i):
        at = jnp.broadcast_to(first + i, columns.shape)
        mask = is_column & (at < depth // GROUP)
        return load(scales_ref.at[at, columns], mask=mask, other=0.0)

    def accumulate(i, carry):
        total, scales = carry
        following = scales_of(i + 1)
        group = first + i
        is_inside = group < depth // GROUP
        at = group * (GROUP // 2) + half
        mask = is_column[:, None] & is_inside
        packed = load(packed_ref.at[columns[:, None], at], mask=mask, other=0)
        low, high = nibbles(packed, interpret=interpret)
        k = group * GROUP + half
        mask = is_row[:, None] & is_inside
        x_low = load(x_ref.at[rows[:, None], k], mask=mask, other=0.0)
        x_high = load(x_ref.at[rows[:, None], k + GROUP // 2], mask=mask, other=0.0)
        product = dot(x_low, low, trans_b=True, precision="highest")
        product += dot(x_high, high, trans_b=True, precision="highest")
        return total + product * scales[None], following

    total = jnp.zeros((config.block_rows, config.block_columns), jnp.float32)
    total, _ = jax.lax.fori_loop(0, num_groups, accumulate, (total, scales_of(0)))
    mask = is_row[:, None] & is_column[None]
    store(out_ref.at[split, rows[:, None], columns[None]], total.astype(out_ref.dtype), mask=mask)


def nibbles(x: jax.Array, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Return the lower and the upper four bits of each byte, minus 8, as bf16.

    A nibble in the last bits of 128 in bf16 makes 128 plus the nibble.
    """
    if interpret:
        halves = x & 15, x >> 4
        low, high = (half.astype(jnp.int32).astype(jnp.float32) - 8 for half in halves)
        return low.astype(jnp.bfloat16), high.astype(jnp.bfloat16)

    def widened(shift: int) -> jax.Array:
        (found,) = triton.elementwise_inline_asm(
            f"""{{
            .reg .b32 w, a, b, one, less;
            mov.b32 one, 0x3f803f80;
            mov.b32 less, 0xc308c308;
            shr.u32 w, $2, {shift};
            prmt.b32 a, w, 0, 0x4140;
            prmt.b32 b, w, 0, 0x4342;
            lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, a, one, less;
            fma.rn.bf16x2 $1, b, one, less;
            }}""",
            args=[x],
            constraints="=r,=r,r",
            pack=4,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)],
        )
        return found

    return widened(0), widened(4)
