"""What a user asks for and gets back: sampling parameters, requests, outputs."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_SEED = 2**32 - 1
MAX_STOP_IDS = 8  # that the device checks per request, the model's ends of sequence included


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen, and when it ends.

    Attributes:
        temperature: 0 is greedy; above it, tokens are drawn from softmax(logits / temperature).
        seed: fixes the draws of a request, whatever else runs beside it and whether or not drafts
            are used. None takes one from the engine's seed and the number of the request.
        max_tokens: most tokens to generate; None for as many as `max_model_len` allows.
        stop_token_ids: further ids that end the output, besides the model's end of sequence.
        ignore_eos: go on past the model's end of sequence.
        detokenize: whether outputs carry text.
    """

    temperature: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    detokenize: bool = True

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature={self.temperature} must be finite and >= 0; 0 means greedy"
            )
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed={self.seed} must be in 0..{MAX_SEED}, or None")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1, or None")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOP_IDS}"
            )
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids={self.stop_token_ids} must not be negative")


@dataclass(frozen=True)
class Request:
    """A validated prompt on its way through the engine."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stop_ids: tuple[int, ...]

    @property
    def max_length(self) -> int:
        """Most tokens the request may come to, prompt included."""
        return len(self.prompt_token_ids) + self.max_tokens


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    token_ids: list[int]
    text: str | None  # None without a tokenizer, or with detokenize=False
    finish_reason: str  # "stop" or "length"
    stop_reason: int | None  # the stop token id that ended the output; None for end of sequence


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its continuations."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: Sequence[CompletionOutput]
