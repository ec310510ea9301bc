"""Measures draft acceptance per pair of target and drafter versions, to show outdated drafters."""

from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from specjax.engine.metrics import Metrics


class Mark(NamedTuple):
    """The counters of an engine and the versions of its weights at one time."""

    version: int
    drafter_version: int
    metrics: Metrics


@dataclass(frozen=True, kw_only=True)
class VersionAcceptance:
    """Draft acceptance while one pair of weights versions was in use.

    Attributes:
        version: the version of the target's weights.
        drafter_version: the version of the drafter's weights; 0 for the weights at construction.
        num_tokens: the number of generated tokens.
        num_drafts: the number of drafts. A draft is all draft tokens of one request in one round.
        mean_acceptance_length: the mean number of tokens that a request gains in a round with
            drafts: the accepted draft tokens and one token of the target. 1 without drafts.
        acceptance_rate_per_pos: for each position in a draft, the fraction of draft tokens that
            were accepted. A draft token after a rejected one counts as not accepted.
        k_histogram: the number of rounds for each K, the maximum number of draft tokens per request
            in a round.
        draft_tokens_per_source, accepted_tokens_per_source: the numbers of draft tokens and of
            accepted draft tokens by source, such as "eagle3", "suffix" and "history".
    """

    version: int
    drafter_version: int
    num_tokens: int
    num_drafts: int
    mean_acceptance_length: float
    acceptance_rate_per_pos: tuple[float, ...]
    k_histogram: dict[int, int]
    draft_tokens_per_source: dict[str, int]
    accepted_tokens_per_source: dict[str, int]

    def acceptance_length(self, k: int) -> float:
        """Return the mean acceptance length to expect if each draft had `k` tokens.

        Unlike `mean_acceptance_length`, the result can be compared between periods whose drafts had
        different lengths.
        """
        return 1 + sum(self.acceptance_rate_per_pos[:k])

    @property
    def mean_k(self) -> float:
        """The mean of K (see `k_histogram`) over all rounds."""
        num_rounds = sum(self.k_histogram.values())
        return sum(k * n for k, n in self.k_histogram.items()) / num_rounds if num_rounds else 0.0


class Freshness:
    """Splits an engine's counters into periods. Within a period, the weights do not change."""

    def __init__(self, start: Metrics):
        self._start = start
        self._closed: list[VersionAcceptance] = []

    def close(self, mark: Mark) -> None:
        """End the current period, because the engine's weights are about to change.

        `mark` has the engine's counters and versions before the change.
        """
        self._closed.append(_since(self._start, mark))
        self._start = mark.metrics

    def read(self, mark: Mark) -> list[VersionAcceptance]:
        """Return the draft acceptance of each period, oldest first, including the current period.

        `mark` has the engine's current counters and versions.
        """
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
        draft_tokens_per_source=dict(
            Counter(now.draft_tokens_per_source) - Counter(start.draft_tokens_per_source)
        ),
        accepted_tokens_per_source=dict(
            Counter(now.accepted_tokens_per_source) - Counter(start.accepted_tokens_per_source)
        ),
    )


def _less(now: tuple[int, ...], before: tuple[int, ...]) -> list[int]:
    return [a - b for a, b in zip_longest(now, before, fillvalue=0)]
