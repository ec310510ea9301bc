"""Edited logits, against loops over the tokens of each request; drafts count as committed ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.device.edits import History, edit, unpack_bits
from specjax.sampling_params import SamplingParams

LENGTH = 18  # the most tokens of a request


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


def double(tokens, length, logits):
    return 2 * logits


def double_twin(tokens, logits):
    return [2 * x for x in logits]


# Numbers 1 and 3 are of requests that are not in the step.
PROCESSORS = ((0, (favour_next, double)), (2, (double, favour_next, forbid_sum)))
TWINS = {0: (favour_next_twin, double_twin), 2: (double_twin, favour_next_twin, forbid_sum_twin)}
compiled = jax.jit(edit, static_argnames="processors")
then, unpack = jax.jit(History.then), jax.jit(unpack_bits, static_argnums=1)


def run(*arguments):
    return np.asarray(compiled(*arguments))


def history_of(requests, rng, drafts):
    """Their tokens with garbage behind, then the drafts."""
    tokens = rng.integers(0, 7, (len(requests), LENGTH))
    lengths = [len(one.prompt) + len(one.output) for one in requests]
    for row, one in zip(tokens, requests, strict=True):
        row[: len(one.prompt) + len(one.output)] = [*one.prompt, *one.output]
    return then(History(tokens, np.array(lengths)), drafts)


def random_logits(rng, *shape):
    """With ties, zeros and values that are out already."""
    logits = np.round(rng.normal(size=shape) * 3 * 8) / 8
    logits[rng.random(shape) < 0.05] = -np.inf
    logits[..., 0] = 0.5
    return logits.astype(np.float32)


def packed_bits(is_set):
    padded = np.pad(is_set, ((0, 0),) * (is_set.ndim - 1) + ((0, -is_set.shape[-1] % 32),))
    words = np.packbits(padded, axis=-1, bitorder="little")
    return words.view(np.int32)


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
        for t in range(k + 1):
            now = one.then(*drafts[b, :t].tolist())
            permitted = set(np.flatnonzero(allowed[b, t]))
            expected = np.array(now.edit(logits[b, t], TWINS, permitted))
            np.testing.assert_allclose(edited[b, t], expected, rtol=1e-5, atol=1e-5)
            if one == asked(one.params, one.prompt, one.output) and not one.params.edits_logits:
                raw = np.where(allowed[b, t], logits[b, t], -np.inf)
                np.testing.assert_array_equal(edited[b, t], raw)


@pytest.fixture
def edit_one(asked):
    """Rows of edited zeros, or of other logits, over seven tokens for one request and its drafts.

    They are a part of more rows, which are compiled once for all.
    """

    def edited(one, drafts=(), *, logits=0.0):
        padded = np.array([[*drafts, *[0] * 4][:4]])
        wide = np.zeros((1, 5, 7), np.float32)
        wide[0, : len(drafts) + 1] = logits
        history = history_of([one], np.random.default_rng(0), padded)
        device = asked.on_device([one], 7)
        return run(wide, device, history, PROCESSORS)[0, : len(drafts) + 1]

    return edited


@pytest.mark.parametrize(
    "word, rows",
    [
        ([0, 1, 2, 5], [0]),  # the whole history
        ([6, 0, 1, 2, 5], []),  # longer than the history
        ([0, 0, 1, 2, 5], []),
        ([0, 1, 2, 3, 4, 5], [2]),  # from prompt to the last draft
    ],
)
def test_a_bad_word_may_be_as_long_as_the_history(asked, edit_one, word, rows):
    edited = edit_one(
        asked(SamplingParams(), [0, 1], [2], [[6, 6, 6, 6, 6, 6, 6, 1], word]), [3, 4]
    )
    expected = np.zeros((3, 7))
    expected[rows, 5] = -np.inf
    np.testing.assert_array_equal(edited, expected)


@pytest.mark.parametrize("room", range(5))
def test_drafts_past_the_end_are_dropped(asked, edit_one, room):
    """Rows that follow no more than there is room for do not notice."""
    params = SamplingParams(frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.5)
    output = [3] * (LENGTH - 3 - room)
    one = asked(params, [1, 2, 1], output, [[3, 5, 6], [1, 3, 2], [3, 3, 4]])
    drafts, logits = [5, 6, 2, 2], np.arange(35, dtype=np.float32).reshape(5, 7)
    edited = edit_one(one, drafts, logits=logits)
    for t in range(room + 1):
        expected = one.then(*drafts[:t]).edit(logits[t])
        np.testing.assert_allclose(edited[t], expected, rtol=1e-5, atol=1e-5)


def test_rows_of_no_request_are_harmless(asked):
    """Padding rows show whatever is in the last slot."""
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


@pytest.mark.parametrize("count", [1, 31, 32, 33])
def test_bits_unpack_in_the_order_of_ids(count):
    is_set = np.random.default_rng(count).random((5, count)) < 0.5
    is_set[0], is_set[1] = True, False
    unpacked = unpack(packed_bits(is_set), count)
    assert unpacked.dtype == bool
    np.testing.assert_array_equal(unpacked, is_set)
