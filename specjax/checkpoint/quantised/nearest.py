"""Rounds weights to the nearest quantised numbers, and computes their scales."""

import jax
import jax.numpy as jnp

from specjax.checkpoint.quantised.bits import Bits


def nearest(
    weights: jax.Array,
    block: tuple[int, int],
    bits: Bits,
    scales_dtype: str = "float32",
    axis: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return numbers [..., O, I] and scales [..., blocks of O, blocks of I] of weights [..., O, I].

    `block` is the number of rows and columns that share a scale. The scale is the block's largest
    absolute weight, divided by half the range of the numbers, or 1 for a block of zeros. Weights
    are divided by their scale and rounded, as compressed-tensors does without calibration. The
    numbers have the dtype of `bits`, except that 4-bit integers are returned as int8.

    If blocks are divided over the devices of a mesh axis, `axis` is the name of this axis. Then all
    devices have the same scale for a block.
    """
    wide = in_blocks(weights.astype(jnp.float32), block)
    largest = jnp.abs(wide).max(axis=(-3, -1))
    largest = largest if axis is None else jax.lax.pmax(largest, axis)
    scales = largest / ((bits.largest - bits.least) / 2)
    scales = scales.astype(scales_dtype)
    scales = jnp.where(scales == 0, jnp.ones_like(scales), scales)
    numbers = wide / scales.astype(jnp.float32)[..., :, None, :, None]
    numbers = jnp.clip(numbers, bits.least, bits.largest)
    if bits.dtype.startswith("int"):
        numbers = jnp.round(numbers).astype("int8")
    else:
        numbers = numbers.astype(bits.dtype)
    return from_blocks(numbers, weights.shape), scales


def in_blocks(matrix: jax.Array, block: tuple[int, int]) -> jax.Array:
    """Return a matrix [..., O, I] as [..., blocks of O, rows, blocks of I, columns].

    The last blocks are padded with zeros.
    """
    *outer, num_out, num_in = matrix.shape
    rows, columns = block
    padding = [(0, 0)] * len(outer) + [(0, -num_out % rows), (0, -num_in % columns)]
    padded = jnp.pad(matrix, padding)
    return padded.reshape(*outer, -(-num_out // rows), rows, -(-num_in // columns), columns)


def from_blocks(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the matrix [..., O, I] with this shape. This is the inverse of `in_blocks`."""
    *outer, num_rows, rows, num_columns, columns = blocks.shape
    matrix = blocks.reshape(*outer, num_rows * rows, num_columns * columns)
    return matrix[..., : shape[-2], : shape[-1]]


def relative_error(made: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the Frobenius norm of `made - weights`, divided by the norm of `weights`."""
    wide = weights.astype(jnp.float32)
    lost = jnp.sum((made.astype(jnp.float32) - wide) ** 2)
    return jnp.sqrt(lost / jnp.maximum(jnp.sum(wide**2), jnp.finfo(jnp.float32).tiny))
