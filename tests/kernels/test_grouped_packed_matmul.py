"""Every implementation of the grouped product with 4-bit numbers, compared with f64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_packed_matmul import grouped_packed_matmul
from pallas_kernels.packed_matmul import FourBits

pytestmark = pytest.mark.slow

# Sizes of groups, then depth and columns. The third has a run that is half empty.
SIZES = {
    "one-row": ((0, 1, 0), (64, 64)),
    "steps": ((5, 0, 17, 2, 0), (320, 130)),
    "edges": ((0, 7, 65, 0, 129, 1), (96, 50)),
    "many": ((16, 15, 1, 0, 480), (128, 90)),
    "no-rows": ((0, 0), (64, 64)),
}
# The form, and whether there are zero points.
FORMS = {
    "mxfp4": (FourBits(32, is_float=True), False),
    "nvfp4": (FourBits(16, is_float=True), False),
    "zeros": (FourBits(64), True),
    "channel": (FourBits(320), False),
}
FLOATS = 0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6
CASES = [
    *(("mxfp4", name, "float32") for name in SIZES),
    *(("mxfp4", name, "bfloat16") for name in ("edges", "many")),
    *(("nvfp4", "edges", "float32"), ("nvfp4", "many", "bfloat16")),
    *(
        ("zeros", "steps", "float32"),
        ("zeros", "many", "bfloat16"),
        ("channel", "steps", "float32"),
    ),
]


def arguments(kind, name, dtype):
    """Return x, the arrays of the matrices, group sizes, and the matrices f64[G, O, I].

    Scales of groups without rows are NaN.
    """
    (form, has_zeros), (sizes, (depth, columns)) = FORMS[kind], SIZES[name]
    rng, count = np.random.default_rng(0), len(sizes)
    codes = rng.integers(0, 16, (count, columns, depth)).astype(np.uint8)
    groups, of_input = (count, form.num_groups(depth), columns), np.arange(depth) // form.group
    zeros = rng.integers(0, 16, groups).astype(np.uint8) if has_zeros else None
    factors = rng.uniform(0.5, 2, (count, columns)).astype(np.float32) if kind == "nvfp4" else None
    scales = rng.uniform(0.01, 0.1, groups).astype("float8_e4m3fn" if form.is_float else np.float16)
    wide = scales.astype(float)
    if kind == "mxfp4":
        scales = rng.integers(120, 130, groups).astype(np.uint8)
        wide = 2.0 ** (scales - 127.0)
    numbers = np.array(FLOATS)[codes] if form.is_float else codes - 8.0
    if has_zeros:
        numbers = codes - zeros[:, of_input].swapaxes(1, 2).astype(float)
    matrices = numbers * wide[:, of_input].swapaxes(1, 2)
    matrices = matrices if factors is None else matrices * factors[..., None]
    scales[np.array(sizes) == 0] = 255 if kind == "mxfp4" else np.nan
    x = rng.normal(size=(sum(sizes), depth)).astype(jnp.dtype(dtype))
    arrays = form.pack(jnp.asarray(codes)), scales, zeros, factors
    return x, arrays, jnp.array(sizes, jnp.int32), matrices


@pytest.mark.parametrize("kind, name, dtype", CASES)
def test_matches_the_definition(kernels, kind, name, dtype):
    """Rows are gathered and scattered in one call, and contiguous in another."""
    x, arrays, sizes, matrices = arguments(kind, name, dtype)
    given = [None if one is None else jnp.array(one) for one in arrays]
    run = partial(grouped_packed_matmul, form=FORMS[kind][0], kernels=kernels)
    multiply = jax.jit(lambda x, *to: run(x, *given, sizes, *to))
    groups = np.repeat(np.arange(len(matrices)), sizes)
    rows = zip(groups, x.astype(np.float64), strict=True)
    expected = np.reshape([matrices[g] @ row for g, row in rows], (len(x), matrices.shape[1]))
    sources, targets = (np.random.default_rng(i).permutation(len(x)) for i in range(2))
    placed = multiply(x[np.argsort(sources)], sources, targets)[targets]
    # MXFP4 is exact in bf16; other matrices are rounded by the reference.
    is_exact = dtype == "float32" or kind == "mxfp4" or kernels == "interpret"
    for out in multiply(x), placed:
        assert out.dtype == dtype
        rtol = 1e-5 if dtype == "float32" else 2**-8
        scale = np.abs(expected).max(initial=1)
        atol = (1e-6 if is_exact else 2**-8) * scale
        np.testing.assert_allclose(np.float64(out), expected, rtol=rtol, atol=atol)
