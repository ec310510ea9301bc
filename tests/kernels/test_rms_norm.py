"""Every implementation of the residual sum and its norm, compared with the equation in f64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm import add_rms_norm, rms_norm

EPS = 1e-6


@functools.partial(jax.jit, static_argnames=("is_centred", "kernels"))
def compiled(x, delta, weight, *, is_centred=False, kernels):
    return add_rms_norm(x, delta, weight, EPS, is_centred, kernels=kernels)


def arguments(num_rows, dim, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x, delta = rng.normal(size=(2, num_rows, dim))
    return tuple(z.astype(jnp.dtype(dtype)) for z in (x, delta, rng.normal(size=dim)))


def by_definition(x, delta, weight, is_centred):
    dtype = x.dtype
    x, delta, weight = (a.astype(np.float64) for a in (x, delta, weight))
    y = (x + delta).astype(dtype).astype(np.float64)  # the stream is kept in its dtype
    return y, y / np.sqrt((y * y).mean(-1, keepdims=True) + EPS) * (weight + is_centred)


@pytest.mark.every_jax
@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize(
    "num_rows, dim, dtype",
    [(3, 320, "float32"), (3, 320, "bfloat16"), (1, 16, "bfloat16"), (2, 4096, "float32")],
)
def test_matches_the_equation(num_rows, dim, dtype, is_centred, kernels):
    inputs = arguments(num_rows, dim, dtype)
    y, out = compiled(*inputs, is_centred=is_centred, kernels=kernels)
    wanted_y, wanted = by_definition(*inputs, is_centred)
    assert y.dtype == out.dtype == inputs[0].dtype
    # XLA may keep the sum in f32 between the two, and the weight may be applied in bf16.
    tolerance = 2e-5 if dtype == "float32" else 1.5 * 2**-7
    np.testing.assert_allclose(np.asarray(y, np.float64), wanted_y, rtol=tolerance, atol=1e-6)
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, rtol=tolerance, atol=1e-6)


@pytest.mark.optimized
def test_a_row_does_not_depend_on_the_others(kernels):
    x, delta, weight = arguments(5, 96, "float32")
    _, all_rows = add_rms_norm(x, delta, weight, EPS, kernels=kernels)
    _, one = add_rms_norm(x[2:3], delta[2:3], weight, EPS, kernels=kernels)
    np.testing.assert_array_equal(np.asarray(all_rows[2]), np.asarray(one[0]))


def test_the_norm_alone_is_the_same():
    x, _, weight = arguments(3, 320, "bfloat16")
    _, out = compiled(x, np.zeros_like(x), weight, kernels="reference")
    alone = jax.jit(functools.partial(rms_norm, eps=EPS))(x, weight)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(alone))
