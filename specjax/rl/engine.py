"""The engine in a training loop: rollouts out, new weights in, and nothing built twice.

Whoever generates steps the engine himself, one step at a time, so that any thread may change
weights between two steps: there is no thread of the engine's own, and one thread is enough.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from specjax.config import SpeculativeConfig
from specjax.device.drafters.drafter import Drafter, Params
from specjax.device.models.model import Model
from specjax.host.sequence import Sequence as Sample
from specjax.llm import LLM
from specjax.metrics import Metrics
from specjax.outputs import Completion
from specjax.prompts import Prompt, as_prompt_list, one_each
from specjax.request import Request
from specjax.rl.freshness import Freshness, Mark, VersionAcceptance
from specjax.rl.rollouts import Rollout, RolloutBatch, Score
from specjax.rl.running import Running, Turns, read_score
from specjax.rl.weights import (
    Source,
    Weights,
    WeightUpdate,
    brings_module,
    checksum,
    copies,
    read_named,
    stage_drafter,
    stage_target,
)
from specjax.sampling_params import SamplingParams
from specjax.tokenizer import ChatTokenizer

PAUSES = ("abort", "wait", "keep")
T = TypeVar("T")


class RolloutError(RuntimeError):
    """The device failed in a step. `rollouts` has what there was; what is partial can go on."""

    def __init__(self, message: str, rollouts: RolloutBatch):
        super().__init__(message)
        self.rollouts = rollouts

    def __reduce__(self) -> Any:  # between processes, with its rollouts
        return type(self), (str(self), self.rollouts)


class _Start(NamedTuple):
    """A checked request that has not been queued."""

    request: Request
    params: SamplingParams  # as the user gave them
    prompt_index: int
    before: Rollout | None = None


class RolloutEngine:
    """An `LLM` for reinforcement learning.

    Generates rollouts with the log-probability of every token in the distribution that it was
    drawn from, by the same forward that verified it; scores tokens by that forward; takes new
    weights in place, between two steps, without compiling.

    Any thread may call any method; those that generate take turns, a step each.

    Args:
        model: as for `LLM`. Weights given as `params` are copied.
        raw_logprobs: report every token's log-probability in the model's own distribution, too.
        options: as for `LLM`.

    Raises:
        ValueError: as `LLM`; or options that a rollout engine sets itself.
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
        options.setdefault("show_progress", False)
        for name in "logprobs_mode", "always_logprobs":
            if name in options:
                raise ValueError(
                    f"{name}={options[name]!r} is the rollout engine's own choice; leave it out "
                    "(raw_logprobs=True adds the model's own log-probabilities)"
                )
        if not isinstance(raw_logprobs, bool):
            raise ValueError(f"raw_logprobs={raw_logprobs!r} must be True or False")
        self._llm = LLM(
            model,
            params=params if params is None else copies(params),
            speculative_config=speculative_config,
            logprobs_mode="both" if raw_logprobs else "processed",
            always_logprobs=True,
            **options,
        )
        self._engine = self._llm.engine
        self._has_raw = raw_logprobs
        self._is_closed = False
        self.version = 0
        self.drafter_version = 0
        self._turns = Turns()
        self._may_run = threading.Event()
        self._may_run.set()
        self._paused_by: int | None = None  # a thread
        self._is_asleep = False
        self._is_torn = False  # whether an update failed half-way
        self._running: set[Running] = set()
        self._num_prompts = 0
        self._ids = itertools.count()
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
        """The weights in use, the engine's own: to be read, not donated."""
        return self._engine.params

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
    ) -> RolloutBatch:
        """Continue prompts, n samples each; samples of a prompt share its pages.

        Rollouts that were aborted go on from where they were, under their own parameters and
        seeds: what comes out is what would have come without the break, if the weights are the
        same. Seeds of prompts depend on the engine's seed and on how many prompts came before.

        Args:
            prompts: texts, lists of token ids, {"prompt_token_ids": [...]}; or rollouts.
            sampling_params: one for all prompts or one per prompt; None for the defaults, and for
                rollouts.

        Raises:
            ValueError: a prompt or parameter that cannot be served, before anything is generated.
            RolloutError: the device failed; it has what there was.
        """
        starts = self._make(prompts, sampling_params)
        rollouts: list[tuple[int, Rollout]] = []
        try:
            for running, rollout in self._run(starts):
                rollouts.append((running.place, rollout))
        except RolloutError as error:
            error.rollouts = _ordered(rollouts)
            raise
        return _ordered(rollouts)

    def stream(
        self,
        prompts: Prompt | Rollout | Sequence[Prompt | Rollout],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Rollout]:
        """As `generate`, each rollout as soon as it is complete.

        They start when the first is asked for; leaving the iteration aborts the others. Other
        calls, `abort` and `update_weights` among them, may come between.
        """
        starts = self._make(prompts, sampling_params)
        return (rollout for _, rollout in self._run(starts))

    def check(
        self,
        prompts: Prompt | Rollout | Sequence[Prompt | Rollout],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> None:
        """Refuse what `generate` would refuse, and do nothing else.

        Raises:
            ValueError: a prompt or parameter that cannot be served.
        """
        self._make(prompts, sampling_params, counts=False)

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
        """
        self._check_ready()
        if sampling_params is not None and not isinstance(sampling_params, SamplingParams):
            raise ValueError(f"sampling_params={sampling_params!r} must be a SamplingParams")
        requests = [
            self._make_scored(sample, sampling_params, f"sample {i}", features)
            for i, sample in enumerate(samples)
        ]
        queued = [request for request in requests if request is not None]
        with self._adding(queued, list) as sequences:
            while not all(sequence.is_finished for sequence in sequences):
                self._step()
        if failed := [one for one in sequences if one.finish_reason != "length"]:
            raise RuntimeError(f"scoring ended early: {failed[0].finish_reason}")
        found = iter(sequences)
        empty = Score(np.zeros(0, np.float32), np.zeros(0, np.float32) if self._has_raw else None)
        return [
            empty if request is None else read_score(next(found), has_raw=self._has_raw)
            for request in requests
        ]

    def update_weights(
        self,
        weights: Weights,
        version: int | None = None,
        *,
        pause: str = "keep",
        drafter: Weights | None = None,
    ) -> WeightUpdate:
        """Run with other weights from the next step on. Nothing is compiled.

        They are copied, array by array, each taking the place of the one before; the caller's are
        neither kept nor donated. What was cached is forgotten.

        Args:
            weights: the target's: a tree like `params.target`, nested mappings or an nnx.State
                with the same paths, or pairs (or a mapping) of Hugging Face name and array. Floats
                are cast. With an MTP drafter, tensors named mtp.* update it too.
            version: above the one before; None for the next.
            pause: what happens to rollouts on their way: "abort" ends them as they are, "wait"
                lets them finish first, "keep" has them go on, under the new weights from their
                next token on, all they have being run again.
            drafter: weights for the drafter, as for `update_drafter`.

        Raises:
            ValueError: weights that do not fit (all differences are named), or a version that is
                not above the last; nothing has changed.
        """
        _check_pause(pause)
        named = read_named(weights, self.params.target, "weights")
        target = stage_target(named, self.target, self.params.target)
        if drafter is None and brings_module(named, self.drafter):
            drafter = named
        own = None
        if drafter is not None:
            own = stage_drafter(drafter, self.drafter, self.params.drafter)
        with self._turns:
            start = time.perf_counter()
            version = self._next_version(version)
            self._replace(target, own, pause)
            self.version = version
            return WeightUpdate.of(version, target + (own or []), time.perf_counter() - start)

    def update_drafter(self, weights: Weights, *, pause: str = "keep") -> WeightUpdate:
        """Draft with other weights from the next step on; outputs do not depend on them.

        Args:
            weights: like `params.drafter` or as for `update_weights`; published names.
            pause: as for `update_weights`.

        Raises:
            ValueError: the drafter has no weights, or these do not fit; nothing has changed.
        """
        _check_pause(pause)
        own = stage_drafter(weights, self.drafter, self.params.drafter)
        with self._turns:
            start = time.perf_counter()
            self._replace(None, own, pause)
            return WeightUpdate.of(self.drafter_version, own, time.perf_counter() - start)

    def pause(self, mode: str = "keep") -> None:
        """Generate nothing until `resume`; see `update_weights` for what `mode` says."""
        _check_pause(mode)
        with self._turns:
            self._check_open()
            self._hold(mode)
            self._stop()

    def resume(self) -> None:
        """Generate again after `pause`."""
        with self._turns:
            if self._is_asleep:
                raise RuntimeError("the engine is asleep; call wake_up")
            self._paused_by = None
            self._may_run.set()

    def abort(self) -> None:
        """End all rollouts as they are; whoever waits for them gets what there is."""
        with self._turns:
            self._check_open()
            self._hold("abort")

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory for others until `wake_up`.

        Level 1 frees caches and states, level 2 the weights as well, target's and drafter's, which
        wait in the host's memory. Rollouts on their way are kept, and wait.

        Raises:
            ValueError: another level.
        """
        if level not in (1, 2) or isinstance(level, bool):
            raise ValueError(f"level={level!r} must be 1, caches and states, or 2, weights as well")
        with self._turns:
            self._check_open()
            if not self._is_asleep:
                self._hold("keep")
                self._engine.release()
                self._stop()
                self._is_asleep = True
            if level == 2:
                self._change(lambda leaf: np.array(jax.device_get(leaf)))

    def wake_up(self) -> None:
        """Take back what `sleep` freed: weights as they were, or as they were updated since."""
        with self._turns:
            self._check_open()
            if self._is_asleep:
                self._change(lambda leaf: jax.device_put(leaf, self._engine.device))
                self._engine.renew()
                self._is_asleep = False
            self._paused_by = None
            self._may_run.set()

    def acceptance(self) -> list[VersionAcceptance]:
        """How drafts fared under each pair of weights, the last one still growing."""
        return self._freshness.read(self._mark())

    def checksum(self) -> str:
        """`weights.checksum` of the target's weights; a trainer's, in the same dtype, is equal."""
        with self._turns:
            return checksum(self.params.target)

    def metrics(self) -> Metrics:
        """Counters since the engine was built."""
        return self._llm.metrics()

    def close(self) -> None:
        """Free the device's memory; closing twice is harmless. Rollouts on their way are lost."""
        with self._turns:
            if not self._is_closed:
                self._is_closed = True
                self._llm.close()
                del self._engine
            self._may_run.set()

    def __enter__(self) -> "RolloutEngine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this RolloutEngine is closed; build a new one")

    def _check_ready(self) -> None:
        self._check_open()
        if self._is_torn:
            raise RuntimeError(
                "an update of the weights failed half-way, so that they are of two versions; "
                "call update_weights again"
            )

    def _make(self, prompts: Any, sampling_params: Any, *, counts: bool = True) -> list[_Start]:
        """Checked requests for prompts, or for rollouts that go on."""
        listed: list[Any] = [prompts] if isinstance(prompts, Rollout) else as_prompt_list(prompts)
        are_rollouts = [isinstance(one, Rollout) for one in listed]
        if not any(are_rollouts):
            with self._turns:  # for no two calls may number their prompts alike
                self._check_ready()
                starts = self._make_new(listed, sampling_params)
                self._num_prompts += len(starts) if counts else 0
            return starts
        self._check_ready()
        if not all(are_rollouts):
            raise ValueError("prompts and rollouts do not go together; make two calls")
        if sampling_params is not None:
            raise ValueError("sampling_params: rollouts go on under their own; leave it out")
        return [self._make_resumed(rollout, f"rollout {i}") for i, rollout in enumerate(listed)]

    def _make_new(self, prompts: list[Prompt], sampling_params: Any) -> list[_Start]:
        given = SamplingParams() if sampling_params is None else sampling_params
        listed = one_each("sampling_params", given, len(prompts))
        starts = []
        for i, (prompt, params) in enumerate(zip(prompts, listed, strict=True)):
            request = self._llm.request_maker.make(
                prompt,
                _reporting(params, f"prompt {i}"),
                self._num_prompts + i,
                f"prompt {i}",
                request_id=("rollout", next(self._ids)),
            )
            starts.append(_Start(request, params, i))
        return starts

    def _make_resumed(self, rollout: Rollout, where: str) -> _Start:
        if not rollout.is_partial:
            raise ValueError(
                f"{where} has ended (finish_reason={rollout.finish_reason!r}); only those that "
                "were aborted go on"
            )
        params = replace(rollout.params, n=1, seed=rollout.seed)
        request = self._llm.request_maker.make(
            rollout.prompt_token_ids.tolist(),
            _reporting(params, where),
            0,
            where,
            request_id=("rollout", next(self._ids)),
            output=rollout.token_ids.tolist(),
        )
        return _Start(request, rollout.params, rollout.prompt_index, rollout)

    def _make_scored(
        self, sample: Any, params: SamplingParams | None, where: str, features: bool
    ) -> Request | None:
        """A request for scores; None if there are no tokens to score."""
        if isinstance(sample, Rollout):
            params = sample.params if params is None else params
            sample = sample.prompt_token_ids, sample.token_ids
        if not isinstance(sample, Sequence) or isinstance(sample, str) or len(sample) != 2:
            raise ValueError(
                f"{where} must be a Rollout, or token ids of a prompt and a completion"
            )
        prompt, output = sample
        if not len(output):
            return None
        params = _reporting(SamplingParams() if params is None else params, where)
        request_id = ("score", next(self._ids))
        return self._llm.request_maker.make_scored(
            prompt, output, params, request_id, where, exports_features=features
        )

    @contextmanager
    def _adding(
        self, requests: list[Request], track: Callable[[list[Sample]], list[T]]
    ) -> Iterator[list[T]]:
        """Queue requests, and abort those that have not ended when the block is left.

        What `track` makes of their samples is there before anything can happen to them.
        """
        try:
            with self._turns:
                self._check_ready()
                self._engine.prepare(requests)
                tracked = track([sample for one in requests for sample in self._engine.add(one)])
            yield tracked
        except KeyboardInterrupt:  # anywhere in a step: nothing is sure to be whole
            with self._turns:
                if not self._is_closed:
                    self._engine.reset()
            raise
        finally:
            with self._turns:
                if not self._is_closed:
                    for request in requests:
                        self._engine.abort(request.request_id)
                    self._engine.drain()

    def _run(self, starts: list[_Start]) -> Iterator[tuple[Running, Rollout]]:
        """Rollouts as they end."""
        failure: Exception | None = None
        requests = [start.request for start in starts]
        with self._adding(requests, partial(self._track, starts)) as remaining:
            try:
                while remaining:
                    for running in [one for one in remaining if one.sequence.is_finished]:
                        remaining.remove(running)
                        yield running, self._hand_out(running)
                    if remaining and not any(one.sequence.is_finished for one in remaining):
                        try:
                            self._step()
                        except Exception as error:  # the device's, or it has been paused for good
                            if self._is_closed:
                                raise
                            failure = error
                            with self._turns:
                                self._end(remaining)
            finally:
                self._running.difference_update(remaining)
        if failure is not None:
            raise RolloutError(f"{failure}", RolloutBatch(())) from failure

    def _track(self, starts: list[_Start], samples: list[Sample]) -> list[Running]:
        """Keep an account of the versions that draw these samples."""
        owner = {start.request.request_id: start for start in starts}
        tracked = []
        for place, sequence in enumerate(samples):
            start = owner[sequence.request.request_id]
            before = start.before
            tracked.append(
                Running(
                    sequence,
                    Completion(sequence, self.tokenizer),
                    start.params,
                    place,
                    start.prompt_index,
                    sequence.index if before is None else before.sample_index,
                    before,
                    [] if before is None else list(before.versions),
                )
            )
        self._running.update(tracked)
        return tracked

    def _hand_out(self, running: Running) -> Rollout:
        with self._turns:
            self._running.discard(running)
            return running.rollout(self.version, has_raw=self._has_raw)

    def _step(self) -> None:
        """One step, as soon as nobody else has the turn and nothing is paused."""
        if not self._may_run.is_set() and self._paused_by == threading.get_ident():
            raise RuntimeError(
                "the engine was paused, or sent to sleep, by the thread that generates; call "
                "resume or wake_up before"
            )
        self._may_run.wait()
        with self._turns:
            self._check_ready()
            if self._may_run.is_set():
                self._engine.step()

    def _hold(self, mode: str) -> None:
        """Bring what runs to where weights may change."""
        if mode == "wait":
            if not self._may_run.is_set():
                raise ValueError(
                    "pause='wait': the engine is paused already, so that nothing would finish; "
                    "use 'keep' or 'abort', or resume before"
                )
            while self._engine.has_work:
                self._engine.step()
        self._engine.land()
        if mode == "abort":
            self._end(self._running)

    def _end(self, rollouts: Iterable[Running]) -> None:
        """End rollouts as they are, with all that is on its way."""
        self._engine.land()
        for running in rollouts:
            self._engine.abort(running.sequence.request.request_id)

    def _stop(self) -> None:
        self._may_run.clear()
        self._paused_by = threading.get_ident()

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

    def _replace(self, target: list[Source] | None, own: list[Source] | None, pause: str) -> None:
        """Change weights between two steps, each array taking the place of the one before."""
        self._check_open()
        self._hold(pause)
        mark = self._mark()
        device = self._engine.device
        sources = [
            *(target or [None] * len(jax.tree.leaves(self.params.target))),
            *(own or [None] * len(jax.tree.leaves(self.params.drafter))),
        ]
        queue = iter(sources)
        was_torn, self._is_torn = self._is_torn, target is not None or self._is_torn

        def change(leaf: Any) -> Any:
            source = next(queue)
            return leaf if source is None else source.copy(leaf.dtype, device)

        self._change(change)
        self._is_torn = was_torn and target is None
        self._engine.use(
            self.params, has_new_target=target is not None, has_new_drafter=own is not None
        )
        self._freshness.close(mark)
        for running in self._running:
            running.close_span(self.version)
        self.drafter_version += own is not None

    def _change(self, change: Callable[[Any], Any]) -> None:
        """Replace the engine's arrays, of which no other reference is kept, one by one."""
        leaves, tree = jax.tree.flatten(self._engine.params)
        self._engine.params = Params(None, None)
        try:
            for i in range(len(leaves)):
                leaves[i] = jax.block_until_ready(change(leaves[i]))
        finally:
            self._engine.params = jax.tree.unflatten(tree, leaves)

    def _mark(self) -> Mark:
        return Mark(self.version, self.drafter_version, self.metrics())


def _ordered(rollouts: list[tuple[int, Rollout]]) -> RolloutBatch:
    return RolloutBatch(rollout for _, rollout in sorted(rollouts, key=lambda pair: pair[0]))


def _reporting(params: Any, where: str) -> SamplingParams:
    """Parameters under which every token's log-probability is reported."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"{where}: sampling_params={params!r} must be a SamplingParams")
    for name in "logprobs", "prompt_logprobs":
        if getattr(params, name) is not None:
            raise ValueError(
                f"{where}: {name}={getattr(params, name)} is not for rollouts, which always bring "
                "the log-probability of every token; leave it out (score has those of given tokens)"
            )
    return replace(params, logprobs=0)


def _check_pause(mode: Any) -> None:
    if mode not in PAUSES:
        raise ValueError(f"pause={mode!r} is not supported; choose one of {', '.join(PAUSES)}")
