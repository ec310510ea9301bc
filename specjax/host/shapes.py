"""Shapes of steps. A program is compiled for each shape, and smaller steps run padded in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from specjax.config import EngineConfig

Shape = tuple[int, int]


@dataclass(frozen=True)
class Shapes:
    """The shapes that a step's prefill chunks and decode round may have.

    Attributes:
        prefill: shapes (batch, width) of chunks: the number of chunks, and the tokens per chunk.
        decode: shapes (batch, k) of rounds: the number of requests, and the drafts per request.
    """

    prefill: tuple[Shape, ...]
    decode: tuple[Shape, ...]

    @classmethod
    def all_of(cls, config: EngineConfig, ks: Sequence[int]) -> "Shapes":
        """Return all shapes of an engine. `ks` are the numbers of drafts that a round may have."""
        return cls(config.prefill_shapes, tuple(product(config.decode_batches, ks)))

    @property
    def first(self) -> "Shapes":
        """One chunk shape and one round shape, which suffice for any step.

        The round shape is the largest. The chunk shape is the one with the most tokens in its first
        four rows, so that four prompts are prefilled fastest. If a step has more or longer chunks
        than the shape holds, the rest runs in later steps.
        """
        chunk = max(self.prefill, key=lambda shape: (min(shape[0], 4) * shape[1], shape))
        return Shapes((chunk,), (max(self.decode),))

    @cached_property
    def widths(self) -> list[int]:
        """The distinct widths of chunks, ascending."""
        return sorted(self._batches)

    def best_width(self, remaining: Sequence[int], max_tokens: int) -> int:
        """Return the chunk width with which the next step prefills the most tokens.

        `remaining` holds the number of tokens to prefill for each sequence. The step runs at most
        `max_tokens` tokens. A wider shape has room for fewer chunks. If several widths are equally
        good, return the smallest.
        """
        if not remaining:
            return self.widths[0]

        def progress(width: int) -> int:
            return self._num_prefilled(width, remaining, max_tokens)

        return max(self.widths, key=lambda width: (progress(width), -width))

    def best_chunks(self, remaining: Sequence[int], max_tokens: int) -> tuple[Shape, int]:
        """Return the chunk shape of width `best_width`, and the number of tokens prefilled."""
        width = self.best_width(remaining, max_tokens)
        num_tokens = self._num_prefilled(width, remaining, max_tokens)
        return self.chunks(len(remaining), width), num_tokens

    def _num_prefilled(self, width: int, remaining: Sequence[int], max_tokens: int) -> int:
        """Return how many tokens a step prefills in chunks of this width; see `best_width`."""
        rows = remaining[: self.max_chunks(width)]
        return min(sum(min(n, width) for n in rows), max_tokens)

    @cached_property
    def most_chunks(self) -> int:
        """The largest number of chunks in a step."""
        return max(batch for batch, _ in self.prefill)

    def max_chunks(self, width: int) -> int:
        """Return the largest batch among the chunk shapes of this width."""
        return self._batches[width][-1]

    def chunks(self, count: int, width: int) -> Shape:
        """Return the smallest shape of this width that holds `count` chunks.

        If no shape of this width holds them, return the largest.
        """
        batches = self._batches[width]
        return next((batch for batch in batches if batch >= count), batches[-1]), width

    def round(self, num_sequences: int, k: int) -> Shape:
        """Return the smallest round shape that holds `num_sequences` with at least `k` drafts.

        If there is none, return the shape with the most drafts that holds `num_sequences`.
        """
        asked = num_sequences, k
        if asked not in self._rounds:
            wide = [shape for shape in self.decode if shape[0] >= num_sequences]
            deep = [shape for shape in wide if shape[1] >= k]
            best = min(deep, key=num_rows) if deep else max(wide, key=lambda s: (s[1], -s[0]))
            self._rounds[asked] = best
        return self._rounds[asked]

    def batch(self, num_sequences: int, k: int) -> int:
        """Return the smallest batch that holds `num_sequences`, among the shapes of `k` drafts."""
        return next(batch for batch in self._decode_batches[k] if batch >= num_sequences)

    @cached_property
    def _rounds(self) -> dict[Shape, Shape]:
        """Cached results of `round`, which every step calls."""
        return {}

    @cached_property
    def _decode_batches(self) -> dict[int, list[int]]:
        """For each k, the batch sizes of the shapes (batch, k) in `decode`, ascending."""
        batches: dict[int, list[int]] = {}
        for batch, k in sorted(self.decode):
            batches.setdefault(k, []).append(batch)
        return batches

    @cached_property
    def _batches(self) -> dict[int, list[int]]:
        """For each width, the batch sizes of the shapes (batch, width) in `prefill`, ascending."""
        batches: dict[int, list[int]] = {}
        for batch, width in sorted(self.prefill):
            batches.setdefault(width, []).append(batch)
        return batches


def num_rows(shape: Shape) -> int:
    """Return the number of rows that the target runs in a round of this shape."""
    batch, k = shape
    return batch * (k + 1)
