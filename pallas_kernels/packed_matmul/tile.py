"""The part of a kernel that multiplies a tile of rows by a tile of a packed matrix."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.packed_matmul.four_bits import FourBits, powers
from pallas_kernels.triton_call import dot, load, widen_e2m1, widen_nibbles


class PackedTile(NamedTuple):
    """The tile that a program multiplies: some rows of x, some outputs, and some runs of inputs.

    `packed_matmul` explains runs.
    """

    group: tuple[jax.Array, ...]  # the leading index of the matrix's arrays; () for a single matrix
    sources: jax.Array  # i32[rows, 1], indices of rows of x
    is_row: jax.Array  # bool[rows, 1]; False for padding
    outputs: jax.Array  # i32[columns]
    is_column: jax.Array  # bool[columns]; False for padding
    first_run: Any
    num_steps: Any
    unroll: int  # number of runs in a step; they are loaded together


def multiply_packed(
    tile: PackedTile,
    x_ref: Any,
    values_ref: Any,
    scales_ref: Any,
    optional: Mapping[str, Any],
    form: FourBits,
    interpret: bool,
) -> jax.Array:
    """Return the product f32[rows, columns] of a tile.

    In registers, numbers are converted to x's dtype, which is exact. Scales that are powers of two
    multiply the numbers, which is exact, too. Other scales multiply the f32 product of each group.
    `packed_matmul` explains the arrays; `optional` has "zeros" and "factors", if they exist.
    """
    depth, (num_bytes, half) = x_ref.shape[1], (values_ref.shape[-1], form.half)
    outputs, is_column, first_run = tile.outputs, tile.is_column, tile.first_run
    are_powers = scales_ref.dtype == jnp.uint8
    # A run's first half and its second half may be in different groups.
    starts = (0,) if form.group % (2 * half) == 0 else (0, half)

    def of_groups(ref, run, other):
        """Return a run's scales or zero points, an array per group; `other` past the last group."""
        found = []
        for start in starts:
            at = jax.lax.div((first_run + run) * 2 * half + start, jnp.int32(form.group))
            mask = is_column & (at < ref.shape[-2])
            places = *tile.group, jnp.broadcast_to(at, outputs.shape), outputs
            found.append(load(ref.at[places], mask=mask, other=other))
        return found

    def scales_of(run):
        if are_powers:
            return [powers(bits) for bits in of_groups(scales_ref, run, 0)]
        return of_groups(scales_ref, run, 0.0)

    def numbers_of(run):
        """Return the numbers in the lower and upper bits of a run's bytes, minus zero points."""
        byte = (first_run + run) * half + jnp.arange(half)[None]
        mask = is_column[:, None] & (byte < num_bytes)
        stored = load(values_ref.at[(*tile.group, outputs[:, None], byte)], mask=mask, other=0)
        widened = widen_e2m1 if form.is_float else widen_nibbles
        parts = widened(stored, x_ref.dtype, interpret=interpret)
        if "zeros" not in optional:
            return parts
        shifts = (zero.astype(jnp.int32) - 8 for zero in of_groups(optional["zeros"], run, 8))
        first, *others = [shift.astype(x_ref.dtype)[:, None] for shift in shifts]
        return parts[0] - first, parts[1] - (others[0] if others else first)

    def products_of(run, scales):
        """Return the products of x and a run of consecutive weights, one product for each scale."""
        products, parts = [], numbers_of(run)
        for i, (start, part) in enumerate(zip((0, half), parts, strict=True)):
            k = (first_run + run) * 2 * half + start + jnp.arange(half)[None]
            mask = tile.is_row & (k < depth)
            x = load(x_ref.at[tile.sources, k], mask=mask, other=0.0)
            if are_powers:
                part = part * scales[min(i, len(scales) - 1)].astype(part.dtype)[:, None]
            products.append(dot(x, part, trans_b=True, precision="highest"))
        return products if len(starts) == 2 else [products[0] + products[1]]

    def runs_of(step):
        return [step * tile.unroll + i for i in range(tile.unroll)]

    def accumulate(step, carry):
        total, scales = carry
        following = [scales_of(run) for run in runs_of(step + 1)]  # loaded while this step runs
        for run, of_run in zip(runs_of(step), scales, strict=True):
            for product, scale in zip(products_of(run, of_run), of_run, strict=True):
                product = product if are_powers else product * scale.astype(jnp.float32)[None]
                total = total + product
        return total, following

    zero = jnp.zeros((len(tile.sources), len(outputs)), jnp.float32)
    carry = zero, [scales_of(run) for run in runs_of(0)]
    total, _ = jax.lax.fori_loop(0, tile.num_steps, accumulate, carry)
    if "factors" not in optional:
        return total
    at = optional["factors"].at[(*tile.group, outputs)]
    return total * load(at, mask=is_column, other=0.0)[None]
