"""An engine for training loops: it generates rollouts and updates weights without a rebuild."""

import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checks import check_choice, check_flags
from specjax.config import SpeculativeConfig
from specjax.device.drafters.drafter import Drafter, Params
from specjax.device.models.model import Model
from specjax.engine.metrics import Metrics
from specjax.engine.sleep import SleepOfAll, check_level
from specjax.host.request import Request
from specjax.llm import LLM
from specjax.rl.checksum import checksum
from specjax.rl.elsewhere import check_folders, replace_elsewhere, stage_elsewhere
from specjax.rl.freshness import Freshness, Mark, VersionAcceptance
from specjax.rl.history import RolloutHistory, check_reuse, identity_of
from specjax.rl.loop import ASLEEP, PAUSED, PAUSES, Loop
from specjax.rl.named import Weights, read_finite
from specjax.rl.quantising import Origin
from specjax.rl.rollouts import Rollout, RolloutBatch, RolloutError, Score
from specjax.rl.running import read_score
from specjax.rl.starts import Start, StartMaker
from specjax.rl.weights import (
    WeightUpdate,
    copies,
    next_version,
    read_update,
    replace_weights,
    stage_drafter,
    stage_target,
)
from specjax.sampling_params import SamplingParams
from specjax.text.prompts import Prompt
from specjax.text.tokenizer import ChatTokenizer
from specjax.vllm_names import without_draft_size


class RolloutEngine:
    """An `LLM` for reinforcement learning.

    It generates rollouts with each token's log-probability in the distribution that the token was
    sampled from. This log-probability comes from the forward pass that verified the token. The
    engine scores given tokens by the same forward pass. It updates weights in place, between two
    steps, without recompiling.

    All methods are thread-safe. Threads that generate take turns, one step at a time.

    Args:
        model: as for `LLM`. Weights given as `params` are copied.
        raw_logprobs: also report log-probabilities in the model's unmodified distribution.
        options: as for `LLM`; verbose defaults to False.

    Raises:
        ValueError: as for `LLM`; or logprobs_mode is given (use `raw_logprobs`); or verification is
            "synthetic", whose tokens are not sampled from the model's distribution.
        CheckpointError: as for `LLM`.
    """

    def __init__(
        self,
        model: str | Path | Model,
        *,
        params: Any = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        raw_logprobs: bool = False,
        **options: Any,
    ):
        options.setdefault("verbose", False)
        if "logprobs_mode" in options:
            raise ValueError(
                f"logprobs_mode={options['logprobs_mode']!r} is set by the rollout engine; leave "
                "it out (raw_logprobs=True adds the model's own log-probabilities)"
            )
        check_flags(raw_logprobs=raw_logprobs)
        if speculative_config is not None:
            size = options.get("tensor_parallel_size", 1)
            speculative_config = SpeculativeConfig.of(without_draft_size(speculative_config, size))
            if speculative_config.verification == "synthetic":
                raise ValueError(
                    "verification='synthetic' does not emit the model's own tokens, which rollouts "
                    "need; leave it out"
                )
        self._llm = LLM(
            model,
            params=params if params is None else copies(params),
            speculative_config=speculative_config,
            logprobs_mode="both" if raw_logprobs else "processed",
            **options,
        )
        self._engine = self._llm.engine
        self._has_raw = raw_logprobs
        self.drafter_version = 0
        self._loop = Loop(self._engine, self._llm.tokenizer, has_raw=raw_logprobs)
        self._turns = self._loop.turns
        self._starts = StartMaker(self._llm.request_maker)
        self._sleep = SleepOfAll(self._engine)
        self._freshness = Freshness(self.metrics())

    @property
    def target(self) -> Model:
        """The target model."""
        return self._llm.target

    @property
    def drafter(self) -> Drafter:
        """The drafter of the target model."""
        return self._engine.drafter

    @property
    def params(self) -> Params:
        """The engine's weights. Do not change, donate or keep them, as updates free them."""
        with self._turns:
            self._loop.check_open()
            return self._engine.params

    @property
    def version(self) -> int:
        """Version of the target's weights; 0 for the weights at construction."""
        return self._loop.version

    @property
    def tokenizer(self) -> ChatTokenizer | None:
        """The checkpoint's tokenizer, if it has one."""
        return self._llm.tokenizer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The checkpoint's end-of-sequence token ids."""
        return self._llm.request_maker.eos_ids

    def generate(
        self,
        prompts: Prompt | Rollout | Sequence[Prompt | Rollout],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        label: Hashable = None,
        history: RolloutHistory | None = None,
        reuse_noise: float = 0.0,
    ) -> RolloutBatch:
        """Generate `SamplingParams.n` samples of each prompt, which share the prompt's cache pages.

        Aborted rollouts resume where they stopped, with their parameters and seeds. If the weights
        are unchanged, "seed_exact" verification gives the tokens of an uninterrupted run, and other
        verification gives tokens from the same distribution. A prompt whose parameters have no seed
        gets one that depends on the engine's seed and on the number of earlier prompts.

        Args:
            prompts: texts, lists of token ids, {"prompt_token_ids": [...]}, or aborted rollouts.
            sampling_params: a `SamplingParams` for all prompts, or a sequence with one per prompt;
                None for the defaults. Must be None for rollouts.
            label: a name for the call, by which `abort` can end it.
            history: earlier rollouts of the prompts, used as drafts. New rollouts are added to it.
            reuse_noise: the fraction of each prompt's samples that take their seed and drafts from
                a rollout of earlier weights in `history`. Seeds in the parameters have no effect on
                these samples. See the caveat in docs/rl.md.

        Raises:
            ValueError: a prompt, parameter or history is not supported; raised before generation.
            RolloutError: the device failed; the error has the rollouts generated so far.
        """
        placed: list[tuple[tuple[int, int], Rollout]] = []
        starts = self._begin(prompts, sampling_params, history, reuse_noise)
        try:
            for running, rollout in self._loop.run(starts, label, history):
                placed.append(((running.place, running.sequence.index), rollout))
        except RolloutError as error:
            error.rollouts = RolloutBatch.ordered(placed)
            raise
        return RolloutBatch.ordered(placed)

    def stream(
        self,
        prompts: Prompt | Rollout | Sequence[Prompt | Rollout],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        label: Hashable = None,
        history: RolloutHistory | None = None,
        reuse_noise: float = 0.0,
    ) -> Iterator[Rollout]:
        """Like `generate`, but yield each rollout as soon as it is complete.

        Generation starts with the first iteration; leaving the iteration aborts the remaining
        rollouts. Other methods, including `abort` and `update_weights`, can be called meanwhile.
        """
        starts = self._begin(prompts, sampling_params, history, reuse_noise)
        return (rollout for _, rollout in self._loop.run(starts, label, history))

    def check(
        self,
        prompts: Prompt | Rollout | Sequence[Prompt | Rollout],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> None:
        """Raise the errors that `generate` would raise for these arguments, without generating."""
        self._loop.check_ready()
        self._starts.make(prompts, sampling_params, counts=False)

    def score(
        self,
        samples: Sequence[Rollout | tuple[Sequence[int], Sequence[int]]],
        sampling_params: SamplingParams | None = None,
        *,
        features: bool = False,
    ) -> list[Score]:
        """Score given tokens with the target's weights, by the same forward pass as generation.

        Args:
            samples: rollouts, or pairs (prompt, completion) of lists of token ids.
            sampling_params: parameters that determine the distribution. If None, a rollout is
                scored with its own parameters, and a pair in the model's own distribution.
            features: also return the hidden states of all positions; see `Score`.

        Raises:
            ValueError: a sample or an argument is not supported; raised before scoring.
            RuntimeError: scoring ended early, for example because the device failed.
        """
        requests = self._make_scored(samples, sampling_params, features)
        scored = iter(self._loop.complete([request for request in requests if request]))
        empty = Score(np.zeros(0, np.float32), np.zeros(0, np.float32) if self._has_raw else None)
        return [
            empty if request is None else read_score(next(scored), has_raw=self._has_raw)
            for request in requests
        ]

    def check_score(
        self,
        samples: Sequence[Rollout | tuple[Sequence[int], Sequence[int]]],
        sampling_params: SamplingParams | None = None,
        *,
        features: bool = False,
    ) -> None:
        """Raise the errors that `score` would raise for these arguments, without scoring."""
        self._make_scored(samples, sampling_params, features)

    def update_weights(
        self,
        weights: Weights,
        version: int | None = None,
        *,
        pause: str = "keep",
        drafter: Weights | None = None,
    ) -> WeightUpdate:
        """Replace the target's weights from the next step on, without recompiling a step.

        Arrays are copied one at a time, and each copy replaces the engine's old array. The caller's
        arrays are neither kept nor donated. Cached prefixes are flushed.

        Args:
            weights: a tree like `params.target`; nested mappings or an nnx.State with the same
                paths; pairs (name, array) or a mapping, with Hugging Face names; or a folder (see
                `read_weights`). With Hugging Face names, the first update compiles programs that
                convert the layouts. Floating-point arrays are cast to the engine's dtypes. If the
                engine's weights are quantised, plain weights are rounded to the same formats.
                Buffers such as `e_score_correction_bias` can be absent, and then keep their
                values. If the drafter is an MTP module, tensors mtp.* also update the drafter.
            version: the new version, above the current version; None for the next integer.
            pause: how rollouts in flight are handled. "abort" ends them with their tokens so far.
                "wait" finishes them first; it is refused if no step can run. "keep" continues them
                after the update: their cache is recomputed, and new weights sample the next tokens.
            drafter: weights for the drafter, as for `update_drafter`.

        Raises:
            ValueError: the weights do not fit (the error lists the faults), cannot be read or are
                not finite, or `version` or `pause` is not possible. Nothing has changed.
            CheckpointError: the folder has no weights, or they are damaged. Nothing has changed.
        """
        check_choice("pause", pause, PAUSES)
        params = self.params
        check_folders(self._engine, weights, drafter)
        named, own = read_update(weights, drafter, params, self.drafter)
        with self._turns:
            self._loop.check_open()
            number = next_version(self.version, version)
            target = stage_target(named, self.target, self._engine.params.target)
            staged = target, self._stage_drafter(own)
            stage_elsewhere(self._engine, weights, drafter)
            return self._replace(*staged, pause, number)

    def update_drafter(self, weights: Weights, *, pause: str = "keep") -> WeightUpdate:
        """Replace the drafter's weights from the next step on; outputs keep their distribution.

        Args:
            weights: as for `update_weights`. A tree has the paths of `params.drafter`, and named
                arrays have the names of the drafter's published checkpoint.
            pause: as for `update_weights`.

        Raises:
            ValueError, CheckpointError: as for `update_weights`, or the drafter has no weights.
                Nothing has changed.
        """
        check_choice("pause", pause, PAUSES)
        params = self.params
        check_folders(self._engine, weights)
        own = read_finite(weights, params.drafter, "drafter's weights")
        with self._turns:
            self._loop.check_open()
            staged = self._stage_drafter(own)
            stage_elsewhere(self._engine, None, weights)
            return self._replace(None, staged, pause, None)

    def pause(self, mode: str = "keep") -> None:
        """Stop generating until `resume`. For `mode`, see `pause` in `update_weights`."""
        check_choice("pause", mode, PAUSES)
        with self._turns:
            self._loop.check_open()
            self._loop.hold(mode)
            self._loop.stop(PAUSED)

    def resume(self) -> None:
        """Continue generating after `pause`. If the engine is asleep, raise a RuntimeError."""
        with self._turns:
            self._loop.check_open()
            if self._loop.is_stopped(ASLEEP):
                raise RuntimeError("the engine is asleep; call wake_up")
            self._loop.go(PAUSED)

    def abort(self, label: Hashable = None) -> None:
        """Abort the rollouts of calls with this label, or of all calls if `label` is None.

        The calls return the tokens generated so far, even while the engine is paused or asleep.
        """
        with self._turns:
            self._loop.check_open()
            self._loop.abort(label)

    def sleep(self, level: int = 1) -> None:
        """Free device memory until `wake_up`.

        Level 1 frees caches and states; level 2 also moves the weights of target and drafter to
        host memory. Rollouts in flight are kept and continue after `wake_up`.

        Raises:
            ValueError: `level` is neither 1 nor 2.
        """
        check_level(level)
        with self._turns:
            self._loop.check_open()
            if not self._loop.is_stopped(ASLEEP):
                self._loop.hold("keep")
                self._sleep.begin(1)
                self._loop.stop(ASLEEP)
            self._sleep.begin(level)

    def wake_up(self) -> None:
        """Undo `sleep`: create empty caches and states, and move weights back to the device.

        Weights that were updated while asleep stay updated. A paused engine stays paused.
        """
        with self._turns:
            self._loop.check_open()
            if self._loop.is_stopped(ASLEEP):
                self._sleep.end()
                self._loop.go(ASLEEP)

    def acceptance(self) -> list[VersionAcceptance]:
        """Return draft acceptance for each pair of target and drafter versions, newest last."""
        return self._freshness.read(self._mark())

    def checksum(self) -> str:
        """Return a checksum of the target's weights. Equal weights have equal checksums."""
        with self._turns:
            self._loop.check_open()
            return checksum(self._engine.params.target)

    def metrics(self) -> Metrics:
        """Return the counters since the engine was built."""
        return self._llm.metrics()

    def close(self) -> None:
        """Free device memory and drop rollouts in flight; closing twice is harmless."""
        with self._turns:
            if not self._loop.is_closed:
                self._loop.close()
                self._llm.close()
                del self._engine

    def __enter__(self) -> "RolloutEngine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _begin(
        self, prompts: Any, params: Any, history: RolloutHistory | None, reuse_noise: float
    ) -> list[Start]:
        self._loop.check_ready()
        identity = check_reuse(history, lambda: identity_of(self._llm), reuse_noise)
        starts = self._starts.make(prompts, params)
        with self._turns:
            if history is not None:
                starts = history.begin(starts, identity, self.version, reuse_noise)
            return starts

    def _make_scored(
        self, samples: Sequence[Any], params: SamplingParams | None, features: bool
    ) -> list[Request | None]:
        """Return a request for each sample, or None for a sample without tokens to score."""
        self._loop.check_ready()
        if params is not None and not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params={params!r} must be a SamplingParams")
        check_flags(features=features)
        if not isinstance(samples, Iterable):
            raise ValueError(f"samples={samples!r:.60} must be a list of rollouts or pairs")
        return [
            self._starts.make_scored(sample, params, f"sample {i}", exports_features=features)
            for i, sample in enumerate(samples)
        ]

    def _stage_drafter(self, named: Mapping[str, Any] | None) -> list[Origin | None] | None:
        if named is None:
            return None
        return stage_drafter(named, self.drafter, self._engine.params.drafter)

    def _replace(
        self,
        target: list[Origin | None] | None,
        own: list[Origin | None] | None,
        pause: str,
        version: int | None,
    ) -> WeightUpdate:
        """Replace weights between two steps, one array at a time.

        For `target` and `own`, see `replace_weights`. `version` is the target's new version, or
        None if `target` is None.
        """
        start, loop, engine = time.perf_counter(), self._loop, self._engine
        loop.hold(pause)
        loop.close_spans()
        self._freshness.close(self._mark())

        def tear() -> None:
            loop.is_torn = True  # until all arrays are replaced

        replace_elsewhere(engine)
        replace_weights(engine, self._sleep, target, own, tear=tear)
        if version is not None:
            loop.is_torn, loop.version = False, version
        self.drafter_version += own is not None
        number = self.drafter_version if version is None else version
        return WeightUpdate.of(number, [*(target or ()), *(own or ())], time.perf_counter() - start)

    def _mark(self) -> Mark:
        return Mark(self.version, self.drafter_version, self.metrics())
