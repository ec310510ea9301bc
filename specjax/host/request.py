"""A request on its way through the engine: a checked prompt with its parameters resolved."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
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
