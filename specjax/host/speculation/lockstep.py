"""One K for replicas that run their steps together.

Where replicas meet in every step, as experts spread over data-parallel ranks make them, all have to
run the same K, or they wait for each other for ever. Loads and times differ between replicas, so
none can tell what another would choose: one decides by the loads of all, and the others follow.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from specjax.host.speculation.policy import DecodeLoad, Policy, Round
from specjax.host.speculation.step_cost import StepCost


class Replicas(Protocol):
    """How replicas talk. All make the same calls in the same order; each waits for the others."""

    @property
    def is_leader(self) -> bool:
        """Whether this replica decides. One of them does."""
        ...

    def gather(self, load: DecodeLoad) -> Sequence[DecodeLoad]:
        """The loads of all replicas, at least where it is the leader who asks."""
        ...

    def broadcast(self, k: int) -> int:
        """The leader's K, whatever the others give."""
        ...


class LockstepPolicy:
    """A policy that the leader of some replicas asks for all of them.

    Every replica has one, around a policy of the same choices; all but the leader's are never
    asked. All compile everything ahead, lest one of them lacks what another runs. A step is as slow
    as the replica with most to do, and gives what all of them get.
    """

    def __init__(self, policy: Policy, replicas: Replicas):
        self._policy = policy
        self._replicas = replicas

    @property
    def choices(self) -> tuple[int, ...]:
        """The policy's."""
        return self._policy.choices

    @property
    def is_learning(self) -> bool:
        """Whether the leader learns, from what it sees of its own."""
        return self._replicas.is_leader and self._policy.is_learning

    def begin(self, replay: Callable[[], StepCost]) -> None:
        """All replicas time their rounds, lest they get out of step; the leader's times count."""
        self._policy.begin(replay)

    def shape_ready(self, batch: int, k: int, time: Callable[[], float]) -> None:
        """Let the leader's policy measure it."""
        if self._replicas.is_leader:
            self._policy.shape_ready(batch, k, time)

    def choose(self, load: DecodeLoad) -> int:
        """The leader's choice."""
        loads = self._replicas.gather(load)
        k = self._policy.choose(_joined(loads)) if self._replicas.is_leader else 0
        return self._replicas.broadcast(k)

    def observe(self, outcome: Round) -> None:
        """Let the leader's policy learn."""
        if self._replicas.is_leader:
            self._policy.observe(outcome)

    def target_changed(self) -> None:
        """Tell the policy; all replicas change their weights together."""
        self._policy.target_changed()

    def drafter_changed(self) -> None:
        """Tell the policy."""
        self._policy.drafter_changed()


def _joined(loads: Sequence[DecodeLoad]) -> DecodeLoad:
    """The load of a step in which all run side by side."""
    members: Counter = sum((Counter(load.members) for load in loads), Counter())
    budgets = [load.max_tokens for load in loads if load.max_tokens is not None]
    return DecodeLoad(
        max(load.num_sequences for load in loads),
        max(load.num_context for load in loads),
        min(budgets, default=None),
        members,
    )
