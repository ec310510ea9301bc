"""The engine in a training loop: rollouts out, new weights in, and nothing built twice."""

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checks import check_choice, check_flags
from specjax.config import SpeculativeConfig
from specjax.device.drafters.drafter import Drafter, Params
from specjax.device.models.model import Model
from specjax.engine.metrics import Metrics
from specjax.engine.sleep import Sleep, change_weights, check_level, on_host
from specjax.host.request import Request
from specjax.llm import LLM
from specjax.rl.freshness import Freshness, Mark, VersionAcceptance
from specjax.rl.loop import ASLEEP, PAUSED, PAUSES, Loop
from specjax.rl.rollouts import Rollout, RolloutBatch, RolloutError, Score
from specjax.rl.running import read_score
from specjax.rl.starts import StartMaker
from specjax.rl.weights import (
    ArraySource,
    Weights,
    WeightUpdate,
    brings_module,
    checksum,
    copies,
    read_finite,
    stage_drafter,
    stage_target,
)
from specjax.sampling_params import SamplingParams
from specjax.text.prompts import Prompt
from specjax.text.tokenizer import ChatTokenizer


class RolloutEngine:
    """An `LLM` for reinforcement learning.

    Generates rollouts with the log-probability of every token in the distribution that it was
    drawn from, by the same forward that verified it; scores tokens by that forward; takes new
    weights in place, between two steps, without compiling.

    Any thread may call any method; those that generate take turns, a step each.

    Args:
        model: as for `LLM`. Weights given as `params` are copied.
        raw_logprobs: report every token's log-probability in the model's own distribution, too.
        options: as for `LLM`; verbose is False unless told.

    Raises:
        ValueError: as `LLM`; options that a rollout engine sets itself; or verification
            "synthetic", whose tokens are not drawn from any distribution that could be told.
        CheckpointError: as `LLM`.
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
                f"logprobs_mode={options['logprobs_mode']!r} is the rollout engine's own choice; "
                "leave it out (raw_logprobs=True adds the model's own log-probabilities)"
            )
        check_flags(raw_logprobs=raw_logprobs)
        if speculative_config is not None:
            speculative_config = SpeculativeConfig.of(speculative_config)
            if speculative_config.verification == "synthetic":
                raise ValueError(
                    "verification='synthetic' does not emit the model's own tokens, which rollouts "
                    "must have; leave it out"
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
        self._sleep = Sleep(self._engine)
        self._freshness = Freshness(self.metrics())

    @property
    def target(self) -> Model:
        """The model that is served."""
        return self._llm.target

    @property
    def drafter(self) -> Drafter:
        """What drafts for it."""
        return self._engine.drafter

    @property
    def params(self) -> Params:
        """The weights in use, the engine's own: to be read, not donated, and not kept."""
        with self._turns:
            self._loop.check_open()
            return self._engine.params

    @property
    def version(self) -> int:
        """Of the target's weights; 0 are those that the engine was built with."""
        return self._loop.version

    @property
    def tokenizer(self) -> ChatTokenizer | None:
        """The checkpoint's, if it has one."""
        return self._llm.tokenizer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The checkpoint's ends of sequence."""
        return self._llm.request_maker.eos_ids

    def generate(
        self,
        prompts: Prompt | Rollout | Sequence[Prompt | Rollout],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        label: Hashable = None,
    ) -> RolloutBatch:
        """Continue prompts, n samples each; samples of a prompt share its pages.

        Rollouts that were aborted go on from where they were, under their own parameters and
        seeds: what comes out is what would have come without the break, if the weights are the
        same and the verification is seed_exact (under the others, the same distribution). Seeds of
        prompts depend on the engine's seed and on how many prompts came before.

        Args:
            prompts: texts, lists of token ids, {"prompt_token_ids": [...]}; or rollouts.
            sampling_params: one for all prompts or one per prompt; None for the defaults, and for
                rollouts.
            label: of the call, for `abort`.

        Raises:
            ValueError: a prompt or parameter that cannot be served, before anything is generated.
            RolloutError: the device failed; it has what there was.
        """
        placed: list[tuple[int, Rollout]] = []
        try:
            for running, rollout in self._loop.run(self._make(prompts, sampling_params), label):
                placed.append((running.place, rollout))
        except RolloutError as error:
            error.rollouts = _ordered(placed)
            raise
        return _ordered(placed)

    def stream(
        self,
        prompts: Prompt | Rollout | Sequence[Prompt | Rollout],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        label: Hashable = None,
    ) -> Iterator[Rollout]:
        """As `generate`, each rollout as soon as it is complete.

        They start when the first is asked for; leaving the iteration aborts the others. Other
        calls, `abort` and `update_weights` among them, may come between.
        """
        starts = self._make(prompts, sampling_params)
        return (rollout for _, rollout in self._loop.run(starts, label))

    def check(
        self,
        prompts: Prompt | Rollout | Sequence[Prompt | Rollout],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> None:
        """Refuse what `generate` would refuse, and do nothing else.

        Raises:
            ValueError: a prompt or parameter that cannot be served.
        """
        self._loop.check_ready()
        self._starts.make(prompts, sampling_params, counts=False)

    def score(
        self,
        samples: Sequence[Rollout | tuple[Sequence[int], Sequence[int]]],
        sampling_params: SamplingParams | None = None,
        *,
        features: bool = False,
    ) -> list[Score]:
        """What the target, as it is now, says of given tokens, by the forward that generates.

        Args:
            samples: rollouts, each under its own parameters; or pairs of token ids, a prompt and a
                completion.
            sampling_params: what shapes the distribution of pairs' tokens; None for the model's
                own.
            features: export the hidden states of all rows, too; see `Score`.

        Raises:
            ValueError: tokens that are not in the vocabulary, or too many; before any is scored.
            RuntimeError: the device failed.
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
        """Refuse what `score` would refuse, and do nothing else.

        Raises:
            ValueError: tokens that cannot be scored.
        """
        self._make_scored(samples, sampling_params, features)

    def update_weights(
        self,
        weights: Weights,
        version: int | None = None,
        *,
        pause: str = "keep",
        drafter: Weights | None = None,
    ) -> WeightUpdate:
        """Run with other weights from the next step on. No step is compiled for it.

        They are copied, array by array, each taking the place of the one before; the caller's are
        neither kept nor donated. What was cached is forgotten.

        Args:
            weights: the target's: a tree like `params.target`, nested mappings or an nnx.State
                with the same paths, or pairs (or a mapping) of Hugging Face name and array, whose
                laying out is compiled at the first update. Floats are cast. With an MTP drafter,
                tensors named mtp.* update it too.
            version: above the one before; None for the next.
            pause: what happens to rollouts on their way: "abort" ends them as they are, "wait"
                lets them finish first, "keep" has them go on, under the new weights from their
                next token on, all they have being run again.
            drafter: weights for the drafter, as for `update_drafter`.

        Raises:
            ValueError: weights that do not fit (all differences are named) or are not finite, or a
                version that is not above the last; nothing has changed.
        """
        check_choice("pause", pause, PAUSES)
        named = read_finite(weights, self.params.target, "weights")
        own = (
            drafter
            if drafter is None
            else read_finite(drafter, self.params.drafter, "drafter's weights")
        )
        if own is None and brings_module(named, self.drafter):
            own = named
        with self._turns:
            self._loop.check_open()
            number = self._next_version(version)
            target = stage_target(named, self.target, self._engine.params.target)
            return self._replace(target, self._stage_drafter(own), pause, number)

    def update_drafter(self, weights: Weights, *, pause: str = "keep") -> WeightUpdate:
        """Draft with other weights from the next step on; outputs do not depend on them.

        Args:
            weights: like `params.drafter` or as for `update_weights`; published names.
            pause: as for `update_weights`.

        Raises:
            ValueError: the drafter has no weights, or these do not fit; nothing has changed.
        """
        check_choice("pause", pause, PAUSES)
        own = read_finite(weights, self.params.drafter, "drafter's weights")
        with self._turns:
            self._loop.check_open()
            return self._replace(None, self._stage_drafter(own), pause, None)

    def pause(self, mode: str = "keep") -> None:
        """Generate nothing until `resume`; see `update_weights` for what `mode` says."""
        check_choice("pause", mode, PAUSES)
        with self._turns:
            self._loop.check_open()
            self._loop.hold(mode)
            self._loop.stop(PAUSED)

    def resume(self) -> None:
        """Generate again after `pause`."""
        with self._turns:
            if self._loop.is_stopped(ASLEEP):
                raise RuntimeError("the engine is asleep; call wake_up")
            self._loop.go(PAUSED)

    def abort(self, label: Hashable = None) -> None:
        """End rollouts as they are, all or those of calls of one label.

        Whoever waits for them gets what there is, even while the engine is paused or asleep.
        """
        with self._turns:
            self._loop.check_open()
            self._loop.abort(label)

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory for others until `wake_up`.

        Level 1 frees caches and states, level 2 the weights as well, target's and drafter's, which
        wait in the host's memory. Rollouts on their way are kept, and wait.

        Raises:
            ValueError: another level.
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
        """Take back what `sleep` freed: weights as they were, or as they were updated since.

        What was paused by `pause` stays so.
        """
        with self._turns:
            self._loop.check_open()
            if self._loop.is_stopped(ASLEEP):
                self._sleep.end()
                self._loop.go(ASLEEP)

    def acceptance(self) -> list[VersionAcceptance]:
        """How drafts fared under each pair of weights, the last one still growing."""
        return self._freshness.read(self._mark())

    def checksum(self) -> str:
        """`weights.checksum` of the target's weights; a trainer's, in the same dtype, is equal."""
        with self._turns:
            return checksum(self._engine.params.target)

    def metrics(self) -> Metrics:
        """Counters since the engine was built."""
        return self._llm.metrics()

    def close(self) -> None:
        """Free the device's memory; closing twice is harmless. Rollouts on their way are lost."""
        with self._turns:
            if not self._loop.is_closed:
                self._loop.close()
                self._llm.close()
                del self._engine

    def __enter__(self) -> "RolloutEngine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _make(self, prompts: Any, sampling_params: Any) -> list[Any]:
        self._loop.check_ready()
        return self._starts.make(prompts, sampling_params)

    def _make_scored(
        self, samples: Sequence[Any], params: SamplingParams | None, features: bool
    ) -> list[Request | None]:
        """A request for each sample that has tokens to score."""
        self._loop.check_ready()
        if params is not None and not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params={params!r} must be a SamplingParams")
        return [
            self._starts.make_scored(sample, params, f"sample {i}", exports_features=features)
            for i, sample in enumerate(samples)
        ]

    def _next_version(self, version: int | None) -> int:
        if version is None:
            return self.version + 1
        if not isinstance(version, int | np.integer) or isinstance(version, bool):
            raise ValueError(f"version={version!r} must be an integer, or None for the next")
        if version <= self.version:
            raise ValueError(
                f"version={version} is not above {self.version}, the one in use; versions rise"
            )
        return int(version)

    def _stage_drafter(self, named: Mapping[str, Any] | None) -> list[ArraySource] | None:
        if named is None:
            return None
        return stage_drafter(named, self.drafter, self._engine.params.drafter)

    def _replace(
        self,
        target: list[ArraySource] | None,
        own: list[ArraySource] | None,
        pause: str,
        version: int | None,
    ) -> WeightUpdate:
        """Change weights between two steps, each array taking the place of the one before.

        A target comes with its version.
        """
        start, loop, engine = time.perf_counter(), self._loop, self._engine
        loop.hold(pause)
        loop.close_spans()
        self._freshness.close(self._mark())
        num_target = len(jax.tree.leaves(engine.params.target))
        sources = [
            *(target or [None] * num_target),
            *(own or [None] * len(jax.tree.leaves(engine.params.drafter))),
        ]

        def change(i: int, leaf: Any) -> Any:
            if (source := sources[i]) is None:
                return leaf
            new = source.copy(leaf.dtype, self._sleep.home(i, leaf))
            loop.is_torn |= i < num_target  # until the last of them is there
            return on_host(new) if self._sleep.level == 2 else new

        change_weights(engine, change)
        if version is not None:
            loop.is_torn, loop.version = False, version
        self.drafter_version += own is not None
        engine.use(
            engine.params, has_new_target=target is not None, has_new_drafter=own is not None
        )
        number = self.drafter_version if version is None else version
        sources = (target or []) + (own or [])
        return WeightUpdate.of(number, sources, time.perf_counter() - start)

    def _mark(self) -> Mark:
        return Mark(self.version, self.drafter_version, self.metrics())


def _ordered(rollouts: list[tuple[int, Rollout]]) -> RolloutBatch:
    return RolloutBatch(rollout for _, rollout in sorted(rollouts, key=lambda pair: pair[0]))
