"""Defines and validates a request's sampling parameters and stop conditions."""

import json as json_module
import math
import operator
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum
from numbers import Real
from typing import Any

import numpy as np

from specjax.vllm_names import SAMPLING, STRUCTURED, take_keys, takes

# Limits per request, because parameters are stored in device arrays of fixed width.
MAX_STOP_IDS = 8  # including the model's end-of-sequence ids
MAX_LOGIT_BIAS = 512
MAX_BAD_WORDS = 32  # number of token sequences; each word gives one or two
MAX_BAD_WORD_TOKENS = 8
MAX_SAMPLES = 16384  # per prompt, as in vLLM; each takes host memory while it waits
LARGEST = 1e30  # maximum scale or shift of logits, which must stay finite in float32

LogitsProcessor = Callable[[Any, Any, Any], Any]


class RequestOutputKind(Enum):
    """The contents of each output of a stream. Calls that are not streams return everything.

    Attributes:
        CUMULATIVE: all tokens and text so far.
        DELTA: the tokens and text added since the previous output.
        FINAL_ONLY: all tokens and text, in one output at the end.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@takes(STRUCTURED)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """A constraint on the output's format; exactly one field must be set.

    Attributes:
        json: a JSON schema, as a mapping or as a string.
        regex: a regular expression that the whole output matches.
        choice: a list of texts; the output equals one of them.
        grammar: a context-free grammar in Lark's notation, as llguidance reads it.
        json_object: True for any JSON object; equivalent to the schema {"type": "object"}.
        structural_tag: a mapping or JSON text with a list of "triggers" (texts) and a list of
            "structures". A structure is a "begin" text that starts with a trigger, JSON that fits
            a "schema", and an "end" text. The output may be any text. But if it contains a trigger,
            a whole structure must begin there.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Mapping[str, Any] | str | None = None

    def __post_init__(self):
        if self.json_object not in (True, None):
            raise ValueError(
                f"structured_outputs.json_object={self.json_object!r} must be True; leave it out"
            )
        fields = {name: value for name, value in vars(self).items() if value is not None}
        if len(fields) != 1:
            raise ValueError(
                "structured_outputs takes exactly one of json, regex, choice, grammar, "
                "json_object and structural_tag, not "
                f"{sorted(fields) or 'none'}"
            )
        if self.json_object:
            object.__setattr__(self, "json", {"type": "object"})
            object.__setattr__(self, "json_object", None)
        if isinstance(self.json, str):
            _parse("structured_outputs.json", self.json)
        elif not isinstance(self.json, Mapping | None):
            raise ValueError(
                f"structured_outputs.json={self.json!r} must be a schema: a mapping or JSON text"
            )
        for name in "regex", "grammar":
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"structured_outputs.{name}={value!r} must be a text, not empty")
        if self.choice is not None:
            is_listed = isinstance(self.choice, Sequence) and not isinstance(self.choice, str)
            choices = tuple(self.choice) if is_listed else ()
            if not choices or not all(isinstance(text, str) and text for text in choices):
                raise ValueError(
                    f"structured_outputs.choice={self.choice!r} must list texts, none empty"
                )
            object.__setattr__(self, "choice", choices)
        if self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", _structural_tag(self.structural_tag))


def _structural_tag(given: Any) -> Mapping[str, Any]:
    """Return a structural tag as a mapping.

    Raises:
        ValueError: the tag is malformed, a structure does not begin with a trigger, or a trigger
            does not begin any structure.
    """
    where = "structured_outputs.structural_tag"
    tag = _parse(where, given) if isinstance(given, str) else given
    if not isinstance(tag, Mapping) or set(tag) - {"type"} != {"structures", "triggers"}:
        shown = reprlib.repr(given)  # the whole may be nested too deeply for `repr`
        raise ValueError(f"{where}={shown} must have the keys structures and triggers")
    triggers = _texts(f"{where}.triggers", tag["triggers"])
    structures = tag["structures"]
    if not isinstance(structures, Sequence) or not structures:
        raise ValueError(f"{where}.structures={structures!r} must be a list, not empty")
    for one in structures:
        if not isinstance(one, Mapping) or set(one) != {"begin", "schema", "end"}:
            raise ValueError(
                f"{where}.structures has {reprlib.repr(one)}; it must have begin, schema and end"
            )
        _texts(f"{where}.structures: begin", [one["begin"]])
        if not isinstance(one["end"], str) or not isinstance(one["schema"], Mapping):
            raise ValueError(f"{where}.structures has {one!r}: end is a text, schema a mapping")
        if not one["begin"].startswith(triggers):
            raise ValueError(
                f"{where}: {one['begin']!r} begins with no trigger of {list(triggers)}; add one"
            )
    if idle := [t for t in triggers if not any(s["begin"].startswith(t) for s in structures)]:
        raise ValueError(f"{where}: the trigger {idle[0]!r} begins no structure; leave it out")
    return tag


def _parse(where: str, text: str) -> Any:
    """Return the value of a JSON text. Errors begin with `where`, the name of its field."""
    try:
        return json_module.loads(text)
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply; use fewer levels") from error
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error


StructuredOutputsParams = StructuredOutputs  # vLLM's name


@takes(SAMPLING)
@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters and stop conditions of a request.

    Fields may be assigned, as in `params.max_tokens = 10`. Each request validates and stores a copy
    when it is made; later assignments do not affect it. The fields up to `prompt_logprobs` may be
    given by position, in vLLM's order.

    Parameters are applied to the logits in this order: repetition, presence and frequency penalty,
    bad_words, logit_bias, allowed_token_ids, min_tokens, logits_processors, structured_outputs.
    Above temperature 0, temperature, min_p, top_k and top_p follow, each over the tokens that the
    previous parameters kept. Tokens that tie at a threshold are kept.

    Attributes:
        n: number of samples per prompt, at most 16384. They share the KV cache pages of the prompt.
        presence_penalty: number subtracted from the logits of tokens in the output.
        frequency_penalty: number subtracted from a logit for each occurrence of the token in the
            output.
        repetition_penalty: a value above 1 discourages tokens of prompt and output (Keskar et al.
            2019, CTRL). Positive logits are divided by the value, and negative logits are
            multiplied by it.
        temperature: 0 is greedy; above 0, tokens are drawn from softmax(logits / temperature).
        top_p: keep the most likely tokens that together reach this probability; 1 keeps all.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens whose probability is at least this fraction of the highest probability.
        seed: makes sampling reproducible, regardless of other requests and of drafts. The seed is
            any integer of 64 bits. Integers outside 0..2**32 - 1 are folded to 32 bits. None or -1
            derives the seed from the engine's seed and the number of the request. Samples after the
            first derive their seeds from this seed.
        stop: texts that end the output, which is truncated before them.
        stop_token_ids: ids that end the output, in addition to the model's end of sequence.
        ignore_eos: continue past the model's end of sequence; the output of `structured_outputs`
            ends there nevertheless.
        max_tokens: maximum number of tokens; None for as many as `max_model_len` allows.
        min_tokens: minimum number of tokens; nothing ends the output earlier.
        logprobs: number of most likely tokens whose log-probabilities are reported per position, in
            addition to the token's own; -1 for the whole vocabulary, if `max_logprobs` allows it;
            None for no log-probabilities.
        prompt_logprobs: as `logprobs`, for the positions of the prompt.
        detokenize: whether outputs carry text.
        skip_special_tokens: omit special tokens from the text.
        spaces_between_special_tokens: must be True if `skip_special_tokens` is False.
        include_stop_str_in_output: end the text with the stop text, or with the text of the stop
            token.
        output_kind: what each output of a stream holds.
        truncate_prompt_tokens: keep only this number of last tokens of the prompt; -1 for as many
            tokens as leave room for `max_tokens`.
        structured_outputs: a constraint on the output's format; needs the extra "structured".
        logit_bias: a number per token id, which is added to the logit of this token.
        allowed_token_ids: the only ids that may be generated.
        bad_words: texts that must not be generated.
        logits_processors: pure JAX functions that take (tokens i32[L], length i32, logits f32[V])
            and return logits f32[V]. They are traced once. Tokens past `length` are meaningless.
        num_speculative_tokens: maximum number of drafts per step, if less than the engine's K; None
            for K.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    _: KW_ONLY
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    logit_bias: Mapping[int, float] | None = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = ()
    logits_processors: Sequence[LogitsProcessor] | None = ()
    num_speculative_tokens: int | None = None

    def __post_init__(self):
        _check_int("n", self.n, 1, MAX_SAMPLES, remedy="repeat the prompt for more samples")
        _check_number("temperature", self.temperature, 0, LARGEST, "0 means greedy")
        _check_number("top_p", self.top_p, 0, 1, "1 keeps all tokens", is_open=True)
        _check_int("top_k", self.top_k, -1, remedy="0 or -1 keeps all tokens")
        _check_number("min_p", self.min_p, 0, 1, "0 keeps all tokens")
        if _is_integer(self.seed) and self.seed == -1:
            self.seed = None
        if self.seed is not None:
            remedy = "None or -1 lets the engine choose"
            _check_int("seed", self.seed, -(2**63), 2**64 - 1, remedy=remedy)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, remedy="None is as many as fit")
        _check_int("min_tokens", self.min_tokens, 0)
        if self.num_speculative_tokens is not None:
            _check_int("num_speculative_tokens", self.num_speculative_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; lower it"
            )
        _check_number(
            "repetition_penalty", self.repetition_penalty, 1 / LARGEST, LARGEST, "1 is none"
        )
        for name in "presence_penalty", "frequency_penalty":
            _check_number(name, getattr(self, name), -2, 2, "0 is none")
        for name in "logprobs", "prompt_logprobs":
            if getattr(self, name) is not None:
                remedy = "None reports nothing, -1 the whole vocabulary"
                _check_int(name, getattr(self, name), -1, remedy=remedy)
        self._check_output()
        self._check_collections()

    def clone(self) -> "SamplingParams":
        """Return a copy that can be changed independently.

        Raises:
            ValueError: a field was assigned a value that the constructor refuses.
        """
        return replace(self)

    @property
    def edits_logits(self) -> bool:
        """Whether any parameter modifies the logits.

        The parameters temperature, logits_processors and structured_outputs do not count.
        """
        truncates = self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return bool(
            truncates
            or penalties != (1, 0, 0)
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.min_tokens
        )

    def _check_output(self) -> None:
        for name in (
            *("include_stop_str_in_output", "ignore_eos", "detokenize"),
            *("skip_special_tokens", "spaces_between_special_tokens"),
        ):
            value = getattr(self, name)
            if np.ndim(value) or value not in (True, False):
                raise ValueError(f"{name}={value!r} must be True or False")
        if not (self.skip_special_tokens or self.spaces_between_special_tokens):
            raise ValueError(
                "spaces_between_special_tokens=False is not supported with "
                "skip_special_tokens=False; leave it out"
            )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind={self.output_kind!r} must be a RequestOutputKind")
        limit = self.truncate_prompt_tokens
        if limit is not None and (np.ndim(limit) or limit != -1):
            remedy = "-1 keeps what leaves room for max_tokens, None all"
            _check_int("truncate_prompt_tokens", limit, 1, remedy=remedy)

    def _check_collections(self) -> None:
        for name in "stop", "stop_token_ids", "bad_words", "logits_processors":
            if getattr(self, name) is None:
                setattr(self, name, ())
        if self.logit_bias is None:
            self.logit_bias = {}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        self.stop = _texts("stop", stop)
        self.bad_words = _texts("bad_words", self.bad_words)
        if self.stop and not self.detokenize:
            raise ValueError("stop needs detokenize=True: it looks for texts in the output")
        self.stop_token_ids = _ids("stop_token_ids", self.stop_token_ids)
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOP_IDS}"
            )
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ValueError("allowed_token_ids is empty; None allows all tokens")
            self.allowed_token_ids = allowed
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(
                f"logit_bias={self.logit_bias!r} must be a mapping of token ids to numbers"
            )
        bias = dict(self.logit_bias)
        if len(bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias has {len(bias)} ids; at most {MAX_LOGIT_BIAS}")
        _ids("logit_bias", bias)
        for token, value in bias.items():
            name = f"logit_bias[{token}]"
            _check_number(name, value, -LARGEST, LARGEST, "allowed_token_ids rules tokens out")
        self.logit_bias = bias
        if not isinstance(self.logits_processors, Sequence) or isinstance(
            self.logits_processors, str
        ):
            raise ValueError(
                f"logits_processors={self.logits_processors!r} must be a list of functions"
            )
        processors = tuple(self.logits_processors)
        if bad := [p for p in processors if not callable(p)]:
            raise ValueError(f"logits_processors has {bad[0]!r}, which is not a function")
        self.logits_processors = processors
        wanted = self.structured_outputs
        if isinstance(wanted, Mapping):
            known = StructuredOutputs.__dataclass_fields__
            fields = take_keys(wanted, STRUCTURED, "structured_outputs", known)
            self.structured_outputs = StructuredOutputs(**fields)
        elif not isinstance(wanted, StructuredOutputs | None):
            raise ValueError(
                f"structured_outputs={wanted!r} must be a StructuredOutputs or a mapping of its "
                "fields"
            )


def _check_number(
    name: str, value: Any, minimum: float, maximum: float, remedy: str, *, is_open: bool = False
) -> None:
    """Raise an error unless `value` is a number from `minimum` to `maximum`.

    If `is_open`, `minimum` itself is an error, too.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else math.nan
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not minimum <= number <= maximum or (is_open and number == minimum):
        span = f"{'(' if is_open else '['}{minimum:g}, {maximum:g}]"
        raise ValueError(f"{name}={value!r} must be a number in {span}; {remedy}")


def _check_int(
    name: str, value: Any, minimum: int, maximum: int | None = None, *, remedy: str = ""
) -> None:
    if not _is_integer(value) or value < minimum or (maximum is not None and value > maximum):
        span = (
            f"an integer of at least {minimum}" if maximum is None else f"in {minimum}..{maximum}"
        )
        raise ValueError(f"{name}={value!r} must be {span}" + (f"; {remedy}" if remedy else ""))


def _is_integer(value: Any) -> bool:
    """Return whether the value is an integer (including JAX's) and not a bool."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def _ids(name: str, ids: Any) -> tuple[int, ...]:
    if isinstance(ids, str) or not hasattr(ids, "__iter__"):
        raise ValueError(f"{name}={ids!r} must be token ids")
    for token in ids:
        _check_int(f"{name}: token id", token, 0)
    return tuple(int(token) for token in ids)


def _texts(name: str, texts: Any) -> tuple[str, ...]:
    if isinstance(texts, str) or not hasattr(texts, "__iter__"):
        raise ValueError(f"{name}={texts!r} must be texts")
    texts = tuple(texts)
    if bad := [text for text in texts if not isinstance(text, str) or not text]:
        raise ValueError(f"{name} has {bad[0]!r}; every entry must be a text that is not empty")
    for text in texts:
        check_text(name, text)
    return texts


def check_text(name: str, text: str) -> None:
    """Raise an error for text with lone surrogates, which tokenizers do not accept."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{name} has half a character in {text!r}: a surrogate without its pair"
        ) from None
