"""A request inside the engine: a validated prompt with resolved parameters."""

import itertools
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from specjax.host.drafts.text_index import TextIndex
from specjax.sampling_params import SamplingParams


def free_numbers(first: int, taken: Container[Hashable], count: int) -> list[int]:
    """Return the first `count` integers n >= `first` for which `str(n)` is not in `taken`."""
    free = (number for number in itertools.count(first) if str(number) not in taken)
    return list(itertools.islice(free, count))


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
        """Append tokens to the output.

        If a token ends the output, return the number of tokens up to and including this token. In
        this case, append nothing afterwards. Return None if the output goes on.
        """
        ...


class Matcher(Protocol):
    """Tracks the position of one output in its grammar."""

    @property
    def is_finished(self) -> bool: ...
    @property
    def dead_end(self) -> str | None:
        """The reason why the output can neither continue nor end; None if it can do either."""
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by tokens of the output.

        Raises:
            ValueError: the grammar does not allow one of the tokens.
        """
        ...

    def masks(self, drafts: Sequence[int]) -> Any:
        """Return masks of the tokens allowed after drafts[:i], for i from 0 to len(drafts).

        The result i32[len(drafts) + 1, W] has a bit for each token, in W words of 32 bits.
        """
        ...


class Demands(NamedTuple):
    """What a request needs from a step, in addition to plain sampling."""

    edits: bool  # whether parameters edit the logits
    masks: bool  # whether a grammar masks the logits
    processor: int  # the engine's number for the list of logits processors; -1 for none
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
    processor: int = -1  # the engine's number for the list of logits processors; -1 for none
    watch_text: Callable[[], TextWatch] | None = None  # called once per sample; None: no stop texts
    follow_grammar: Callable[[], Matcher] | None = None  # called once per sample; None: no grammar
    priority: int = 0  # the lowest value goes first
    output_token_ids: tuple[int, ...] = ()  # output tokens that its only sample already has
    is_scored: bool = False  # whether only log-probabilities of `output_token_ids` are wanted
    exports_features: bool = False  # whether to export hidden states of prompt and scored output
    references: TextIndex | None = None  # texts to draft from, which outputs may repeat
    replays: tuple[Sequence[int], ...] = ()  # earlier outputs, with its first samples' seeds

    @cached_property
    def demands(self) -> "Demands":
        """What this request needs from a step. Most requests have equal demands."""
        params = self.params
        masks = params.structured_outputs is not None
        wanted = params.logprobs, 0 if self.is_scored else params.prompt_logprobs
        return Demands(params.edits_logits, masks, self.processor, *wanted)

    @cached_property
    def group(self) -> Hashable:
        """The rounded temperature. Requests of equal `group` share learned acceptance rates."""
        return round(self.params.temperature, 1)

    @cached_property
    def max_length(self) -> int:
        """Maximum number of tokens, including the prompt."""
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def constraints(self) -> str:
        """A text with the names of the parameters that forbid tokens, for error messages.

        The text is empty if no parameter forbids tokens.
        """
        params = self.params
        given = {
            "structured_outputs": params.structured_outputs is not None,
            "allowed_token_ids": params.allowed_token_ids is not None,
            "bad_words": params.bad_words,
            f"min_tokens={params.min_tokens}": params.min_tokens,
            "logits_processors": params.logits_processors,
        }
        return ", ".join(name for name, is_given in given.items() if is_given)
