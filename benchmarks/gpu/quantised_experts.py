"""Problems of experts in float8 and 4 bits, and of the projections of latents in float8."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from problems import Problem, experts, normal

from pallas_kernels.batched_scaled_matmul import batched_scaled_matmul
from pallas_kernels.grouped_packed_matmul import grouped_packed_matmul
from pallas_kernels.grouped_scaled_matmul import grouped_scaled_matmul
from pallas_kernels.packed_matmul import FourBits

BLOCK = 128, 128


def _float8(num: int, width: int, depth: int) -> tuple[jax.Array, jax.Array]:
    """Return matrices in float8, and scales of blocks."""
    sizes = num, *(-(-size // side) for size, side in zip((width, depth), BLOCK, strict=True))
    scales = (1 + jnp.abs(normal(40, sizes, "float32"))) / depth**0.5
    return normal(20, (num, width, depth), "float8_e4m3fn"), scales


def _mxfp4(num: int, width: int, depth: int) -> tuple[jax.Array, jax.Array]:
    """Return matrices of 4-bit numbers, and exponents of scales."""
    keys = jax.random.split(jax.random.key(20))
    values = jax.random.bits(keys[0], (num, width, 32 * -(-depth // 64)), jnp.uint8)
    return values, 117 + jax.random.bits(keys[1], (num, depth // 32, width), jnp.uint8) % 4


def _int4(num: int, width: int, depth: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return matrices of 4-bit integers, and the scales and zero points of their groups."""
    keys, form = jax.random.split(jax.random.key(20)), PACKED["int4"]
    values = jax.random.bits(keys[0], (num, width, form.width(depth)), jnp.uint8)
    groups = num, form.num_groups(depth), width
    scales = (1 + jnp.abs(normal(40, groups, "float32"))) / (8 * depth**0.5)
    return values, scales.astype(jnp.float16), jax.random.bits(keys[1], groups, jnp.uint8) % 16


PACKED = {"mxfp4": FourBits(32, is_float=True), "int4": FourBits(128)}
MATRICES = {"float8": _float8, "mxfp4": _mxfp4, "int4": _int4}


def quantised_experts(
    kind: str, num_tokens: int, mixture: tuple[int, int], depth: int, width: int, dtype: Any
) -> Problem:
    """Return the problem `experts` with quantised matrices of a kind in `MATRICES`."""
    plain = experts(num_tokens, mixture, depth, width, dtype)
    weights = MATRICES[kind](mixture[0], width, depth)

    def call(weights, item, kernels, config):
        if kind == "float8":
            given = item[0], *weights, *item[1:]
            return weights, grouped_scaled_matmul(*given, block=BLOCK, kernels=kernels)
        matrices = *weights, *[None] * (4 - len(weights))  # None: no zero points or factors
        given = item[0], *matrices, *item[1:]
        return weights, grouped_packed_matmul(*given, form=PACKED[kind], kernels=kernels)

    used = int((plain.items[-1][1] > 0).sum())
    itemsize = jnp.dtype(dtype).itemsize
    narrow = sum(one.nbytes for one in weights) // mixture[0]
    moved = plain.num_bytes - used * (depth * width * itemsize - narrow)
    return replace(plain, state=weights, call=call, num_bytes=moved)


def scaled_heads(num_rows: int, num_heads: int, depth: int, width: int, dtype: Any) -> Problem:
    """Return the problem of multiplying each head's rows by the head's matrix in float8."""
    weights = _float8(num_heads, width, depth)
    items = tuple((normal(i, (num_rows, num_heads, depth), dtype),) for i in range(2))

    def call(weights, item, kernels, config):
        return weights, batched_scaled_matmul(*item, *weights, block=BLOCK, kernels=kernels)

    rows = num_rows * num_heads * (depth + width) * jnp.dtype(dtype).itemsize
    return Problem(weights, items, call, rows + sum(one.nbytes for one in weights))
