"""Rollouts and scores for a trainer, and batches of rollouts as padded arrays."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np

from specjax.checks import check_count, is_integer
from specjax.sampling_params import SamplingParams


class Span(NamedTuple):
    """Consecutive tokens that were sampled from the same weights version."""

    version: int
    num_tokens: int


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled continuation of a prompt.

    Attributes:
        prompt_token_ids: the prompt's token ids, i32[P].
        token_ids: the output's token ids, i32[T], including an end-of-sequence token.
        logprobs: the log-probability f32[T] of each token in the distribution that it was sampled
            from. Penalties, temperature, top-k and so on have been applied to this distribution.
            The log-probability does not depend on whether the token was drafted.
        raw_logprobs: the log-probability f32[T] of each token in the model's own distribution; None
            unless requested.
        versions: the weights versions of the tokens, in order.
        finish_reason: "stop", "length", "abort" (the rollout can be resumed) or "error".
        text: the output's text; None without a tokenizer, or with detokenize=False.
        params: the sampling parameters.
        seed: the seed of this sample.
        prompt_index: the index of the prompt in the call.
        sample_index: the index of this sample among the samples of the prompt.
        error: the error if only this rollout failed, else None.
        quantization: the kinds of quantised numbers in the target's weights, such as "fp8" or
            "fp8, int4"; None if no weight is quantised. All log-probabilities come from the
            quantised model.
        reuses_noise: whether the rollout was sampled with the noise of a rollout of earlier
            weights; see `reuse_noise` in `RolloutEngine.generate`.
    """

    prompt_token_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray | None
    versions: tuple[Span, ...]
    finish_reason: str
    text: str | None
    params: SamplingParams
    seed: int
    prompt_index: int
    sample_index: int
    error: Exception | None = None
    quantization: str | None = None
    reuses_noise: bool = False

    @property
    def is_partial(self) -> bool:
        """Whether the rollout was aborted and can be resumed."""
        return self.finish_reason == "abort"


class PaddedRollouts(NamedTuple):
    """N rollouts as arrays. Prompts are padded on the left, and outputs on the right."""

    prompt_tokens: np.ndarray  # i32[N, P], padded on the left
    tokens: np.ndarray  # i32[N, T], padded on the right
    mask: np.ndarray  # bool[N, T], true at tokens, false at padding
    logprobs: np.ndarray  # f32[N, T], 0 at padding
    raw_logprobs: np.ndarray | None  # like logprobs; None unless all rollouts have them
    versions: np.ndarray  # i64[N, T], weights version of each token; -1 at padding
    prompt_lengths: np.ndarray  # i32[N]
    lengths: np.ndarray  # i32[N]
    prompt_indices: np.ndarray  # i32[N], equal for the samples of a prompt
    is_complete: np.ndarray  # bool[N], false for aborted and failed rollouts
    reuses_noise: np.ndarray  # bool[N], see `Rollout.reuses_noise`

    def joined(self) -> "JoinedRollouts":
        """Return each prompt and its output as one row, with all padding on the right.

        Causal models that count positions from the left need this form.
        """
        padding = self.prompt_tokens.shape[1] - self.prompt_lengths
        columns = np.arange(self.prompt_tokens.shape[1] + self.tokens.shape[1])
        order = (columns + padding[:, None]) % len(columns)

        def join(prompts: np.ndarray, outputs: np.ndarray) -> np.ndarray:
            return np.take_along_axis(np.concatenate([prompts, outputs], axis=1), order, axis=1)

        def of_outputs(values: np.ndarray, fill: Any) -> np.ndarray:
            prompts = np.full(self.prompt_tokens.shape, fill, values.dtype)
            return join(prompts, values)[:, 1:]

        raw = self.raw_logprobs
        return JoinedRollouts(
            join(self.prompt_tokens, self.tokens),
            of_outputs(self.mask, False),
            of_outputs(self.logprobs, 0),
            None if raw is None else of_outputs(raw, 0),
            of_outputs(self.versions, -1),
        )


class JoinedRollouts(NamedTuple):
    """N rows of L = P + T tokens; each row is a prompt followed by its output.

    In all fields but `tokens`, column t belongs to token t + 1, as in a causal model's logits.
    """

    tokens: np.ndarray  # i32[N, L], padded on the right
    mask: np.ndarray  # bool[N, L - 1], true at tokens of outputs
    logprobs: np.ndarray  # f32[N, L - 1], 0 outside the mask
    raw_logprobs: np.ndarray | None  # like logprobs; None unless all rollouts have them
    versions: np.ndarray  # i64[N, L - 1], weights version of each token; -1 outside the mask


class RolloutBatch(Sequence[Rollout]):
    """A sequence of rollouts in the order of their prompts.

    The samples of a prompt are next to each other.
    """

    @classmethod
    def ordered(cls, rollouts: Iterable[tuple[tuple[int, int], Rollout]]) -> "RolloutBatch":
        """Return the rollouts of pairs (place, rollout), sorted by place.

        A place is a pair: the index of the prompt in the call, and the index of the sample.
        """
        return cls(rollout for _, rollout in sorted(rollouts, key=lambda pair: pair[0]))

    def __init__(self, rollouts: Iterable[Rollout]):
        self._rollouts = tuple(rollouts)

    def __len__(self) -> int:
        return len(self._rollouts)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> "RolloutBatch": ...
    def __getitem__(self, index: int | slice) -> "Rollout | RolloutBatch":
        found = self._rollouts[index]
        return RolloutBatch(found) if isinstance(found, tuple) else found

    @property
    def quantization(self) -> str | None:
        """The distinct values of `Rollout.quantization`, joined by commas; None if all are None."""
        return ", ".join(sorted({one.quantization for one in self if one.quantization})) or None

    @property
    def num_tokens(self) -> int:
        """Total number of output tokens."""
        return sum(len(rollout.token_ids) for rollout in self)

    def padded(
        self, pad_id: int, *, prompt_length: int | None = None, length: int | None = None
    ) -> PaddedRollouts:
        """Return the rollouts as arrays, padded to the longest rollout or to the given lengths.

        Raises:
            ValueError: a rollout is longer than a given length, or an argument is not an integer.
        """
        if not is_integer(pad_id) or not -(2**31) <= pad_id < 2**31:
            raise ValueError(
                f"pad_id={pad_id!r} must be an integer of 32 bits; if the tokenizer has no padding "
                "token, use 0"
            )
        prompts = [rollout.prompt_token_ids for rollout in self]
        outputs = [rollout.token_ids for rollout in self]
        width = _width("prompt_length", prompts, prompt_length)
        rows = _width("length", outputs, length)
        raw = [one.raw_logprobs for one in self if one.raw_logprobs is not None]
        has_raw = len(raw) == len(self)
        return PaddedRollouts(
            np.flip(_padded([np.flip(p) for p in prompts], width, pad_id, np.int32), axis=1),
            _padded(outputs, rows, pad_id, np.int32),
            _padded([np.ones(len(output)) for output in outputs], rows, 0, np.bool_),
            _padded([rollout.logprobs for rollout in self], rows, 0, np.float32),
            _padded(raw, rows, 0, np.float32) if has_raw else None,
            _padded([_versions(rollout) for rollout in self], rows, -1, np.int64),
            np.array([len(prompt) for prompt in prompts], np.int32),
            np.array([len(output) for output in outputs], np.int32),
            np.array([rollout.prompt_index for rollout in self], np.int32),
            np.array([rollout.finish_reason in ("stop", "length") for rollout in self], np.bool_),
            np.array([rollout.reuses_noise for rollout in self], np.bool_),
        )


class RolloutError(RuntimeError):
    """Raised if generation ended early. `rollouts` has the rollouts so far.

    Aborted rollouts among them can be resumed.
    """

    def __init__(self, message: str, rollouts: RolloutBatch):
        super().__init__(message)
        self.rollouts = rollouts

    def __reduce__(self) -> Any:  # keeps `rollouts` when pickled
        return type(self), (str(self), self.rollouts)


class Score(NamedTuple):
    """The target's scores of a prompt with P tokens and a completion with T tokens.

    L = P + T - 1 is the number of scored positions. A log-probability is -inf if top-k, top-p or
    min-p excludes the token. This can happen even to a sampled token, because scoring and
    generation may round probabilities differently.
    """

    logprobs: np.ndarray  # f32[T], for the completion's tokens; see `Rollout.logprobs`
    raw_logprobs: np.ndarray | None  # f32[T]; see `Rollout.raw_logprobs`
    hidden: np.ndarray | None = None  # [L, D], hidden states after the final norm, if requested
    auxiliary: np.ndarray | None = None  # [L, A D], states of the drafter's A auxiliary layers


def _width(name: str, rows: list[np.ndarray], given: int | None) -> int:
    longest = max((len(row) for row in rows), default=0)
    if given is None:
        return longest
    check_count(**{name: given})
    if given < longest:
        raise ValueError(f"{name}={given} is less than the {longest} tokens of a rollout; raise it")
    return given


def _padded(rows: list[np.ndarray], width: int, fill: float, dtype: type) -> np.ndarray:
    padded = np.full((len(rows), width), fill, dtype)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded


def _versions(rollout: Rollout) -> np.ndarray:
    versions, counts = zip(*rollout.versions, strict=True) if rollout.versions else ((), ())
    return np.repeat(np.array(versions, np.int64), counts)
