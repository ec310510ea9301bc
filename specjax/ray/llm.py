"""Contains `RayLLM`, an LLM whose replicas are Ray actors.

Each replica has its own process, on any node of the cluster, and may divide its model over several
devices. The driver, which is the process that makes a `RayLLM`, assigns seeds and routes requests.
"""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from specjax.checks import check_positive
from specjax.engine.metrics import Metrics
from specjax.outputs import CompletionOutput, RequestOutput
from specjax.ray.progress import Progress
from specjax.ray.worker import RayWorker
from specjax.rl.named import Weights
from specjax.rl.ray_pool import MAX_DEATHS, WorkerPool, WorkersDied, import_ray
from specjax.rl.ray_worker import NotBuilt, WorkerState
from specjax.rl.rollouts import RolloutBatch
from specjax.rl.weights import WeightUpdate
from specjax.sampling_params import RequestOutputKind, SamplingParams
from specjax.serving.options import read_options
from specjax.text.completions import Shown
from specjax.text.prompts import Prompt, as_prompt_list, one_each, prompt_text
from specjax.text.seeds import derived_seed

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_STREAMS = 10_000  # maximum number of requests that a worker has at a time


class RayLLM:
    """Replicas of an LLM, each in a Ray actor (worker), that share requests.

    A request goes to the worker with the fewest unfinished samples. If a worker dies, a new worker
    with the current weights replaces it. The requests of the dead worker continue on other workers,
    with the same seeds. The worker that runs a request does not affect the request's tokens, except
    by rounding: batches of different sizes may round differently.

    Args:
        model: a folder or hub id that every worker can load.
        data_parallel_size: the number of workers.
        ray_options: the Ray options of each worker's actor (`num_gpus`, `runtime_env`, ...). By
            default, a worker has `tensor_parallel_size` GPUs if the cluster has GPUs.
        options: options of `LLM`, which each worker's LLM gets.

    Raises:
        ImportError: Ray is not installed.
        ValueError, CheckpointError: as for `LLM`, or the cluster is too small.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        data_parallel_size: int,
        ray_options: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        check_positive(data_parallel_size=data_parallel_size)
        if not isinstance(model, str | Path):
            raise ValueError(
                f"model={type(model).__name__} must be a folder or hub id, which workers can load"
            )
        given = read_options(options)
        ray = self._ray = import_ray("RayLLM")
        default = {"num_cpus": 1, "max_concurrency": MAX_STREAMS}
        if any(node["Resources"].get("GPU") for node in ray.nodes()):
            default["num_gpus"] = given["tensor_parallel_size"]
        self._seed, self._num_requests = given["seed"], 0
        self._num_samples: Counter[int] = Counter()  # unfinished samples, by worker
        self._pool = WorkerPool(
            ray,
            ray.remote(RayWorker),
            model,
            {"verbose": False, **options},
            num_workers=data_parallel_size,
            ray_options=default | dict(ray_options or {}),
            size_name="data_parallel_size",
        )
        try:
            self._default_params = self._pool.call_all("default_params")[0]
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt. Outputs come in the order of the prompts.

        If only some requests fail, they end with finish_reason "error", and the others continue. If
        all requests fail, the first error is raised.

        Args:
            prompts: as for `LLM.generate`.
            sampling_params: parameters for all prompts, or a list with one per prompt; None for the
                checkpoint's parameters.

        Raises:
            ValueError: a prompt or parameter cannot be served; raised before generation starts.
        """
        listed = as_prompt_list(prompts)
        given = self._default_params if sampling_params is None else sampling_params
        params = [
            self._seeded(one, self._num_requests + i)
            for i, one in enumerate(one_each("sampling_params", given, len(listed)))
        ]
        self._pool.call_first("check_requests", listed, params)
        numbers = range(self._num_requests, self._num_requests + len(listed))
        self._num_requests += len(listed)

        async def last(
            prompt: Prompt, one: SamplingParams, number: int
        ) -> RequestOutput | Exception:
            final = replace(one, output_kind=RequestOutputKind.FINAL_ONLY)
            try:
                (output,) = [x async for x in self._grow(prompt, final, str(number))]
            except Exception as error:
                return error
            return output

        async def gather() -> list[RequestOutput | Exception]:
            return await asyncio.gather(*map(last, listed, params, numbers))

        ended = _wait_for(gather)
        errors = [one for one in ended if isinstance(one, Exception)]
        if errors and len(errors) == len(ended):
            raise errors[0]
        return [
            _failed(listed[i], str(numbers[i]), params[i], one)
            if isinstance(one, Exception)
            else one
            for i, one in enumerate(ended)
        ]

    def generate_stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt. Yield an output whenever new tokens have arrived.

        See `AsyncLLM.generate_stream`. Leaving the iteration aborts the request.

        Raises:
            ValueError: the prompt or a parameter cannot be served.
            WorkersDied: workers died repeatedly while the request ran, or cannot be replaced.
            RuntimeError: a worker died, the request had to start again on another worker, and the
                new tokens differ from the tokens that were already yielded.
        """
        number, self._num_requests = self._num_requests, self._num_requests + 1
        params = self._default_params if sampling_params is None else sampling_params
        return self._grow(prompt, self._seeded(params, number), str(number))

    def update_weights(
        self, weights: Weights, version: int | None = None, *, drafter: Weights | None = None
    ) -> WeightUpdate:
        """Replace the target's weights of all workers, or of none if a worker fails.

        For the arguments and errors, see `RolloutEngine.update_weights`. The weights are put in the
        object store once for all workers. A worker replaces its weights between two steps, and its
        unfinished requests continue with the new weights. Return the `WeightUpdate` of the worker
        that took the longest.
        """
        return self._pool.update_weights(weights, version, drafter=drafter)

    def add_corpus(self, name: str, texts: Sequence[str | Sequence[int]]) -> None:
        """Add a corpus to all workers; see `LLM.add_corpus`. New workers get it, too."""

        def change(state: WorkerState) -> WorkerState:
            return replace(state, corpora={**state.corpora, name: texts})

        self._pool.change_all(change, "add_corpus", name, texts)

    def remove_corpus(self, name: str) -> None:
        """Remove a corpus from all workers; see `LLM.remove_corpus`."""

        def change(state: WorkerState) -> WorkerState:
            kept = {one: texts for one, texts in state.corpora.items() if one != name}
            return replace(state, corpora=kept)

        self._pool.change_all(change, "remove_corpus", name)

    def versions(self) -> list[int]:
        """Return the version of each worker's weights; 0 for the weights at construction."""
        return self._pool.call_all("version")

    def metrics(self) -> list[Metrics]:
        """Return the counters of each worker's engine, since the worker's start."""
        return self._pool.call_all("metrics")

    def close(self) -> None:
        """End the workers; closing twice is harmless."""
        self._pool.close()

    def __enter__(self) -> "RayLLM":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _seeded(self, params: Any, number: int) -> SamplingParams:
        """Return a copy of the parameters with a seed.

        If `params` have no seed, the new seed is derived from the request's number `number`, as in
        an `LLM`.

        Raises:
            ValueError: `params` are not a `SamplingParams`, or have logits processors.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params has {params!r}, which is not a SamplingParams")
        if params.logits_processors:
            raise ValueError(
                "logits_processors are compiled into a worker's steps, again for each copy that is "
                "sent to it; use LLM or AsyncLLM for them"
            )
        return (
            params.clone()
            if params.seed is not None
            else replace(params, seed=derived_seed(self._seed, number))
        )

    async def _grow(
        self, prompt: Prompt, params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        progress, shown, num_deaths = Progress(params), Shown(params.output_kind), 0
        while not progress.is_finished:
            self._pool.check_open()
            workers = list(self._pool.workers)
            number = min(range(len(workers)), key=self._num_samples.__getitem__)
            self._num_samples[number] += params.n
            try:
                async with aclosing(self._run(workers[number], prompt, progress)) as grown:
                    async for output in grown:
                        part = shown.of(replace(output, request_id=request_id))
                        if part is not None:
                            yield part
            except (*self._pool.deaths, NotBuilt) as error:
                num_deaths += 1
                if num_deaths == MAX_DEATHS:
                    raise WorkersDied(
                        f"{MAX_DEATHS} workers died one after the other while request {request_id} "
                        f"ran (the last: {error}); leave it out, or find out why it ends them",
                        RolloutBatch(()),
                    ) from error
                log.warning(
                    "worker %d died, and request %s runs again: %s", number, request_id, error
                )
                await asyncio.to_thread(self._pool.replace, number, workers[number])
            finally:
                self._num_samples[number] -= params.n

    async def _run(
        self, worker: Any, prompt: Prompt, progress: Progress
    ) -> AsyncGenerator[RequestOutput, None]:
        """Let a worker run or continue a request. Yield the whole output whenever it has grown."""
        stream = worker.stream.options(num_returns="streaming").remote(
            prompt, progress.params, uuid.uuid4().hex, progress.begin()
        )
        try:
            async for reference in stream:
                output = progress.add(await reference)
                if output is not None:
                    yield output
        except self._ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, Exception):
                raise
            raise error.cause from error
        finally:
            self._ray.cancel(stream)


def _failed(
    prompt: Prompt, request_id: str, params: SamplingParams, error: Exception
) -> RequestOutput:
    """Return the output of a request that failed with `error`."""
    samples = [
        CompletionOutput(i, None, [], None, None, "error", None, error) for i in range(params.n)
    ]
    return RequestOutput(request_id, prompt_text(prompt), [], None, samples)


def _wait_for(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the coroutine `make()` on an event loop in another thread, and return its result.

    The caller's thread may have a running loop, as in a notebook. If the caller is interrupted, the
    coroutine is cancelled.
    """
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, name="specjax-ray", daemon=True)
    thread.start()
    try:
        return asyncio.run_coroutine_threadsafe(make(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_others() -> None:
    """Cancel all other tasks of this event loop, and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
