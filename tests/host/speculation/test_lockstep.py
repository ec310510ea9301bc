"""Replicas in lock step: one decides, the others follow.

Engines that do so, and wait for each other, are in `tests/test_dynamic_k.py`.
"""

import pytest

from specjax.host.speculation.acceptance import Acceptance, DraftOutcome
from specjax.host.speculation.lockstep import LockstepPolicy
from specjax.host.speculation.policy import DecodeLoad, GoodputPolicy, PolicyRule, Round
from specjax.host.speculation.step_cost import StepCost

LOADS = [
    DecodeLoad(3, 100, 64, {("a", 2): 2, ("b", 1): 1}),
    DecodeLoad(5, 40, 32, {("a", 2): 4, ("c", 0): 1}),
]


class Replica:
    """One of two, whose collectives are lists that both know."""

    def __init__(self, rank, calls):
        self.is_leader, self.calls = rank == 0, calls

    def gather(self, load):
        self.calls.append(load)
        return LOADS

    def broadcast(self, k):
        self.calls += [k] * self.is_leader
        return self.calls[2]


class Asked(PolicyRule):
    """Notes the loads it is asked with."""

    choices = (0, 2)

    def __init__(self):
        self.loads = []

    def choose(self, load):
        self.loads.append(load)
        return 2


def test_the_leader_decides_by_the_loads_of_all():
    """As slow as the fullest replica, and with the tokens of all."""
    leading, following = Asked(), Asked()
    calls = [LOADS[1]]  # it has come before the leader
    assert LockstepPolicy(leading, Replica(0, calls)).choose(LOADS[0]) == 2
    assert calls == [LOADS[1], LOADS[0], 2]
    assert LockstepPolicy(following, Replica(1, calls)).choose(LOADS[1]) == 2
    members = {("a", 2): 6, ("b", 1): 1, ("c", 0): 1}
    assert leading.loads == [DecodeLoad(5, 100, 32, members)] and following.loads == []


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_leader_learns_and_all_are_told_of_new_weights(rank, monkeypatch):
    policy, told = GoodputPolicy((0, 3), StepCost({8: {0: 7.0, 3: 14.0}}), Acceptance(3)), []
    replica = LockstepPolicy(policy, Replica(rank, []))
    before = policy.acceptance.rates()
    replica.observe(Round(8, 3, 0, {DraftOutcome(3, 0): 8}, 9.0))
    assert replica.is_learning == (rank == 0)
    assert (policy.acceptance.rates() != before) == (rank == 0)
    for change in "target_changed", "drafter_changed":
        monkeypatch.setattr(policy, change, lambda change=change: told.append(change))
        getattr(replica, change)()
    assert told == ["target_changed", "drafter_changed"]
