"""Frees an engine's device memory for a while, and allocates it again later."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Sharding

from specjax.device.drafters.drafter import Params
from specjax.device.placement import own_part, put
from specjax.engine.engine import Engine


class Sleeper(Protocol):
    """The attributes and methods of an engine that `Sleep` needs. A `Follower` has them, too."""

    params: Any
    programs: Any

    def release(self) -> None: ...
    def renew(self) -> None: ...


class Sleep:
    """Puts an engine to sleep, and wakes it up.

    Level 0 is awake. Level 1 frees the caches and all other state of requests. Level 2 also moves
    the weights to the host.
    """

    def __init__(self, engine: Sleeper):
        self._engine = engine
        self.level = 0
        self._homes: list[Sharding] = []  # shardings to restore, if the weights are on the host

    def change(self, change: Callable[[int, Any, Sharding], Any]) -> None:
        """Replace the engine's weights array by array, whether the engine is asleep or awake.

        `change(i, array, sharding)` returns the array that replaces array number i. A new array
        must have the given sharding.
        """

        def changed(i: int, leaf: Any) -> Any:
            new = change(i, leaf, self._home(i, leaf))
            return on_host(new) if self.level == 2 and new is not leaf else new

        change_weights(self._engine, changed)

    def _home(self, number: int, leaf: Any) -> Sharding:
        """Return the sharding that the weights array `number` has while the engine is awake."""
        return self._homes[number] if self._homes else leaf.sharding

    def begin(self, level: int) -> None:
        """Fall asleep at `level`, and free memory. Call this only while no step is in flight."""
        self._engine.programs.elsewhere(begin_sleep, level)
        if not self.level:
            self._engine.release()
            self.level = 1
        if level == 2:
            self.level = 2  # set first: `end` restores weights if moving them fails half-way
            self._homes = self._homes or [x.sharding for x in jax.tree.leaves(self._engine.params)]
            change_weights(self._engine, lambda _, leaf: on_host(leaf))

    def end(self) -> None:
        """Wake up: move the current weights to the device, and create an empty state."""
        if self.level:
            self._engine.programs.elsewhere(end_sleep)
            change_weights(self._engine, lambda i, leaf: put(own_part(leaf), self._home(i, leaf)))
            self._homes = []
            self._engine.renew()
            self.level = 0


class SleepOfAll:
    """Puts all replicas of an engine to sleep together; see `Sleep`."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._sleeps = {one: Sleep(one) for one in engine.engines}

    @property
    def _each(self) -> list[Sleep]:
        return [self._sleeps[one] for one in self._engine.engines]

    @property
    def level(self) -> int:
        """See `Sleep`."""
        return max(one.level for one in self._each)

    def begin(self, level: int) -> None:
        """See `Sleep`."""
        for one in self._each:
            one.begin(level)

    def change(self, change: Callable[[int, Any, Sharding], Any]) -> None:
        """See `Sleep`."""
        for one in self._each:
            one.change(change)

    def end(self) -> None:
        """See `Sleep`."""
        for one in self._each:
            one.end()


def check_level(level: object) -> None:
    """Raise a ValueError for every level except 1 and 2."""
    if level not in (1, 2) or isinstance(level, bool):
        raise ValueError(f"level={level!r} must be 1 (frees caches and states) or 2 (weights too)")


def begin_sleep(follower: Any, level: int) -> None:
    """Put this process's part of an engine to sleep at `level` (see `Sleep`).

    Process 0 passes this function to `Programs.elsewhere`.
    """
    follower.sleep.begin(level)


def end_sleep(follower: Any) -> None:
    """Undo `begin_sleep`."""
    follower.sleep.end()


def change_weights(engine: Sleeper, change: Callable[[int, Any], Any]) -> None:
    """Replace the engine's weights array by array.

    `change(i, array)` returns the array that replaces array number i. Only one array at a time is
    in memory in both its old and its new form.
    """
    leaves, tree = jax.tree.flatten(engine.params)
    engine.params = Params(None, None)
    try:
        for i in range(len(leaves)):
            leaves[i] = jax.block_until_ready(change(i, leaves[i]))
    finally:
        engine.params = jax.tree.unflatten(tree, leaves)


def on_host(leaf: Any) -> np.ndarray:
    """Return a copy of an array, or of this process's part of it, in host memory."""
    return np.array(jax.device_get(own_part(leaf)))
