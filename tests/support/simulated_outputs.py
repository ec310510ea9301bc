"""The results of a simulated device's programs."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specjax.device.drafters.drafter import Variant
from specjax.device.extras import Extras


class Draft(NamedTuple):
    """The drafts of a round; see `specjax.device.verification.Draft`."""

    tokens: Any  # i32[B, K]


@dataclass
class HostArray:
    """A NumPy array with the methods of a JAX array. Reading it raises `error` if that is set."""

    array: np.ndarray
    error: Exception | None = None

    def copy_to_host_async(self) -> None:
        """Do nothing."""

    def is_ready(self) -> bool:
        """Return false, as if the device had not finished."""
        return False

    def __array__(self, *arguments, **options):
        if self.error is not None:
            raise self.error
        return self.array


class Extension(NamedTuple):
    features: Any = None
    logits: frozenset[int] = frozenset()  # numbers of the logits processors that have run


class Outputs:
    """The packed results of a program, in the form of `pack_outputs`.

    Log-probabilities are made up, so that a test can see to which token they belong. For the token
    at position p, the log-probability is -p, and the rank is its id. The n most likely tokens are
    those with the n next ids. If no request asks for log-probabilities of output tokens, they are
    zeros.
    """

    def __init__(self, batch, num_rows, width, variant: Variant, vocab_size, has_raw, *, extras):
        self._has_logprobs = extras & Extras.LOGPROBS > 0
        self._num_rows, self._width, self._variant = num_rows, width, variant
        self._vocab_size, self._has_raw = vocab_size, has_raw
        self._prompt = 2 + num_rows + self._size(num_rows, variant.num_logprobs)
        total = self._prompt + self._size(width, variant.num_prompt_logprobs if width else None)
        self.packed = np.zeros((batch, total), np.int32)

    def put(self, row: int, start: int, tokens: list[int], num_drafts: int) -> None:
        """Store the tokens of a row. The first token has the position `start`."""
        self.packed[row, :2] = len(tokens), num_drafts
        self.packed[row, 2 : 2 + len(tokens)] = tokens
        if self._has_logprobs:
            num_top = self._variant.num_logprobs
            self._put(row, 2 + self._num_rows, self._num_rows, num_top, start, tokens)

    def put_prompt(self, row: int, start: int, following: list[int]) -> None:
        """Store the token after each token of a chunk.

        The first stored token has the position `start`.
        """
        num_top = self._variant.num_prompt_logprobs
        assert num_top is not None
        self._put(row, self._prompt, self._width, num_top, start, following)

    def _size(self, num_rows, num_top):
        return 0 if num_top is None else num_rows * (2 + 2 * num_top + self._has_raw)

    def _put(self, row, at, num_rows, num_top, start, tokens):
        count, out = len(tokens), self.packed[row]
        own = -np.arange(start, start + count, dtype=np.float32)
        ids = (np.array(tokens, np.int32)[:, None] + 1 + np.arange(num_top)) % self._vocab_size
        top = own[:, None] - 1 - np.arange(num_top, dtype=np.float32)
        fields = [own, np.array(tokens, np.int32), ids, top, *([own - 0.5] * self._has_raw)]
        for field_, per_row in zip(fields, (1, 1, num_top, num_top, 1), strict=False):
            values = np.ascontiguousarray(field_).reshape(-1)
            is_float = values.dtype == np.float32
            out[at : at + count * per_row] = values.view(np.int32) if is_float else values
            at += num_rows * per_row
