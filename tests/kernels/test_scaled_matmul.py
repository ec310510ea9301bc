"""Every implementation of the product with 8-bit numbers and scales, compared with f64."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.scaled_matmul import scaled_matmul
from pallas_kernels.scaled_matmul.triton import ScaledMatmulTuning, scaled_matmul_triton

F8 = ml_dtypes.float8_e4m3fn
# Rows, depth, columns, and the block: nothing divides the last ones.
CASES = {
    "one-row": ((1, 128, 128), (128, 128)),
    "blocks": ((5, 256, 192), (128, 128)),
    "edges": ((17, 200, 150), (64, 128)),
    "narrow": ((9, 224, 90), (64, 96)),  # as blocks that are cut for several devices
    "outputs": ((70, 100, 90), (1, 100)),
    "a-prompt": ((520, 128, 64), (128, 128)),
    "no-rows": ((0, 128, 64), (128, 128)),
}


def arguments(shape, block, dtype="float32", seed=0):
    """Return x, values and scales.

    The values include subnormal ones and the largest, but no NaN.
    """
    rng, (rows, depth, columns) = np.random.default_rng(seed), shape
    bits = rng.integers(0, 255, (columns, depth)).astype(np.uint8)
    bits[bits == 127] = 1
    x = rng.normal(size=(rows, depth)).astype(jnp.dtype(dtype))
    sizes = [-(-size // side) for size, side in zip((columns, depth), block, strict=True)]
    return x, bits.view(F8), rng.uniform(0.01, 0.1, sizes).astype(np.float32)


def by_definition(x, values, scales, block):
    of_rows, of_columns = (
        np.arange(n) // side for n, side in zip(values.shape, block, strict=True)
    )
    matrix = values.astype(np.float64) * scales.astype(np.float64)[of_rows[:, None], of_columns]
    return x.astype(np.float64) @ matrix.T


def check(out, expected, dtype):
    assert out.shape == expected.shape and out.dtype == dtype
    rtol = 1e-5 if dtype == "float32" else 2**-7
    scale = np.abs(expected).max(initial=1)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize(
    "name, dtype",
    [*((name, "float32") for name in CASES), ("narrow", "bfloat16"), ("outputs", "bfloat16")],
)
def test_matches_the_definition(kernels, name, dtype):
    shape, block = CASES[name]
    given = arguments(shape, block, dtype)
    multiply = jax.jit(partial(scaled_matmul, block=block, kernels=kernels))
    check(multiply(*given), by_definition(*given, block), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_integers_in_groups(kernels, dtype):
    shape, block = (5, 256, 90), (1, 128)
    x, values, scales = arguments(shape, block, dtype)
    given = x, values.view(np.int8), scales
    out = scaled_matmul(*given, block, kernels=kernels)
    check(out, by_definition(*given, block), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("num_splits, unroll", [(1, 1), (1, 2), (3, 1), (2, 2)])
def test_other_tiles(num_splits, unroll):
    """Some splits of the depth end inside a tile, and one split is empty."""
    shape, block = (20, 600, 150), (64, 128)
    config = ScaledMatmulTuning(16, 32, 128, num_splits, 4, 2, unroll)
    given = arguments(shape, block, "bfloat16")
    out = scaled_matmul_triton(*given, block, config=config, interpret=True)
    check(out, by_definition(*given, block), "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["edges", "outputs"])
def test_the_last_outputs_in_another_dtype(kernels, name):
    shape, block = CASES[name]
    given = arguments(shape, block, "bfloat16")
    out = scaled_matmul(*given, block, jnp.float32, 33, kernels=kernels)
    expected = by_definition(*given, block)[:, 33:]
    assert out.dtype == jnp.float32
    # Only a reference that multiplies the scales first rounds their product.
    atol = (2**-9 if kernels == "reference" and name == "edges" else 1e-5) * np.abs(expected).max()
    np.testing.assert_allclose(out, expected, rtol=0, atol=atol)
