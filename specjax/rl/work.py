"""Queues work for workers that may die, and counts the workers that fit in a cluster.

This is plain bookkeeping of indices and resource amounts, independent of Ray.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SLACK = 1e-6  # rounding tolerance for fractional resources, such as 0.1 of a GPU


@dataclass(frozen=True)
class Group:
    """Work items that one worker gets together."""

    places: tuple[int, ...]  # indices of the work items in a call
    num_deaths: int = 0  # number of workers that died while they had these items


class Deadly(NamedTuple):
    """A work item during which `max_deaths` workers died."""

    place: int
    error: Exception  # the error of the last death


class WorkQueue:
    """A queue of groups of work items; each item is done once, even if workers die.

    The items of a dead worker are retried next, one at a time, to find the item that killed it.
    Once `max_deaths` workers have died at the same item, no more work is handed out.
    """

    def __init__(self, groups: Iterable[Sequence[int]], max_deaths: int):
        self._waiting = deque(Group(tuple(places)) for places in groups)
        self._taken: set[Group] = set()
        self._max_deaths = max_deaths
        self.deadly: Deadly | None = None

    @property
    def is_left(self) -> bool:
        """Whether work remains: a group can be taken, or a taken group is not done yet."""
        return bool(self._taken or (self._waiting and self.deadly is None))

    def take(self) -> Group | None:
        """Take the next group; return None if no group is waiting."""
        if not self._waiting or self.deadly is not None:
            return None
        group = self._waiting.popleft()
        self._taken.add(group)
        return group

    def done(self, group: Group) -> None:
        """Mark a taken group as done."""
        self._taken.remove(group)

    def died(self, group: Group, error: Exception) -> None:
        """Queue the items of a taken group again, because its worker died."""
        self._taken.remove(group)
        num_deaths = group.num_deaths + 1
        if len(group.places) == 1 and num_deaths >= self._max_deaths:
            self.deadly = self.deadly or Deadly(group.places[0], error)
        self._waiting.extendleft(Group((place,), num_deaths) for place in reversed(group.places))


def num_fitting(needs: Mapping[str, float], nodes: Iterable[Mapping[str, float]]) -> float:
    """Return the number of workers that fit on the nodes, if each worker needs `needs`.

    `needs` and each node have amounts by the name of a resource.
    """
    needed = {name: amount for name, amount in needs.items() if amount}
    if not needed:
        return float("inf")
    return sum(
        min(int(node.get(name, 0) / amount + SLACK) for name, amount in needed.items())
        for node in nodes
    )
