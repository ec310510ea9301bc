"""Rollouts on many engines at once: one per Ray actor, all with the same weights.

The driver keeps one queue of prompts, in small groups, and hands a group to whichever actor is
free, so that long outputs do not hold up the rest. What an actor was given and did not answer when
it died goes back to the queue, and another actor takes its place with the weights of the day. The
seed of a prompt is fixed before it is handed out, so that who answers it makes no difference.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.config import SpeculativeConfig, check_positive
from specjax.metrics import Metrics
from specjax.prompts import Prompt, as_prompt_list, derived_seed, one_each
from specjax.rl.engine import RolloutEngine, RolloutError, WeightUpdate
from specjax.rl.freshness import VersionAcceptance
from specjax.rl.rollouts import Rollout, RolloutBatch, Score
from specjax.rl.weights import Weights, read_named
from specjax.sampling_params import SamplingParams

MAX_DEATHS = 3  # of workers at the same work, before it is given up


class WorkersDied(RolloutError):
    """Every worker that was given some prompt died. `rollouts` has those of all that finished."""


@dataclass(frozen=True)
class _State:
    """What a new worker must be told to be like the others; arrays are in the object store."""

    version: int = 0
    weights: Any = None
    drafter: Any = None
    sleep_level: int = 0


class _Worker:
    """An engine in an actor. An error of building it is raised by every call, as it was."""

    def __init__(
        self, model: Any, options: Mapping[str, Any], state: _State, weights: Any, drafter: Any
    ):
        self.failure: Exception | None = None
        try:
            self.engine = RolloutEngine(model, **options)
            if weights is not None:
                self.engine.update_weights(weights, state.version)
            if drafter is not None:
                self.engine.update_drafter(drafter)
            if state.sleep_level:
                self.engine.sleep(state.sleep_level)
        except Exception as error:
            self.failure = error

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What a method of the engine gives."""
        if self.failure is not None:
            raise self.failure
        return getattr(self.engine, method)(*args, **kwargs)


@dataclass(frozen=True)
class _Group:
    """Work that goes to one worker at once: places in a call."""

    places: tuple[int, ...]
    num_deaths: int = 0  # of workers that had it


class RayRollouts:
    """As many `RolloutEngine`s as workers, to be used as if they were one.

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
        ValueError, CheckpointError: as `RolloutEngine`.
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
        self._actor = self._ray.remote(_Worker).options(
            **({"num_cpus": 1, "max_concurrency": 4} | dict(ray_options or {}))
        )
        self._model = model
        self._options = {"speculative_config": speculative_config, **options}
        self._group_size = group_size
        self._state = _State()
        self._num_prompts = 0
        self._workers = [self._start() for _ in range(num_workers)]
        try:
            self._everywhere("metrics")
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
            WorkersDied: workers died again and again at the same prompt; it has all that finished.
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
        updated then serve whatever has not been generated yet.
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
        """What the target says of given tokens; see `RolloutEngine.score`."""

        def send(worker: Any, places: Sequence[int]) -> Any:
            group = [samples[place] for place in places]
            return worker.call.remote("score", group, sampling_params, features=features)

        scores = dict(self._run(len(samples), send, lambda places, scores: scores))
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

        They go to the object store once, wherever the workers are.
        """
        placed = self._place(weights)
        own = None if drafter is None else self._place(drafter)
        version = self.version + 1 if version is None else version
        updates = self._everywhere("update_weights", placed, version, pause=pause)
        self._state = replace(self._state, version=version, weights=placed)
        if own is not None:
            updates += self._update_drafter(own, pause)
        slowest = max(update.seconds for update in updates)
        return updates[0]._replace(seconds=slowest)

    def update_drafter(self, weights: Weights, *, pause: str = "keep") -> WeightUpdate:
        """Draft with other weights; see `RolloutEngine.update_drafter`."""
        return max(self._update_drafter(self._place(weights), pause), key=lambda one: one.seconds)

    def sleep(self, level: int = 1) -> None:
        """Free the devices' memory until `wake_up`; see `RolloutEngine.sleep`."""
        self._everywhere("sleep", level)
        self._state = replace(self._state, sleep_level=level)

    def wake_up(self) -> None:
        """Take back what `sleep` freed."""
        self._everywhere("wake_up")
        self._state = replace(self._state, sleep_level=0)

    def acceptance(self) -> list[list[VersionAcceptance]]:
        """How drafts fared under each pair of weights, by worker, since it was started."""
        return self._everywhere("acceptance")

    def metrics(self) -> list[Metrics]:
        """The counters of each worker, since it was started."""
        return self._everywhere("metrics")

    def checksums(self) -> list[str]:
        """Of each worker's weights; see `RolloutEngine.checksum`."""
        return self._everywhere("checksum")

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
        """A new worker in the place of one that died, unless it has been replaced already."""
        if self._workers and self._workers[number] is dead:
            self._ray.kill(dead)
            self._workers[number] = self._start()

    def _place(self, weights: Weights) -> Any:
        """Weights of any form in the object store, by name and as NumPy's arrays."""
        named = read_named(weights, weights if is_dataclass(weights) else None, "weights")
        return self._ray.put({name: np.asarray(x) for name, x in jax.device_get(named).items()})

    def _update_drafter(self, placed: Any, pause: str) -> list[WeightUpdate]:
        updates = self._everywhere("update_drafter", placed, pause=pause)
        self._state = replace(self._state, drafter=placed)
        return updates

    def _everywhere(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """What a method gives on every worker; those that died are replaced, and asked again."""
        self._check_open()

        def ask(number: int) -> tuple[Any, Any]:
            worker = self._workers[number]
            return worker, worker.call.remote(method, *args, **kwargs)

        asked = [ask(number) for number in range(len(self._workers))]
        answers = []
        for number, (worker, reference) in enumerate(asked):
            num_deaths = 0
            while len(answers) == number:
                try:
                    answers.append(self._get(reference))
                except self._deaths as error:
                    num_deaths += 1
                    if num_deaths == MAX_DEATHS:
                        message = f"worker {number} died {MAX_DEATHS} times at {method}: {error}"
                        raise WorkersDied(message, RolloutBatch(())) from error
                    self._replace(number, worker)
                    worker, reference = ask(number)
        return answers

    def _continue(self, prompts: Any, sampling_params: Any) -> Iterator[tuple[int, list[Rollout]]]:
        """The samples of each prompt, by its place, as they come.

        Raises:
            ValueError: as `RolloutEngine.check`, before anything is generated.
        """
        self._everywhere("check", prompts, sampling_params)
        listed: list[Any] = [prompts] if isinstance(prompts, Rollout) else as_prompt_list(prompts)
        if any(isinstance(one, Rollout) for one in listed):
            return self._resume(listed)
        given = SamplingParams() if sampling_params is None else sampling_params
        params: list[SamplingParams] = one_each("sampling_params", given, len(listed))
        seeds = [self._seed(i, one) for i, one in enumerate(params)]
        self._num_prompts += len(listed)

        def send(worker: Any, places: Sequence[int]) -> Any:
            seeded = [replace(params[place], seed=seeds[place]) for place in places]
            return worker.call.remote("generate", [listed[place] for place in places], seeded)

        def read(places: Sequence[int], batch: RolloutBatch) -> list[list[Rollout]]:
            samples: list[list[Rollout]] = [[] for _ in places]
            for rollout in batch:
                place = places[rollout.prompt_index]
                samples[rollout.prompt_index].append(
                    replace(rollout, prompt_index=place, params=params[place])
                )
            return samples

        return self._run(len(listed), send, read)

    def _resume(self, rollouts: list[Rollout]) -> Iterator[tuple[int, list[Rollout]]]:
        def send(worker: Any, places: Sequence[int]) -> Any:
            return worker.call.remote("generate", [rollouts[place] for place in places])

        return self._run(len(rollouts), send, lambda places, batch: [[one] for one in batch])

    def _seed(self, index: int, params: SamplingParams) -> int:
        """The seed that an engine by itself would give the prompt."""
        if params.seed is not None:
            return params.seed
        return derived_seed(self._options.get("seed", 0), self._num_prompts + index)

    def _run(
        self,
        count: int,
        send: Callable[[Any, Sequence[int]], Any],
        read: Callable[[Sequence[int], Any], Sequence[Any]],
    ) -> Iterator[tuple[int, Any]]:
        """Have the workers do all of `count` pieces of work, each once, in groups.

        Args:
            send: gives a worker the pieces at some places, and returns the reference of its answer.
            read: an answer, as one value for each of the places.
        """
        self._check_open()
        if self._state.sleep_level:
            raise RuntimeError("the workers are asleep; call wake_up")
        queue = deque(self._groups(count))
        free = list(range(len(self._workers)))
        busy: dict[Any, tuple[int, Any, _Group]] = {}  # by reference: worker and its work
        given_up: tuple[int, Exception] | None = None
        try:
            while busy or (queue and given_up is None):
                while queue and free and given_up is None:
                    number, group = free.pop(0), queue.popleft()
                    worker = self._workers[number]
                    busy[send(worker, group.places)] = number, worker, group
                (reference,), _ = self._ray.wait(list(busy), num_returns=1)
                number, worker, group = busy.pop(reference)
                free.append(number)
                try:
                    answer = self._get(reference)
                except self._deaths as error:
                    self._replace(number, worker)
                    num_deaths = group.num_deaths + 1
                    if len(group.places) == 1 and num_deaths == MAX_DEATHS:
                        given_up = group.places[0], error
                    # One by one, and first, so that it shows which of them is deadly.
                    queue.extendleft(_Group((place,), num_deaths) for place in group.places)
                    continue
                except RolloutError as error:
                    partial = zip(group.places, read(group.places, error.rollouts), strict=True)
                    yield from (pair for pair in partial if pair[1])
                    raise
                yield from zip(group.places, read(group.places, answer), strict=True)
        finally:
            self._abort([(worker, reference) for reference, (_, worker, _) in busy.items()])
        if given_up is not None:
            place, error = given_up
            raise WorkersDied(
                f"{MAX_DEATHS} workers died one after the other at prompt {place} (the last: "
                f"{error}); leave it out, or see what it does to them",
                RolloutBatch(()),
            ) from error

    def _groups(self, count: int) -> Iterator[_Group]:
        even_share = -(-count // (2 * len(self._workers)))
        most = min(max(even_share, 1), self._options.get("max_num_seqs", 16))
        size = most if self._group_size is None else self._group_size
        for start in range(0, count, size):
            yield _Group(tuple(range(start, min(start + size, count))))

    def _abort(self, running: Sequence[tuple[Any, Any]]) -> None:
        """End what workers still do for a call that nobody waits for any more."""
        aborts = [worker.call.remote("abort") for worker, _ in running]
        references = [*aborts, *(reference for _, reference in running)]
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


def _in_order(answers: Mapping[int, list[Rollout]]) -> RolloutBatch:
    return RolloutBatch(rollout for place in sorted(answers) for rollout in answers[place])


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError("RayRollouts needs Ray; pip install 'specjax[ray]'") from error
    return ray
