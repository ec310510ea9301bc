"""The noise depends on (seed, position, token) alone, and is standard Gumbel."""

import jax.numpy as jnp
import numpy as np

from specjax.device.noise import gumbel_noise

EULER = 0.5772156649


def test_a_row_does_not_depend_on_its_neighbours():
    seeds = jnp.array([7, 7, 2**32 - 1, 7], jnp.uint32)
    positions = jnp.array([3, 4, 3, 3])
    noise = np.asarray(gumbel_noise(seeds, positions, 50))
    np.testing.assert_array_equal(noise[0], noise[3])
    for i in range(4):
        alone = gumbel_noise(seeds[i : i + 1], positions[i : i + 1], 50)
        np.testing.assert_array_equal(alone[0], noise[i])


def test_seeds_positions_and_tokens_are_independent_draws():
    seeds, positions = jnp.meshgrid(jnp.arange(40, dtype=jnp.uint32), jnp.arange(50))
    noise = np.asarray(gumbel_noise(seeds.reshape(-1), positions.reshape(-1), 20))
    assert len(np.unique(noise)) > 0.99 * noise.size
    # The mean of n standard Gumbel draws has a standard error of pi / sqrt(6 n).
    assert abs(noise.mean() - EULER) < 5 * np.pi / np.sqrt(6 * noise.size)
    assert abs(noise.var() / (np.pi**2 / 6) - 1) < 0.05
    for axis in 0, 1:
        means = noise.reshape(50, 40, 20).mean(axis=(1 - axis, 2))
        assert means.std() < 3 * np.pi / np.sqrt(6 * noise.size / len(means))
