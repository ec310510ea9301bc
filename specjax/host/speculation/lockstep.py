"""Chooses one K (number of drafts per request) for replicas that run their steps together.

Replicas that synchronise in every step, e.g. with experts spread over data-parallel ranks, must run
the same K, or they deadlock. Their loads and times differ, so their policies would choose different
Ks. Therefore one replica, the leader, decides from the loads of all replicas, and the other
replicas follow.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from specjax.host.speculation.policy import DecodeLoad, Policy, Round
from specjax.host.speculation.profile import Profile
from specjax.host.speculation.step_cost import StepCost


class Replicas(Protocol):
    """Communication between replicas.

    All replicas make the same calls in the same order. The calls block.
    """

    @property
    def is_leader(self) -> bool:
        """Whether this replica is the leader. Exactly one replica is."""
        ...

    def gather(self, load: DecodeLoad) -> Sequence[DecodeLoad]:
        """Return the loads of all replicas. Only the leader uses the result."""
        ...

    def broadcast(self, k: int) -> int:
        """Return the leader's K on every replica."""
        ...


class LockstepPolicy:
    """Makes every replica use the K that the leader's policy chooses.

    Every replica wraps a policy with the same choices, but only the leader's policy chooses. All
    replicas must compile ahead, so that all have the same programs. The leader assumes that a step
    takes as long as on the busiest replica. It counts the tokens that all replicas gain.
    """

    def __init__(self, policy: Policy, replicas: Replicas):
        self._policy = policy
        self._replicas = replicas

    @property
    def choices(self) -> tuple[int, ...]:
        """The choices of the wrapped policy."""
        return self._policy.choices

    @property
    def is_learning(self) -> bool:
        """Whether this replica is the leader and its policy learns.

        The leader learns from its own rounds.
        """
        return self._replicas.is_leader and self._policy.is_learning

    @property
    def weighs_requests(self) -> bool:
        """Whether the wrapped policy reads `num_context` and `members` of a load."""
        return self._policy.weighs_requests

    def begin(self, replay: Callable[[], StepCost]) -> None:
        """Let the wrapped policy of each replica measure rounds. Only the leader uses the times."""
        self._policy.begin(replay)

    def shape_ready(self, batch: int, k: int, time: Callable[[], float]) -> None:
        """Let the leader's policy measure a round of this shape."""
        if self._replicas.is_leader:
            self._policy.shape_ready(batch, k, time)

    def choose(self, load: DecodeLoad) -> int:
        """Return the K that the leader chooses."""
        loads = self._replicas.gather(load)
        k = self._policy.choose(_joined(loads)) if self._replicas.is_leader else 0
        return self._replicas.broadcast(k)

    def observe(self, outcome: Round) -> None:
        """Let the leader's policy learn from a round."""
        if self._replicas.is_leader:
            self._policy.observe(outcome)

    def learned(self) -> Profile | None:
        """Return the profile that the leader learned; None on other replicas."""
        return self._policy.learned() if self._replicas.is_leader else None

    def target_changed(self) -> None:
        """Notify the wrapped policy. All replicas change their weights together."""
        self._policy.target_changed()

    def drafter_changed(self) -> None:
        """Notify the wrapped policy. All replicas change their weights at the same step."""
        self._policy.drafter_changed()


def _joined(loads: Sequence[DecodeLoad]) -> DecodeLoad:
    """Return the load from which the leader's policy chooses K for all replicas.

    It has the largest sizes, the smallest token budget and all members of `loads`.
    """
    members: Counter = sum((Counter(load.members) for load in loads), Counter())
    budgets = [load.max_tokens for load in loads if load.max_tokens is not None]
    return DecodeLoad(
        max(load.num_sequences for load in loads),
        max(load.num_context for load in loads),
        min(budgets, default=None),
        members,
    )
