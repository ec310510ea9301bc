"""Kernels as text of Triton functions, run in NumPy and compared with their equations.

tests/inspect/test_jax_triton.py compiles the text with Triton.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import triton_call, triton_source

pytestmark = pytest.mark.every_jax

F32 = jnp.float32


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def launched(kernel, *operands, grid, shape=(), dtype=F32):
    out = jax.ShapeDtypeStruct(shape or operands[0].shape, dtype)
    (made,) = triton_call.triton_call(
        kernel, operands, [out], name="tested", grid=grid, num_warps=1
    )
    return np.asarray(made)


def test_a_multiply_add_rounds_once(checker):
    def kernel(a, b, c, out):
        out[...] = triton_call.multiply_add(a[...], b[...], c[...], interpret=False)

    a, b, c = normal(3, 64)
    once = (a.astype(np.float64) * b + c).astype(np.float32)
    assert np.any(once != a * b + c)
    np.testing.assert_array_equal(launched(kernel, a, b, c, grid=(1,)), once)


def test_a_grid_that_is_too_wide_becomes_one_axis(checker, monkeypatch):
    def kernel(out):
        i, j, k = (pl.program_id(axis) for axis in range(3))
        out[i, j, k] = 100 * i + 10 * j + k

    monkeypatch.setattr(triton_source, "MAX_PROGRAMS", 4)
    shape = 3, 5, 2
    i, j, k = np.indices(shape)
    made = launched(kernel, grid=shape, shape=shape, dtype=jnp.int32)
    np.testing.assert_array_equal(made, 100 * i + 10 * j + k)


def source_of(kernel, shape):
    """Return the text of a kernel of one array, which is only described by its shape."""
    ref = jax.ShapeDtypeStruct(shape, jnp.int8)
    call = pl.pallas_call(kernel, out_shape=ref, grid=(1,), in_specs=[pl.no_block_spec],
                          out_specs=pl.no_block_spec, interpret=True)  # fmt: skip
    (traced,) = jax.make_jaxpr(call)(ref).eqns
    jaxpr = traced.params["jaxpr"]
    return triton_source.triton_source(jaxpr, name="f", grid=(1,), aliases={}, num_inputs=1)


@pytest.mark.parametrize("size, is_wide", [(2**31 - 1, False), (2**31, True)])
def test_offsets_have_as_many_bits_as_the_array_takes(size, is_wide):
    def kernel(x, out):
        out[pl.program_id(0)] = x[pl.program_id(0)]

    assert ("tl.int64" in source_of(kernel, (size,))) == is_wide


def test_what_has_no_translation_is_named():
    def kernel(x, out):
        out[0] = jax.lax.clz(x[0])

    with pytest.raises(NotImplementedError, match="clz has no translation"):
        source_of(kernel, (4,))


@pytest.mark.parametrize(
    "asked, has_pallas, has_jax_triton, found",
    [
        (None, True, True, "pallas"),
        (None, False, True, "jax_triton"),
        (None, False, False, None),
        ("mosaic", True, True, "'mosaic' is unknown; choose one of pallas, jax_triton"),
        ("jax_triton", True, False, "'jax_triton' is not installed; pip install jax-triton"),
        ("pallas", False, True, "'pallas' is not installed; unset it"),
    ],
)
def test_backends(asked, has_pallas, has_jax_triton, found, monkeypatch):
    monkeypatch.delenv(triton_call.VARIABLE, raising=False)
    monkeypatch.setattr(triton_call, "plt", pl if has_pallas else None)
    spec = "a spec" if has_jax_triton else None
    monkeypatch.setattr(triton_call.importlib.util, "find_spec", lambda name: spec)
    if asked is None:
        assert triton_call.backend() == found
        assert bool(triton_call.packages_of_backend()) == (found == "jax_triton")
        return
    monkeypatch.setenv(triton_call.VARIABLE, asked)
    with pytest.raises(ValueError, match=found):
        triton_call.backend()
