"""What users get: continuations of a prompt, and what the target says of their tokens."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


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
