"""A pool of Ray actors that are alike: work is shared out among them, and who dies is replaced.

It hands a group of work to whichever worker is free, so that long outputs do not hold up the rest.
What a worker was given and did not answer when it died goes back to the queue, and another takes
its place with the weights of the day.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from specjax.rl.ray_worker import NotBuilt, Worker, WorkerState
from specjax.rl.rollouts import RolloutBatch, RolloutError
from specjax.rl.weights import WeightUpdate
from specjax.rl.work import Group, WorkQueue, num_fitting

MAX_DEATHS = 3  # of workers at the same work, before it is given up
MAX_CALLS = 16  # that generate or score at once in a worker; more wait


class WorkersDied(RolloutError):
    """Workers died, and no other can do their work. `rollouts` has those of all that finished."""


class _Busy(NamedTuple):
    """Who does a group of work."""

    number: int
    worker: Any
    group: Group


class WorkerPool:
    """As many workers as were asked for, each of which can be told what the others were.

    Args:
        ray: the module, initialized.
        model, options: of every worker's engine.
        num_workers: how many.
        ray_options: what Ray gives each of their actors.

    Raises:
        ValueError: the cluster is too small for them.
    """

    def __init__(
        self,
        ray: Any,
        model: Any,
        options: Mapping[str, Any],
        *,
        num_workers: int,
        ray_options: Mapping[str, Any],
    ):
        self._ray = ray
        self.state = WorkerState()  # what a new worker is told
        self._ray_options = ray_options
        actor = ray.remote(concurrency_groups={"work": MAX_CALLS})(Worker)
        self._actor = actor.options(**ray_options)
        self._model = model
        self._options = options
        self._labels = itertools.count()
        self._num_workers = num_workers
        if lack := self._lack():
            raise ValueError(lack)
        self.workers = [self._start() for _ in range(num_workers)]

    def close(self) -> None:
        """End the workers; closing twice is harmless."""
        for worker in self.workers:
            self._ray.kill(worker)
        self.workers = []

    def check_awake(self) -> None:
        """Refuse to go on while the workers are asleep, or closed."""
        self._check_open()
        if self.state.sleep_level:
            raise RuntimeError("the workers are asleep; call wake_up")

    def put(self, value: Any) -> Any:
        """The reference of a value in the object store, where all workers find it."""
        return self._ray.put(value)

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """What a method of the engine gives on every worker."""
        numbers = range(len(self.workers))
        return _values(self._outcomes(numbers, "call", method, *args, **kwargs))

    def call_first(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What a method of the engine gives on one worker."""
        (value,) = _values(self._outcomes([0], "call", method, *args, **kwargs))
        return value

    def update(self, method: str, *args: Any, **kwargs: Any) -> tuple[WeightUpdate, int]:
        """The slowest worker's update, and the drafter's version; all are updated, or none."""
        outcomes: list[Any] = [None] * len(self.workers)
        try:
            outcomes = self._outcomes(range(len(self.workers)), "update", method, *args, **kwargs)
            return max(_values(outcomes), key=lambda one: one[0].seconds)
        except BaseException:
            for number, outcome in enumerate(outcomes):
                if not isinstance(outcome, ValueError):  # by which it would have refused it
                    # At once: one that is killed may still answer, by weights that others lack.
                    with suppress(WorkersDied):  # the next call says so
                        self._replace(number, self.workers[number])
            raise

    def run(
        self,
        name: str,
        groups: Iterable[Sequence[int]],
        send: Callable[[Any, int, Sequence[int]], Any],
        read: Callable[[Sequence[int], Any], Sequence[Any]],
    ) -> Iterator[tuple[int, Any]]:
        """Have the workers do pieces of work, each once, in groups; each place with its value.

        Args:
            name: what errors call a piece.
            groups: places of the pieces that a worker is given at once.
            send: gives a worker, under the label of this call, the pieces at some places, and
                returns the reference of its answer.
            read: an answer, as one value for each of the places.

        Raises:
            WorkersDied: workers died again and again at the same piece, or cannot be replaced.
            RolloutError: a device failed; values that there are come before it.
        """
        label = next(self._labels)
        work = WorkQueue(groups, MAX_DEATHS)
        free = deque(range(len(self.workers)))
        busy: dict[Any, _Busy] = {}  # by reference
        try:
            while work.is_left:
                self.check_awake()  # whatever has happened since the last rollout was handed out
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
                f"{error}); leave it out, or see what it does to them",
                RolloutBatch(()),
            ) from error

    def _start(self) -> Any:
        state = self.state
        bare = replace(state, weights=None, drafter=None)  # Ray fetches them as arguments only
        return self._actor.remote(self._model, self._options, bare, state.weights, state.drafter)

    def _replace(self, number: int, dead: Any) -> None:
        """A new worker in the place of one that died, unless it has been replaced already.

        Raises:
            WorkersDied: the cluster has lost what it needs.
        """
        if not self.workers or self.workers[number] is not dead:
            return
        self._ray.kill(dead)  # though it may only have been out of reach
        if lack := self._lack():
            raise WorkersDied(f"a worker died and cannot be replaced: {lack}", RolloutBatch(()))
        self.workers[number] = self._start()

    def _lack(self) -> str | None:
        """What keeps the cluster from ever having room for all workers."""
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
            f"num_workers={self._num_workers} of {wanted} each do not fit in the cluster, which "
            f"has {total} on {len(nodes)} node(s), enough for {room}; lower num_workers or what "
            "ray_options ask for, or add nodes"
        )

    def _outcomes(
        self, numbers: Sequence[int], method: str, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """What a worker's method gives on some workers, or the exceptions that it raises there.

        Those that died are replaced, and asked again.

        Raises:
            WorkersDied: one of them did again and again, or cannot be replaced.
        """
        self._check_open()
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
            except self._deaths as error:
                work.died(group, error)
                self._replace(number, self.workers[number])
                continue
            except NotBuilt as error:
                self._ray.kill(self.workers[number])  # so that the next call builds another
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
        """What a worker has made of a group; nothing if it died, and the work is left."""
        places = done.group.places
        try:
            answer = self._get(reference)
        except self._deaths as error:
            work.died(done.group, error)
            self._replace(done.number, done.worker)
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
        """End what workers still do for a call that nobody waits for any more."""
        references = [*busy, *(one.worker.abort.remote(label) for one in busy.values())]
        if references:
            self._ray.wait(references, num_returns=len(references))

    def _get(self, reference: Any) -> Any:
        """An answer; what the engine raised is raised as it was."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            if not isinstance(cause, Exception):
                raise
            raise cause from error

    @property
    def _deaths(self) -> tuple[type[Exception], ...]:
        """What Ray raises for a worker that is no more, or whose answer went with it."""
        found = self._ray.exceptions
        return found.RayActorError, found.WorkerCrashedError, found.ObjectLostError

    def _check_open(self) -> None:
        if not self.workers:
            raise RuntimeError("this RayRollouts is closed; build a new one")


def send_work(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Have a worker do what takes long, on threads that what pauses or aborts it does not need."""
    return method.options(concurrency_group="work").remote(*args, **kwargs)


def _values(outcomes: list[Any]) -> list[Any]:
    """The outcomes, none of which may be an exception."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes
