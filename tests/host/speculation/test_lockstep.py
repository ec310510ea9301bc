"""Replicas in lock step: threads that meet at a barrier, as ranks meet in a collective.

Engines that do so are in `tests/test_dynamic_k.py`.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from specjax.host.speculation.acceptance import Acceptance, DraftOutcome
from specjax.host.speculation.lockstep import LockstepPolicy
from specjax.host.speculation.policy import DecodeLoad, GoodputPolicy, PolicyRule, Round
from specjax.host.speculation.step_cost import StepCost

POINTS = {1: {0: 6.0, 1: 7.0, 3: 9.0}, 8: {0: 7.0, 1: 9.0, 3: 14.0}, 64: {0: 9.0, 1: 17.0, 3: 33.0}}


class Ring:
    """What replicas in one process share; a replica that does not come is waited for in vain."""

    def __init__(self, size):
        self.barrier = Barrier(size, timeout=5)
        self.loads = [None] * size
        self.k = None


class Member:
    """One replica's end of it."""

    def __init__(self, ring, rank):
        self.ring, self.rank = ring, rank

    @property
    def is_leader(self):
        return self.rank == 0

    def gather(self, load):
        self.ring.loads[self.rank] = load
        self.ring.barrier.wait()
        return list(self.ring.loads)

    def broadcast(self, k):
        if self.is_leader:
            self.ring.k = k
        self.ring.barrier.wait()
        chosen = self.ring.k
        self.ring.barrier.wait()
        return chosen


def adaptive():
    return GoodputPolicy((0, 1, 3), StepCost(POINTS), Acceptance(3))


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
    ring, inner = Ring(2), [Asked(), Asked()]
    policies = [LockstepPolicy(one, Member(ring, rank)) for rank, one in enumerate(inner)]
    loads = [
        DecodeLoad(3, 100, 64, {("a", 2): 2, ("b", 1): 1}),
        DecodeLoad(5, 40, 32, {("a", 2): 4, ("c", 0): 1}),
    ]
    with ThreadPoolExecutor(2) as pool:
        ks = list(pool.map(lambda pair: pair[0].choose(pair[1]), zip(policies, loads, strict=True)))
    assert ks == [2, 2]
    members = {("a", 2): 6, ("b", 1): 1, ("c", 0): 1}
    assert inner[0].loads == [DecodeLoad(5, 100, 32, members)] and inner[1].loads == []


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_leader_learns(rank):
    policy = adaptive()
    follower = LockstepPolicy(policy, Member(Ring(2), rank))
    before = policy.acceptance.rates()
    follower.observe(Round(8, 3, 0, {DraftOutcome(3, 0): 8}, 9.0))
    assert follower.is_learning == (rank == 0)
    assert (policy.acceptance.rates() != before) == (rank == 0)


@pytest.mark.parametrize("change", ["target_changed", "drafter_changed"])
def test_every_replica_is_told_of_new_weights(change, monkeypatch):
    told = []
    for rank in range(2):
        policy = adaptive()
        monkeypatch.setattr(policy, change, lambda rank=rank: told.append(rank))
        getattr(LockstepPolicy(policy, Member(Ring(2), rank)), change)()
    assert told == [0, 1]
