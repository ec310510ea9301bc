"""An oracle for the options of a request that affect logits, with loops and in float64."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from specjax.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_IDS, SamplingParams


@dataclass(frozen=True)
class Asked:
    """The options and the tokens of a request, and the logits and probabilities that follow.

    All computations are loops over tokens, or NumPy in float64. Where a user would give texts,
    there are token ids. `processor` is the engine's number for the request's logits processors.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    stop_ids: Sequence[int] = ()
    processor: int = -1

    def then(self, *tokens: int) -> "Asked":
        """Return the request after it has generated `tokens`."""
        return replace(self, output=[*self.output, *tokens])

    def edit(
        self,
        logits: Sequence[float],
        twins: Mapping[int, Sequence[Callable]] | None = None,
        allowed: Any = None,
    ) -> list[float]:
        """Return the logits after penalties, bias, bad words, minimum length and masks.

        The logits are not yet divided by the temperature. `twins` maps the number of logits
        processors to equivalent Python functions of (tokens, logits). `allowed` has the ids that a
        grammar permits.
        """
        tokens, counts = [*self.prompt, *self.output], Counter(self.output)
        penalties = "repetition_penalty", "presence_penalty", "frequency_penalty"
        repetition, presence, frequency = (float32(getattr(self.params, p)) for p in penalties)
        edited = [float(x) for x in logits]
        for twin in (twins or {}).get(self.processor, ()):
            edited = twin(tokens, edited)
        for token in set(tokens):
            x = edited[token]
            x = x / repetition if x > 0 else x * repetition
            edited[token] = x - frequency * counts[token] - presence * (counts[token] > 0)
        for *start, end in self.bad_words:
            if len(start) <= len(tokens) and tokens[len(tokens) - len(start) :] == start:
                edited[end] = -math.inf
        for token, bias in self.params.logit_bias.items():
            edited[token] += float32(bias)
        permitted = self.params.allowed_token_ids
        for token in range(len(edited)):
            if permitted is not None and token not in permitted:
                edited[token] = -math.inf
        if len(self.output) < self.params.min_tokens:
            for token in self.stop_ids:
                edited[token] = -math.inf
        return [x if allowed is None or i in allowed else -math.inf for i, x in enumerate(edited)]

    def kept(self, edited: Sequence[float]) -> list[bool]:
        """Return which edited logits are left after min_p, then top_k, then top_p."""
        if self.params.temperature == 0:
            return [True] * len(edited)
        left = np.exp((np.array(edited) - max(edited)) / float32(self.params.temperature))
        left[left < float32(self.params.min_p) * left.max()] = 0
        ranked = sorted(left, reverse=True)
        if 0 < self.params.top_k < len(left):
            left[left < ranked[self.params.top_k - 1]] = 0
        if self.params.top_p < 1:
            ranked = np.array(sorted(left / left.sum(), reverse=True))
            last = np.argmax(np.cumsum(ranked) >= float32(self.params.top_p))
            left[left / left.sum() < ranked[last]] = 0
        return (left > 0).tolist()

    def probs(self, logits: Sequence[float]) -> np.ndarray:
        """Return the probabilities of the next token."""
        edited = np.array(self.edit(logits))
        if self.params.temperature == 0:
            return np.eye(len(edited))[edited.argmax()]
        weights = np.exp((edited - edited.max()) / float32(self.params.temperature))
        weights *= self.kept(edited.tolist())
        return weights / weights.sum()

    @classmethod
    def random(cls, rng: np.random.Generator, vocab_size: int, drafts: Sequence[int]) -> "Asked":
        """Return a request with random tokens and a random mix of options.

        Bad words are often matched by the tokens. Token 0 is always allowed.
        """

        def some(*values):
            return values[rng.integers(len(values))]

        def ids(most):
            return (1 + rng.permutation(vocab_size - 1)[: rng.integers(most + 1)]).tolist()

        def word(text):
            end, size = rng.integers(len(text) + 1), rng.integers(MAX_BAD_WORD_TOKENS)
            return [*text[max(end - size, 0) : end], *(ids(1) or [1])]

        prompt, output = (rng.integers(0, min(vocab_size, 9), n).tolist() for n in (some(1, 9), 6))
        output = output[: rng.integers(7)]
        if rng.random() < 0.15:
            return cls(SamplingParams(temperature=some(0, 1)), prompt, output)
        return cls(
            SamplingParams(
                temperature=some(0.0, 0.3, 1.0, 2.5),
                top_k=int(some(0, -1, 1, 3, vocab_size, vocab_size + 5)),
                top_p=some(1.0, 1e-9, 0.3, 0.9, 0.999),
                min_p=some(0.0, 0.0, 0.01, 0.3, 1.0),
                repetition_penalty=some(1.0, 1.3, 0.7),
                presence_penalty=some(0.0, 0.5, -1.0),
                frequency_penalty=some(0.0, 0.3, -0.6),
                logit_bias={i: float(rng.normal() * 4) for i in ids(min(vocab_size - 1, 8))},
                allowed_token_ids=some(None, None, [0, *ids(vocab_size - 1)]),
                min_tokens=int(rng.integers(len(output) + len(drafts) + 2)),
                max_tokens=None,
            ),
            prompt,
            output,
            bad_words=[word([*prompt, *output, *drafts]) for _ in range(some(0, 5, 32))],
            stop_ids=ids(min(vocab_size - 1, MAX_STOP_IDS)),
            processor=some(-1, 0, 2),
        )

    @staticmethod
    def on_device(asked: Sequence["Asked"], vocab_size: int, *, max_logit_bias: int = 8) -> Any:
        """Return `Requests` with the options of `asked`, and the seeds 0, 1, and so on.

        Unused places hold values that the engine must ignore, such as NaN.
        """
        from specjax.device.requests import Edits, Requests, Sampling

        def column(values, dtype=np.float32):
            return np.array(list(values)).astype(dtype)

        def table(rows, width, fill, dtype=np.int32):
            return column([[*row, *[fill] * (width - len(row))] for row in rows], dtype)

        def padded(words):
            unused = [()] * (MAX_BAD_WORDS - len(words))
            return [
                i for w in [*words, *unused] for i in [*[-1] * MAX_BAD_WORD_TOKENS, *w][len(w) :]
            ]

        def bits(ids):
            chosen = range(vocab_size) if ids is None else ids
            words = [sum(1 << i % 32 for i in chosen if i // 32 == w) for w in range(num_words)]
            return np.array(words, np.uint32).view(np.int32)

        num_words = -(-vocab_size // 32)
        params = [one.params for one in asked]
        sampling = Sampling(
            temperature=column(p.temperature for p in params),
            seeds=column(range(len(asked)), np.uint32),
            top_k=column((max(p.top_k, 0) for p in params), np.int32),
            top_p=column(p.top_p for p in params),
            min_p=column(p.min_p for p in params),
        )
        edits = Edits(
            repetition=column(p.repetition_penalty for p in params),
            presence=column(p.presence_penalty for p in params),
            frequency=column(p.frequency_penalty for p in params),
            min_tokens=column((p.min_tokens for p in params), np.int32),
            bias_ids=table([list(p.logit_bias) for p in params], max_logit_bias, -1),
            bias=table(
                [list(p.logit_bias.values()) for p in params], max_logit_bias, math.nan, np.float32
            ),
            bad_words=column((padded(one.bad_words) for one in asked), np.int32),
            allowed=column((bits(p.allowed_token_ids) for p in params), np.int32),
            processor=column((one.processor for one in asked), np.int32),
        )
        return Requests(
            prompt_lengths=column((len(one.prompt) for one in asked), np.int32),
            limits=column([2**30] * len(asked), np.int32),
            stop_ids=table([one.stop_ids for one in asked], MAX_STOP_IDS, -1),
            sampling=sampling,
            edits=edits,
        )


def sampling_of(temperatures: Sequence[float], seeds: Sequence[int] | None = None) -> Any:
    """Return `Sampling` with these temperatures and without truncation.

    The default seeds are 0, 1, and so on.
    """
    from specjax.device.requests import Sampling

    n = len(temperatures)
    seeds = np.array(range(n) if seeds is None else seeds, np.uint32)
    given, ones = np.array(temperatures, np.float32), np.ones(n, np.float32)
    return Sampling(given, seeds, np.zeros(n, np.int32), ones, 0 * ones)


def float32(x: float) -> float:
    """Return x rounded to float32."""
    return float(np.float32(x))
