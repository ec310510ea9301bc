"""The public door: prompts in, continuations out."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specjax.checkpoint.hub import resolve
from specjax.config import DTYPES, EngineConfig, SpeculativeConfig, check_positive
from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.drafter import Drafter, NoDrafter, Params
from specjax.device.drafters.registry import load_drafter, share_embedding
from specjax.device.models.model import Model
from specjax.device.models.registry import describe_model, load_model, read_config
from specjax.device.verification import make_verification
from specjax.engine import Engine
from specjax.host.sequence import Sequence as RunningSequence
from specjax.host.speculation.policy import StaticPolicy
from specjax.memory import (
    default_num_pages,
    drafter_cache_bytes,
    target_cache_bytes,
    weight_bytes,
)
from specjax.metrics import Metrics
from specjax.precompile import keep_compilations
from specjax.prompts import Prompt, RequestMaker, as_prompt_list
from specjax.request import CompletionOutput, Request, RequestOutput, TokenLogprobs
from specjax.sampling_params import SamplingParams
from specjax.tokenizer import ChatTokenizer, load_tokenizer, read_eos_ids

LOGPROBS_ALIASES = {"raw_logprobs": "raw", "processed_logprobs": "processed"}  # as vLLM has them


class LLM:
    """A model ready to generate, with or without speculation.

    Args:
        model: a checkpoint in Hugging Face layout (folder or hub id), or a `Model` value.
        params: the parameters of a `Model` value.
        speculative_config: a `SpeculativeConfig` or its fields; None decodes plainly.
        dtype: of weights and caches, "float32" or "bfloat16".
        max_model_len: most tokens of a request, prompt included; None for the model's own limit,
            at most 8192.
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: most prompt tokens of one step.
        num_pages: pages of the key-value pool; None for what the device's memory holds.
        page_size: tokens per page.
        gpu_memory_utilization: part of the GPU's memory for weights and the pool.
        async_scheduling: plan and launch a step before reading the one before it.
        enable_prefix_caching: not there yet; True warns, and prompts are prefilled in full.
        exact: bitwise equal tokens and logprobs under any schedule: every step runs in one shape,
            of all `max_num_seqs` requests and at least 8 tokens for each, and waits for nothing.
        max_logprobs: most likeliest tokens that a request may ask for.
        logprobs_mode: "raw" reports the model's distribution, "processed" the one that tokens are
            drawn from; vLLM's "raw_logprobs" and "processed_logprobs" are the same.
        tensor_parallel_size: devices to split the model over; must be 1.
        kernels: implementation of the GPU operations, "auto" or "reference".
        compilation_cache: folder where compiled steps are kept between runs, unless JAX is already
            set to one; None keeps nothing.
        seed: seed of requests that bring none.
        show_progress: show a bar while the steps compile.

    Raises:
        ValueError: settings that do not fit each other or the model.
        CheckpointError: files that are missing, damaged or not what they are used as.
    """

    def __init__(
        self,
        model: str | Path | Model,
        *,
        params: Any = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        dtype: str = "float32",
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        num_pages: int | None = None,
        page_size: int = 16,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = False,
        async_scheduling: bool = True,
        exact: bool = False,
        max_logprobs: int = 20,
        logprobs_mode: str = "raw",
        tensor_parallel_size: int = 1,
        kernels: str = "auto",
        compilation_cache: str | Path | None = "~/.cache/specjax",
        seed: int = 0,
        show_progress: bool = True,
    ):
        _refuse_unsupported(tensor_parallel_size, enable_prefix_caching)
        speculation = None
        if speculative_config is not None:
            speculation = SpeculativeConfig.of(speculative_config)
        self.tokenizer: ChatTokenizer | None = None
        self._eos_ids: tuple[int, ...] = ()
        folder = None
        if isinstance(model, str | Path):
            if params is not None:
                raise ValueError("params goes with a Model value; a checkpoint brings its own")
            folder = resolve(model)
            target = describe_model(read_config(folder))
            self.tokenizer = load_tokenizer(folder)
            self._eos_ids = read_eos_ids(folder)
        elif params is None:
            raise ValueError("a Model value needs params, its parameters")
        else:
            target = model
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r} is not supported; choose one of {', '.join(DTYPES)}")
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization={gpu_memory_utilization} must be in (0, 1]")
        if max_model_len is None:
            max_model_len = min(target.max_position, 8192)
        check_positive(max_model_len=max_model_len, max_num_seqs=max_num_seqs, page_size=page_size)
        if max_model_len > target.max_position:
            raise ValueError(
                f"max_model_len={max_model_len} exceeds the {target.max_position} positions that "
                "the model was made for; lower it"
            )

        config = EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size,
            num_pages=-(-max_model_len // page_size) if num_pages is None else num_pages,
            dtype=dtype,
            kernels=kernels,
            async_scheduling=async_scheduling,
            exact=exact,
            max_logprobs=max_logprobs,
            logprobs_mode=LOGPROBS_ALIASES.get(logprobs_mode, logprobs_mode),
            seed=seed,
        )
        drafter: Drafter = NoDrafter()
        drafter_params = None
        if speculation:
            drafter, drafter_params = load_drafter(
                _drafter_folder(speculation, folder), speculation, target, np.dtype(dtype)
            )
        num_drafts = speculation.num_speculative_tokens if speculation else 0
        if num_pages is None:
            cache = target_cache_bytes(target, page_size, num_drafts, dtype)
            cache += drafter_cache_bytes(drafter, page_size, dtype)
            weights = weight_bytes(target, dtype)
            num_pages = default_num_pages(config, cache, weights, gpu_memory_utilization)
            config = replace(config, num_pages=num_pages)
        if folder is not None:
            _, params = load_model(folder, np.dtype(dtype))
        if isinstance(drafter, ChainDrafter):
            drafter, drafter_params = share_embedding(drafter, drafter_params, target, params)
        if compilation_cache is not None:
            keep_compilations(Path(compilation_cache).expanduser())
        self.target = target
        self._next_id = 0
        self._is_closed = False
        self.engine = Engine(
            config,
            target,
            drafter,
            Params(params, drafter_params),
            StaticPolicy(num_drafts),
            make_verification(speculation) if speculation else None,
            show_progress=show_progress,
        )
        self._show_progress = show_progress
        self.request_maker = RequestMaker(
            config,
            self.tokenizer,
            target.vocab_size,
            self._eos_ids,
            self.engine.number_of,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt; outputs come in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, {"prompt_token_ids": [...]}, or a list of such.
            sampling_params: one for all prompts or one per prompt; None for the defaults.
            use_tqdm: show a progress bar.

        Raises:
            ValueError: a prompt or parameter that cannot be served, before anything is generated.
        """
        self._check_open()
        listed = as_prompt_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            all_params = [sampling_params or SamplingParams()] * len(listed)
        elif isinstance(sampling_params, Sequence):
            all_params = list(sampling_params)
        else:
            all_params = [sampling_params]
        if bad := [one for one in all_params if not isinstance(one, SamplingParams)]:
            raise ValueError(f"sampling_params has {bad[0]!r}, which is not a SamplingParams")
        if len(all_params) != len(listed):
            raise ValueError(
                f"sampling_params has {len(all_params)} entries for {len(listed)} prompts; "
                "give one, or one per prompt"
            )
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        requests = [
            self.request_maker.make(prompt, params, self._next_id + i, f"prompt {i}")
            for i, (prompt, params) in enumerate(zip(listed, all_params, strict=True))
        ]
        self._next_id += len(requests)
        finished = self._run(requests, use_tqdm)
        return [
            self._output(request, finished[request.request_id], text)
            for request, text in zip(requests, texts, strict=True)
        ]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or a list of conversations."""
        self._check_open()
        if self.tokenizer is None:
            raise ValueError(
                "chat needs a checkpoint with a tokenizer; use generate with token ids"
            )
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise ValueError(
                f"messages={messages!r} must be a conversation, a list of "
                '{"role", "content"}, or a list of conversations'
            )
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            {"prompt_token_ids": self.tokenizer.apply_chat_template(conversation)}
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def metrics(self) -> Metrics:
        """Counters since the engine was built."""
        self._check_open()
        return self.engine.metrics()

    def close(self) -> None:
        """Free the device memory. The LLM cannot be used afterwards; closing twice is harmless."""
        if not self._is_closed:
            self._is_closed = True
            del self.engine, self.request_maker

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this LLM is closed; build a new one")

    def _run(self, requests: list[Request], use_tqdm: bool) -> dict[int, list[RunningSequence]]:
        """The samples of each request, by its id."""
        columns = (
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]:.0f} tokens/s"),
        )
        self.engine.prepare(requests, show_progress=self._show_progress)
        finished: dict[int, list[RunningSequence]] = {r.request_id: [] for r in requests}
        with Progress(*columns, disable=not use_tqdm, transient=True) as progress:
            total = sum(len(request.seeds) for request in requests)
            task = progress.add_task("", total=total, rate=0.0)
            for request in requests:
                self.engine.add(request)
            num_tokens = 0
            try:
                while self.engine.has_work:
                    for sequence in self.engine.step():
                        finished[sequence.request.request_id].append(sequence)
                        num_tokens += len(sequence.output)
                        elapsed = progress.tasks[task].elapsed or 1e-9
                        progress.update(task, advance=1, rate=num_tokens / elapsed)
            except BaseException:
                self.engine.reset()
                raise
        return finished

    def _output(
        self, request: Request, samples: list[RunningSequence], prompt: str | None
    ) -> RequestOutput:
        samples = sorted(samples, key=lambda sample: sample.index)
        prompt_logprobs = None
        if request.params.prompt_logprobs is not None:
            prompt_logprobs = [
                entry and self._with_text(entry) for entry in samples[0].prompt_logprobs
            ]
        return RequestOutput(
            request.request_id,
            prompt,
            list(request.prompt_token_ids),
            prompt_logprobs,
            [self._completion(sample) for sample in samples],
        )

    def _completion(self, sample: RunningSequence) -> CompletionOutput:
        params, token_ids = sample.request.params, sample.output
        text = None
        if self.tokenizer is not None and params.detokenize:
            stopped = isinstance(sample.stop_reason, str) and sample.watch
            text = stopped.text if stopped else self.tokenizer.decode(token_ids)
        logprobs = total = None
        if params.logprobs is not None:
            logprobs = [self._with_text(entry) for entry in sample.logprobs]
            pairs = zip(token_ids, logprobs, strict=True)
            total = sum(entry[token].logprob for token, entry in pairs)
        assert sample.finish_reason is not None
        return CompletionOutput(
            index=sample.index,
            token_ids=list(token_ids),
            text=text,
            cumulative_logprob=total,
            logprobs=logprobs,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )

    def _with_text(self, entry: TokenLogprobs) -> TokenLogprobs:
        if self.tokenizer is None:
            return entry
        tokenizer = self.tokenizer
        return {
            token: replace(logprob, decoded_token=tokenizer.decode_token(token))
            for token, logprob in entry.items()
        }


def _drafter_folder(speculation: SpeculativeConfig, target_folder: Path | None) -> Path:
    if speculation.model is not None:
        return resolve(speculation.model)
    if target_folder is None:
        raise ValueError(
            f"speculative_config.model=None with method={speculation.method!r} stands for the "
            "target's own checkpoint, but the target is a Model value; give the folder"
        )
    return target_folder


def _refuse_unsupported(tensor_parallel_size: int, prefix_caching: bool) -> None:
    if tensor_parallel_size != 1:
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size} is not supported; use 1, one device"
        )
    if prefix_caching:
        warnings.warn(
            "enable_prefix_caching=True: there is no prefix cache yet, prompts are prefilled in "
            "full",
            stacklevel=3,
        )
