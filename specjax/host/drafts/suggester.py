"""Suggests drafts from the host, which the device uses instead of its drafter's.

A round is planned while the round before it runs, so the host does not know the last tokens. A
suggestion begins at the first token that the host does not know: it is a path of expected tokens.
The device compares the beginning of the path with the tokens that the rounds in flight have given,
and drafts the rest. If they differ, the drafter's drafts are used. So a suggestion that comes too
late costs nothing, and the host never waits for the device.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from specjax.config import SpeculativeConfig
from specjax.host.drafts.sources import SOURCES, Source
from specjax.host.drafts.text_index import NOTHING
from specjax.host.sequence import RowOutput, Sequence
from specjax.methods import METHODS

RECENT = 0.8  # weight of the past in running means of a sample
SLOW = 0.02  # weight of a round in running means over all samples


class Suggestion(NamedTuple):
    """A path of expected tokens from the position `start` on."""

    start: int
    tokens: list[int]
    source: str
    score: float  # expected number of accepted drafts, see `Continuation`

    def is_used(self, tokens: SequenceOf[int], length: int) -> bool:
        """Return whether a round after the first `length` of a sequence's `tokens` uses the path.

        If the path differs from these tokens, or ends with them, the drafter's drafts are used.
        """
        num_past = length - self.start
        is_longer = num_past < len(self.tokens)
        return is_longer and self.tokens[:num_past] == tokens[self.start : length]


class SourceCounts(NamedTuple):
    """Numbers of rounds with drafts from a source, of these drafts, and of those accepted."""

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class _Means:
    """Running means of a sample's accepted drafts per round."""

    __slots__ = ("any", "drafter")

    def __init__(self, drafter: float):
        self.any = 0.0  # of rounds with drafts from any source
        self.drafter = drafter  # of rounds with the drafter's drafts


class Suggester:
    """Suggests the drafts of the source from which most are expected to be accepted.

    Attributes:
        sources: the sources, empty for an engine without drafts from the host.
        max_drafts: maximum number of drafts in a round.
        counts: counts by source; the drafter is one, under its method's name.
    """

    @classmethod
    def of(cls, config: SpeculativeConfig | None) -> "Suggester":
        """Return the suggester that a `speculative_config` describes."""
        if config is None:
            return cls()
        sources = [source for name in config.all_sources for source in SOURCES[name](config)]
        drafter = METHODS[config.method].drafter or config.method
        return cls(sources, config.num_speculative_tokens, drafter)

    def __init__(self, sources: Iterable[Source] = (), max_drafts: int = 0, drafter: str = ""):
        self.sources = tuple(sources)
        self.max_drafts = max_drafts
        self.counts: dict[str, SourceCounts] = {}
        self._drafter = drafter
        self._means: WeakKeyDictionary[Sequence, _Means] = WeakKeyDictionary()
        self._mean_of_drafter = 0.0  # over all samples
        # Accepted drafts per expected one, by source: counts of texts are not probabilities.
        self._ratios = {source.name: 1.0 for source in self.sources}

    def named(self, name: str) -> Any:
        """Return the source of this name; None if there is none."""
        return next((source for source in self.sources if source.name == name), None)

    @property
    def width(self) -> int:
        """Maximum number of tokens of a path: of a round in flight, and of the next drafts."""
        return 2 * self.max_drafts + 1 if self.sources else 0

    def suggest(
        self, sequences: SequenceOf[Sequence], num_drafts: int
    ) -> tuple[Suggestion | None, ...]:
        """Return a suggestion or None for each sequence of a round that has just been planned.

        The round has `num_drafts` drafts. The result is empty if there are no sources or drafts.
        """
        if not self.sources or not num_drafts:
            return ()
        for source in self.sources:
            source.begin_step()
        return tuple([self._suggest(sequence, num_drafts) for sequence in sequences])

    def _suggest(self, sequence: Sequence, k: int) -> Suggestion | None:
        means = self._means.get(sequence)
        if means is None:
            means = self._means[sequence] = _Means(self._mean_of_drafter)
        if not sequence.draft_limit:
            return None
        most_in_flight = sequence.max_tokens_in_flight - (k + 1)
        num_in_flight = min(most_in_flight, 1 + round(means.any))
        # If fewer tokens are in flight than expected, more of the path are drafts.
        count = k + most_in_flight - num_in_flight
        best, score, name = NOTHING, 0.0, ""
        for source in self.sources:
            found = source.continuation(sequence, num_in_flight, count)
            its_score = min(found.score, k) * self._ratios[source.name]
            if its_score > score:
                best, score, name = found, its_score, source.name
                if found.score >= k:
                    break
        if not best.tokens or score < means.drafter:
            return None
        tokens = best.tokens[: self.width]  # another policy may have a larger K
        return Suggestion(len(sequence.token_ids), tokens, name, min(best.score, k))

    def learn(
        self,
        sequences: SequenceOf[Sequence],
        suggested: SequenceOf[Suggestion | None],
        outputs: SequenceOf[RowOutput],
        num_kept: SequenceOf[int],
    ) -> None:
        """Learn from a round whose tokens have been appended.

        `outputs` has the round's output for each sequence, and `num_kept` how many of its tokens
        the sequence has gained. `suggested` is the result of `suggest`; if it is empty, there is
        nothing to learn.
        """
        for sequence, path, row, kept in zip(sequences, suggested, outputs, num_kept, strict=False):
            if kept:
                self._learn(sequence, path, row.num_drafts, kept)

    def _learn(
        self, sequence: Sequence, suggestion: Suggestion | None, num_drafts: int, num_kept: int
    ) -> None:
        means, length = self._means[sequence], len(sequence.token_ids) - num_kept
        num_accepted = min(num_kept - 1, num_drafts)
        means.any += (1 - RECENT) * (num_accepted - means.any)
        if suggestion is not None and not suggestion.is_used(sequence.token_ids, length):
            suggestion = None
        if num_drafts:
            source = suggestion.source if suggestion else self._drafter
            old = self.counts.get(source, SourceCounts())
            added = 1, num_drafts, num_accepted
            self.counts[source] = SourceCounts(*map(sum, zip(old, added, strict=True)))
        if suggestion is None:
            means.drafter += (1 - RECENT) * (num_accepted - means.drafter)
            self._mean_of_drafter += SLOW * (num_accepted - self._mean_of_drafter)
        elif num_drafts:
            found = min(1.0, num_accepted / min(suggestion.score, num_drafts))
            self._ratios[suggestion.source] += SLOW * (found - self._ratios[suggestion.source])

    def finish(self, sequence: Sequence) -> None:
        """Let the sources keep the output of a finished sequence."""
        for source in self.sources:
            source.finish(sequence)
