"""Kernels as the text of Triton functions, run program by program in numpy, against the equations.

What Triton's own compiler makes of the text is in `tests/inspect/test_jax_triton.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from support import kernels_paged_attention, triton_stand_in
from support.kernels_delta_rule import Implementation, Sizes, Streams
from support.kernels_paged_attention import (
    Case,
    attention_by_definition,
    compiled,
    options,
)

from pallas_kernels import dispatch, triton_call, triton_source
from pallas_kernels.draw_tokens import draw_tokens
from pallas_kernels.fused_linear import Norm, fused_linear
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.rms_norm import add_rms_norm
from pallas_kernels.rope_write import HeadWeights, rope_write
from pallas_kernels.route import Rule, route
from pallas_kernels.truncation import truncate

pytestmark = pytest.mark.every_jax

F32 = jnp.float32


@pytest.fixture
def translated(monkeypatch):
    """Kernels run as jax_triton would have them run."""
    for module in triton_call, dispatch:
        monkeypatch.setattr(module, "backend", lambda: "jax_triton")
    monkeypatch.setattr(triton_call, "launch", triton_stand_in.launch)
    monkeypatch.setattr(dispatch, "compute_capability", lambda: (9, 0))


def normal(*shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


def norm():
    run = partial(add_rms_norm, eps=1e-6, is_centred=True)
    return run, (normal(3, 320), normal(3, 320, seed=1), normal(320))


def draw():
    temperature, seeds = np.array([0.0, 0.5, 1.0], np.float32), np.arange(3, dtype=np.uint32)
    counters = np.array([5, 9, 70], np.int32), np.array([0, 1, 2], np.int32)

    def run(logits, temperature, seeds, counters, *, kernels):
        return draw_tokens(logits, temperature, seeds, 2, counters, kernels=kernels)

    return run, (3 * normal(3, 5000), temperature, seeds, counters)


def rope():
    """Two requests of three rows; heads with biases and norms, and a page that is not assigned."""
    num_heads, num_kv_heads, dim, half = 4, 2, 32, 8
    width = (num_heads + 2 * num_kv_heads) * dim
    weights = HeadWeights(normal(width), normal(dim, seed=1), normal(dim, seed=2))
    angles = normal(2, 3, half), normal(2, 3, half, seed=3)
    kv = normal(2, 6, 16, 2, num_kv_heads, dim)
    table = np.array([[4, 2], [1, -1]], np.int32)
    positions = np.array([[15, 16, -1], [14, 15, 16]], np.int32)
    given = normal(2, 3, width), weights, angles, kv, np.int32(1), table, positions
    return partial(rope_write, num_heads=num_heads, eps=1e-5), given


def truncation():
    top_k, top_p = np.array([5, 0, 40, 0], np.int32), np.array([1, 0.6, 0.9, 1], np.float32)
    min_p = np.array([0, 0, 0.01, 0], np.float32)
    return truncate, (3 * normal(4, 900), np.full(4, 0.7, np.float32), top_k, top_p, min_p)


def grouped():
    return grouped_matmul, (normal(24, 40), normal(5, 40, 24), np.array([0, 17, 1, 0, 6], np.int32))


def latent():
    table = np.array([[3, 0, 5], [2, 4, 1]], np.int32)
    positions = np.array([[40, 41], [7, -1]], np.int32)
    given = normal(2, 2, 5, 80), normal(2, 6, 16, 80), np.int32(1), table, positions
    return partial(latent_attention, rank=64, scale=0.2), given


def gated():
    def run(x, weight, scale, *, kernels):
        return fused_linear(x, weight, norm=Norm(scale, 1e-5, True), is_gated=True, kernels=kernels)

    return run, (normal(5, 200), normal(200, 48, seed=1) / 8, normal(200, seed=2))


def added():
    """The product of more tiles, and the residual stream."""

    def run(x, weight, residual, *, kernels):
        return fused_linear(x, weight, residual=residual, kernels=kernels)

    return run, (normal(3, 100), normal(100, 40, seed=1) / 8, normal(3, 40, seed=2))


def routes():
    """By sigmoids, of more rows than a word has bits."""
    is_padding = np.arange(40) % 7 == 6

    def run(logits, correction, *, kernels):
        rule = Rule(is_sigmoid=True, scaling=2.5)
        made = route(logits, 4, rule, correction, is_padding, kernels=kernels)
        return made._replace(weights=jnp.where(is_padding[:, None], 0, made.weights))

    return run, (normal(40, 100), normal(100, seed=1) / 8)


OPERATIONS = norm, draw, rope, truncation, grouped, gated, added, latent, routes


@pytest.mark.parametrize("operation", OPERATIONS)
def test_translations_do_what_the_operations_are(operation, translated):
    run, given = operation()
    ours, reference = (
        jax.tree.leaves(jax.jit(partial(run, kernels=kernels))(*given))
        for kernels in ("triton", "reference")
    )
    for one, other in zip(ours, reference, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "case",
    [
        Case((60, 5, 0), (4, 3, 0), 4, has_sinks=True),  # split, as are so few requests
        Case((70,), (3,), 4, window=20, soft_cap=2.0, dtype="bfloat16", pool="float8_e4m3fn"),
    ],
)
def test_attention_matches_its_equation(case, translated):
    inputs = kernels_paged_attention.arguments(case)
    out = compiled("triton")(*inputs, **options(case))
    wanted = attention_by_definition(*inputs, **options(case))
    tolerance = 2e-5 if case.dtype == "float32" else 2e-2
    np.testing.assert_allclose(out.astype(F32), wanted, rtol=tolerance, atol=tolerance)


def test_the_delta_rule_matches_its_equation(translated):
    streams = Streams.random(Sizes(), 2, 12)
    serving = Implementation("triton").serve(streams, batch=3)
    serving.prompt(3, 5, width=8)
    serving.step((4, 3), (2, 3))
    serving.step((4, 2), (4, 1))
    serving.check()


def launched(kernel, *operands, grid, shape=(), dtype=F32):
    out = jax.ShapeDtypeStruct(shape or operands[0].shape, dtype)
    (made,) = triton_call.triton_call(
        kernel, operands, [out], name="tested", grid=grid, num_warps=1
    )
    return np.asarray(made)


def test_a_multiply_add_rounds_once(translated):
    def kernel(a, b, c, out):
        out[...] = triton_call.multiply_add(a[...], b[...], c[...], interpret=False)

    a, b, c = normal(3, 64)
    once = (a.astype(np.float64) * b + c).astype(np.float32)
    assert np.any(once != a * b + c)
    np.testing.assert_array_equal(launched(kernel, a, b, c, grid=(1,)), once)


def test_a_grid_that_is_too_wide_becomes_one_axis(translated, monkeypatch):
    def kernel(out):
        i, j, k = (pl.program_id(axis) for axis in range(3))
        out[i, j, k] = 100 * i + 10 * j + k

    monkeypatch.setattr(triton_source, "MAX_PROGRAMS", 4)
    shape = 3, 5, 2
    i, j, k = np.indices(shape)
    made = launched(kernel, grid=shape, shape=shape, dtype=jnp.int32)
    np.testing.assert_array_equal(made, 100 * i + 10 * j + k)


def test_slices_and_loops(translated):
    """Of lengths that are known when traced, and that are not, none and some, one in the other."""

    def kernel(x, count, out):
        def add(i, carry):
            first, second = carry  # which change places
            return second, jax.lax.fori_loop(0, i, lambda j, z: z + x[pl.ds(j, 8), :], first)

        zero = jnp.zeros((8, 4), F32)
        of_three = jax.lax.fori_loop(0, 3, add, (zero, zero + 1))
        of_count = jax.lax.fori_loop(0, count[0], add, of_three)
        out[0], out[1] = of_count

    def wanted(x, count):
        pair = np.zeros((8, 4)), np.ones((8, 4))
        for i in [*range(3), *range(count)]:
            pair = pair[1], pair[0] + sum(x[j : j + 8] for j in range(i))
        return pair

    x = normal(16, 4)
    for count in 0, 4:
        made = launched(kernel, x, np.array([count], np.int32), grid=(1,), shape=(2, 8, 4))
        np.testing.assert_allclose(made, wanted(x, count), rtol=1e-5, atol=1e-5)


def source_of(kernel, shape):
    """The text of a kernel of one array, which need not exist."""
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


def test_the_backend_is_pallas_where_it_is_there(monkeypatch):
    monkeypatch.delenv(triton_call.VARIABLE, raising=False)
    monkeypatch.setattr(triton_call, "plt", pl)
    assert triton_call.backend() == "pallas" and not triton_call.packages_of_backend()
    monkeypatch.setattr(triton_call, "plt", None)
    monkeypatch.setattr(triton_call.importlib.util, "find_spec", lambda name: name)
    assert triton_call.backend() == "jax_triton" and triton_call.packages_of_backend()
    monkeypatch.setattr(triton_call.importlib.util, "find_spec", lambda name: None)
    assert triton_call.backend() is None


@pytest.mark.parametrize(
    "name, message",
    [
        ("mosaic", "'mosaic' is unknown; choose one of pallas, jax_triton"),
        ("jax_triton", "'jax_triton' is not installed; pip install jax-triton"),
        ("pallas", "'pallas' is not installed; unset it"),
    ],
)
def test_a_backend_that_cannot_be_is_an_error(name, message, monkeypatch):
    monkeypatch.setenv(triton_call.VARIABLE, name)
    monkeypatch.setattr(triton_call, "plt", None)
    monkeypatch.setattr(triton_call.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        triton_call.backend()
