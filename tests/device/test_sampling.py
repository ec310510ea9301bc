"""Greedy and noisy choice, against numpy and against the softmax that it should draw from."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.device.noise import gumbel_noise
from specjax.device.sampling import Sampling, sample


def sampling_of(temperatures, seeds):
    return Sampling(jnp.array(temperatures, jnp.float32), jnp.array(seeds, jnp.uint32))


def test_greedy_rows_take_the_first_best_whatever_stands_beside_them():
    logits = jnp.array([[0.0, 3.0, 3.0, 1.0], [5.0, 1.0, 5.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    positions = jnp.array([4, 5, 6])
    cold = sample(logits, sampling_of([0, 0, 0], [1, 2, 3]), positions)
    assert cold.tolist() == [1, 0, 0] and cold.dtype == jnp.int32
    mixed = sample(logits, sampling_of([0, 9.0, 0], [1, 2, 3]), positions)
    assert mixed.tolist()[::2] == [1, 0]


def test_draws_follow_the_softmax():
    """A chi-square test at three temperatures, over positions of one seed."""
    count, logits = 20000, jnp.array([1.0, 0.0, -1.0, 2.0, 0.5])
    for temperature in 0.5, 1.0, 2.0:
        params = sampling_of([temperature] * count, [11] * count)
        rows = jnp.broadcast_to(logits, (count, 5))
        drawn = np.bincount(sample(rows, params, jnp.arange(count)), minlength=5)
        expected = count * np.asarray(jax.nn.softmax(logits / temperature))
        assert ((drawn - expected) ** 2 / expected).sum() < 23.5  # p = 1e-4 at 4 degrees


def test_draws_are_a_function_of_seed_and_position():
    logits = jax.random.normal(jax.random.key(0), (6, 30))
    logits = logits.at[1].set(logits[0]).at[2].set(logits[0])
    params = sampling_of([1.0] * 6, [5, 5, 6, 5, 5, 5])
    positions = jnp.array([8, 8, 8, 9, 10, 11])
    together = sample(logits, params, positions)
    alone = [
        sample(logits[i : i + 1], params.at(jnp.array([i])), positions[i : i + 1])[0]
        for i in range(6)
    ]
    assert together.tolist() == [int(x) for x in alone]
    assert together[0] == together[1] != together[2]


def test_part_of_the_vocabulary_shares_the_noise_of_all():
    """The choice among some ids is that among all, if the others could never win."""
    ids = jnp.array([3, 17, 4, 29, 11])
    logits = jax.random.normal(jax.random.key(1), (200, 30))
    is_kept = jnp.zeros(30, bool).at[ids].set(True)
    params, positions = sampling_of([1.0] * 200, range(200)), jnp.arange(200)
    columns = sample(logits[:, ids], params, positions, ids, 30)
    full = sample(jnp.where(is_kept, logits, -jnp.inf), params, positions)
    np.testing.assert_array_equal(ids[columns], full)
    noise = gumbel_noise(params.seeds, positions, 30)
    np.testing.assert_array_equal(columns, (logits + noise)[:, ids].argmax(-1))


def test_repeat_keeps_the_rows_of_a_request_together():
    repeated = sampling_of([0.5, 1.5], [1, 2]).repeat(3)
    assert repeated.temperature.tolist() == [0.5] * 3 + [1.5] * 3
    assert repeated.seeds.tolist() == [1] * 3 + [2] * 3
