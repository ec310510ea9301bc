"""Every implementation of products with several 8-bit matrices, compared with f64.

In `grouped_scaled_matmul`, each row has one matrix. In `batched_scaled_matmul`, each row is
multiplied by all matrices.
"""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.batched_scaled_matmul import batched_scaled_matmul
from pallas_kernels.grouped_scaled_matmul import grouped_scaled_matmul

pytestmark = pytest.mark.slow

# Sizes of groups, then depth, columns and block; the last two have edges everywhere.
CASES = {
    "one-row": ((0, 0, 1), (128, 128), (128, 128)),
    "blocks": ((5, 0, 17, 2, 0), (256, 192), (64, 128)),
    "edges": ((0, 7, 65, 0, 129, 1), (200, 150), (64, 128)),
    "outputs": ((16, 15, 1, 0, 480), (100, 90), (1, 100)),
    "no-rows": ((0, 0), (128, 64), (128, 128)),
}


def arguments(name, dtype, kind="float8_e4m3fn"):
    """Return x, values and scales. Scales of groups without rows are NaN."""
    sizes, (depth, columns), block = CASES[name]
    rng, num_groups = np.random.default_rng(0), len(sizes)
    values = rng.integers(0, 127, (num_groups, columns, depth)).astype(np.uint8)
    values |= rng.integers(0, 2, values.shape).astype(np.uint8) << 7
    blocks = [-(-size // side) for size, side in zip((columns, depth), block, strict=True)]
    scales = rng.uniform(0.01, 0.1, (num_groups, *blocks)).astype(np.float32)
    scales[np.array(sizes) == 0] = np.nan
    x = rng.normal(size=(sum(sizes), depth)).astype(jnp.dtype(dtype))
    return x, values.view(kind), scales, np.array(sizes, np.int32), block


def by_definition(x, values, scales, sizes, block):
    places = [np.arange(n) // side for n, side in zip(values.shape[1:], block, strict=True)]
    wide = values.astype(np.float64) * scales.astype(np.float64)[:, places[0]][:, :, places[1]]
    groups = np.repeat(np.arange(len(sizes)), sizes)
    products = [wide[g] @ row for g, row in zip(groups, x.astype(np.float64), strict=True)]
    return np.reshape(products, (len(x), values.shape[1]))


@pytest.mark.parametrize(
    "name, dtype, kind",
    [
        *((name, "float32", "float8_e4m3fn") for name in CASES),
        ("edges", "bfloat16", "float8_e4m3fn"),
        ("outputs", "bfloat16", "int8"),
    ],
)
def test_matches_the_definition(kernels, name, dtype, kind):
    """Rows are gathered and scattered in one call, and contiguous in another."""
    x, values, scales, sizes, block = arguments(name, dtype, getattr(ml_dtypes, kind, kind))
    given = [*map(jnp.array, (values, scales, sizes))]
    options = {"block": block, "kernels": kernels}
    multiply = jax.jit(lambda x, *to: grouped_scaled_matmul(x, *given, *to, **options))
    expected = by_definition(x, values, scales, sizes, block)
    sources, targets = (np.random.default_rng(i).permutation(len(x)) for i in range(2))
    placed = multiply(x[np.argsort(sources)], sources, targets)[targets]
    for out in multiply(x), placed:
        check(out, expected, dtype)


def check(out, expected, dtype):
    assert out.dtype == dtype
    rtol = 1e-5 if dtype == "float32" else 2**-7
    scale = np.abs(expected).max(initial=1)
    np.testing.assert_allclose(np.float64(out), expected, rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize("num_rows, block", [(0, (64, 64)), (1, (16, 32)), (130, (128, 96))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_with_every_matrix(kernels, num_rows, block, dtype):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, 3, 96)).astype(jnp.dtype(dtype))
    values = rng.normal(size=(3, 50, 96)).astype(ml_dtypes.float8_e4m3fn)
    blocks = [-(-size // side) for size, side in zip((50, 96), block, strict=True)]
    scales = rng.uniform(0.1, 1, (3, *blocks)).astype(np.float32)
    out = jax.jit(partial(batched_scaled_matmul, block=block, kernels=kernels))(x, values, scales)
    sizes = np.full(3, num_rows)
    rows = x.swapaxes(0, 1).reshape(-1, 96)
    expected = by_definition(rows, values, scales, sizes, block).reshape(3, num_rows, 50)
    check(out, expected.swapaxes(0, 1), dtype)
