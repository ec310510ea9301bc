"""The asynchronous Ray actor that runs one replica of an LLM."""

import asyncio
import time
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from typing import Any

from specjax.async_llm import AsyncLLM
from specjax.engine.metrics import Metrics
from specjax.engine.sleep import SleepOfAll
from specjax.llm import LLM
from specjax.outputs import CompletionOutput, RequestOutput
from specjax.rl.ray_worker import NotBuilt, WorkerFailed, WorkerState
from specjax.rl.weights import (
    WeightUpdate,
    next_version,
    read_update,
    replace_weights,
    stage_drafter,
    stage_target,
)
from specjax.sampling_params import SamplingParams
from specjax.text.prompts import Prompt


class RayWorker:
    """An `AsyncLLM` in a Ray actor.

    If building it failed, every call raises `NotBuilt` with the error.
    """

    def __init__(
        self, model: Any, options: Mapping[str, Any], state: WorkerState, weights: Any, drafter: Any
    ):
        self._failure: Exception | None = None
        self._version, self._drafter_version = 0, state.drafter_version
        try:
            self._llm = AsyncLLM(model, **options)
            if weights is not None:
                self._update_weights(weights, state.version, drafter)
                self._drafter_version = state.drafter_version
        except Exception as error:
            self._failure = NotBuilt(error)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: Hashable,
        before: CompletionOutput | None,
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt, or the sample `before` of the prompt if it is not None.

        See `AsyncLLM.generate_stream` and `AsyncLLM.resume_stream`.

        Raises:
            ValueError: the prompt or a parameter cannot be served.
            WorkerFailed: the device failed.
        """
        self._check()
        try:
            made = (
                self._llm.generate_stream(prompt, params, request_id=request_id)
                if before is None
                else self._llm.resume_stream(prompt, params, before, request_id=request_id)
            )
            async for output in made:
                self._check()
                yield output
        except (ValueError, NotBuilt, WorkerFailed):
            raise
        except Exception as error:
            raise WorkerFailed(f"{type(error).__name__}: {error}") from error

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the replica, or read an attribute of its LLM."""
        self._check()
        return await asyncio.to_thread(getattr(self, method), *args)

    async def update(
        self, method: str, weights: Any, version: int, *, drafter: Any
    ) -> tuple[WeightUpdate, int]:
        """Replace the weights; return the result and the drafter's new version.

        `method` is always "update_weights", which `WorkerPool.update` passes.
        """
        self._check()
        update = await asyncio.to_thread(self._update_weights, weights, version, drafter)
        return update, self._drafter_version

    def version(self) -> int:
        """Return the version of the target's weights."""
        return self._version

    def metrics(self) -> Metrics:
        """Return the counters of the engine."""
        return self._llm.metrics()

    def default_params(self) -> SamplingParams:
        """Return the checkpoint's sampling parameters."""
        return self._llm.apply(LLM.get_default_sampling_params).result()

    def check_requests(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
        """Check prompts and their parameters.

        Raises:
            ValueError: a prompt or parameter cannot be served.
        """

        def check(llm: LLM) -> None:
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                llm.request_maker.make(prompt, one, 0, f"prompt {i}")

        self._llm.apply(check).result()

    def _update_weights(self, weights: Any, version: int, drafter: Any) -> WeightUpdate:
        number, start = next_version(self._version, version), time.perf_counter()
        engine = self._llm.apply(lambda llm: llm.engine).result()
        named, own = read_update(weights, drafter, engine.params, engine.drafter)

        def replace(llm: LLM) -> WeightUpdate:
            is_torn = False

            def tear() -> None:
                nonlocal is_torn
                is_torn = True

            target = stage_target(named, llm.target, engine.params.target)
            drafts = None
            if own is not None:
                drafts = stage_drafter(own, engine.drafter, engine.params.drafter)
            try:
                replace_weights(engine, SleepOfAll(engine), target, drafts, tear=tear)
            except Exception as error:
                if is_torn:
                    self._failure = WorkerFailed(f"an update failed half-way: {error}")
                raise self._failure or error from error
            self._version, self._drafter_version = number, self._drafter_version + bool(drafts)
            sources = [*target, *(drafts or [])]
            return WeightUpdate.of(number, sources, time.perf_counter() - start)

        return self._llm.apply(replace).result()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
