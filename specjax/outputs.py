"""Outputs for users: the continuations of a prompt, and log-probabilities of their tokens."""

import secrets
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Logprob(NamedTuple):
    """A token's log-probability and rank (1: most likely); see `LLM`'s option `logprobs_mode`."""

    logprob: float
    rank: int
    decoded_token: str | None = None
    raw_logprob: float | None = None  # in "raw" mode, if logprobs_mode is "both"


TokenLogprobs = dict[int, Logprob]  # by token id: the token itself first, then the most likely


def new_call_id() -> str:
    """Return an id for a tool call. Mistral's chat templates require nine letters or digits."""
    return secrets.token_hex(5)[:9]


@dataclass(frozen=True)
class ToolCall:
    """A call of a function that the model asks for.

    Attributes:
        name: the function's name.
        arguments: JSON text. The text is not valid JSON if the model wrote invalid or incomplete
            JSON.
        id: the id of the call. The message with the function's result must repeat this id. Calls
            that differ only in their ids are equal.
    """

    name: str
    arguments: str
    id: str = field(default_factory=new_call_id, compare=False)


@dataclass(frozen=True)
class ChatMessage:
    """An output of `LLM.chat`, divided into the parts of an assistant's message."""

    content: str | None  # None if there is no text apart from tool calls
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the message in OpenAI's form, which can be appended to the conversation."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            found["reasoning"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return found


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt, finished or not."""

    index: int
    text: str | None  # None without a tokenizer, or with detokenize=False
    token_ids: list[int]
    cumulative_logprob: float | None  # None unless logprobs were requested
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None  # "stop", "length", "abort" or "error"; None while the text grows
    stop_reason: int | str | None  # stop text or token id; None for end of sequence and length
    error: Exception | None = None  # the error, if this request failed
    message: ChatMessage | None = None  # the text's parts; only in outputs of `LLM.chat`
    # Two bytes for each round that gave some of token_ids: its numbers of drafts and of accepted
    # drafts. A round gives its accepted drafts and one more token. Prefill counts as a round.
    rounds: bytes = field(default=b"", repr=False, compare=False)

    def finished(self) -> bool:
        """Return whether the output is complete."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """The times of a request's stages. Fields with `_ts` are seconds of `time.monotonic`.

    Attributes:
        num_generation_tokens: number of tokens of all samples.
        queued_ts: when the request was queued.
        scheduled_ts: when the first sample was first scheduled in a step; None before that.
        first_token_ts: when the first token was read; None before that.
        last_token_ts: when the latest token was read; None before the first token.
        rounds: a pair (number of drafts, number of accepted drafts) for each round with drafts, of
            all samples; empty until the request has finished.
    """

    num_generation_tokens: int
    queued_ts: float
    scheduled_ts: float | None
    first_token_ts: float | None
    last_token_ts: float | None
    rounds: Sequence[tuple[int, int]] = ()

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from queueing to the first token; None before the first token."""
        return None if self.first_token_ts is None else self.first_token_ts - self.queued_ts


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its continuations."""

    request_id: Hashable  # the id that the user gave; by default a number, as a string
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None  # its first entry is None
    outputs: Sequence[CompletionOutput]
    finished: bool = True  # whether all outputs are complete
    # These are not compared: outputs are equal if their tokens are, regardless of timing.
    metrics: RequestMetrics | None = field(default=None, compare=False)
    num_cached_tokens: int | None = field(default=None, compare=False)  # None before the start
