"""Problems of products with quantised matrices."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from problems import CACHE_BYTES, Problem, normal

from pallas_kernels.packed_matmul import FourBits, packed_matmul
from pallas_kernels.packed_matmul.triton import packed_matmul_triton
from pallas_kernels.scaled_matmul import scaled_matmul
from pallas_kernels.scaled_matmul.triton import scaled_matmul_triton


def scaled(num_rows: int, depth: int, width: int, block: tuple[int, int], dtype: Any) -> Problem:
    """Return the problem of multiplying rows by matrices in float8 with a scale per block."""
    sizes = -(-width // block[0]), -(-depth // block[1])
    count = max(2, min(8, CACHE_BYTES // (depth * width)))
    items = tuple(
        (
            normal(i, (num_rows, depth), dtype),
            normal(20 + i, (width, depth), "float8_e4m3fn"),
            (1 + jnp.abs(normal(40 + i, sizes, "float32"))) / depth**0.5,
        )
        for i in range(count)
    )

    def call(nothing, item, kernels, config):
        if config is None:
            return nothing, scaled_matmul(*item, block, kernels=kernels)
        interpret = kernels == "interpret"
        return nothing, scaled_matmul_triton(*item, block, config=config, interpret=interpret)

    read = depth * width + 4 * sizes[0] * sizes[1]
    moved = read + num_rows * (depth + width) * jnp.dtype(dtype).itemsize
    return Problem((), items, call, moved)


def packed(num_rows: int, depth: int, width: int, group: int, dtype: Any) -> Problem:
    """Return the problem of multiplying rows by matrices of 4-bit numbers.

    Each group of inputs has a scale and a zero point.
    """
    form = FourBits(group)
    groups, num_bytes = (form.num_groups(depth), width), form.width(depth)
    count = max(2, min(8, CACHE_BYTES // (width * num_bytes)))
    items = tuple(
        (
            normal(i, (num_rows, depth), dtype),
            jax.random.bits(jax.random.key(20 + i), (width, num_bytes), jnp.uint8),
            (0.2 + 0.2 * jnp.abs(normal(40 + i, groups, dtype))) / depth**0.5,
            jax.random.bits(jax.random.key(60 + i), groups, jnp.uint8) & 15,
        )
        for i in range(count)
    )

    def call(nothing, item, kernels, config):
        if config is None:
            return nothing, packed_matmul(*item, None, form, kernels=kernels)
        options = {"config": config, "interpret": kernels == "interpret"}
        return nothing, packed_matmul_triton(*item, None, form, **options)

    read = width * num_bytes + 3 * math.prod(groups)
    moved = read + num_rows * (depth + width) * jnp.dtype(dtype).itemsize
    return Problem((), items, call, moved)
