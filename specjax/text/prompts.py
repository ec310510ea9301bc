"""Makes requests from users' prompts and parameters.

Errors name the prompt, the value and the remedy.
"""

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NotRequired, TypedDict

import jax
import numpy as np

from specjax.config import EngineConfig
from specjax.host.grammar import Grammar, GrammarCompiler
from specjax.host.request import Request
from specjax.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_STOP_IDS,
    LogitsProcessor,
    SamplingParams,
    StructuredOutputs,
    check_text,
)
from specjax.text.constraints import check_some_allowed
from specjax.text.detokenizer import bad_word_ids, watch_for
from specjax.text.seeds import derived_seed, folded_seed
from specjax.text.tokenizer import ChatTokenizer

PROMPT_KEYS = {"prompt", "prompt_token_ids"}


class TextPrompt(TypedDict):
    """A prompt that is a text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt of token ids, with an optional text that outputs show for it."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one or several prompts as a list of prompts."""
    if isinstance(prompts, str | Mapping | bytes | bytearray):
        return [prompts]
    if not isinstance(prompts, Iterable) or _is_scalar(prompts):
        raise ValueError(f"prompts={prompts!r} must be a text, token ids, or a list of these")
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(token, int | np.integer) for token in listed):
        return [listed]
    return listed


def prompt_text(prompt: Prompt) -> str | None:
    """Return the text that a user gave as a prompt; None if the prompt has no text."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def refuse_lora(lora_request: object) -> None:
    """Refuse vLLM's lora_request, unless it is None."""
    if lora_request is not None:
        raise ValueError(
            f"lora_request={lora_request!r} is not supported; merge the adapter into the "
            "checkpoint and leave it out"
        )


def truncated(params: Any, given: Mapping[str, Any]) -> Any:
    """Return a copy of `params` to which vLLM's tokenization_kwargs `given` are applied.

    If `params` is a list, each item is copied. A value of any other type is returned unchanged.

    Raises:
        ValueError: `given` is not a mapping, or has a key other than truncate_prompt_tokens.
    """
    if not isinstance(given, Mapping):
        raise ValueError(
            f"tokenization_kwargs={given!r} must be a mapping, {{'truncate_prompt_tokens': n}}"
        )
    if unknown := sorted(map(str, set(given) - {"truncate_prompt_tokens"})):
        raise ValueError(
            f"tokenization_kwargs has {unknown[0]!r}, which is not supported; only "
            "truncate_prompt_tokens is; or pass token ids"
        )
    if isinstance(params, SamplingParams):
        return replace(params, **given)
    return [truncated(one, given) for one in params] if isinstance(params, list) else params


def one_each(name: str, given: Any, count: int) -> list[Any]:
    """Return a list of `count` values, one for each prompt.

    `given` is a single value for all prompts, or a list with a value for each prompt.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise ValueError(
            f"{name} has {len(given)} entries for {count} prompts; give one, or one per prompt"
        )
    return list(given)


def params_each(given: Any, count: int) -> list[SamplingParams]:
    """Return the sampling parameters of each of `count` prompts.

    Raises:
        ValueError: the list `given` does not have `count` items, or one is not a SamplingParams.
    """
    all_params = one_each("sampling_params", given, count)
    if bad := [one for one in all_params if not isinstance(one, SamplingParams)]:
        raise ValueError(f"sampling_params has {bad[0]!r}, which is not a SamplingParams")
    return all_params


@dataclass(frozen=True)
class RequestMaker:
    """Validates requests, and resolves their parameters."""

    config: EngineConfig
    tokenizer: ChatTokenizer | None
    vocab_size: int
    eos_ids: tuple[int, ...]
    number_of: Callable[[tuple[LogitsProcessor, ...]], int]  # see `Repertoire.number_of`

    @cached_property
    def grammars(self) -> GrammarCompiler | None:
        """The compiler of grammars for structured outputs; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        text = self.tokenizer.tokenizer.to_str()
        return GrammarCompiler(text, self.vocab_size, self.eos_ids)

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        number: int,
        where: str,
        *,
        request_id: Hashable | None = None,
        priority: int = 0,
        output: Sequence[int] = (),
    ) -> Request:
        """Return the request of one prompt. `where` is the prompt's name in errors.

        `number` is the request's id unless `request_id` is given. The seeds depend on `number`
        unless `params` has a seed. The request continues after the tokens `output`.

        Raises:
            ValueError: the prompt or a parameter cannot be served.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"{where}: sampling_params={params!r} must be a SamplingParams")
        token_ids = _token_ids(prompt, self.tokenizer, where)
        if not token_ids:
            raise ValueError(
                f"{where} is empty: {prompt!r} has no tokens; a prompt needs at least one token"
            )
        try:
            params = self._resolved(params)
            if not isinstance(request_id, Hashable):
                raise ValueError(f"request_id={request_id!r} must be hashable, like a text")
            token_ids = token_ids[-self._most_prompt_tokens(params) :]
            self._check_ids("", token_ids)
            self._check_priority(priority)
            request = self._make(tuple(token_ids), params, number)
            request = self.after(request, _token_ids(output, None, "its output"))
            request_id = str(number) if request_id is None else request_id
            return replace(request, request_id=request_id, priority=priority)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def _resolved(self, params: SamplingParams) -> SamplingParams:
        """Return a copy of the parameters in which logprobs=-1 is replaced by the vocabulary size.

        The copy is validated again, because a user may have assigned fields of `params`.
        """
        wanted = [n for n in ("logprobs", "prompt_logprobs") if getattr(params, n) == -1]
        if wanted and self.config.max_logprobs < self.vocab_size:
            raise ValueError(
                f"{wanted[0]}=-1 asks for all {self.vocab_size} tokens of the vocabulary, and "
                f"max_logprobs={self.config.max_logprobs}; ask for fewer, or build the LLM with "
                f"max_logprobs={self.vocab_size}"
            )
        return replace(params, **dict.fromkeys(wanted, self.vocab_size))

    def _most_prompt_tokens(self, params: SamplingParams) -> int:
        limit = params.truncate_prompt_tokens
        if limit is None:
            return sys.maxsize
        if limit == -1:
            return max(1, self.config.max_model_len - (params.max_tokens or 1))
        return limit

    def _make(self, token_ids: tuple[int, ...], params: SamplingParams, number: int) -> Request:
        config = self.config
        self._check_ids("stop_token_ids: ", params.stop_token_ids or ())
        self._check_ids("allowed_token_ids: ", params.allowed_token_ids or ())
        self._check_ids("logit_bias: ", params.logit_bias or ())
        room = config.max_model_len - len(token_ids)
        if room < 1:
            raise ValueError(
                f"it has {len(token_ids)} tokens and max_model_len={config.max_model_len} "
                "leaves no room for output; shorten the prompt or raise max_model_len"
            )
        if params.min_tokens > room:
            raise ValueError(
                f"min_tokens={params.min_tokens} exceeds the {room} tokens that max_model_len="
                f"{config.max_model_len} leaves after a prompt of {len(token_ids)}; lower "
                "min_tokens or raise max_model_len"
            )
        self._check_supported(params)
        # The end of sequence ends a grammar's output, even with ignore_eos.
        ignores_eos = params.ignore_eos and params.structured_outputs is None
        stop_ids = (*(() if ignores_eos else self.eos_ids), *(params.stop_token_ids or ()))
        stop_ids = tuple(dict.fromkeys(stop_ids))
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"stop_token_ids and the model's ends of sequence come to {len(stop_ids)} ids; at "
                f"most {MAX_STOP_IDS}"
            )
        bad_words = self._bad_words(params)
        grammar = self._grammar(params)
        check_some_allowed(params, self.vocab_size, stop_ids, bad_words, grammar)
        given = params.seed
        seed = derived_seed(config.seed, number) if given is None else folded_seed(given)
        seeds = (seed, *(derived_seed(seed, index) for index in range(1, params.n)))
        return Request(
            number,
            token_ids,
            params,
            min(params.max_tokens or room, room),
            seeds,
            stop_ids,
            bad_words,
            self._register(tuple(params.logits_processors or ())),
            watch_for(self.tokenizer, params, token_ids),
            grammar and grammar.matcher,
        )

    def make_scored(
        self,
        prompt: Prompt,
        output: Sequence[int],
        params: SamplingParams,
        request_id: Hashable,
        where: str,
        *,
        exports_features: bool,
    ) -> Request:
        """Return a request that computes log-probabilities of `output`, and generates no token.

        If `exports_features`, the request also returns the target's hidden states.

        Raises:
            ValueError: the prompt, the output or a parameter cannot be served.
        """
        if self.config.exact:
            raise ValueError(
                f"{where}: scores need a separate program, and exact=True runs all requests in "
                "one; build the engine with exact=False"
            )
        if params.structured_outputs is not None:
            raise ValueError(f"{where}: structured_outputs: scores ignore grammars; leave it out")
        params = replace(params, n=1, max_tokens=None, stop=(), prompt_logprobs=None)
        request = self.make(prompt, params, 0, where, request_id=request_id)
        tokens = _token_ids(output, None, f"{where}: its output")
        try:
            self._check_ids("its output: ", tokens)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if not 0 < len(tokens) <= request.max_tokens:
            raise ValueError(
                f"{where}: its output has {len(tokens)} tokens; from 1 to the "
                f"{request.max_tokens} that max_model_len={self.config.max_model_len} leaves "
                "after the prompt can be scored"
            )
        return replace(
            request,
            output_token_ids=tuple(tokens),
            max_tokens=len(tokens),
            is_scored=True,
            exports_features=exports_features,
        )

    def after(self, request: Request, output: list[int]) -> Request:
        """Return the request, changed so that it continues after `output`.

        Raises:
            ValueError: the request cannot continue after these tokens.
        """
        if not output:
            return request
        self._check_ids("its output: ", output)
        if request.params.n > 1:
            raise ValueError(f"n={request.params.n}: an output is continued as one sample; use n=1")
        if len(output) >= request.max_tokens:
            raise ValueError(
                f"its output already has {len(output)} tokens, and max_tokens="
                f"{request.max_tokens}; raise max_tokens or max_model_len"
            )
        if request.follow_grammar is not None:
            request.follow_grammar().accept(output)
        return replace(request, output_token_ids=tuple(output))

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        if bad := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise ValueError(
                f"{name}token id {bad[0]} is outside the vocabulary of {self.vocab_size}; ids are "
                f"0..{self.vocab_size - 1}"
            )

    def _check_priority(self, priority: Any) -> None:
        if not isinstance(priority, int | np.integer) or isinstance(priority, bool):
            raise ValueError(f"priority={priority!r} must be an integer; the lowest goes first")
        if priority and self.config.scheduling_policy != "priority":
            raise ValueError(
                f"priority={priority} has no effect with "
                f"scheduling_policy={self.config.scheduling_policy!r}; build the LLM with "
                "scheduling_policy='priority'"
            )

    def _check_supported(self, params: SamplingParams) -> None:
        config = self.config
        for name in "logprobs", "prompt_logprobs":
            wanted = getattr(params, name) or 0
            if wanted > config.max_logprobs:
                raise ValueError(
                    f"{name}={wanted} exceeds max_logprobs={config.max_logprobs}; ask for fewer, "
                    "or build the LLM with a higher max_logprobs"
                )
            if wanted > self.vocab_size:
                raise ValueError(f"{name}={wanted} exceeds the vocabulary of {self.vocab_size}")
        if config.exact:
            for name in "prompt_logprobs", "logits_processors":
                if getattr(params, name) not in (None, ()):
                    raise ValueError(
                        f"{name} needs a separate program, and exact=True runs all requests in "
                        f"one; leave {name} out, or build the LLM with exact=False"
                    )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if not params.bad_words:
            return ()
        if self.tokenizer is None:
            raise ValueError("bad_words are texts, but the checkpoint has no tokenizer")
        words = bad_word_ids(self.tokenizer, params.bad_words)
        if len(words) > MAX_BAD_WORDS:
            raise ValueError(
                f"bad_words come to {len(words)} token sequences; at most {MAX_BAD_WORDS}"
            )
        for word in words:
            if len(word) > MAX_BAD_WORD_TOKENS:
                raise ValueError(
                    f"bad_words: {self.tokenizer.decode(word)!r} has {len(word)} tokens; at most "
                    f"{MAX_BAD_WORD_TOKENS}"
                )
        return words

    def _register(self, processors: tuple[LogitsProcessor, ...]) -> int:
        shapes = (
            jax.ShapeDtypeStruct((1, self.config.max_model_len), np.int32),
            jax.ShapeDtypeStruct((1,), np.int32),
            jax.ShapeDtypeStruct((1, self.vocab_size), np.float32),
        )
        for processor in processors:
            name = getattr(processor, "__name__", repr(processor))
            try:
                hash(processor)
                result = jax.eval_shape(jax.vmap(processor), *shapes)
            except Exception as error:  # a user's function may raise anything
                raise ValueError(
                    f"logits_processors: {name} failed when hashed, or traced with (tokens "
                    f"i32[L], length i32, logits f32[V]): {error}"
                ) from error
            shape = getattr(result, "shape", None)
            if shape != (1, self.vocab_size) or not np.issubdtype(result.dtype, np.floating):
                shown = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape[1:])}", result)
                raise ValueError(
                    f"logits_processors: {name} returned {shown}; it must return logits "
                    f"float32[{self.vocab_size}]"
                )
        return self.number_of(processors)

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        wanted = params.structured_outputs
        if wanted is None:
            return None
        if self.grammars is None:
            raise ValueError("structured_outputs need a checkpoint with a tokenizer")
        assert isinstance(wanted, StructuredOutputs)
        return self.grammars.compile(wanted)


def _token_ids(prompt: Prompt, tokenizer: ChatTokenizer | None, where: str) -> list[int]:
    if isinstance(prompt, Mapping):
        prompt = _of_mapping(prompt, where)
    if isinstance(prompt, bytes | bytearray):
        raise ValueError(f"{where} is bytes; decode them to text, as with .decode('utf-8')")
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                f"{where} is text, but the checkpoint has no tokenizer; pass token ids"
            )
        check_text(where, prompt)
        return tokenizer.encode(prompt)
    if not isinstance(prompt, Sequence | np.ndarray) or _is_scalar(prompt):
        raise ValueError(f"{where} is {prompt!r}; expected a text or a list of token ids")
    if bad := [x for x in prompt if not isinstance(x, int | np.integer) or isinstance(x, bool)]:
        raise ValueError(
            f"{where} has {bad[0]!r}: token ids must be integers; pass a list of them, or a text"
        )
    return [int(token) for token in prompt]


def _is_scalar(value: Any) -> bool:
    return getattr(value, "ndim", 1) == 0  # a NumPy array without dimensions


def _of_mapping(prompt: Mapping[str, Any], where: str) -> Any:
    """Return the token ids of a prompt or, if it has none, its text."""
    if unknown := sorted(map(str, set(prompt) - PROMPT_KEYS)):
        raise ValueError(
            f"{where} has the key {unknown[0]!r}, which is not supported; prompts have the keys "
            "prompt (a text) and prompt_token_ids"
        )
    if not prompt:
        raise ValueError(f"{where} has no keys; give prompt (a text) or prompt_token_ids")
    if not isinstance(prompt.get("prompt", ""), str):
        raise ValueError(f"{where}: prompt={prompt['prompt']!r} must be a text")
    found = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if "prompt_token_ids" in prompt and isinstance(found, str):
        raise ValueError(f"{where}: prompt_token_ids={found!r} must be token ids")
    return found
