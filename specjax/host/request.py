"""A request inside the engine: a validated prompt with resolved parameters."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from specjax.sampling_params import SamplingParams


class TextWatch(Protocol):
    """Watches the text of one output for stop strings."""

    @property
    def stop_reason(self) -> str | None: ...
    @property
    def text(self) -> str: ...
    @property
    def stable(self) -> str:
        """The text that no later token can change."""
        ...

    def append(self, tokens: Sequence[int]) -> int | None:
        """Append tokens; return how many are kept if one of them ends the output, else None."""
        ...


class Matcher(Protocol):
    """Follows one output through its grammar."""

    @property
    def is_finished(self) -> bool: ...
    @property
    def dead_end(self) -> str | None:
        """The reason why the grammar allows no next token; None if it allows one."""
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by tokens of the output.

        Raises:
            ValueError: the grammar does not allow one of them.
        """
        ...

    def masks(self, drafts: Sequence[int]) -> Any:
        """Return masks of tokens allowed after each draft prefix, i32[len(drafts) + 1, W]."""
        ...


class Demands(NamedTuple):
    """The options of a request that every step with it must support."""

    edits: bool
    masks: bool
    processor: int  # the engine's number of its logits processors; -1 for none
    logprobs: int | None  # number of likeliest tokens to report; None for no log-probabilities
    prompt_logprobs: int | None


@dataclass(frozen=True)
class Request:
    """A validated prompt with resolved parameters."""

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
    priority: int = 0  # lowest first
    output_token_ids: tuple[int, ...] = ()  # output tokens that its only sample already has
    is_scored: bool = False  # only log-probabilities of these output tokens are wanted
    exports_features: bool = False  # hidden states of all rows are wanted

    @cached_property
    def demands(self) -> "Demands":
        """The options that a step must support besides plain sampling; equal for most requests."""
        params = self.params
        masks = params.structured_outputs is not None
        wanted = params.logprobs, 0 if self.is_scored else params.prompt_logprobs
        return Demands(params.edits_logits, masks, self.processor, *wanted)

    @cached_property
    def group(self) -> Hashable:
        """A key that is equal for requests with similar acceptance rates."""
        return round(self.params.temperature, 1)

    @cached_property
    def max_length(self) -> int:
        """Maximum number of tokens, including the prompt."""
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def constraints(self) -> str:
        """The names of parameters that rule tokens out, for error messages; may be empty."""
        params = self.params
        given = {
            "structured_outputs": params.structured_outputs is not None,
            "allowed_token_ids": params.allowed_token_ids is not None,
            "bad_words": params.bad_words,
            f"min_tokens={params.min_tokens}": params.min_tokens,
            "logits_processors": params.logits_processors,
        }
        return ", ".join(name for name, is_given in given.items() if is_given)
