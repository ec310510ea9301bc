"""Matmuls whose sum is left to the kernel that reads it, where that fills the GPU.

A matmul of few rows is bound by reading its weight, which takes a program on every multiprocessor;
one with few columns has not so many tiles. Splitting its depth makes more. Where the sum of the
parts is what the next kernel does first anyway, that costs no launch, and the order of the sum is
fixed.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose

TILE_ROWS, TILE_COLUMNS = 64, 64
LEAST_TILES = 128  # of the H200's 132 multiprocessors
MOST_SPLITS, LEAST_DEPTH = 8, 256


def project(x: jax.Array, weight: jax.Array, kernels: str) -> jax.Array:
    """x [N, D] @ weight [D, F] as [N, F], or as partial sums f32[S, N, F] for a kernel to add."""
    num_splits = splits_of(x.shape[0], *weight.shape)
    if num_splits == 1 or choose("rms_norm", kernels, ("triton", "reference")) == "reference":
        return x @ weight
    return jnp.einsum(
        "nsd,sdf->snf",
        x.reshape(x.shape[0], num_splits, -1),
        weight.reshape(num_splits, -1, weight.shape[1]),
        preferred_element_type=jnp.float32,
    )


def splits_of(num_rows: int, depth: int, width: int) -> int:
    """The fewest parts, a power of two, that make a tile for every multiprocessor."""
    num_tiles = -(-num_rows // TILE_ROWS) * -(-width // TILE_COLUMNS)
    splits = 1
    while (
        num_tiles * splits < LEAST_TILES
        and splits < MOST_SPLITS
        and depth % (2 * splits * LEAST_DEPTH) == 0
    ):
        splits *= 2
    return splits
