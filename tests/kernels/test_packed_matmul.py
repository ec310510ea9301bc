"""Every implementation of the product with 4-bit numbers, by the definition in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.packed_matmul import half, pack, packed_matmul
from pallas_kernels.packed_matmul.triton import packed_matmul_triton
from pallas_kernels.scaled_matmul.triton import ScaledMatmulTuning

# Rows, depth, columns, group, and whether there are zero points: nothing divides the last ones.
CASES = {
    "one-row": ((1, 128, 128), 128, False),
    "halves": ((5, 320, 150), 64, True),  # of a byte are of two groups
    "edges": ((17, 208, 90), 32, True),
    "small-groups": ((3, 72, 40), 16, False),
    "channel": ((70, 160, 90), 160, False),
    "a-prompt": ((520, 128, 64), 64, True),
    "no-rows": ((0, 128, 64), 128, False),
}


def arguments(shape, group, has_zeros, dtype="float32"):
    """x, numbers u8[O, I] of all kinds, scales f16, zero points."""
    rng, (rows, depth, columns) = np.random.default_rng(0), shape
    x = rng.normal(size=(rows, depth)).astype(jnp.dtype(dtype))
    numbers = rng.integers(0, 16, (columns, depth)).astype(np.uint8)
    groups = -(-depth // group), columns
    zeros = rng.integers(0, 16, groups).astype(np.uint8) if has_zeros else None
    return x, numbers, rng.uniform(0.01, 0.1, groups).astype(np.float16), zeros


def by_definition(x, numbers, scales, zeros, group):
    groups = np.arange(numbers.shape[1]) // group
    shift = 8.0 if zeros is None else zeros[groups].T.astype(float)
    return x.astype(float) @ ((numbers - shift) * scales[groups].T.astype(float)).T


def check(out, expected, dtype):
    assert out.shape == expected.shape and out.dtype == dtype
    rtol = 1e-5 if dtype == "float32" else 2**-7
    scale = np.abs(expected).max(initial=1)
    np.testing.assert_allclose(np.asarray(out, float), expected, rtol=rtol, atol=rtol * scale)


def packed(numbers, group):
    return pack(jnp.asarray(numbers), half(group))


@pytest.mark.parametrize(
    "name, dtype",
    [*((name, "float32") for name in CASES), ("edges", "bfloat16"), ("halves", "bfloat16")],
)
def test_matches_the_definition(kernels, name, dtype):
    shape, group, has_zeros = CASES[name]
    x, numbers, *others = arguments(shape, group, has_zeros, dtype)
    multiply = jax.jit(partial(packed_matmul, group=group, kernels=kernels))
    out = multiply(x, packed(numbers, group), *others)
    check(out, by_definition(x, numbers, *others, group), dtype)


@pytest.mark.parametrize("num_splits", [1, 3, 4])
def test_other_tiles(num_splits):
    """Parts of the depth that end between tiles, and one that is empty."""
    group, config = 128, ScaledMatmulTuning(16, 32, 128, num_splits, 4, 2)
    x, numbers, *others = arguments((20, 600, 150), group, True, "bfloat16")
    given = x, packed(numbers, group), *others, group, half(group)
    out = packed_matmul_triton(*given, config=config, interpret=True)
    check(out, by_definition(x, numbers, *others, group), "bfloat16")


def test_the_last_outputs_in_another_dtype(kernels):
    x, numbers, *others = arguments((17, 208, 90), 32, True, "bfloat16")
    out = packed_matmul(x, packed(numbers, 32), *others, 32, jnp.float32, 33, kernels=kernels)
    expected = by_definition(x, numbers, *others, 32)[:, 33:]
    assert out.dtype == jnp.float32
    # Only the reference multiplies by the scales first, and rounds the product.
    atol = (2**-8 if kernels == "reference" else 1e-5) * np.abs(expected).max()
    np.testing.assert_allclose(out, expected, rtol=0, atol=atol)


def test_any_size_of_a_group_in_plain_jax():
    for depth, group in (33, 33), (36, 12), (21, 7):
        x, numbers, *others = arguments((3, depth, 5), group, True)
        out = packed_matmul(x, packed(numbers, group), *others, group, kernels="reference")
        check(out, by_definition(x, numbers, *others, group), "float32")
