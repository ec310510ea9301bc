"""Every implementation of the grouped product with MXFP4, by the definition in f64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_mxfp4_matmul import grouped_mxfp4_matmul

# Sizes of groups, then depth and columns. The third has a run that is half empty.
CASES = {
    "one-row": ((0, 1, 0), (64, 64)),
    "steps": ((5, 0, 17, 2, 0), (320, 130)),
    "edges": ((0, 7, 65, 0, 129, 1), (96, 50)),
    "many": ((16, 15, 1, 0, 480), (128, 90)),
    "no-rows": ((0, 0), (64, 64)),
}
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def arguments(name, dtype):
    """x, values, exponents, sizes, and the matrices f64[G, O, I]; no scale of a group without rows
    is a number."""
    sizes, (depth, columns) = CASES[name]
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 16, (len(sizes), columns, depth)).astype(np.uint8)
    exponents = rng.integers(120, 130, (len(sizes), depth // 32, columns)).astype(np.uint8)
    matrices = np.where(bits > 7, -1, 1) * NUMBERS[bits & 7]
    matrices *= 2.0 ** (np.repeat(exponents, 32, axis=1).swapaxes(1, 2) - 127.0)
    exponents[np.array(sizes) == 0] = 255
    runs = np.pad(bits, ((0, 0), (0, 0), (0, depth % 64))).reshape(len(sizes), columns, -1, 2, 32)
    values = (runs[..., 0, :] | runs[..., 1, :] << 4).reshape(len(sizes), columns, -1)
    x = rng.normal(size=(sum(sizes), depth)).astype(jnp.dtype(dtype))
    return x, values, exponents, np.array(sizes, np.int32), matrices


@pytest.mark.parametrize(
    "name, dtype",
    [*((name, "float32") for name in CASES), ("edges", "bfloat16"), ("many", "bfloat16")],
)
def test_matches_the_definition(kernels, name, dtype):
    """With rows from and to any places, and as they are. Weights are exact in bf16."""
    x, *arrays, matrices = arguments(name, dtype)
    given = [*map(jnp.array, arrays)]
    multiply = jax.jit(lambda x, *to: grouped_mxfp4_matmul(x, *given, *to, kernels=kernels))
    groups = np.repeat(np.arange(len(matrices)), arrays[-1])
    rows = zip(groups, x.astype(np.float64), strict=True)
    expected = np.reshape([matrices[g] @ row for g, row in rows], (len(x), matrices.shape[1]))
    sources, targets = (np.random.default_rng(i).permutation(len(x)) for i in range(2))
    placed = multiply(x[np.argsort(sources)], sources, targets)[targets]
    for out in multiply(x), placed:
        assert out.dtype == dtype
        rtol = 1e-5 if dtype == "float32" else 2**-8
        scale = np.abs(expected).max(initial=1)
        np.testing.assert_allclose(np.float64(out), expected, rtol=rtol, atol=1e-6 * scale)
