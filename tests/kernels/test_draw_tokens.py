"""Draws of every implementation, compared with the equation and with its distribution."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from pallas_kernels.draw_tokens import draw_tokens
from pallas_kernels.draw_tokens import triton as kernel

# Rows and tokens of most tests, which share programs: tiles that are full, and one that is not.
SHAPE = 16, 9001
compiled = jax.jit(draw_tokens, static_argnums=3, static_argnames=("vocab_size", "kernels"))


def arguments(num_rows, vocab_size, seed=0, temperatures=(0.0, 0.5, 1.0, 1e-7)):
    rng = np.random.default_rng(seed)
    return (
        (3 * rng.normal(size=(num_rows, vocab_size))).astype(np.float32),
        rng.choice(temperatures, num_rows).astype(np.float32),
        rng.integers(0, 2**32, num_rows, np.uint32),
        2,
        tuple(rng.integers(0, 9999, num_rows).astype(np.int32) for _ in "ab"),
    )


@functools.partial(jax.jit, static_argnums=1)
def bits_by_definition(seed, stream, counters):
    """Return threefry's random bits of the first tokens, as many as any test has."""
    key = jax.random.fold_in(jax.random.key(seed), stream)
    for counter in counters:
        key = jax.random.fold_in(key, counter)
    first, second = np.divmod(np.arange(SHAPE[1]), 64)
    calls = jnp.array(32 * first + second % 32, jnp.uint32)
    words = threefry_2x32(jax.random.key_data(key), jnp.stack([jnp.zeros_like(calls), calls]))
    return jnp.where(second < 32, *words)


def by_definition(logits, temperature, seeds, stream, counters, token_ids=None):
    """Return the token of each row by the equation in f64, and its lead over the second token."""
    ids = np.arange(logits.shape[1]) if token_ids is None else np.asarray(token_ids)
    tokens, leads = [], []
    for n, row in enumerate(np.asarray(logits, np.float64)):
        if temperature[n] > 0:
            mine = tuple(counter[n] for counter in counters)
            bits = np.asarray(bits_by_definition(seeds[n], stream, mine))[ids]
            u = np.minimum((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)
            row = row / max(float(temperature[n]), 1e-5) - np.log(-np.log1p(-u))
        second, best = np.sort(row)[-2:]
        tokens.append(ids[row.argmax()])
        leads.append((best - second) / max(1.0, abs(best)))
    return np.array(tokens), np.array(leads)


@pytest.mark.parametrize("shape, num_counters", [(SHAPE, 2), ((1, 7), 0)])
def test_matches_the_equation(shape, num_counters, kernels):
    *inputs, counters = arguments(*shape)
    inputs = *inputs, counters[:num_counters]
    if shape[0] == 1:
        inputs[1][:] = 1.0
    tokens = compiled(*inputs, kernels=kernels)
    wanted, lead = by_definition(*inputs)
    clear = lead > 1e-5  # f32 may see a tie another way
    assert clear.sum() > 0.9 * shape[0] - 1
    np.testing.assert_array_equal(np.asarray(tokens)[clear], wanted[clear])


@pytest.mark.slow
@pytest.mark.every_jax
def test_columns_go_by_their_names(kernels):
    inputs = arguments(16, 50)
    ids = np.random.default_rng(1).permutation(300)[:50].astype(np.int32)
    tokens = compiled(*inputs, token_ids=ids, vocab_size=300, kernels=kernels)
    np.testing.assert_array_equal(np.asarray(tokens), by_definition(*inputs, ids)[0])


@pytest.mark.every_jax
def test_the_first_of_equals_and_rows_that_leave_no_token(kernels):
    """A NaN anywhere leaves a row without a token. +inf and the lowest number can be drawn."""
    logits, temperature, *others = arguments(*SHAPE)
    logits[:], temperature[:] = -np.inf, np.arange(SHAPE[0]) // 2 % 2
    logits[1, [4100, 70, 8999]] = 2.0
    logits[2, 9000] = 0.0
    logits[4, 5], logits[5, 5] = np.finfo(np.float32).min, np.inf
    logits[6:14] = 1.0
    for row, column in enumerate((0, 63, 4095, 4096, 8191, 8192, 9000), start=6):
        logits[row, column] = np.nan
    logits[13] = np.nan
    tokens = compiled(logits, temperature, *others, kernels=kernels)
    assert tokens.tolist() == [-1, 70, 9000, -1, 5, 5, *[-1] * 10]


@pytest.mark.slow
def test_rows_of_a_request_follow_each_other(kernels):
    _, temperature, seeds, stream, (places, others) = arguments(*SHAPE)
    num_rows = 3 * SHAPE[0]
    rows = np.random.default_rng(5).normal(size=(num_rows, SHAPE[1])).astype(np.float32)
    tokens = compiled(rows, temperature, seeds, stream, (places, others), kernels=kernels)
    for t in range(3):
        alone = compiled(
            rows[t::3], temperature, seeds, stream, (places + t, others), kernels=kernels
        )
        np.testing.assert_array_equal(np.asarray(tokens)[t::3], np.asarray(alone))


def test_the_kernels_noise_is_within_its_error():
    """The GPU's logarithm is as inexact as allowed, upwards or downwards, at every scale."""
    words = np.unique(np.geomspace(1, 2**32 - 1, 20_000).astype(np.uint32))
    words = np.concatenate([words, ~words])
    u = np.minimum((words.astype(np.float32) + np.float32(0.5)) / 2**32, 1 - 2.0**-24)
    exact = -np.log(-np.log1p(-u.astype(np.float64)))

    def wrong(x, *, interpret, sign):
        exact = np.log2(np.asarray(x, np.float64))
        near = (x > 0.5) & (x < 2)
        return np.float32(exact + sign * 2.0**-22 * np.where(near, 1, np.abs(exact)))

    for sign in -1, 0, 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel, "log2", functools.partial(wrong, sign=sign))
            found = np.asarray(kernel._gumbel(jnp.array(words), interpret=True))
        assert np.abs(found - exact).max() < 8e-6
