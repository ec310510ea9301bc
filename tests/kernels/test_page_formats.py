"""Pools of 8-bit numbers: written values, and attention, compared with f64."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.kernels_paged_attention import (
    LAYER,
    Case,
    arguments,
    attention_by_definition,
    compiled,
    options,
    paged,
)

from pallas_kernels.dispatch import UnsupportedError, _log_once
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.page_formats import FP8_BYTES, PAGE_FORMATS, why_no_kernel
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.quantisation import as_stored, float8_of, quantise, widened
from pallas_kernels.rope_write import HeadWeights, rope_write
from specjax.device.cache.latent_prompt import attend_plainly
from specjax.device.cache.pages import Pages
from specjax.device.cache.rows import CachedRows
from specjax.device.weights.latent_up import LatentUp

FP8, INT8 = (PAGE_FORMATS[name] for name in ("fp8", "int8"))
POOLS = FP8.dtype, INT8.dtype


@pytest.mark.slow
def test_numbers_are_rounded_to_the_nearest_and_never_overflow():
    """Inputs are all fp8 numbers and their midpoints. Twice the scale gives half the number."""
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    between = (numbers[1:] + numbers[:-1]) / 2
    x = jnp.array([*numbers, *between, 449.0, -1e30, np.inf, np.nan])
    stored = np.asarray(quantise(x, 1.0, FP8))
    wanted = np.asarray(x)[:-4].astype(ml_dtypes.float8_e4m3fn)  # ties to even
    np.testing.assert_array_equal(stored[:-4].view(np.uint8), wanted.view(np.uint8))
    assert [*stored[-4:-1].astype(np.float32)] == [448.0, -448.0, 448.0] and np.isnan(stored[-1])
    as_bytes = quantise(x, 1.0, FP8_BYTES)
    np.testing.assert_array_equal(as_bytes, stored.view(np.uint8))
    np.testing.assert_array_equal(widened(as_bytes, jnp.float32), stored.astype(np.float32))
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(float8_of)(codes), expected)
    halved, _ = as_stored(x[:10], FP8.dtype, jnp.float32(2.0))
    np.testing.assert_array_equal(np.asarray(halved), wanted[:10].astype(np.float32) / 2)

    x = jnp.array([[1.0, -2.54, 0.01], [0.0, 0.0, 0.0], [0.3, 1e-30, np.inf]])
    stored, scales = as_stored(x, INT8.dtype, None)
    np.testing.assert_array_equal(stored[:2], [[50, -127, 1], [0, 0, 0]])
    np.testing.assert_allclose(scales, [0.02, 1.0, np.inf], rtol=1e-6)


def written(pool, kernels, dtype):
    """Run rope_write for a chunk and a round; return q, and the pools before and after."""
    rng = np.random.default_rng(1)
    num_heads, num_kv_heads, dim, half = 4, 2, 32, 8
    width = (num_heads + 2 * num_kv_heads) * dim
    weights = HeadWeights(rng.normal(size=width), *np.abs(rng.normal(size=(2, dim))))
    weights = HeadWeights(*(x.astype(jnp.dtype(dtype)) for x in weights))
    angle = rng.normal(size=(2, 5, half))
    angles = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    qkv = (10.0 ** rng.integers(-2, 5, (2, 5, 1)) * rng.normal(size=(2, 5, width))).astype(
        jnp.dtype(dtype)
    )
    table = np.array([[4, 2], [1, -1]], np.int32)
    positions = np.array([[13, 14, 15, 16, -1], [14, 15, 16, -1, -1]], np.int32)
    shape = 2, 6, 16, 2, num_kv_heads, dim

    def run(kv, scales):
        where = np.int32(LAYER), table, positions
        chosen = {"num_heads": num_heads, "eps": 1e-5, "kernels": kernels}
        return rope_write(qkv, weights, angles, kv, *where, scales=scales, **chosen)

    def empty(dtype, scales):
        return jnp.full(shape, 1, dtype), scales

    plain = jax.jit(run)(*empty(dtype, None))
    given = jnp.array([[9.0, 9.0], [0.5, 2.0]])
    if pool == INT8.dtype:
        given = jnp.full(shape[:-1], 3.0)
    return plain, empty(pool, given), jax.jit(run)(*empty(pool, given))


@pytest.mark.slow
@pytest.mark.every_jax
@pytest.mark.parametrize("pool", POOLS)
def test_writes_are_what_a_plain_pool_gets_rounded_once(pool, kernels):
    """The same entries are written as in a plain pool, and queries are equal."""
    (q, plain, _), (kv, given), (same, stored, scales) = written(pool, kernels, "bfloat16")
    np.testing.assert_array_equal(q, same)
    assert stored.dtype == pool and q.dtype == jnp.bfloat16
    plain, stored = (np.asarray(x).astype(np.float64) for x in (plain, stored))
    is_written = (plain != 1).any(axis=-1)
    assert is_written.sum() == (4 + 2) * 2 * 2
    np.testing.assert_array_equal(stored[~is_written], 1)
    if pool == FP8.dtype:
        x = (plain / np.asarray(given)[:, None, None, :, None, None]).clip(-448, 448)
        wanted = x.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        assert (wanted[is_written] == 448).any()
    else:
        wanted_scales = np.where(is_written, np.abs(plain).max(axis=-1) / 127, 3.0)
        np.testing.assert_allclose(scales, wanted_scales, rtol=1e-6)
        wanted = np.where(is_written[..., None], np.rint(plain / wanted_scales[..., None]), 1)
    # A division that is rounded otherwise may tip a number that is half-way.
    is_same = stored[is_written] == wanted[is_written]
    assert is_same.mean() > 0.99
    np.testing.assert_allclose(stored[is_written], wanted[is_written], rtol=2**-3, atol=1)


SHAPES = {
    "rows1": Case((0, 37, 70, 5), (1, 1, 0, 1), 1),
    "rows17-gqa": Case((3, 40), (17, 9), 17, group=4),
    "window-sinks": Case((70, 5, 20), (5, 3, 0), 5, window=20, has_sinks=True),
    "window-block-dim128": Case((20, 37), (4, 2), 4, dim=128, window=20, is_block=True),
    "soft-cap-split": Case((300, 5), (4, 4), 4, soft_cap=1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", SHAPES)
def test_attention_matches_the_equation(name, pool, kernels):
    """The oracle reads the dequantised pool. Entries and scales that no row may read are NaN."""
    case = replace(SHAPES[name], dtype="bfloat16", pool=pool)
    inputs, chosen = arguments(case), options(case)
    out = np.asarray(compiled(kernels)(*inputs, **chosen), np.float64)
    expected = attention_by_definition(*inputs, **chosen)
    np.testing.assert_allclose(out, expected, rtol=0, atol=0.02 * np.abs(expected).max())
    error = out - expected
    assert np.sqrt((error**2).mean() / (expected**2).mean()) < 0.004


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_attention_over_latents_matches_the_equation(pool, kernels):
    """Latents and rotated parts have separate scales."""
    rank, rotated, scale = 64, 16, 0.2
    case = Case((5, 31, 120, 0), (4, 2, 4, 0), 4)
    rng = np.random.default_rng(0)
    entries, table, positions = paged(case, rng, rank + rotated)
    q = rng.normal(size=(*positions.shape, 3, rank + rotated)).astype(jnp.bfloat16)
    scales = rng.uniform(0.5, 2.0, (len(entries), 2)).astype(np.float32)
    if pool == INT8.dtype:
        entries, scales = np.rint(40 * np.nan_to_num(entries)), paged(case, rng, 2)[0]
        entries, scales = entries.clip(-127, 127), (1 + np.abs(scales)) / 80
    entries = entries.astype(jnp.dtype(pool))
    run = partial(latent_attention, rank=rank, scale=scale, kernels=kernels)
    given = q, entries, np.int32(LAYER), table, positions
    out = np.asarray(jax.jit(run)(*given, scales=scales), np.float64)

    own = scales[LAYER].astype(np.float64)
    whole = entries[LAYER].astype(np.float64) * np.repeat(own, (rank, rotated), axis=-1)
    for b, t in np.argwhere(positions >= 0):
        places = np.arange(positions[b, t] + 1)
        seen = whole[table[b, places // 16], places % 16]
        scores = scale * q[b, t].astype(np.float64) @ seen.T
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected = weights @ seen[:, :rank] / weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(out[b, t], expected, rtol=0, atol=0.02 * np.abs(expected).max())


def test_gpus_without_the_conversion_are_named():
    pool = jax.ShapeDtypeStruct((2, 8, 16, 2, 2, 64), FP8.dtype)
    assert why_no_kernel(pool, (8, 9)) is None
    assert "float8_e4m3fn needs compute capability 8.9" in str(why_no_kernel(pool, (8, 6)))


@pytest.mark.parametrize("name, problem", [("int8", "float32: int8"), ("fp8", "float8_e4m3fn")])
def test_an_8_bit_pool_runs_where_the_kernel_lacks_it(name, problem, checker, caplog):
    """Plain JAX runs, with a log line. If the kernel was requested by name, it is an error."""
    case = replace(SHAPES["rows1"], pool=PAGE_FORMATS[name].dtype)  # with queries in float32
    inputs, chosen = arguments(case), options(case)
    _log_once.cache_clear()
    out = jax.jit(partial(paged_attention, kernels="auto"))(*inputs, **chosen)
    expected = attention_by_definition(*inputs, **chosen)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    (line,) = [one.message for one in caplog.records if "plain JAX" in one.message]
    assert line.startswith("paged_attention runs as plain JAX") and problem in line
    with pytest.raises(UnsupportedError, match=problem):
        jax.jit(partial(paged_attention, kernels="triton"))(*inputs, **chosen)


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_prompts_read_latents_times_their_scales(pool):
    """Attention over keys and values of heads gives the result of a dequantised pool."""
    rank, rotated, num_heads = 64, 16, 2
    case, rng = Case((0, 40), (24, 17), 24), np.random.default_rng(0)
    entries, table, positions = paged(case, rng, rank + rotated)
    entries = np.rint(4 * np.nan_to_num(entries)).astype(jnp.dtype(pool))
    places = entries.shape[:3] if pool == INT8.dtype else entries.shape[:1]
    scales = rng.uniform(0.05, 0.2, (*places, 2)).astype(np.float32)
    own = scales if pool == INT8.dtype else scales[:, None, None]
    whole = entries.astype(np.float32) * np.repeat(own, (rank, rotated), axis=-1)
    up = LatentUp(rng.normal(size=(num_heads * (32 + 20), rank)).astype(np.float32), num_heads, 32)
    rows = CachedRows(positions.reshape(-1), table, folds=True, kernels="reference")
    queries = (
        rng.normal(size=(positions.size, num_heads, n)).astype(np.float32) for n in (32, rotated)
    )
    run = partial(attend_plainly, layer=np.int32(LAYER), up=up, scale=0.2)
    run = partial(run, **dict(zip(("nope", "rope"), queries, strict=True)))
    expected = run(rows, Pages(jnp.array(whole)))
    np.testing.assert_array_equal(run(rows, Pages(jnp.array(entries), jnp.array(scales))), expected)
    assert np.abs(expected).max() > 0.1
