"""The Ray actor that runs a rollout engine in each worker process."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specjax.rl.engine import RolloutEngine
from specjax.rl.history import SharedHistory, identity_of
from specjax.rl.rollouts import RolloutBatch
from specjax.rl.weights import WeightUpdate

RETRY_S = 0.05  # seconds between attempts to abort a call


class NotBuilt(RuntimeError):
    """Raised if a worker has no engine, because building it failed with `error`."""

    def __init__(self, error: Exception):
        super().__init__(error)
        self.error = error


class WorkerFailed(RuntimeError):
    """Raised by a worker whose device failed, so that another worker must replace it."""


@dataclass(frozen=True)
class WorkerState:
    """The state that a new worker needs to match the other workers.

    `weights` and `drafter` refer to arrays in Ray's object store. `corpora` has texts by name.
    """

    version: int = 0
    drafter_version: int = 0
    weights: Any = None
    drafter: Any = None  # of its last update; can be target weights with mtp.*
    sleep_level: int = 0
    corpora: Mapping[str, Any] = field(default_factory=dict)


class Worker:
    """A rollout engine in a Ray actor.

    If building the engine failed, every call raises `NotBuilt` with the error.
    """

    def __init__(
        self, model: Any, options: Mapping[str, Any], state: WorkerState, weights: Any, drafter: Any
    ):
        self._ended = threading.Condition()
        self._running: set[int] = set()  # labels of the calls that run
        self._aborted: set[int] = set()  # labels of the calls that were aborted
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
        """The engine. Raises `NotBuilt` if the engine could not be built."""
        if self._failure is not None:
            raise NotBuilt(self._failure)
        return self._engine

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the engine."""
        return getattr(self.engine, method)(*args, **kwargs)

    def update(self, method: str, *args: Any, **kwargs: Any) -> tuple[WeightUpdate, int]:
        """Call an update method of the engine; return its result and the drafter's new version."""
        return self.call(method, *args, **kwargs), self.engine.drafter_version

    def identity(self) -> dict[str, Any]:
        """Return the engine's identity; see `identity_of`."""
        return identity_of(self.engine._llm)

    def generate(
        self, label: int, *args: Any, shared: SharedHistory | None = None, **options: Any
    ) -> RolloutBatch | None:
        """Generate rollouts; return None if the call `label` was aborted before it began.

        Drafts come from the history `shared`, if there is one. `options` are further arguments of
        `RolloutEngine.generate`.
        """
        with self._ended:
            if label in self._aborted:
                return None
            self._running.add(label)
        try:
            if shared is not None:
                options["history"] = shared.restored()
            return self.engine.generate(*args, label=label, **options)
        finally:
            with self._ended:
                self._running.remove(label)
                self._ended.notify_all()

    def abort(self, label: int) -> None:
        """Abort the rollouts of the call `label`, and wait until they have ended."""
        with self._ended:
            self._aborted.add(label)
            while label in self._running:
                self.engine.abort(label)
                self._ended.wait(RETRY_S)  # the call may not have reached the engine yet
