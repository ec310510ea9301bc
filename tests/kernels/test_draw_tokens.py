"""Every implementation of the draw against its equation, with jax.random's own bits, and by law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.draw_tokens import draw_tokens
from pallas_kernels.draw_tokens.triton import TuningConfig, draw_tokens_triton, threefry

IMPLEMENTATIONS = "reference", "interpret"


def arguments(num_rows, vocab_size, seed=0, temperatures=(0.0, 0.5, 1.0, 1e-7)):
    rng = np.random.default_rng(seed)
    return (
        jnp.asarray(3 * rng.normal(size=(num_rows, vocab_size)), jnp.float32),
        jnp.asarray(rng.choice(temperatures, num_rows), jnp.float32),
        jnp.asarray(rng.integers(0, 2**32, num_rows, np.uint32)),
        2,
        tuple(jnp.asarray(rng.integers(0, 9999, num_rows), jnp.int32) for _ in "ab"),
    )


def by_definition(logits, temperature, seeds, stream, counters, token_ids=None):
    """The equation in f64, row by row; and by how much the token won."""
    ids = np.arange(logits.shape[1]) if token_ids is None else np.asarray(token_ids)
    tokens, leads = [], []
    for n, row in enumerate(np.asarray(logits, np.float64)):
        if temperature[n] > 0:
            key = jax.random.fold_in(jax.random.key(seeds[n]), stream)
            for counter in counters:
                key = jax.random.fold_in(key, counter[n])
            bits = np.asarray(jax.random.bits(key, (ids.max() + 1,), jnp.uint32))[ids]
            u = np.minimum((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)
            row = row / max(float(temperature[n]), 1e-5) - np.log(-np.log1p(-u))
        second, best = np.sort(row)[-2:]
        tokens.append(ids[row.argmax()])
        leads.append((best - second) / max(1.0, abs(best)))
    return np.array(tokens), np.array(leads)


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_rows, vocab_size", [(1, 7), (5, 4096), (16, 333), (3, 9001)])
def test_matches_the_equation(num_rows, vocab_size, kernels):
    inputs = arguments(num_rows, vocab_size)
    tokens = draw_tokens(*inputs, kernels=kernels)
    wanted, lead = by_definition(*inputs)
    clear = lead > 1e-5  # f32 may see a tie another way
    assert clear.sum() > 0.9 * num_rows - 1
    np.testing.assert_array_equal(np.asarray(tokens)[clear], wanted[clear])


@pytest.mark.every_jax
@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_columns_go_by_their_names(kernels):
    inputs = arguments(16, 50)
    ids = jnp.asarray(np.random.default_rng(1).permutation(300)[:50], jnp.int32)
    tokens = draw_tokens(*inputs, token_ids=ids, vocab_size=300, kernels=kernels)
    np.testing.assert_array_equal(np.asarray(tokens), by_definition(*inputs, ids)[0])


@pytest.mark.every_jax
@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_the_first_of_equals_and_rows_of_nothing(kernels):
    logits = jnp.full((4, 5000), -jnp.inf).at[1, [4100, 70, 4999]].set(2.0).at[2, 4999].set(0.0)
    temperature = jnp.asarray([0.0, 0.0, 1.0, 1.0])
    zeros = jnp.zeros(4, jnp.uint32)
    tokens = draw_tokens(logits, temperature, zeros, 0, (), kernels=kernels)
    assert tokens.tolist() == [0, 70, 4999, 0]


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_draws_follow_the_distribution(kernels):
    """Chi-square at 4 degrees of freedom; 23.5 is passed once in 10,000 times."""
    probs, count = np.array([0.5, 0.2, 0.15, 0.1, 0.05]), 2000
    logits = jnp.broadcast_to(0.7 * jnp.log(jnp.asarray(probs, jnp.float32)), (count, 5))
    position = jnp.arange(count, dtype=jnp.int32)
    seeds = jnp.full(count, 77, jnp.uint32)
    tokens = draw_tokens(logits, jnp.full(count, 0.7), seeds, 0, (position,), kernels=kernels)
    found = np.bincount(np.asarray(tokens), minlength=5)
    assert ((found - count * probs) ** 2 / (count * probs)).sum() < 23.5


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_rows_of_a_request_follow_each_other(kernels):
    logits, temperature, seeds, stream, (places, others) = arguments(4, 100)
    rows = jnp.asarray(np.random.default_rng(5).normal(size=(12, 100)), jnp.float32)
    tokens = draw_tokens(rows, temperature, seeds, stream, (places, others), kernels=kernels)
    for t in range(3):
        alone = draw_tokens(
            rows[t::3], temperature, seeds, stream, (places + t, others), kernels=kernels
        )
        np.testing.assert_array_equal(np.asarray(tokens)[t::3], np.asarray(alone))


def test_tiles_do_not_change_a_token():
    logits, *others = arguments(6, 5000)
    tokens = [
        draw_tokens_triton(logits, *others, None, None, config=TuningConfig(block), interpret=True)
        for block in (256, 4096)
    ]
    np.testing.assert_array_equal(*map(np.asarray, tokens))


@pytest.mark.every_jax
def test_the_bits_are_those_of_jax_random():
    key = jax.random.fold_in(jax.random.key(11), 5)
    words = jax.random.key_data(key)
    count = jnp.arange(100, dtype=jnp.uint32)
    first, second = threefry((words[0], words[1]), (jnp.zeros_like(count), count))
    bits = jax.random.bits(key, (100,), jnp.uint32)
    np.testing.assert_array_equal(np.asarray(first ^ second), np.asarray(bits))


@pytest.mark.parametrize(
    "name, change",
    [
        ("logits", {"logits": (4, 8, 2)}),
        ("temperature and seeds", {"temperature": (4, 1), "seeds": (4, 1)}),
        ("temperature", {"temperature": (3,), "seeds": (3,)}),
        ("temperature and seeds", {"seeds": (8,)}),
        ("counters", {"counter": (1,)}),
        ("token_ids", {"token_ids": (9,)}),
    ],
)
def test_shapes_that_do_not_fit_are_named(name, change):
    shapes = {
        "logits": (4, 8),
        "temperature": (4,),
        "seeds": (4,),
        "counter": (4,),
        "token_ids": (8,),
    } | change
    zeros = {key: jnp.zeros(shape) for key, shape in shapes.items()}
    with pytest.raises(ValueError, match=f"^{name} must"):
        draw_tokens(
            zeros["logits"],
            zeros["temperature"],
            zeros["seeds"],
            0,
            (zeros["counter"],),
            token_ids=zeros["token_ids"],
            vocab_size=100,
        )


def test_logits_that_the_kernel_does_not_take_are_named():
    zeros = jnp.zeros(2)
    with pytest.raises(ValueError, match="logits are bfloat16; float32"):
        draw_tokens(jnp.zeros((2, 8), jnp.bfloat16), zeros, zeros, 0, (), kernels="interpret")
