"""How well a drafter still knows its target: acceptance under each pair of weights."""

from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from specjax.engine.metrics import Metrics


class Mark(NamedTuple):
    """An engine's counters at a moment, and the weights it ran with until then."""

    version: int
    drafter_version: int
    metrics: Metrics


@dataclass(frozen=True, kw_only=True)
class VersionAcceptance:
    """What came of drafts while the same weights were in use.

    Attributes:
        version: of the target.
        drafter_version: of the drafter; 0 is the one that the engine was built with.
        num_tokens: generated.
        num_drafts: rounds of one request that had drafts.
        mean_acceptance_length: tokens per such a round.
        acceptance_rate_per_pos: of the drafts at a position that could have stood, the part that
            did; not conditional on those before.
        k_histogram: rounds by K.
    """

    version: int
    drafter_version: int
    num_tokens: int
    num_drafts: int
    mean_acceptance_length: float
    acceptance_rate_per_pos: tuple[float, ...]
    k_histogram: dict[int, int]

    def acceptance_length(self, k: int) -> float:
        """Tokens per round of `k` drafts, by the rates: comparable whatever K was."""
        return 1 + sum(self.acceptance_rate_per_pos[:k])

    @property
    def mean_k(self) -> float:
        """Drafts per round."""
        num_rounds = sum(self.k_histogram.values())
        return sum(k * n for k, n in self.k_histogram.items()) / num_rounds if num_rounds else 0.0


class Freshness:
    """Cuts an engine's counters where weights changed."""

    def __init__(self, start: Metrics):
        self._start = start
        self._closed: list[VersionAcceptance] = []

    def close(self, mark: Mark) -> None:
        """End the stretch of the weights of `mark`."""
        self._closed.append(_since(self._start, mark))
        self._start = mark.metrics

    def read(self, mark: Mark) -> list[VersionAcceptance]:
        """All stretches, `mark` being now."""
        return [*self._closed, _since(self._start, mark)]


def _since(start: Metrics, mark: Mark) -> VersionAcceptance:
    now = mark.metrics
    accepted = _less(now.num_accepted_tokens_per_pos, start.num_accepted_tokens_per_pos)
    drafted = _less(now.num_draft_tokens_per_pos, start.num_draft_tokens_per_pos)
    num_drafts = now.num_drafts - start.num_drafts
    return VersionAcceptance(
        version=mark.version,
        drafter_version=mark.drafter_version,
        num_tokens=now.num_generation_tokens - start.num_generation_tokens,
        num_drafts=num_drafts,
        mean_acceptance_length=1 + sum(accepted) / num_drafts if num_drafts else 1.0,
        acceptance_rate_per_pos=tuple(
            stood / count if count else 0.0 for stood, count in zip(accepted, drafted, strict=True)
        ),
        k_histogram=dict(Counter(now.k_histogram) - Counter(start.k_histogram)),
    )


def _less(now: tuple[int, ...], before: tuple[int, ...]) -> list[int]:
    return [a - b for a, b in zip_longest(now, before, fillvalue=0)]
