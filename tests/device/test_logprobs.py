"""Log-probabilities and ranks, against sorts in float64."""

import jax
import numpy as np
import pytest

from specjax.device.logprobs import token_logprobs

compiled = jax.jit(token_logprobs, static_argnums=2)


def run(*arguments):
    return jax.device_get(compiled(*arguments))


@pytest.mark.parametrize("vocab_size, num_top", [(7, 7), (200, 5), (200, 0), (5000, 20)])
def test_against_a_sort(vocab_size, num_top):
    """Ties have the rank of their first, and come with the lowest id first."""
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=(40, vocab_size)) * np.resize([1, 10, 0.01], 40)[:, None]
    logits[::2] = np.round(logits[::2])
    logits[1::4, rng.random(vocab_size) < 0.5] = -np.inf
    logits[:, 0] = 2.0
    logits = logits.astype(np.float32)
    tokens = rng.integers(0, vocab_size, 40)
    tokens[:6] = logits[:6].argmax(-1)
    found = run(logits, tokens, num_top)
    assert found.ranks.dtype == found.top_ids.dtype == np.int32
    assert found.top_ids.shape == found.top_logprobs.shape == (40, num_top)
    for i, (row, token) in enumerate(zip(logits.astype(np.float64), tokens, strict=True)):
        logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        order = np.argsort(-row, kind="stable")[:num_top]
        tolerance = {"rtol": 1e-5, "atol": 1e-5}
        np.testing.assert_allclose(found.logprobs[i], logprobs[token], **tolerance)
        np.testing.assert_array_equal(found.top_ids[i], order)
        np.testing.assert_allclose(found.top_logprobs[i], logprobs[order], **tolerance)
        assert found.ranks[i] == 1 + sum(row > row[token])
    assert found.ranks[:6].tolist() == [1] * 6
