"""Prompt lookup on the device, compared with a search through Python lists."""

import re

import jax
import numpy as np
import pytest

from specjax.device.drafters.drafter import DraftContext, Variant
from specjax.device.drafters.ngram import NGramDrafter
from specjax.device.edits import History

LENGTH, BATCH = 24, 400
BOUNDS = [(1, 1), (1, 3), (2, 5), (3, 3)]
GARBAGE = [-1, 0, 1, 2, 3, 4, 2**31 - 1]  # what may lie past the known tokens


def draft_of(drafter, context, k):
    return drafter.draft(None, None, None, context, k)


# To compile takes longer than to run.
quickly = {"xla_backend_optimization_level": 0}
run = jax.jit(draft_of, static_argnums=(0, 2), compiler_options=quickly)


def context_of(tokens, lengths, is_active=None):
    """Return a context with only the fields that this drafter may read."""
    if is_active is None:
        is_active = np.full(len(lengths), True)
    return DraftContext(
        slots=None,
        starts=None,
        is_active=np.array(is_active),
        page_table=None,
        requests=None,
        history=History(np.array(tokens, np.int32), np.array(lengths, np.int32)),
        has_edits=None,
        kernels="auto",
        row_multiple=1,
        shares_noise=True,
        variant=Variant(masks=True),  # which drafts do not pass through
    )


def padded(histories, rng, length=LENGTH):
    """Return histories i32[B, length], padded with garbage, and their lengths."""
    tokens = rng.choice(GARBAGE, (len(histories), length))
    for row, history in zip(tokens, histories, strict=True):
        row[: len(history)] = history
    return tokens, [len(history) for history in histories]


def search(history, shortest, longest, k):
    """Return a request's drafts, or None: the tokens after the last match of the longest suffix."""
    for n in range(min(longest, len(history) - 1), shortest - 1, -1):
        for start in range(len(history) - n - 1, -1, -1):
            if history[start : start + n] == history[-n:]:
                grown = list(history)
                for i in range(k):
                    grown.append(grown[start + n + i])
                return grown[len(history) :]
    return None


def random_histories(rng, alphabet, count, length=LENGTH):
    histories = [rng.integers(0, alphabet, n).tolist() for n in rng.integers(0, length + 1, count)]
    # None, one, two and as many tokens as there are places.
    for history, n in zip(histories, (0, 1, 2, length), strict=False):
        history[:] = rng.integers(0, alphabet, n).tolist()
    return histories


@pytest.mark.slow
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("k, length", [(0, LENGTH), (3, LENGTH), (8, LENGTH), (2, 3)])
def test_random_histories(bounds, k, length):
    """In one case, histories are too short for the longest match."""
    rng = np.random.default_rng(k)
    for alphabet in range(2, 6):
        histories = random_histories(rng, alphabet, BATCH, length)
        is_active = rng.random(BATCH) < 0.9
        is_active[:4] = True
        tokens, lengths = padded(histories, rng, length)
        # A row of padding may say that it has any number of tokens.
        unknown = rng.choice([0, 3, -5, length + 5, 2**31 - 1], BATCH)
        lengths = np.where(is_active, lengths, unknown)
        draft, _ = run(NGramDrafter(*bounds), context_of(tokens, lengths, is_active), k)
        assert draft.tokens.dtype == draft.counts.dtype == np.int32
        assert not draft.tokens.weak_type and not draft.counts.weak_type
        found = [search(history, *bounds, k) for history in histories]
        found = [one if live else None for one, live in zip(found, is_active, strict=True)]
        counts = [0 if one is None else k for one in found]
        expected = [[0] * k if one is None else one for one in found]
        np.testing.assert_array_equal(draft.counts, counts)
        np.testing.assert_array_equal(draft.tokens, np.array(expected).reshape(BATCH, k))
        # Some have drafts, some have none.
        assert length < LENGTH or 10 < sum(one is not None for one in found) < BATCH - 10


@pytest.mark.parametrize(
    "history, bounds, drafts",
    [
        ([5, 1, 2, 3, 7, 7, 9, 2, 3, 8, 8, 4, 1, 2, 3], (2, 3), [7, 7, 9, 2, 3]),  # the longest
        ([5, 1, 2, 3, 7, 7, 9, 2, 3, 8, 8, 4, 1, 2, 3], (2, 2), [8, 8, 4, 1, 2]),  # the latest
        ([9, 1, 2, 1, 2, 1], (2, 5), [2, 1, 2, 1, 2]),  # overlaps the last tokens
        ([0, 1, 2, 3, 4, 1, 2], (2, 5), [3, 4, 1, 2, 3]),  # goes on in circles
        ([2, 1, 3, 1, 2, 4, 1], (2, 5), None),
    ],
)
def test_examples(history, bounds, drafts):
    context = context_of(*padded([history], np.random.default_rng(0)))
    draft, state = run(NGramDrafter(*bounds), context, 5)
    assert draft.probs is None and state is None
    assert draft.counts.tolist() == [5 if drafts else 0]
    assert drafts is None or draft.tokens[0].tolist() == drafts


def test_no_value_is_larger_than_the_history():
    context = context_of(np.zeros((8, 512)), [9] * 8)
    program = str(jax.make_jaxpr(draft_of, static_argnums=(0, 2))(NGramDrafter(), context, 8))
    shapes = re.findall(r":\w+\[([\d,]+)\]", program)
    sizes = [np.prod([int(x) for x in shape.split(",")]) for shape in shapes]
    assert len(sizes) > 20 and max(sizes) <= 8 * (512 + NGramDrafter().prompt_lookup_max)
    assert not re.search(r"\b(sort|scan|while|cond)\b", program)
