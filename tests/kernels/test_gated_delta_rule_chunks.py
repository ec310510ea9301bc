"""The chunked form of the gated delta rule, of the reference, against the recurrence in f64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels_delta_rule import TOLERANCE, error

from pallas_kernels.gated_delta_rule.reference import (
    Tokens,
    advance,
    recur_chunks,
)


def random_tokens(length=300, *, fastest=1.0, noise=None, least_beta=0.0, seed=0):
    """Tokens of two heads, and a state; keys are alike but for `noise`, where that is given."""
    rng = np.random.default_rng(seed)

    def unit(z):
        return z / np.linalg.norm(z, axis=-1, keepdims=True)

    q, k, v = rng.normal(size=(3, 1, length, 2, 8))
    k = unit(k) if noise is None else unit(unit(k[:, :1]) + noise * k)
    tokens = (
        *(unit(q) / np.sqrt(8), k, v),
        -fastest * rng.uniform(size=(1, length, 2)) * [1.0, 1e-3],
        rng.uniform(least_beta, 1.0, size=(1, length, 2)),
    )
    s = rng.normal(size=(1, 2, 8, 8))
    return s.astype(np.float32), Tokens(*(x.astype(np.float32) for x in tokens))


def recur_in_f64(s, tokens):
    s, q, k, v, g, beta = (np.asarray(x, np.float64) for x in (s, *tokens))
    out = np.zeros_like(v)
    for t in range(q.shape[1]):
        s = s * np.exp(g[:, t, :, None, None])
        u = beta[:, t, :, None] * (v[:, t] - (s @ k[:, t, :, :, None])[..., 0])
        s = s + u[..., None] * k[:, t, :, None]
        out[:, t] = (s @ q[:, t, :, :, None])[..., 0]
    return s, out


@jax.jit
def recur_by_scan(s, tokens):
    """What steps do, in a form that can be differentiated."""
    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)

    def step(s, token):
        q, k, v, g, beta = token
        s, o, _ = advance(s, q, k, v, jnp.exp(g), beta)
        return s, o

    s, out = jax.lax.scan(step, s, by_time)
    return s, jnp.moveaxis(out, 0, 1)


in_chunks = jax.jit(recur_chunks)

TOKENS = {
    "long": random_tokens(),
    "fast": random_tokens(fastest=20.0),  # e^-640 over a chunk, e^-3000 over all of them
    "alike": random_tokens(noise=1e-3, least_beta=0.98, fastest=1e-2),
    "equal": random_tokens(noise=0.0, least_beta=1.0, fastest=0.0),
}


@pytest.mark.parametrize("name", TOKENS)
def test_chunks_equal_the_recurrence(name):
    s, tokens = TOKENS[name]
    expected = recur_in_f64(s, tokens)
    chunked, plain = in_chunks(s, tokens), recur_by_scan(s, tokens)
    for ours, theirs, exact in zip(chunked, plain, expected, strict=True):
        assert error(ours, exact) < TOLERANCE
        assert error(theirs, exact) < TOLERANCE


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.grad, argnums=(1, 2))
def gradients(run, s, tokens):
    s, out = run(s, tokens)
    weights = jnp.cos(jnp.arange(out.shape[1]))[:, None, None]
    return (s**2).sum() + (weights[None] * out**2).sum()


@pytest.mark.parametrize("name", ["long", "fast", "alike"])
def test_gradients_of_chunks_equal_those_of_the_recurrence(name):
    s, tokens = TOKENS[name]
    tokens = Tokens(*(x[:, :70] for x in tokens))
    ours, expected = (gradients(run, s, tokens) for run in (in_chunks, recur_by_scan))
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert error(x, np.asarray(y, np.float64)) < 10 * TOLERANCE
