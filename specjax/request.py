"""A request on its way through the engine, and what its user gets back."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from specjax.sampling_params import SamplingParams


class TextWatch(Protocol):
    """Watches the text of one output for what should end it."""

    @property
    def stop_reason(self) -> str | None: ...
    @property
    def text(self) -> str: ...
    @property
    def settled(self) -> str:
        """As much of the text as nothing that follows can take back."""
        ...

    def append(self, tokens: Sequence[int]) -> int | None:
        """Take new tokens; how many of them stand, if one of them ends the output."""
        ...


class Matcher(Protocol):
    """Follows one output through its grammar."""

    @property
    def is_finished(self) -> bool: ...
    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by tokens of the output."""
        ...

    def masks(self, drafts: Sequence[int]) -> Any:
        """Permissions i32[len(drafts) + 1, ceil(V/32)] after each prefix of drafts."""
        ...


class Demands(NamedTuple):
    """What a request asks of every step that it is in."""

    edits: bool
    masks: bool
    processor: int  # the engine's number of its logits processors; -1 for none
    logprobs: int | None  # likeliest tokens to report beside each; None for nothing
    prompt_logprobs: int | None


@dataclass(frozen=True)
class Request:
    """A validated prompt with its parameters resolved: what the host needs to serve it."""

    request_id: Hashable
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seeds: tuple[int, ...]  # one per sample
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    processor: int = -1  # the engine's number of its logits processors
    watch_text: Callable[[], TextWatch] | None = None  # one per sample
    follow_grammar: Callable[[], Matcher] | None = None
    priority: int = 0  # the least goes first
    output_token_ids: tuple[int, ...] = ()  # which its one sample has already
    is_scored: bool = False  # what the target says of them is wanted, and nothing more
    exports_features: bool = False  # and the hidden states of all rows

    @cached_property
    def demands(self) -> "Demands":
        """What a step must do for it besides drawing from logits: the same for most requests."""
        params = self.params
        masks = params.structured_outputs is not None
        wanted = params.logprobs, 0 if self.is_scored else params.prompt_logprobs
        return Demands(params.edits_logits, masks, self.processor, *wanted)

    @cached_property
    def group(self) -> Hashable:
        """The same for requests whose drafts are about as likely to stand."""
        return round(self.params.temperature, 1)

    @cached_property
    def max_length(self) -> int:
        """Most tokens the request may come to, prompt included."""
        return len(self.prompt_token_ids) + self.max_tokens


class Logprob(NamedTuple):
    """A token's log-probability under the target, and its rank (1 is the likeliest)."""

    logprob: float
    rank: int
    decoded_token: str | None = None
    raw_logprob: float | None = None  # the model's own, beside a processed one, if asked for


TokenLogprobs = dict[int, Logprob]  # by token id: the token itself first, then the likeliest


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str | None  # None without a tokenizer, or with detokenize=False
    token_ids: list[int]
    cumulative_logprob: float | None  # None unless logprobs were asked for
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None  # "stop", "length", "abort" or "error"; None while it grows
    stop_reason: int | str | None  # what ended the output; None for end of sequence and length
    error: Exception | None = None  # what failed, of this request alone

    def finished(self) -> bool:
        """Whether this is all there will be."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """When a request went through which station; `_ts` are seconds of `time.monotonic`.

    Attributes:
        num_generation_tokens: tokens of all samples.
        queued_ts: when it was queued.
        scheduled_ts: when its first sample was first put into a step; None before.
        first_token_ts: when its first token was read; None before.
        last_token_ts: when its latest token was read; None before the first.
    """

    num_generation_tokens: int
    queued_ts: float
    scheduled_ts: float | None
    first_token_ts: float | None
    last_token_ts: float | None

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from the queue to the first token; None before it."""
        return None if self.first_token_ts is None else self.first_token_ts - self.queued_ts


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its continuations."""

    request_id: Hashable  # a text, unless a user named the request otherwise
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None  # None for the first token
    outputs: Sequence[CompletionOutput]
    finished: bool = True  # whether this is all there will be
    # Two outputs are equal whenever the same was generated, whatever that took.
    metrics: RequestMetrics | None = field(default=None, compare=False)
    num_cached_tokens: int | None = field(default=None, compare=False)  # None before it has begun
