"""A rollout engine inside a Ray actor: what a worker process runs."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specjax.rl.engine import RolloutEngine
from specjax.rl.rollouts import RolloutBatch
from specjax.rl.weights import WeightUpdate

RETRY_S = 0.05  # between attempts to abort a call that has not reached the engine yet


class NotBuilt(RuntimeError):
    """A worker has no engine, because of the error that it was built with."""

    def __init__(self, error: Exception):
        super().__init__(error)
        self.error = error


@dataclass(frozen=True)
class WorkerState:
    """What a new worker must be told to be like the others; arrays are in the object store."""

    version: int = 0
    drafter_version: int = 0
    weights: Any = None
    drafter: Any = None  # of the last update that had any, perhaps among the target's
    sleep_level: int = 0


class Worker:
    """An engine in an actor. An error of building it is raised by every call."""

    def __init__(
        self, model: Any, options: Mapping[str, Any], state: WorkerState, weights: Any, drafter: Any
    ):
        self._ended = threading.Condition()
        self._running: set[int] = set()  # labels of calls
        self._aborted: set[int] = set()
        self._failure: Exception | None = None
        try:
            self._engine = RolloutEngine(model, **options)
            if weights is not None:
                self._engine.update_weights(weights, state.version, drafter=drafter)
            elif drafter is not None:
                self._engine.update_drafter(drafter)
            self._engine.drafter_version = state.drafter_version
            if state.sleep_level:
                self._engine.sleep(state.sleep_level)
        except Exception as error:
            self._failure = error

    @property
    def engine(self) -> RolloutEngine:
        """The engine, if it could be built."""
        if self._failure is not None:
            raise NotBuilt(self._failure)
        return self._engine

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What a method of the engine gives."""
        return getattr(self.engine, method)(*args, **kwargs)

    def update(self, method: str, *args: Any, **kwargs: Any) -> tuple[WeightUpdate, int]:
        """What an update gives, and the drafter's version after it."""
        return self.call(method, *args, **kwargs), self.engine.drafter_version

    def generate(self, label: int, *args: Any) -> RolloutBatch | None:
        """Rollouts; None for a call that was aborted before it began."""
        with self._ended:
            if label in self._aborted:
                return None
            self._running.add(label)
        try:
            return self.engine.generate(*args, label=label)
        finally:
            with self._ended:
                self._running.remove(label)
                self._ended.notify_all()

    def abort(self, label: int) -> None:
        """End the rollouts of a call, and return when they have ended."""
        with self._ended:
            self._aborted.add(label)
            while label in self._running:
                self.engine.abort(label)
                self._ended.wait(RETRY_S)  # for it may be on its way to the engine
