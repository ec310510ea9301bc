"""The asynchronous Ray actor that runs one replica of an LLM."""

import asyncio
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from typing import Any

from specjax.async_llm import AsyncLLM
from specjax.engine.metrics import Metrics
from specjax.llm import LLM
from specjax.outputs import CompletionOutput, RequestOutput
from specjax.rl.online import OnlineWeights
from specjax.rl.ray_worker import NotBuilt, WorkerFailed, WorkerState
from specjax.rl.weights import WeightUpdate
from specjax.sampling_params import SamplingParams
from specjax.text.prompts import Prompt


class RayWorker:
    """An `AsyncLLM` in a Ray actor.

    If building the `AsyncLLM` failed, every call raises `NotBuilt` with the error.
    """

    def __init__(
        self, model: Any, options: Mapping[str, Any], state: WorkerState, weights: Any, drafter: Any
    ):
        self._failure: Exception | None = None
        try:
            self._llm = AsyncLLM(model, **options)
            self._weights = OnlineWeights(self._llm)
            if weights is not None:
                self._update_weights(weights, state.version, drafter)
            self._weights.drafter_version = state.drafter_version
            for name, texts in state.corpora.items():
                self.add_corpus(name, texts)
        except Exception as error:
            self._failure = NotBuilt(error)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: Hashable,
        before: CompletionOutput | None,
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt. If `before` is not None, continue this sample of the prompt instead.

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
        """Call a synchronous method of this class in a thread, and return the result."""
        self._check()
        return await asyncio.to_thread(getattr(self, method), *args)

    async def update(
        self, method: str, weights: Any, version: int, *, drafter: Any
    ) -> tuple[WeightUpdate, int]:
        """Replace the weights; return the `WeightUpdate` and the drafter's version after it.

        `method` is not used, because `WorkerPool.update` always passes "update_weights".
        """
        self._check()
        update = await asyncio.to_thread(self._update_weights, weights, version, drafter)
        return update, self._weights.drafter_version

    def version(self) -> int:
        """Return the version of the target's weights."""
        return self._weights.version

    def metrics(self) -> Metrics:
        """Return the counters of the engine."""
        return self._llm.metrics()

    def add_corpus(self, name: str, texts: Sequence[str | Sequence[int]]) -> None:
        """See `LLM.add_corpus`."""
        self._llm.apply(lambda llm: llm.add_corpus(name, texts)).result()

    def remove_corpus(self, name: str) -> None:
        """See `LLM.remove_corpus`."""
        self._llm.apply(lambda llm: llm.remove_corpus(name)).result()

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
        try:
            return self._weights.update(weights, version, drafter=drafter)
        except Exception as error:
            if self._weights.is_torn:
                self._failure = WorkerFailed(f"an update failed half-way: {error}")
            raise self._failure or error from error

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
