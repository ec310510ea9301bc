"""Choosing K."""

import pytest

from specjax.host.speculation.policy import StaticPolicy


@pytest.mark.parametrize("k", [0, 3])
def test_static_policy_is_the_same_at_any_batch_size(k):
    policy = StaticPolicy(k)
    assert policy.choices == (k,)
    assert {policy.choose(batch_size) for batch_size in (1, 2, 7, 256)} == {k}
