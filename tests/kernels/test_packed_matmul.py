"""Every implementation of the product with 4-bit numbers, compared with float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.packed_matmul import FourBits, packed_matmul
from pallas_kernels.packed_matmul.triton import packed_matmul_triton
from pallas_kernels.scaled_matmul.triton import ScaledMatmulTuning

pytestmark = pytest.mark.slow

# Rows, depth, columns, the form, and whether there are zero points: nothing divides the last ones.
CASES = {
    "one-row": ((1, 128, 128), FourBits(128), False),
    "halves": ((5, 320, 150), FourBits(64), True),  # of a byte are of two groups
    "edges": ((17, 208, 90), FourBits(32), True),
    "small-groups": ((3, 72, 40), FourBits(16), False),
    "floats": ((3, 72, 40), FourBits(16, is_float=True), False),
    "channel": ((70, 160, 90), FourBits(160), False),
    "a-prompt": ((520, 128, 64), FourBits(64), True),
    "no-rows": ((0, 128, 64), FourBits(128), False),
}
FLOATS = 0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6


def arguments(shape, form, has_zeros, dtype="float32"):
    """Return x, codes u8[O, I], scales, zero points and, for FP4, factors.

    Scales of FP4 are float8.
    """
    rng, (rows, depth, columns) = np.random.default_rng(0), shape
    x = rng.normal(size=(rows, depth)).astype(jnp.dtype(dtype))
    codes = rng.integers(0, 16, (columns, depth)).astype(np.uint8)
    groups = -(-depth // form.group), columns
    zeros = rng.integers(0, 16, groups).astype(np.uint8) if has_zeros else None
    scales = rng.uniform(0.01, 0.1, groups).astype(np.float16)
    if not form.is_float:
        return x, codes, scales, zeros, None
    factors = rng.uniform(0.5, 2, columns).astype(np.float32)
    return x, codes, scales.astype("float8_e4m3fn"), None, factors


def by_definition(x, codes, scales, zeros, factors, form):
    groups = np.arange(codes.shape[1]) // form.group
    numbers = np.array(FLOATS)[codes] if form.is_float else codes - 8.0
    if zeros is not None:
        numbers = codes - zeros[groups].T.astype(float)
    y = x.astype(float) @ (numbers * scales.astype(float)[groups].T).T
    return y if factors is None else y * factors


def check(out, expected, dtype):
    assert out.shape == expected.shape and out.dtype == dtype
    rtol = 1e-5 if dtype == "float32" else 2**-7
    scale = np.abs(expected).max(initial=1)
    np.testing.assert_allclose(np.asarray(out, float), expected, rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, "float32") for name in CASES),
        *((name, "bfloat16") for name in ("edges", "halves", "floats")),
    ],
)
def test_matches_the_definition(kernels, name, dtype):
    shape, form, has_zeros = CASES[name]
    x, codes, *others = arguments(shape, form, has_zeros, dtype)
    multiply = jax.jit(partial(packed_matmul, form=form, kernels=kernels))
    out = multiply(x, form.pack(jnp.asarray(codes)), *others)
    check(out, by_definition(x, codes, *others, form), dtype)


@pytest.mark.parametrize("num_splits", [1, 3, 4])
def test_other_tiles(num_splits):
    """Some splits of the depth end inside a tile, and one split is empty."""
    form, config = FourBits(128), ScaledMatmulTuning(16, 32, 128, num_splits, 4, 2)
    x, codes, *others = arguments((20, 600, 150), form, True, "bfloat16")
    given = x, form.pack(jnp.asarray(codes)), *others, form
    out = packed_matmul_triton(*given, config=config, interpret=True)
    check(out, by_definition(x, codes, *others, form), "bfloat16")


@pytest.mark.parametrize("name", ["edges", "floats"])
def test_the_last_outputs_in_another_dtype(kernels, name):
    shape, form, has_zeros = CASES[name]
    x, codes, *others = arguments(shape, form, has_zeros, "bfloat16")
    given = x, form.pack(jnp.asarray(codes)), *others, form
    out = packed_matmul(*given, jnp.float32, 33, kernels=kernels)
    expected = by_definition(x, codes, *others, form)[:, 33:]
    assert out.dtype == jnp.float32
    # Only the reference multiplies by the scales first, and rounds the product.
    atol = (2**-8 if kernels == "reference" else 1e-5) * np.abs(expected).max()
    np.testing.assert_allclose(out, expected, rtol=0, atol=atol)


def test_any_size_of_a_group_in_plain_jax():
    for depth, form in (33, FourBits(33)), (36, FourBits(12)), (21, FourBits(7)):
        x, codes, *others = arguments((3, depth, 5), form, True)
        given = x, form.pack(jnp.asarray(codes)), *others, form
        out = packed_matmul(*given, kernels="reference")
        check(out, by_definition(x, codes, *others, form), "float32")
