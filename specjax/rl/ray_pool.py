"""A pool of identical Ray actors (workers) that share work.

Each group of work items goes to the next free worker, so that long outputs do not delay other
groups. If a worker dies, its unfinished group returns to the queue, and a new worker with the
current weights replaces the dead worker.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.rl.named import Weights, read_named
from specjax.rl.ray_worker import NotBuilt, WorkerFailed, WorkerState
from specjax.rl.rollouts import RolloutBatch, RolloutError
from specjax.rl.weights import WeightUpdate
from specjax.rl.work import Group, WorkQueue, num_fitting

MAX_DEATHS = 3  # a call fails once this number of workers died at the same work item
MAX_CALLS = 16  # maximum number of concurrent generate or score calls per worker


class WorkersDied(RolloutError):
    """Raised if workers died and their work could not be done.

    `rollouts` has all finished rollouts.
    """


class _Busy(NamedTuple):
    """A worker and its current group of work."""

    number: int
    worker: Any
    group: Group


class WorkerPool:
    """A fixed number of workers.

    A worker that replaces a dead worker gets the current weights, corpora and sleep level.

    Args:
        ray: the ray module, initialized.
        actor: the workers' class, a Ray actor.
        model, options: the arguments of every worker's engine.
        num_workers: the number of workers.
        ray_options: the Ray options of each worker's actor.
        size_name: what to call the number of workers in error messages.

    Raises:
        ValueError: the cluster is too small for the workers.
    """

    def __init__(
        self,
        ray: Any,
        actor: Any,
        model: Any,
        options: Mapping[str, Any],
        *,
        num_workers: int,
        ray_options: Mapping[str, Any],
        size_name: str = "num_workers",
    ):
        self._ray = ray
        self.state = WorkerState()  # what new workers start with
        self._ray_options = ray_options
        self._actor = actor.options(**ray_options)
        self._model = model
        self._options = options
        self._labels = itertools.count()
        self._num_workers, self._size_name = num_workers, size_name
        self._replacing = threading.RLock()  # updates and replacements take turns
        if lack := self._lack():
            raise ValueError(lack)
        self.workers = [self._start() for _ in range(num_workers)]

    def close(self) -> None:
        """End the workers; closing twice is harmless."""
        for worker in self.workers:
            self._ray.kill(worker)
        self.workers = []

    def check_awake(self) -> None:
        """Raise a RuntimeError if the workers are asleep, or the pool is closed."""
        self.check_open()
        if self.state.sleep_level:
            raise RuntimeError("the workers are asleep; call wake_up")

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every worker's engine; return a list with each worker's result."""
        numbers = range(len(self.workers))
        return _values(self._outcomes(numbers, "call", method, *args, **kwargs))

    def call_first(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the first worker's engine; return its result."""
        (value,) = _values(self._outcomes([0], "call", method, *args, **kwargs))
        return value

    def change_all(
        self, change: Callable[[WorkerState], WorkerState], method: str, *args: Any
    ) -> None:
        """Call a method of every worker's engine, and then change the state for new workers.

        `change` takes the old state and returns the new state. If a call raises an error, the state
        stays unchanged.
        """
        with self._replacing:  # a worker that is replaced meanwhile would have the old state
            self.call_all(method, *args)
            self.state = change(self.state)

    def identity(self) -> dict[str, Any]:
        """Return the identity of the first worker's engine; see `identity_of`."""
        (value,) = _values(self._outcomes([0], "identity"))
        return value

    def put(self, value: Any) -> Any:
        """Put a value in Ray's object store, and return its reference."""
        return self._ray.put(value)

    def update(self, method: str, *args: Any, **kwargs: Any) -> tuple[WeightUpdate, int]:
        """Call an update method of every worker's engine. Either all engines change, or none does.

        Return the `WeightUpdate` that took the longest, and the drafter's version after the update.
        """
        outcomes: list[Any] = [None] * len(self.workers)
        try:
            outcomes = self._outcomes(range(len(self.workers)), "update", method, *args, **kwargs)
            return max(_values(outcomes), key=lambda one: one[0].seconds)
        except BaseException:
            for number, outcome in enumerate(outcomes):
                if not isinstance(outcome, ValueError):  # a ValueError changes nothing
                    # Replace the worker now, since a killed worker may still answer the next call.
                    with suppress(WorkersDied):  # the next call raises it
                        self.replace(number, self.workers[number])
            raise

    def update_weights(
        self, weights: Weights, version: int | None, *, drafter: Weights | None, **options: Any
    ) -> WeightUpdate:
        """Replace the weights of every worker's target, or of none; see `update`.

        `options` are passed to the workers' method `update_weights`.
        """
        placed = self.place(weights)
        own = None if drafter is None else self.place(drafter)
        with self._replacing:  # a worker that is replaced meanwhile would get the old weights
            version = self.state.version + 1 if version is None else version
            update, drafter_version = self.update(
                "update_weights", placed, version, drafter=own, **options
            )
            if drafter_version > self.state.drafter_version and own is None:
                own = placed
            self.state = replace(
                self.state,
                version=update.version,
                drafter_version=drafter_version,
                weights=placed,
                drafter=self.state.drafter if own is None else own,
            )
        return update

    def place(self, weights: Weights) -> Any:
        """Put weights of any form in Ray's object store, as NumPy arrays by name.

        Return their Ray reference.
        """
        named = read_named(weights, weights if is_dataclass(weights) else None, "weights")
        arrays = {name: np.asarray(x) for name, x in jax.device_get(named).items()}
        return self._ray.put(arrays)

    def run(
        self,
        name: str,
        groups: Iterable[Sequence[int]],
        send: Callable[[Any, int, Sequence[int]], Any],
        read: Callable[[Sequence[int], Any], Sequence[Any]],
    ) -> Iterator[tuple[int, Any]]:
        """Run groups of work items on free workers; yield a pair (index, value) for each item.

        Args:
            name: what to call a work item in error messages.
            groups: for each group, the indices of the items that one worker gets together.
            send: the function that sends a group's items to a worker. `send(worker, label,
                indices)` returns the Ray reference of the worker's result. `label` identifies this
                call of `run`.
            read: the function that splits a worker's result. `read(indices, result)` returns one
                value per index.

        Raises:
            WorkersDied: workers died repeatedly at the same item, or cannot be replaced.
            RolloutError: a worker's generation ended early, or the engine of a new worker could not
                be built. The values of a group that ended early are yielded before the error.
            RuntimeError: the workers are asleep, or the pool is closed.
        """
        label = next(self._labels)
        work = WorkQueue(groups, MAX_DEATHS)
        free = deque(range(len(self.workers)))
        busy: dict[Any, _Busy] = {}  # by the reference of the result
        try:
            while work.is_left:
                self.check_awake()  # `sleep` or `close` may have been called since the last value
                while free and (group := work.take()):
                    worker = self.workers[free[0]]
                    reference = send(worker, label, group.places)
                    busy[reference] = _Busy(free.popleft(), worker, group)
                (reference,), _ = self._ray.wait(list(busy), num_returns=1)
                done = busy.pop(reference)
                free.append(done.number)
                yield from self._finish(work, done, reference, read)
        finally:
            self._abort(label, busy)
        if work.deadly is not None:
            place, error = work.deadly
            raise WorkersDied(
                f"{MAX_DEATHS} workers died one after the other at {name} {place} (the last: "
                f"{error}); leave it out, or find out why it ends them",
                RolloutBatch(()),
            ) from error

    def _start(self) -> Any:
        state = self.state
        bare = replace(state, weights=None, drafter=None)  # Ray fetches only arguments
        return self._actor.remote(self._model, self._options, bare, state.weights, state.drafter)

    def replace(self, number: int, dead: Any) -> None:
        """Replace the worker `dead` by a new one, unless it has been replaced already.

        `number` is the worker's index.

        Raises:
            WorkersDied: the cluster no longer has the resources for all workers.
        """
        with self._replacing:
            if not self.workers or self.workers[number] is not dead:
                return
            self._ray.kill(dead)  # it may be alive and only unreachable
            if lack := self._lack():
                raise WorkersDied(f"a worker died and cannot be replaced: {lack}", RolloutBatch(()))
            self.workers[number] = self._start()

    def _lack(self) -> str | None:
        """Return why the cluster cannot hold all workers, or None if all workers fit."""
        options = self._ray_options
        names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
        needs = {name: options.get(option) or 0 for option, name in names.items()}
        needs |= options.get("resources") or {}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        room = num_fitting(needs, nodes)
        if room >= self._num_workers:
            return None
        wanted = {name: amount for name, amount in needs.items() if amount}
        total = {name: sum(node.get(name, 0) for node in nodes) for name in wanted}
        return (
            f"{self._size_name}={self._num_workers} of {wanted} each do not fit in the cluster, "
            f"which has {total} on {len(nodes)} node(s), enough for {room}; lower "
            f"{self._size_name} or ray_options, or add nodes"
        )

    def _outcomes(
        self, numbers: Sequence[int], method: str, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Call a method of some workers, which are given by their numbers (indices).

        Return each worker's result, or the exception that it raised. Workers that die are replaced,
        and the new workers are called.

        Raises:
            WorkersDied: a worker died repeatedly, or cannot be replaced.
        """
        self.check_open()
        work = WorkQueue([(number,) for number in numbers], MAX_DEATHS)
        asked: dict[Any, Group] = {}
        outcomes: dict[int, Any] = {}
        while work.is_left:
            while group := work.take():
                worker = self.workers[group.places[0]]
                asked[getattr(worker, method).remote(*args, **kwargs)] = group
            (reference,), _ = self._ray.wait(list(asked), num_returns=1)
            group = asked.pop(reference)
            (number,) = group.places
            try:
                outcomes[number] = self._get(reference)
            except self.deaths as error:
                work.died(group, error)
                self.replace(number, self.workers[number])
                continue
            except NotBuilt as error:
                self._ray.kill(self.workers[number])  # the next call then replaces it
                outcomes[number] = error.error
            except Exception as error:
                outcomes[number] = error
            work.done(group)
        if work.deadly is not None:
            number, error = work.deadly
            message = f"worker {number} died {MAX_DEATHS} times over one call (the last: {error})"
            raise WorkersDied(message, RolloutBatch(())) from error
        return [outcomes[number] for number in numbers]

    def _finish(
        self,
        work: WorkQueue,
        done: _Busy,
        reference: Any,
        read: Callable[[Sequence[int], Any], Sequence[Any]],
    ) -> Iterator[tuple[int, Any]]:
        """Yield a group's (index, value) pairs, or queue the group again if its worker died."""
        places = done.group.places
        try:
            answer = self._get(reference)
        except self.deaths as error:
            work.died(done.group, error)
            self.replace(done.number, done.worker)
            return
        except NotBuilt as error:
            self._ray.kill(done.worker)
            message = f"a worker could not be built again: {error.error}"
            raise RolloutError(message, RolloutBatch(())) from error.error
        except RolloutError as error:
            partial = zip(places, read(places, error.rollouts), strict=True)
            yield from (pair for pair in partial if pair[1])
            raise
        work.done(done.group)
        yield from zip(places, read(places, answer), strict=True)

    def _abort(self, label: int, busy: Mapping[Any, _Busy]) -> None:
        """Abort a call's work on the `busy` workers, and wait until it has ended."""
        references = [*busy, *(one.worker.abort.remote(label) for one in busy.values())]
        if references:
            self._ray.wait(references, num_returns=len(references))

    def _get(self, reference: Any) -> Any:
        """Return the result behind a reference; raise the engine's errors without Ray's wrapper."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            if not isinstance(cause, Exception):
                raise
            raise cause from error

    @property
    def deaths(self) -> tuple[type[Exception], ...]:
        """The exceptions after which a worker has to be replaced.

        Each means that the worker's process died, its result was lost, or its device failed.
        """
        found = self._ray.exceptions
        return found.RayActorError, found.WorkerCrashedError, found.ObjectLostError, WorkerFailed

    def check_open(self) -> None:
        """Raise a RuntimeError if the pool is closed."""
        if not self.workers:
            raise RuntimeError("the pool of workers is closed; build a new one")


def import_ray(name: str) -> Any:
    """Return the ray module, initialized. `name` is the name of the class that needs it.

    Raises:
        ImportError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError(f"{name} needs Ray; pip install 'specjax[ray]'") from error
    if not ray.is_initialized():
        ray.init()
    return ray


def send_work(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an actor's method in the actor's thread pool for long calls.

    Other methods of the actor, such as `abort`, can then run at the same time.
    """
    return method.options(concurrency_group="work").remote(*args, **kwargs)


def _values(outcomes: list[Any]) -> list[Any]:
    """Return the outcomes; raise the first exception among them."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes
