"""Generates rollouts on many engines.

Each Ray actor has one engine, and all engines have the same weights. The driver splits prompts into
small groups, which `ray_pool` distributes. The driver also assigns seeds, so that outputs do not
depend on which worker runs a prompt.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specjax.checks import check_positive
from specjax.config import SpeculativeConfig
from specjax.engine.metrics import Metrics
from specjax.rl.freshness import VersionAcceptance
from specjax.rl.history import RolloutHistory, check_reuse
from specjax.rl.named import Weights
from specjax.rl.ray_pool import MAX_CALLS, WorkerPool, import_ray, send_work
from specjax.rl.ray_worker import Worker
from specjax.rl.rollouts import Rollout, RolloutBatch, RolloutError, Score
from specjax.rl.weights import WeightUpdate
from specjax.sampling_params import SamplingParams
from specjax.text.prompts import Prompt, as_prompt_list, one_each
from specjax.text.seeds import derived_seed

_USUAL_SEQS = 16  # max_num_seqs on the smallest device; the driver cannot see workers' devices


class RayRollouts:
    """A set of `RolloutEngine`s, one per worker, that is used like a single engine.

    It is not thread-safe. Outputs equal the outputs of a single engine with the same options: the
    number of workers, the assignment of prompts to workers, and workers that die make no
    difference.

    Args:
        model: a folder or hub id that every worker can load.
        num_workers: the number of workers, each with one engine.
        ray_options: the Ray options of each worker's actor (`num_gpus`, `runtime_env`, ...).
        group_size: the maximum number of prompts that a worker gets together. If None, it is half
            of a worker's average share of the prompts, but at most `max_num_seqs` (16 if unset).
        speculative_config, options: as for `RolloutEngine`.

    Raises:
        ImportError: Ray is not installed.
        ValueError, CheckpointError: as for `RolloutEngine`, or the cluster is too small.
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
                f"model={type(model).__name__} must be a folder or hub id, which workers can load"
            )
        ray = import_ray("RayRollouts")
        default = {"num_cpus": 1, "max_concurrency": 4}
        self._options = {"speculative_config": speculative_config, **options}
        self._group_size = group_size
        self._num_prompts = 0
        self._pool = WorkerPool(
            ray,
            ray.remote(concurrency_groups={"work": MAX_CALLS})(Worker),
            model,
            self._options,
            num_workers=num_workers,
            ray_options=default | dict(ray_options or {}),
        )
        try:
            self._pool.call_all("metrics")
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Version of the target's weights."""
        return self._pool.state.version

    def generate(
        self,
        prompts: Prompt | Rollout | Sequence[Prompt | Rollout],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        history: RolloutHistory | None = None,
        reuse_noise: float = 0.0,
    ) -> RolloutBatch:
        """Continue prompts or aborted rollouts; see `RolloutEngine.generate`.

        Each call sends a copy of `history` to the workers. A worker drafts from its copy, to which
        it adds the rollouts of its current group of prompts.

        Raises:
            ValueError: a prompt or parameter is not supported.
            WorkersDied: workers died repeatedly at the same prompt, or cannot be replaced. The
                error has all finished rollouts.
            RolloutError: the generation of a worker ended early. The error has all rollouts of
                that worker's group so far, and all finished rollouts of other groups.
        """
        answers: dict[int, list[Rollout]] = {}
        try:
            groups = self._continue(prompts, sampling_params, history, reuse_noise)
            for place, rollouts in groups:
                answers[place] = rollouts
        except RolloutError as error:
            error.rollouts = _in_order(answers)
            raise
        return _in_order(answers)

    def stream(
        self,
        prompts: Prompt | Rollout | Sequence[Prompt | Rollout],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        history: RolloutHistory | None = None,
        reuse_noise: float = 0.0,
    ) -> Iterator[Rollout]:
        """Like `generate`, but yield the rollouts of each group of prompts when the group is done.

        Leaving the iteration aborts the remaining rollouts. Other methods can be called during the
        iteration. After an update of weights, all further tokens come from the new weights. After
        `sleep`, call `wake_up` before continuing; otherwise the iteration raises a RuntimeError.
        """
        groups = self._continue(prompts, sampling_params, history, reuse_noise)
        return (rollout for _, rollouts in groups for rollout in rollouts)

    def score(
        self,
        samples: Sequence[Rollout | tuple[Sequence[int], Sequence[int]]],
        sampling_params: SamplingParams | None = None,
        *,
        features: bool = False,
    ) -> list[Score]:
        """Score given tokens with the target; see `RolloutEngine.score`.

        Raises:
            ValueError: as for `RolloutEngine.score`, before scoring.
            WorkersDied: workers died repeatedly at the same sample, or cannot be replaced.
            RuntimeError: the workers are asleep, or a device failed.
        """
        self._pool.check_awake()
        self._pool.call_first("check_score", samples, sampling_params, features=features)

        def send(worker: Any, label: int, places: Sequence[int]) -> Any:
            group = [samples[place] for place in places]
            return send_work(worker.call, "score", group, sampling_params, features=features)

        groups = self._groups(len(samples))
        scores = dict(self._pool.run("sample", groups, send, lambda places, scores: scores))
        return [scores[place] for place in range(len(samples))]

    def update_weights(
        self,
        weights: Weights,
        version: int | None = None,
        *,
        pause: str = "keep",
        drafter: Weights | None = None,
    ) -> WeightUpdate:
        """Replace the target's weights; see `RolloutEngine.update_weights`.

        The weights are put in the object store once for all workers. The update is all or nothing:
        if a worker fails, the updated workers are rebuilt with the previous weights.
        """
        return self._pool.update_weights(weights, version, drafter=drafter, pause=pause)

    def update_drafter(self, weights: Weights, *, pause: str = "keep") -> WeightUpdate:
        """Replace the drafter's weights on all workers, or on none if a worker fails.

        See `RolloutEngine.update_drafter`.
        """
        placed = self._pool.place(weights)
        update, version = self._pool.update("update_drafter", placed, pause=pause)
        self._pool.state = replace(self._pool.state, drafter_version=version, drafter=placed)
        return update

    def sleep(self, level: int = 1) -> None:
        """Free device memory until `wake_up`; see `RolloutEngine.sleep`.

        If a worker fails, all workers are treated as asleep. Then call `sleep` or `wake_up` again.
        """
        before, self._pool.state = self._pool.state, replace(self._pool.state, sleep_level=level)
        try:
            self._pool.call_all("sleep", level)
        except ValueError:  # all workers refused it
            self._pool.state = before
            raise

    def wake_up(self) -> None:
        """Undo `sleep`. If a worker fails, call `wake_up` again."""
        self._pool.call_all("wake_up")
        self._pool.state = replace(self._pool.state, sleep_level=0)

    def acceptance(self) -> list[list[VersionAcceptance]]:
        """Return the `RolloutEngine.acceptance` of each worker's engine."""
        return self._pool.call_all("acceptance")

    def metrics(self) -> list[Metrics]:
        """Return the counters of each worker's engine, since the worker's start."""
        return self._pool.call_all("metrics")

    def checksums(self) -> list[str]:
        """Return the checksum of each worker's weights; see `RolloutEngine.checksum`."""
        return self._pool.call_all("checksum")

    def close(self) -> None:
        """End the workers; closing twice is harmless."""
        self._pool.close()

    def __enter__(self) -> "RayRollouts":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _continue(
        self, prompts: Any, sampling_params: Any, history: RolloutHistory | None, reuse_noise: float
    ) -> Iterator[tuple[int, list[Rollout]]]:
        """Return an iterator of pairs (index, samples), one for each prompt or rollout.

        The pairs of a group of prompts come as soon as the group is finished.

        Raises:
            ValueError: as for `RolloutEngine.check`, before generation.
        """
        self._pool.check_awake()
        self._pool.call_first("check", prompts, sampling_params)
        identity = check_reuse(history, self._pool.identity, reuse_noise)
        options: dict[str, Any] = {}
        if history is not None:
            history.bind(identity)
            history.begin_update(self.version)
            options = {"shared": self._pool.put(history.shared()), "reuse_noise": reuse_noise}
        listed: list[Any] = [prompts] if isinstance(prompts, Rollout) else as_prompt_list(prompts)
        if any(isinstance(one, Rollout) for one in listed):
            return self._resume(listed, history, options)
        given = SamplingParams() if sampling_params is None else sampling_params
        params: list[SamplingParams] = one_each("sampling_params", given, len(listed))
        seeds = [self._seed(i, one) for i, one in enumerate(params)]
        self._num_prompts += len(listed)

        def send(worker: Any, label: int, places: Sequence[int]) -> Any:
            seeded = [replace(params[place], seed=seeds[place]) for place in places]
            group = [listed[place] for place in places]
            return send_work(worker.generate, label, group, seeded, **options)

        def read(places: Sequence[int], batch: RolloutBatch) -> list[list[Rollout]]:
            samples: list[list[Rollout]] = [[] for _ in places]
            _keep(batch, history)
            for rollout in batch:
                place = places[rollout.prompt_index]
                samples[rollout.prompt_index].append(
                    replace(rollout, prompt_index=place, params=params[place])
                )
            return samples

        return self._pool.run("prompt", self._groups(len(listed)), send, read)

    def _resume(
        self, rollouts: list[Rollout], history: RolloutHistory | None, options: Mapping[str, Any]
    ) -> Iterator[tuple[int, list[Rollout]]]:
        def send(worker: Any, label: int, places: Sequence[int]) -> Any:
            return send_work(worker.generate, label, [rollouts[i] for i in places], **options)

        def read(places: Sequence[int], batch: RolloutBatch) -> list[list[Rollout]]:
            _keep(batch, history)
            return [[one] for one in batch]

        return self._pool.run("rollout", self._groups(len(rollouts)), send, read)

    def _seed(self, index: int, params: SamplingParams) -> int:
        """Return the seed that the prompt would get from a single engine."""
        if params.seed is not None:
            return params.seed
        return derived_seed(self._options.get("seed", 0), self._num_prompts + index)

    def _groups(self, count: int) -> Iterator[range]:
        even_share = -(-count // (2 * len(self._pool.workers)))
        max_prompts = min(max(even_share, 1), self._options.get("max_num_seqs") or _USUAL_SEQS)
        size = max_prompts if self._group_size is None else self._group_size
        for start in range(0, count, size):
            yield range(start, min(start + size, count))


def _keep(batch: RolloutBatch, history: RolloutHistory | None) -> None:
    if history is not None:
        for rollout in batch:
            history.add(rollout)


def _in_order(answers: Mapping[int, list[Rollout]]) -> RolloutBatch:
    return RolloutBatch(rollout for place in sorted(answers) for rollout in answers[place])
