"""Noise depends only on seed, stream, counters and token, and has the intended distribution."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pallas_kernels.draw_tokens import reference
from specjax.device.noise import Stream, gumbel_noise, uniform_noise

pytestmark = pytest.mark.every_jax

gumbel = jax.jit(gumbel_noise, static_argnums=(1, 3))
uniform = jax.jit(uniform_noise, static_argnums=(1, 3))
COUNT, WIDTH = 4000, 50


def draw(noise, stream, *, seed=5, rounds=()):
    """Return draws [COUNT, WIDTH] for one seed at positions 0, 1, ..."""
    counters = np.arange(COUNT), *(np.full(COUNT, x) for x in rounds)
    return np.asarray(noise(np.full(COUNT, seed, np.uint32), stream, counters, WIDTH))


def draw_of(noise, stream, seeds, counters):
    """Return draws [n, WIDTH] for n keys, padded to COUNT keys to use the same program."""
    inputs = [np.pad(x, (0, COUNT - len(seeds))) for x in (seeds, *counters)]
    return np.asarray(noise(inputs[0], stream, tuple(inputs[1:]), WIDTH))[: len(seeds)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "noise, stream, num_counters", [(gumbel, Stream.DRAFT, 2), (uniform, Stream.ACCEPT, 1)]
)
def test_a_draw_does_not_depend_on_what_is_drawn_beside_it(noise, stream, num_counters):
    """A draw does not depend on its row, the batch, or the number of tokens or drafts."""
    seeds = np.array([7, 7, 2**32 - 1, 7, 0], np.uint32)
    counters = (np.array([3, 4, 3, 3, 2**30]), np.array([1, 0, 1, 1, 0]))[:num_counters]
    together = draw_of(noise, stream, seeds, counters)
    np.testing.assert_array_equal(together[0], together[3])
    for i in range(5):
        alone = noise(seeds[i : i + 1], stream, tuple(c[i : i + 1] for c in counters), WIDTH)
        np.testing.assert_array_equal(np.asarray(alone)[0], together[i])
    for width in 3, 201:
        other = np.asarray(noise(seeds, stream, counters, width))
        shared = min(width, WIDTH)
        np.testing.assert_array_equal(other[:, :shared], together[:, :shared])


@pytest.mark.slow
def test_no_key_is_used_twice():
    """Draws differ if the seed, stream, position, step of a round or token differs."""
    keys = np.array(list(itertools.product([0, 1, 2, 2**32 - 1], range(6), range(4))))
    seeds, positions, steps = keys[:, 0].astype(np.uint32), keys[:, 1], keys[:, 2]
    drawn = [
        draw_of(gumbel, stream, seeds, counters)[:, :16]
        for stream in Stream
        for counters in [(positions, steps), (positions,)]
    ]
    rows = np.unique(np.concatenate(drawn), axis=0)
    # Without steps, four of the rows are alike.
    assert len(rows) == len(Stream) * (len(keys) + len(keys) // 4)
    # One draw in 2^32 may come up again by chance, but not a row in another order.
    assert len(np.unique(rows)) > 0.999 * rows.size
    assert len({frozenset(row.tolist()) for row in rows}) == len(rows)


def test_draws_under_different_keys_are_independent():
    """Correlations of draws that are used in one round are as small as for independent draws."""
    target = draw(gumbel, Stream.TARGET)
    drawn = [
        target,
        draw(gumbel, Stream.DRAFT),
        *(draw(gumbel, Stream.DRAFT, rounds=(step,)) for step in range(2)),
        draw(uniform, Stream.ACCEPT),
        draw(gumbel, Stream.TARGET, seed=6),
        *(np.roll(target, 1, axis) for axis in range(2)),  # the next position, the next token
    ]
    ranks = np.array([stats.rankdata(x) for x in drawn])
    found = np.abs(np.corrcoef(ranks)) - np.eye(len(drawn))
    assert found.max() < 4.5 / np.sqrt(target.size), found


def test_every_word_of_random_bits_becomes_its_quantile(monkeypatch):
    """Large draws (above 16.6), where 1 - p is not a float32, are as exact as other draws."""
    words = np.array([0, 1, 2, 3, 10, 255, 2**12, 2**20, 2**31, 2**32 - 2**12, 2**32 - 1])
    monkeypatch.setattr(reference, "token_bits", lambda *_: jnp.array(words, jnp.uint32))
    noise_of = jax.jit(lambda seeds, at: gumbel_noise(seeds, Stream.TARGET, (at,), len(words)))
    noise = np.asarray(noise_of(np.zeros(1, np.uint32), np.zeros(1, int)))
    # The probability of a larger draw; at its other end the law is cut off at one in 2^24.
    above = np.minimum((words + 0.5) / 2**32, 1 - 2.0**-24)
    np.testing.assert_allclose(noise[0], stats.gumbel_r.isf(above), rtol=2e-5)
    assert noise[0, 0] > 22 and np.isfinite(noise).all()
