"""Drafts from the host replace the drafter's if they continue the tokens; compared with Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.fits import FIXED_SEED, pvalue

from specjax.device.edits import History
from specjax.device.requests import Sampling
from specjax.device.suggestions import Suggestions, replace_drafts
from specjax.device.verification import Block, Draft, Rejection, SeedExact, Target
from specjax.device.vocabulary import WHOLE

pytestmark = pytest.mark.slow

BATCH, LENGTH, WIDTH, VOCAB = 300, 16, 7, 3


def expected(draft, count, path, start, tokens):
    """Return a request's drafts, their number, and whether they come from the path."""
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


@pytest.mark.parametrize("method", [Rejection(), Block(), SeedExact()])
def test_the_next_token_has_the_targets_distribution(method):
    """This holds for drafts from a path and from the drafter, and for every token of the path."""
    batch, k, rng = 40_000, 2, np.random.default_rng(1)
    p, q = (rng.dirichlet(np.ones(VOCAB), k + 1).astype(np.float32) for _ in range(2))
    drawn = (rng.random((batch, k, 1)) > np.cumsum(q[:k], axis=1)[None]).sum(axis=2)
    path = rng.integers(-1, VOCAB, batch)  # -1: no path; else this token in both places
    suggestions = Suggestions(
        np.ones(batch, np.int32), np.stack([path] * k, axis=1, dtype=np.int32)
    )
    history = History(np.zeros((batch, 4), np.int32), np.ones(batch, np.int32))
    sampling = Sampling(
        np.ones(batch, np.float32),
        rng.integers(0, 2**32, batch, dtype=np.uint32),
        np.zeros(batch, np.int32),
        np.ones(batch, np.float32),
        np.zeros(batch, np.float32),
    )

    @jax.jit
    def verify(drawn, suggestions, sampling):
        given = Draft(drawn, jnp.broadcast_to(q[:k], (batch, k, VOCAB)))
        draft = replace_drafts(given, suggestions, history, WHOLE)
        logits = jnp.broadcast_to(jnp.log(p), (batch, k + 1, VOCAB))
        target = Target(logits, sampling, history.lengths, draft.counts)
        return method.verify(draft, target)

    verdict = verify(drawn.astype(np.int32), suggestions, sampling)
    first = np.asarray(verdict.tokens)[:, 0]
    for token in range(-1, VOCAB):
        counts = np.bincount(first[path == token], minlength=VOCAB)
        assert pvalue(counts, np.float64(p[0])) > FIXED_SEED, token
        assert (np.asarray(verdict.num_accepted)[path == token] > 0).any()
