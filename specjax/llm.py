"""Contains `LLM`, the public entry point, which continues prompts."""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

from specjax.device.models.model import Model
from specjax.engine.log import get_log
from specjax.engine.metric_reader import Metric, list_metrics
from specjax.engine.metrics import Metrics
from specjax.engine.process import OwnLock
from specjax.engine.progress import progress
from specjax.engine.sleep import SleepOfAll, check_level
from specjax.host.request import Request, free_numbers
from specjax.host.sequence import Sequence as Sample
from specjax.messages.chat import Chat, ChatOptions
from specjax.outputs import RequestOutput
from specjax.sampling_params import SamplingParams
from specjax.serving.assembly import assemble
from specjax.serving.corpora import CorpusMethods
from specjax.serving.description import describe
from specjax.serving.dynamic_k import save_profile
from specjax.serving.options import LLMOptions, read_options
from specjax.serving.vllm_methods import VllmMethods
from specjax.text.completions import Growing, Outputs, samples_of
from specjax.text.prompts import (
    Prompt,
    RequestMaker,
    as_prompt_list,
    one_each,
    params_each,
    prompt_text,
    refuse_lora,
    truncated,
)
from specjax.text.tokenizer import ChatTokenizer


class LLM(CorpusMethods, VllmMethods):
    """A model ready to generate, with or without speculative decoding.

    Threads may share an LLM: their requests run in the same steps.

    Args:
        model: a checkpoint in Hugging Face layout (folder or hub id), or a `Model` value.
        params: the parameters of a `Model` value.
        speculative_config: a `SpeculativeConfig`, or a mapping of its fields; None for no drafts.
        dtype: dtype of weights and caches, "float32" (or "float") or "bfloat16"; "auto" is the
            checkpoint's dtype on a GPU, float32 on a CPU.
        quantization: format to which linear layers of an unquantised checkpoint are rounded: "fp8"
            (e4m3) or "int8", with a scale per output, or "int4", with a scale per 128 inputs.
        max_model_len: maximum number of tokens of a request, including the prompt; None for the
            model's limit, on a CPU at most 8192.
        max_num_seqs: maximum number of samples (n per request) that run together; None for 256 on a
            GPU (fewer if its memory holds fewer recurrent states), 16 on a CPU.
        max_num_batched_tokens: maximum number of tokens per step, including the extra tokens that
            some drafters run; None for 8192 on a GPU, 512 on a CPU.
        max_num_scheduled_tokens: maximum number of tokens per step, without drafters' extra tokens;
            None for max_num_batched_tokens.
        decode_batches: batch sizes that rounds may be compiled for, like (1, 8, 64); None for
            powers of two up to max_num_seqs.
        prefill_shapes: pairs (batch, width) that prefill steps may be compiled for; None for widths
            that double up to the token budget, each for 1, 4, 16, ... prompts.
        num_pages: KV cache pages; None for max_num_seqs full requests, fewer if memory is low.
        page_size: tokens per page.
        kv_cache_dtype: dtype of pages, "auto" (`dtype`), "fp8" (e4m3, with the checkpoint's scales
            or 1), or "int8" (with a scale for each token and head).
        kv_cache_dtype_skip_layers: numbers of layers whose pages stay in dtype; "sliding_window"
            for all layers with a window.
        gpu_memory_utilization: fraction of the GPU's memory for weights and the KV cache.
        enable_prefix_caching: keep pages for later requests with the same prefix. Recurrent models
            also need a snapshot of their states, so they reuse shorter prefixes.
        num_snapshots: number of snapshots kept; None for 4 * max_num_seqs, fewer if memory is low.
        async_scheduling: plan and launch a step before reading the previous step's results.
        scheduling_policy: "fcfs", first come, first served, or "priority".
        compile_ahead: compile the programs of all shapes before requests run. Speed and rounding
            then do not change while serving. By default, requests are padded to a few compiled
            shapes, while programs of other shapes are compiled in the background.
        exact: make tokens and logprobs bitwise equal under any schedule. All rounds are
            padded to one shape: at least `max_num_seqs` requests, with 8 or more tokens each.
        max_logprobs: maximum number of likeliest tokens that a request may ask for.
        logprobs_mode: "raw" reports the model's distribution, "processed" the distribution that
            tokens are drawn from; vLLM's "raw_logprobs" and "processed_logprobs" are the same.
            "both" reports "processed", and adds "raw" as `Logprob.raw_logprob`.
        tensor_parallel_size: number of devices that share the model, over all processes.
        nnodes, node_rank, master_addr, master_port, distributed_timeout_seconds: several processes
            that share the model. Only process 0 has the LLM; the others call `follow`. The page
            "Several devices" explains each.
        data_parallel_size: number of replicas of the model, each on tensor_parallel_size devices,
            that share the requests. Sizes like max_num_seqs hold for each replica.
        enable_expert_parallel: give each device whole experts, instead of a part of each.
        kernels: implementation of the GPU operations, "auto" or "reference".
        collectives: how GPUs exchange sums, "auto", "nccl" or "graph"; see `EngineConfig`.
        device: "auto" for JAX's default device; "simulated" computes no model, for measurements.
        compilation_cache: folder of compiled steps, or None. JAX's cache folder has precedence.
        seed: seed of requests without a seed, any integer of 64 bits.
        verbose: log loading, and show progress: as bars on a terminal, or else as log lines. The
            logger "specjax" writes to stderr, unless logging is configured.

    Raises:
        ValueError: options contradict each other or do not fit the model.
        CheckpointError: files are missing, damaged or of the wrong kind.
    """

    def __init__(self, model: str | Path | Model, **options: Unpack[LLMOptions]):
        given, start = read_options(options), time.monotonic()
        serving = assemble(model, **given)
        self._name = str(model) if isinstance(model, str | Path) else type(model)
        self._verbose = verbose = given["verbose"]
        self._lock = OwnLock()  # guards the engine; held per step, not per call
        self._next_id, self._is_closed = 0, False
        self.target, self.tokenizer = serving.target, serving.tokenizer
        self._method, self._default_params = serving.method, serving.default_params
        self.engine = serving.build_engine(show_progress=verbose)
        seconds = time.monotonic() - start, self.engine.metrics().compile_seconds
        get_log(verbose=verbose).info("ready after %.1f s, %.1f s of them compiling", *seconds)
        self.sleeps = SleepOfAll(self.engine)
        self.request_maker = RequestMaker(
            *(serving.config, serving.tokenizer, serving.target.vocab_size, serving.eos_ids),
            self.engine.number_of,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        *,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt. Outputs come in the order of the prompts.

        A request that fails ends with finish_reason "error". All other requests continue.

        Args:
            prompts: a text, a list of token ids, {"prompt": ...}, {"prompt_token_ids": [...]}, or a
                list of these.
            sampling_params: parameters for all prompts, or a list with one per prompt; None for
                `get_default_sampling_params`.
            use_tqdm: whether to show progress (a bar, or log lines without a terminal), or a class
                like tqdm, which then shows it.
            lora_request: must be None; LoRA adapters are not supported.
            priority: with scheduling_policy="priority", requests with low values go first.
            tokenization_kwargs: {"truncate_prompt_tokens": n}, as in `SamplingParams`.

        Raises:
            ValueError: a prompt or parameter cannot be served; raised before generation starts.
            RuntimeError: the LLM is closed or asleep.
        """
        refuse_lora(lora_request)
        requests = self._requests(prompts, sampling_params, priority, tokenization_kwargs)
        with self._running(requests) as started:
            samples = samples_of(started)
            with progress(samples, self.metrics, use_tqdm, verbose=self._verbose) as tick:
                for sample in samples:  # each is checked until it ends, and not again
                    while not sample.is_finished:
                        self._step()
                        tick()
            self._drain()
        return [outputs.output() for outputs in started]

    def generate_stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = False,
    ) -> Iterator[RequestOutput]:
        """Continue each prompt. Yield a request's output whenever it has grown.

        `SamplingParams.output_kind` sets what an output contains, by default everything so far. The
        last output of a request is `finished`. Requests start when the iteration starts; leaving it
        aborts unfinished requests. Between two outputs, the LLM may be used for other calls.
        `use_tqdm` logs progress every ten seconds, because printed outputs would break a bar.

        Raises:
            ValueError, RuntimeError: as for `generate`; raised by the call itself.
        """
        requests = self._requests(prompts, sampling_params, priority)
        return self._stream(requests, is_told=use_tqdm)

    def _stream(
        self, requests: list[tuple[Request, str | None]], *, is_told: bool
    ) -> Iterator[RequestOutput]:
        with self._running(requests) as started:
            growing, samples = Growing(started), samples_of(started)
            told = progress(samples, self.metrics, is_told, verbose=self._verbose, draws=False)
            with told as tick:
                while growing:
                    with self._lock:  # another thread's step may grow it meanwhile
                        self._check_open()
                        if not growing.is_due:
                            self._step()
                        outputs = growing.take()
                    tick()
                    yield from outputs
            self._drain()

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or a list of conversations.

        Each sample's `message` has its content, reasoning and tool calls; see docs/tools.md.

        Args:
            messages: each message's content is a text, or a list of {"type": "text", "text": ...}.
            sampling_params, use_tqdm, lora_request: as for `generate`.
            chat_template: a Jinja template, or the name of a template in the checkpoint.
            chat_template_content_format: "openai" passes contents as lists of parts, except in tool
                messages. "string" and "auto" join the parts of a list to a text, with line breaks.
            add_generation_prompt: whether the prompt ends with the start of the assistant's turn.
            continue_final_message: continue the last message; needs add_generation_prompt=False.
            tools: functions that the model may call, as JSON schemas.
            chat_template_kwargs: variables passed to the template, like enable_thinking.
            options: tool_choice, parallel_tool_calls, reasoning_effort and response_template (see
                `ChatOptions`); priority and tokenization_kwargs, as for `generate`.

        Raises:
            ValueError: as for `generate`; there is no tokenizer; messages, an option or a tool are
                malformed or contradictory; or the model's format of tool calls is unknown.
            CheckpointError: there is no chat template.
            RuntimeError: the LLM is closed or asleep.
        """
        self._check_open()
        chosen, options = ChatOptions.split({"tools": tools, **options})
        chat = Chat.of(
            self.get_tokenizer(),
            messages,
            self.get_default_sampling_params() if sampling_params is None else sampling_params,
            chosen,
            content_format=chat_template_content_format,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=chat_template_kwargs,
        )
        outputs = self.generate(chat.prompts, chat.params, use_tqdm, lora_request, **options)
        return chat.read(outputs)

    def make_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        request_id: Hashable | None = None,
        priority: int = 0,
    ) -> Request:
        """Return a validated request, which can be passed to `start`.

        Raises:
            ValueError: the prompt or a parameter cannot be served.
        """
        where = "prompt" if request_id is None else f"request {request_id!r}"
        with self._lock:
            self._check_awake()
            (number,) = free_numbers(self._next_id, self.engine.unfinished_ids, 1)
            request = self.request_maker.make(
                prompt, sampling_params, number, where, request_id=request_id, priority=priority
            )
            self._next_id = number + 1
        return request

    def start(self, request: Request, prompt: str | None = None) -> Outputs:
        """Queue a request. Return its outputs, which grow as the engine steps.

        Raises:
            ValueError: an unfinished request has the same id.
            RuntimeError: the LLM is closed or asleep.
        """
        with self._lock:
            self._check_awake()
            self.engine.prepare([request], show_progress=self._verbose)
            return Outputs.of(request, self.engine.add(request), prompt, self.tokenizer)

    def metrics(self) -> Metrics:
        """Return the engine's metrics, such as the number of tokens since the engine was built."""
        with self._lock:
            self._check_open()
            return self.engine.metrics()

    def get_metrics(self) -> list[Metric]:
        """Return the metrics that vLLM also has, under vLLM's names; see `metrics`."""
        return list_metrics(self.metrics())

    def save_dynamic_config(self, path: str | Path) -> None:
        """Write a profile of learned times and rates, which `dynamic_config_path` can name.

        Raises:
            ValueError: no times were learned, or the file cannot be written.
        """
        with self._lock:
            self._check_open()
            save_profile(self.engine, path)

    def get_tokenizer(self) -> ChatTokenizer:
        """Return the checkpoint's tokenizer, with encode, decode and apply_chat_template.

        Raises:
            ValueError: the checkpoint has no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer; generate takes and gives token ids")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling_params, read from generation_config.json if there is one."""
        return self._default_params.clone()

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache and return True. While requests run, do nothing: return False."""
        with self._lock:
            self._check_open()
            if not self.engine.has_work:
                self.engine.clear_prefixes()
            return not self.engine.has_work

    def sleep(self, level: int = 1) -> None:
        """Free device memory until `wake_up`.

        Level 1 frees caches and states. Level 2 also moves the weights to host memory; unlike in
        vLLM, no level discards weights.

        Raises:
            ValueError: the level is neither 1 nor 2.
            RuntimeError: requests are unfinished.
        """
        check_level(level)
        with self._lock:
            self._check_open()
            if self.engine.has_work:
                raise RuntimeError("requests have not finished; let them, or abort them, first")
            self.sleeps.begin(level)

    def wake_up(self) -> None:
        """Allocate again the memory that `sleep` has freed."""
        with self._lock:
            self._check_open()
            self.sleeps.end()

    def is_sleeping(self) -> bool:
        """Return whether the LLM is asleep (see `sleep`)."""
        self._check_open()
        return self.sleeps.level > 0

    def close(self) -> None:
        """Free the device memory. The LLM cannot be used afterwards; closing twice is harmless."""
        if self._lock.is_forked:  # the memory belongs to the process that built it
            return
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self.engine.close()
                del self.engine, self.request_maker, self.sleeps

    def __repr__(self) -> str:
        return describe(self._name, self._method, None if self._is_closed else self.engine)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _step(self) -> list[Sample]:
        """Run a step for all threads' requests. Return the samples that gained tokens or ended."""
        with self._lock:
            self._check_open()
            return self.engine.step()

    def _drain(self) -> None:
        """Read the results of steps in flight, if no other thread has work for the engine."""
        with self._lock:
            if not self._is_closed:
                self.engine.drain()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this LLM is closed; build a new one")

    def _check_awake(self) -> None:
        self._check_open()
        if self.sleeps.level:
            raise RuntimeError("the LLM is asleep; call wake_up")

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[tuple[Request, str | None]]:
        """Return a validated request per prompt, and the prompt's text (None for token ids)."""
        listed = as_prompt_list(prompts)
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        if tokenization_kwargs:
            given = truncated(given, tokenization_kwargs)
        all_params = params_each(given, len(listed))
        priorities = one_each("priority", 0 if priority is None else priority, len(listed))
        with self._lock:
            self._check_awake()
            numbers = free_numbers(self._next_id, self.engine.unfinished_ids, len(listed))
            requests = [
                self.request_maker.make(
                    prompt, params, numbers[i], f"prompt {i}", priority=priorities[i]
                )
                for i, (prompt, params) in enumerate(zip(listed, all_params, strict=True))
            ]
            self._next_id = max(numbers, default=self._next_id - 1) + 1
        return [(one, prompt_text(prompt)) for one, prompt in zip(requests, listed, strict=True)]

    @contextmanager
    def _running(self, requests: list[tuple[Request, str | None]]) -> Iterator[list[Outputs]]:
        """Queue requests, yield their outputs; at the end of `with`, abort unfinished requests."""
        started: list[Outputs] = []
        try:
            with self._lock:
                self._check_awake()
                self.engine.prepare([one for one, _ in requests], show_progress=self._verbose)
                for request, text in requests:
                    samples = self.engine.add(request)
                    started.append(Outputs.of(request, samples, text, self.tokenizer))
            yield started
        except KeyboardInterrupt:  # maybe within a step: the state may be inconsistent
            with self._lock:
                if not self._is_closed:
                    self.engine.reset()
            raise
        finally:
            with self._lock:
                if not self._is_closed:
                    for outputs in started:
                        if not outputs.is_finished:  # a finished request's id may be in use again
                            self.engine.abort(outputs.request.request_id)
