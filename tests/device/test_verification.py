"""The verdict, against a loop over every case of a small vocabulary."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.device.verification import verify_seed_exact


@pytest.mark.parametrize("k", range(4))
def test_the_longest_equal_prefix_stands(k):
    cases = list(itertools.product(itertools.product(range(2), repeat=k), [(0, 1, 1, 0)[: k + 1]]))
    drafts = jnp.array([draft for draft, _ in cases], jnp.int32).reshape(len(cases), k)
    target = jnp.array([tokens for _, tokens in cases], jnp.int32)
    verdict = verify_seed_exact(drafts, target)
    for (draft, tokens), accepted in zip(cases, verdict.num_accepted.tolist(), strict=True):
        equal = [a == b for a, b in zip(draft, tokens, strict=False)]
        assert accepted == [*equal, False].index(False)
    np.testing.assert_array_equal(verdict.tokens, target)
