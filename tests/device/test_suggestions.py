"""Drafts from the host replace the drafter's where they continue the tokens: by plain Python."""

import jax
import numpy as np
import pytest

from specjax.device.edits import History
from specjax.device.suggestions import Suggestions, replace_drafts
from specjax.device.verification import Draft
from specjax.device.vocabulary import WHOLE

BATCH, LENGTH, WIDTH, VOCAB = 300, 16, 7, 3


def expected(draft, count, path, start, tokens):
    """(drafts, number of drafts, whether they are the path's) of one request."""
    past = len(tokens) - start
    if path[:past] == tokens[start:] and len(path) > past:
        drafts = path[past:][: len(draft)]
        return drafts, len(drafts), True
    return draft, count, False


@pytest.mark.parametrize("k, has_counts", [(3, True), (5, False)])
def test_paths_are_used_where_they_continue_the_tokens(k, has_counts):
    rng = np.random.default_rng(k)
    tokens = rng.integers(0, VOCAB, (BATCH, LENGTH))
    lengths = rng.integers(1, LENGTH - 1, BATCH)
    starts = np.maximum(lengths - rng.integers(0, 5, BATCH), 0)
    paths = [rng.integers(0, VOCAB, n).tolist() for n in rng.integers(0, WIDTH + 1, BATCH)]
    for i, path in enumerate(paths):  # most begin with what came
        same = tokens[i, starts[i] : lengths[i]].tolist()
        path[: rng.integers(0, 6)] = same[: rng.integers(0, 6)]
    padded = np.full((BATCH, WIDTH), -1)
    for row, path in zip(padded, paths, strict=True):
        del path[WIDTH:]
        row[: len(path)] = path
    drafts, counts = rng.integers(0, VOCAB, (BATCH, k)), rng.integers(0, k + 1, BATCH)
    probs = rng.random((BATCH, k, VOCAB), np.float32)
    as_ints = [x.astype(np.int32) for x in (drafts, counts, starts, padded, tokens, lengths)]
    drafts, counts, starts, padded, tokens, lengths = as_ints
    draft = Draft(drafts, probs, counts if has_counts else None)
    call = jax.jit(lambda *given: replace_drafts(*given, WHOLE))
    found = call(draft, Suggestions(starts, padded), History(tokens, lengths))
    num_used = 0
    for i, path in enumerate(paths):
        known = tokens[i, : lengths[i]].tolist()
        count = int(counts[i]) if has_counts else k
        wanted, num_drafts, is_path = expected(drafts[i].tolist(), count, path, starts[i], known)
        assert found.counts[i] == num_drafts
        assert found.tokens[i, : len(wanted)].tolist() == wanted
        q = np.eye(VOCAB)[found.tokens[i]] if is_path else probs[i]
        np.testing.assert_array_equal(found.probs[i], q)
        num_used += is_path
    assert 0.2 * BATCH < num_used < 0.8 * BATCH
