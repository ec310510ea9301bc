"""Work that is shared out to workers who may die: what there is to do, and how many fit where.

It knows numbers only, neither what a worker is nor what it is given.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SLACK = 1e-6  # of how often a part of a device goes into a whole


@dataclass(frozen=True)
class Group:
    """What one worker does at once: places in a call."""

    places: tuple[int, ...]
    num_deaths: int = 0  # of workers that had it


class Deadly(NamedTuple):
    """A place at which worker after worker died."""

    place: int
    error: Exception  # of the last


class WorkQueue:
    """Places, each of which is to be done once, whoever dies over it.

    What a dead worker had comes next, place by place, so that it shows which of them is deadly. A
    place that has cost `max_deaths` workers is not handed out again, and nothing else is either.
    """

    def __init__(self, groups: Iterable[Sequence[int]], max_deaths: int):
        self._waiting = deque(Group(tuple(places)) for places in groups)
        self._taken: set[Group] = set()
        self._max_deaths = max_deaths
        self.deadly: Deadly | None = None

    @property
    def is_left(self) -> bool:
        """Whether anything is to be taken, or to be waited for."""
        return bool(self._taken or (self._waiting and self.deadly is None))

    def take(self) -> Group | None:
        """The next group, or None if there is none for now."""
        if not self._waiting or self.deadly is not None:
            return None
        group = self._waiting.popleft()
        self._taken.add(group)
        return group

    def done(self, group: Group) -> None:
        """Note that a group that was taken has been answered."""
        self._taken.remove(group)

    def died(self, group: Group, error: Exception) -> None:
        """Note that the worker that had taken a group is no more."""
        self._taken.remove(group)
        num_deaths = group.num_deaths + 1
        if len(group.places) == 1 and num_deaths >= self._max_deaths:
            self.deadly = self.deadly or Deadly(group.places[0], error)
        self._waiting.extendleft(Group((place,), num_deaths) for place in reversed(group.places))


def num_fitting(needs: Mapping[str, float], nodes: Iterable[Mapping[str, float]]) -> float:
    """How many that need these resources each, all of one node, fit on the nodes together."""
    needed = {name: amount for name, amount in needs.items() if amount}
    if not needed:
        return float("inf")
    return sum(
        min(int(node.get(name, 0) / amount + SLACK) for name, amount in needed.items())
        for node in nodes
    )
