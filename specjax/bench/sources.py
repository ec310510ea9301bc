"""Counts drafts by their source: the drafter, or a source on the host such as "suffix"."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from specjax.bench.result import by_source
from specjax.engine.metrics import Metrics


class DraftsBySource(NamedTuple):
    """Counts of drafts by source. They are empty if only the drafter makes drafts.

    Attributes:
        drafts: number of rounds with drafts from each source. A round counts once for each request
            that got drafts from the source.
        tokens: number of draft tokens from each source.
        accepted: number of accepted draft tokens from each source.
    """

    drafts: Mapping[str, int]
    tokens: Mapping[str, int]
    accepted: Mapping[str, int]

    @classmethod
    def between(cls, before: Metrics, after: Metrics) -> "DraftsBySource":
        """Return the growth of the counts between two snapshots of the engine's metrics."""
        names = "drafts_per_source", "draft_tokens_per_source", "accepted_tokens_per_source"
        return cls(*(Counter(getattr(after, n)) - Counter(getattr(before, n)) for n in names))

    @classmethod
    def total(cls, counts: Iterable["DraftsBySource"]) -> "DraftsBySource":
        """Return the sum of `counts` for each source."""
        columns = zip(*counts, strict=True)
        return cls(*(sum(map(Counter, column), Counter[str]()) for column in columns))

    @property
    def figures(self) -> dict[str, dict[str, Any]]:
        """The counts and the acceptance of each source."""
        tokens, accepted = ({n: of.get(n, 0) for n in self.drafts} for of in self[1:])
        return by_source(self.drafts, tokens, accepted)
