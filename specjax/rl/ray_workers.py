"""Rollouts on many engines at once: one per Ray actor, all with the same weights.

The driver keeps one queue of prompts, in small groups, and hands a group to whichever actor is
free, so that long outputs do not hold up the rest. What an actor was given and did not answer when
it died goes back to the queue, and another actor takes its place with the weights of the day. The
seed of a prompt is fixed before it is handed out, so that who answers it makes no difference.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.config import SpeculativeConfig, check_positive
from specjax.engine.metrics import Metrics
from specjax.rl.engine import RolloutEngine
from specjax.rl.freshness import VersionAcceptance
from specjax.rl.rollouts import Rollout, RolloutBatch, RolloutError, Score
from specjax.rl.weights import Weights, WeightUpdate, read_named
from specjax.rl.work import Group, WorkQueue, num_fitting
from specjax.sampling_params import SamplingParams
from specjax.text.prompts import Prompt, as_prompt_list, derived_seed, one_each

MAX_DEATHS = 3  # of workers at the same work, before it is given up
MAX_CALLS = 16  # that generate or score at once in a worker; more wait
_USUAL_SEQS = 16  # of an engine on the least of devices, which the driver does not see
RETRY_S = 0.05  # between attempts to abort a call that has not reached the engine yet


class WorkersDied(RolloutError):
    """Workers died, and no other can do their work. `rollouts` has those of all that finished."""


class _NotBuilt(RuntimeError):
    """A worker has no engine, because of the error that it was built with."""

    def __init__(self, error: Exception):
        super().__init__(error)
        self.error = error


@dataclass(frozen=True)
class _State:
    """What a new worker must be told to be like the others; arrays are in the object store."""

    version: int = 0
    drafter_version: int = 0
    weights: Any = None
    drafter: Any = None  # of the last update that had any, perhaps among the target's
    sleep_level: int = 0


class _Worker:
    """An engine in an actor. An error of building it is raised by every call."""

    def __init__(
        self, model: Any, options: Mapping[str, Any], state: _State, weights: Any, drafter: Any
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
            raise _NotBuilt(self._failure)
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


class _Busy(NamedTuple):
    """Who does a group of work."""

    number: int
    worker: Any
    group: Group


class RayRollouts:
    """As many `RolloutEngine`s as workers, to be used as if they were one, by one thread.

    Outputs are those of a single engine with the same options: they depend neither on the number
    of workers nor on which of them answers, or dies.

    Args:
        model: a checkpoint that every worker finds, a folder or hub id.
        num_workers: how many engines.
        ray_options: what Ray gives each of their actors (`num_gpus`, `runtime_env`, ...).
        group_size: most prompts that a worker is given at once; None for at most half of what
            would be its even share, and no more than `max_num_seqs`.
        speculative_config, options: as for `RolloutEngine`.

    Raises:
        ImportError: Ray is not installed.
        ValueError, CheckpointError: as `RolloutEngine`; or the cluster is too small for them.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        num_workers: int,
        ray_options: Mapping[str, Any] | None = None,
        group_size: int | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        **options: Any,
    ):
        check_positive(num_workers=num_workers)
        if group_size is not None:
            check_positive(group_size=group_size)
        if not isinstance(model, str | Path):
            raise ValueError(
                f"model={type(model).__name__} must be a folder or hub id, which workers load"
            )
        self._ray = _import_ray()
        if not self._ray.is_initialized():
            self._ray.init()
        default = {"num_cpus": 1, "max_concurrency": 4}
        self._ray_options: dict[str, Any] = default | dict(ray_options or {})
        actor = self._ray.remote(concurrency_groups={"work": MAX_CALLS})(_Worker)
        self._actor = actor.options(**self._ray_options)
        self._model = model
        self._options = {"speculative_config": speculative_config, **options}
        self._group_size = group_size
        self._state = _State()
        self._num_prompts = 0
        self._labels = itertools.count()
        self._num_workers = num_workers
        if lack := self._lack():
            raise ValueError(lack)
        self._workers = [self._start() for _ in range(num_workers)]
        try:
            self._everywhere("call", "metrics")
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Of the weights in use."""
        return self._state.version

    def generate(
        self,
        prompts: Prompt | Rollout | Sequence[Prompt | Rollout],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> RolloutBatch:
        """Continue prompts, or rollouts that were aborted; see `RolloutEngine.generate`.

        Raises:
            ValueError: a prompt or parameters that cannot be served.
            WorkersDied: workers died again and again at the same prompt, or cannot be replaced; it
                has all that finished.
            RolloutError: a device failed; it has what that worker had, and all that finished.
        """
        answers: dict[int, list[Rollout]] = {}
        try:
            for place, rollouts in self._continue(prompts, sampling_params):
                answers[place] = rollouts
        except RolloutError as error:
            error.rollouts = _in_order(answers)
            raise
        return _in_order(answers)

    def stream(
        self,
        prompts: Prompt | Rollout | Sequence[Prompt | Rollout],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Rollout]:
        """As `generate`, the rollouts of a group of prompts as soon as all of them are complete.

        Leaving the iteration aborts the others. Other calls may come between: weights that are
        updated then serve whatever has not been generated yet. After `sleep`, it goes on if
        `wake_up` comes before the next rollout is asked for, and else ends in a RuntimeError.
        """
        groups = self._continue(prompts, sampling_params)
        return (rollout for _, rollouts in groups for rollout in rollouts)

    def score(
        self,
        samples: Sequence[Rollout | tuple[Sequence[int], Sequence[int]]],
        sampling_params: SamplingParams | None = None,
        *,
        features: bool = False,
    ) -> list[Score]:
        """What the target says of given tokens; see `RolloutEngine.score`.

        Raises:
            ValueError: as `RolloutEngine.score`, before anything is scored anywhere.
            WorkersDied: workers died again and again at the same sample, or cannot be replaced.
        """
        self._check_awake()
        self._ask([0], "call", "check_score", samples, sampling_params, features=features)

        def send(worker: Any, label: int, places: Sequence[int]) -> Any:
            group = [samples[place] for place in places]
            return _work(worker.call, "score", group, sampling_params, features=features)

        scores = dict(self._run("sample", len(samples), send, lambda places, scores: scores))
        return [scores[place] for place in range(len(samples))]

    def update_weights(
        self,
        weights: Weights,
        version: int | None = None,
        *,
        pause: str = "keep",
        drafter: Weights | None = None,
    ) -> WeightUpdate:
        """Run with other weights; see `RolloutEngine.update_weights`.

        They go to the object store once, wherever the workers are. All workers take them, or none:
        if one of them fails at it, those that have changed are built again as they were.
        """
        placed = self._place(weights)
        own = None if drafter is None else self._place(drafter)
        version = self.version + 1 if version is None else version
        update, drafter_version = self._update(
            "update_weights", placed, version, pause=pause, drafter=own
        )
        if drafter_version > self._state.drafter_version and own is None:
            own = placed
        self._state = replace(
            self._state,
            version=update.version,
            drafter_version=drafter_version,
            weights=placed,
            drafter=self._state.drafter if own is None else own,
        )
        return update

    def update_drafter(self, weights: Weights, *, pause: str = "keep") -> WeightUpdate:
        """Draft with other weights; see `RolloutEngine.update_drafter`. All workers do, or none."""
        placed = self._place(weights)
        update, version = self._update("update_drafter", placed, pause=pause)
        self._state = replace(self._state, drafter_version=version, drafter=placed)
        return update

    def sleep(self, level: int = 1) -> None:
        """Free the devices' memory until `wake_up`; see `RolloutEngine.sleep`.

        If a worker fails at it, all count as asleep: call it again, or `wake_up`.
        """
        before, self._state = self._state, replace(self._state, sleep_level=level)
        try:
            self._everywhere("call", "sleep", level)
        except ValueError:  # refused by all
            self._state = before
            raise

    def wake_up(self) -> None:
        """Take back what `sleep` freed; if a worker fails at it, call it again."""
        self._everywhere("call", "wake_up")
        self._state = replace(self._state, sleep_level=0)

    def acceptance(self) -> list[list[VersionAcceptance]]:
        """How drafts fared under each pair of weights, by worker, since it was started."""
        return self._everywhere("call", "acceptance")

    def metrics(self) -> list[Metrics]:
        """The counters of each worker, since it was started."""
        return self._everywhere("call", "metrics")

    def checksums(self) -> list[str]:
        """Of each worker's weights; see `RolloutEngine.checksum`."""
        return self._everywhere("call", "checksum")

    def close(self) -> None:
        """End the workers; closing twice is harmless."""
        for worker in self._workers:
            self._ray.kill(worker)
        self._workers = []

    def __enter__(self) -> "RayRollouts":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _start(self) -> Any:
        state = self._state
        bare = replace(state, weights=None, drafter=None)  # Ray fetches them as arguments only
        return self._actor.remote(self._model, self._options, bare, state.weights, state.drafter)

    def _replace(self, number: int, dead: Any) -> None:
        """A new worker in the place of one that died, unless it has been replaced already.

        Raises:
            WorkersDied: the cluster has lost what it needs.
        """
        if not self._workers or self._workers[number] is not dead:
            return
        self._ray.kill(dead)  # though it may only have been out of reach
        if lack := self._lack():
            raise WorkersDied(f"a worker died and cannot be replaced: {lack}", RolloutBatch(()))
        self._workers[number] = self._start()

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

    def _place(self, weights: Weights) -> Any:
        """Weights of any form in the object store, by name and as NumPy's arrays."""
        named = read_named(weights, weights if is_dataclass(weights) else None, "weights")
        return self._ray.put({name: np.asarray(x) for name, x in jax.device_get(named).items()})

    def _update(self, method: str, *args: Any, **kwargs: Any) -> tuple[WeightUpdate, int]:
        """The slowest worker's update, and the drafter's version; all are updated, or none."""
        outcomes: list[Any] = [None] * len(self._workers)
        try:
            outcomes = self._outcomes(range(len(self._workers)), "update", method, *args, **kwargs)
            return max(_values(outcomes), key=lambda one: one[0].seconds)
        except BaseException:
            for number, outcome in enumerate(outcomes):
                if not isinstance(outcome, ValueError):  # by which it would have refused it
                    # At once: one that is killed may still answer, by weights that others lack.
                    with suppress(WorkersDied):  # the next call says so
                        self._replace(number, self._workers[number])
            raise

    def _everywhere(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """What a method gives on every worker."""
        return self._ask(range(len(self._workers)), method, *args, **kwargs)

    def _ask(self, numbers: Sequence[int], method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return _values(self._outcomes(numbers, method, *args, **kwargs))

    def _outcomes(
        self, numbers: Sequence[int], method: str, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """What a method gives on some workers, or the exceptions that it raises there.

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
                worker = self._workers[group.places[0]]
                asked[getattr(worker, method).remote(*args, **kwargs)] = group
            (reference,), _ = self._ray.wait(list(asked), num_returns=1)
            group = asked.pop(reference)
            (number,) = group.places
            try:
                outcomes[number] = self._get(reference)
            except self._deaths as error:
                work.died(group, error)
                self._replace(number, self._workers[number])
                continue
            except _NotBuilt as error:
                self._ray.kill(self._workers[number])  # so that the next call builds another
                outcomes[number] = error.error
            except Exception as error:
                outcomes[number] = error
            work.done(group)
        if work.deadly is not None:
            number, error = work.deadly
            message = f"worker {number} died {MAX_DEATHS} times over one call (the last: {error})"
            raise WorkersDied(message, RolloutBatch(())) from error
        return [outcomes[number] for number in numbers]

    def _continue(self, prompts: Any, sampling_params: Any) -> Iterator[tuple[int, list[Rollout]]]:
        """The samples of each prompt, by its place, as they come.

        Raises:
            ValueError: as `RolloutEngine.check`, before anything is generated.
        """
        self._check_awake()
        self._ask([0], "call", "check", prompts, sampling_params)
        listed: list[Any] = [prompts] if isinstance(prompts, Rollout) else as_prompt_list(prompts)
        if any(isinstance(one, Rollout) for one in listed):
            return self._resume(listed)
        given = SamplingParams() if sampling_params is None else sampling_params
        params: list[SamplingParams] = one_each("sampling_params", given, len(listed))
        seeds = [self._seed(i, one) for i, one in enumerate(params)]
        self._num_prompts += len(listed)

        def send(worker: Any, label: int, places: Sequence[int]) -> Any:
            seeded = [replace(params[place], seed=seeds[place]) for place in places]
            return _work(worker.generate, label, [listed[place] for place in places], seeded)

        def read(places: Sequence[int], batch: RolloutBatch) -> list[list[Rollout]]:
            samples: list[list[Rollout]] = [[] for _ in places]
            for rollout in batch:
                place = places[rollout.prompt_index]
                samples[rollout.prompt_index].append(
                    replace(rollout, prompt_index=place, params=params[place])
                )
            return samples

        return self._run("prompt", len(listed), send, read)

    def _resume(self, rollouts: list[Rollout]) -> Iterator[tuple[int, list[Rollout]]]:
        def send(worker: Any, label: int, places: Sequence[int]) -> Any:
            return _work(worker.generate, label, [rollouts[place] for place in places])

        def read(places: Sequence[int], batch: RolloutBatch) -> list[list[Rollout]]:
            return [[one] for one in batch]

        return self._run("rollout", len(rollouts), send, read)

    def _seed(self, index: int, params: SamplingParams) -> int:
        """The seed that an engine by itself would give the prompt."""
        if params.seed is not None:
            return params.seed
        return derived_seed(self._options.get("seed", 0), self._num_prompts + index)

    def _run(
        self,
        name: str,
        count: int,
        send: Callable[[Any, int, Sequence[int]], Any],
        read: Callable[[Sequence[int], Any], Sequence[Any]],
    ) -> Iterator[tuple[int, Any]]:
        """Have the workers do all of `count` pieces of work, each once, in groups.

        Args:
            name: what errors call a piece.
            send: gives a worker, under the label of this call, the pieces at some places, and
                returns the reference of its answer.
            read: an answer, as one value for each of the places.
        """
        label = next(self._labels)
        work = WorkQueue(self._groups(count), MAX_DEATHS)
        free = deque(range(len(self._workers)))
        busy: dict[Any, _Busy] = {}  # by reference
        try:
            while work.is_left:
                self._check_awake()  # whatever has happened since the last rollout was handed out
                while free and (group := work.take()):
                    worker = self._workers[free[0]]
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
        except _NotBuilt as error:
            self._ray.kill(done.worker)
            message = f"a worker could not be built again: {error.error}"
            raise RolloutError(message, RolloutBatch(())) from error.error
        except RolloutError as error:
            partial = zip(places, read(places, error.rollouts), strict=True)
            yield from (pair for pair in partial if pair[1])
            raise
        work.done(done.group)
        yield from zip(places, read(places, answer), strict=True)

    def _groups(self, count: int) -> Iterator[range]:
        even_share = -(-count // (2 * len(self._workers)))
        most = min(max(even_share, 1), self._options.get("max_num_seqs") or _USUAL_SEQS)
        size = most if self._group_size is None else self._group_size
        for start in range(0, count, size):
            yield range(start, min(start + size, count))

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
        if not self._workers:
            raise RuntimeError("this RayRollouts is closed; build a new one")

    def _check_awake(self) -> None:
        self._check_open()
        if self._state.sleep_level:
            raise RuntimeError("the workers are asleep; call wake_up")


def _work(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Have a worker do what takes long, on threads that what pauses or aborts it does not need."""
    return method.options(concurrency_group="work").remote(*args, **kwargs)


def _values(outcomes: list[Any]) -> list[Any]:
    """The outcomes, none of which may be an exception."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def _in_order(answers: Mapping[int, list[Rollout]]) -> RolloutBatch:
    return RolloutBatch(rollout for place in sorted(answers) for rollout in answers[place])


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError("RayRollouts needs Ray; pip install 'specjax[ray]'") from error
    return ray
