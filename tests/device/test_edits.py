"""Edited logits, compared with loops over each request's tokens and its earlier drafts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.logits import double

from specjax.device.edits import History, apply_processors, edit
from specjax.device.vocabulary import WHOLE
from specjax.sampling_params import SamplingParams

LENGTH = 15  # the most tokens of a request


def favour_next(tokens, length, logits):
    return logits.at[(tokens[length - 1] + 1) % logits.shape[0]].add(2.0)


def forbid_sum(tokens, length, logits):
    total = jnp.where(jnp.arange(tokens.shape[0]) < length, tokens, 0).sum()
    return logits.at[1 + total % (logits.shape[0] - 1)].set(-jnp.inf)


def favour_next_twin(tokens, logits):
    i = (tokens[-1] + 1) % len(logits)
    return [x + 2.0 * (token == i) for token, x in enumerate(logits)]


def forbid_sum_twin(tokens, logits):
    i = 1 + sum(tokens) % (len(logits) - 1)
    return [-np.inf if token == i else x for token, x in enumerate(logits)]


def double_twin(tokens, logits):
    return [2 * x for x in logits]


# Numbers 1 and 3 are of requests that are not in the step.
PROCESSORS = ((0, (favour_next, double)), (2, (double, favour_next, forbid_sum)))
TWINS = {0: (favour_next_twin, double_twin), 2: (double_twin, favour_next_twin, forbid_sum_twin)}
then, unpack = jax.jit(History.then), jax.jit(WHOLE.bits, static_argnums=1)


@partial(jax.jit, static_argnames="processors")
def compiled(logits, requests, history, processors=(), masks=None):
    logits = apply_processors(logits, requests, history, processors, WHOLE)
    return edit(logits, requests, history, masks)


def run(*arguments):
    return np.asarray(compiled(*arguments))


def history_of(requests, rng, drafts):
    """Return the requests' tokens, then their drafts, then garbage."""
    tokens = rng.integers(0, 7, (len(requests), LENGTH))
    lengths = [len(one.prompt) + len(one.output) for one in requests]
    for row, one in zip(tokens, requests, strict=True):
        row[: len(one.prompt) + len(one.output)] = [*one.prompt, *one.output]
    return then(History(tokens, np.array(lengths)), drafts)


def random_logits(rng, *shape):
    """Return random logits, with ties, zeros and -inf."""
    logits = np.round(rng.normal(size=shape) * 3 * 8) / 8
    logits[rng.random(shape) < 0.05] = -np.inf
    logits[..., 0] = 0.5
    return logits.astype(np.float32)


def packed_bits(is_set):
    padded = np.pad(is_set, ((0, 0),) * (is_set.ndim - 1) + ((0, -is_set.shape[-1] % 32),))
    words = np.packbits(padded, axis=-1, bitorder="little")
    return words.view(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size, k, seed", [(7, 2, 0), (33, 3, 1), (96, 0, 2)])
def test_random_requests_beside_each_other(asked, vocab_size, k, seed):
    rng, batch = np.random.default_rng(seed), 120
    drafts = rng.integers(0, min(vocab_size, 9), (batch, k))
    requests = [asked.random(rng, vocab_size, row.tolist()) for row in drafts]
    history = history_of(requests, rng, drafts)
    logits = random_logits(rng, batch, k + 1, vocab_size)
    allowed = rng.random(logits.shape) < 0.8
    allowed[..., 0] = allowed[::2] = True
    device = asked.on_device(requests, vocab_size)
    edited = run(logits, device, history, PROCESSORS, packed_bits(allowed))
    for b, one in enumerate(requests):
        # Drafts past the end are dropped: rows that follow as many as there is room for do not
        # notice.
        room = LENGTH - len(one.prompt) - len(one.output)
        for t in range(min(k, room) + 1):
            now = one.then(*drafts[b, :t].tolist())
            permitted = set(np.flatnonzero(allowed[b, t]))
            expected = np.array(now.edit(logits[b, t], TWINS, permitted))
            np.testing.assert_allclose(edited[b, t], expected, rtol=1e-5, atol=1e-5)
            if one == asked(one.params, one.prompt, one.output) and not one.params.edits_logits:
                raw = np.where(allowed[b, t], logits[b, t], -np.inf)
                np.testing.assert_array_equal(edited[b, t], raw)


def test_a_bad_word_may_be_longer_than_the_history(asked):
    """Other words match the end of the history and drafts, or all tokens from the prompt on."""
    words = [2, 0, 1, 2, 5], [0, 0, 1, 2, 5], [0, 1, 2, 5], [0, 1, 2, 3, 4, 5]
    requests = [asked(SamplingParams(), [0, 1], [2], [[6] * 7 + [1], word]) for word in words]
    history = history_of(requests, np.random.default_rng(0), np.array([[3, 4]] * 4))
    logits = np.zeros((4, 3, 7), np.float32)
    edited = run(logits, asked.on_device(requests, 7), history, PROCESSORS)
    assert np.argwhere(edited == -np.inf).tolist() == [[2, 0, 5], [3, 2, 5]]


def test_rows_of_no_request_are_harmless(asked):
    """Padding rows have the options of the last slot, which may be garbage."""
    rng = np.random.default_rng(7)
    drafts = rng.integers(0, 9, (120, 3))
    requests = [asked.random(rng, 33, row.tolist()) for row in drafts]
    history, device = history_of(requests, rng, drafts), asked.on_device(requests, 33)
    logits = random_logits(rng, 120, 4, 33)
    masks = packed_bits(rng.random(logits.shape) < 0.8)

    def junk(x):
        x = np.array(x)
        x[100:] = rng.integers(-(2**31), 2**31 - 1, x[100:].shape, dtype=np.int32).view(x.dtype)
        return x

    alone = run(logits, device, history, PROCESSORS, masks)
    beside = run(*jax.tree.map(junk, (logits, device, history)), PROCESSORS, masks)
    np.testing.assert_array_equal(alone[:100], beside[:100])


def test_extended_history_is_committed(asked):
    one = asked(prompt=[1, 2], output=[3])
    history = history_of([one, one], np.random.default_rng(0), np.zeros((2, 0), np.int32))
    assert history.extended([]) is history
    extended = jax.jit(History.extended)
    longer = jax.device_get(extended(history, [np.array([4, 5]), np.array([6, 7])]))
    assert longer.lengths.tolist() == [5, 5]
    assert longer.tokens[:, :5].tolist() == [[1, 2, 3, 4, 6], [1, 2, 3, 5, 7]]
    np.testing.assert_array_equal(longer.tokens[:, 5:], history.tokens[:, 5:])
