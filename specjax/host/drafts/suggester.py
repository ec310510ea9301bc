"""Suggests drafts from the host, which the device uses instead of the drafter's drafts.

A round is planned while the previous round is in flight, so the host does not know the last tokens
yet. A suggestion is a path of expected tokens, from the first token that the host does not know.
The device compares the start of the path with the tokens of the rounds in flight. If they are
equal, the rest of the path is used as drafts. Otherwise, the drafter's drafts are used. So the host
never waits for the device, and a path that turns out to be wrong does not replace any drafts.
"""

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from specjax.config import SpeculativeConfig
from specjax.host.drafts.sources import SOURCES, Source
from specjax.host.drafts.text_index import NOTHING, Continuation
from specjax.host.sequence import RowOutput, Sequence
from specjax.host.speculation.requests import TextDrafts
from specjax.methods import METHODS

RECENT = 0.8  # weight of earlier rounds in a sample's running means
SLOW = 0.02  # weight of a new round in the running means over all samples
RETRY = 0.0002  # weight of the first guess in a ratio that keeps a source from being used
LOOK_EVERY = 8  # if rounds have no drafts, texts are searched once in this number of rounds


class Suggestion(NamedTuple):
    """The tokens that the host expects from position `start` on.

    Rounds in flight are expected to give the first tokens. The tokens after these are drafts.
    """

    start: int
    tokens: list[int]
    source: str
    score: float  # expected number of accepted drafts, see `Continuation`


def is_used(path: Suggestion | None, sequence: Sequence, num_kept: int) -> bool:
    """Return whether the drafts of the latest round came from the suggestion `path`.

    The round gave the last `num_kept` tokens of the sequence. The drafts came from `path` if `path`
    begins with the sequence's tokens from position `path.start` up to the round, and is longer.
    """
    if path is None:
        return False
    length = len(sequence.token_ids) - num_kept
    num_past = length - path.start
    is_longer = num_past < len(path.tokens)
    return is_longer and path.tokens[:num_past] == sequence.token_ids[path.start : length]


class _Found(NamedTuple):
    """The best continuation of all sources: the one with the most expected accepted drafts."""

    best: Continuation
    num_drafts: int  # its tokens after those that are expected from rounds in flight
    source: str
    score: float  # corrected by the source's earlier results


class SourceCounts(NamedTuple):
    """Counts for one source of drafts: rounds with its drafts, draft tokens and accepted tokens."""

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class _Means:
    """Running means of a sample's accepted drafts per round."""

    __slots__ = ("any", "drafter")

    def __init__(self, drafter: float):
        self.any = 0.0  # over all rounds, with drafts from any source
        self.drafter = drafter  # over rounds with the drafter's drafts


class Suggester:
    """Suggests drafts from the source with the highest expected number of accepted drafts.

    No draft is suggested if the drafter is expected to do better than all sources.

    Attributes:
        sources: the sources; empty if all drafts come from the drafter.
        max_drafts: the maximum number of drafts in a round.
        counts: the counts of each source by name, and the counts of the drafter. For the name of
            the drafter, see `Method.drafter`.
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
        self._mean_of_drafter = 1.0  # over all samples; a first guess
        # By source: accepted drafts per expected one, which corrects the scores.
        self._ratios = {source.name: 1.0 for source in self.sources}
        self._used = 1.0  # fraction of suggestions that the device has used
        self._found: dict[Sequence, _Found] = {}  # for the next round
        self._num_idle = 0  # rounds since the last one with drafts

    def named(self, name: str) -> Any:
        """Return the first source with this name; None if there is none."""
        return next((source for source in self.sources if source.name == name), None)

    @property
    def width(self) -> int:
        """The maximum number of tokens in a `Suggestion`; 0 without sources.

        The round in flight gives up to `max_drafts` + 1 of these tokens. The others are drafts.
        """
        return 2 * self.max_drafts + 1 if self.sources else 0

    def suggest(
        self, sequences: SequenceOf[Sequence], num_drafts: int
    ) -> tuple[Suggestion | None, ...]:
        """Return a suggestion or None for each sequence of a round that has just been planned.

        The round has `num_drafts` drafts. The result is () if `num_drafts` is 0.
        """
        if not num_drafts:
            return ()
        self._num_idle = 0
        if not self._found:
            self._begin_step()
        suggested = tuple([self._suggest(sequence, num_drafts) for sequence in sequences])
        self._found.clear()
        return suggested

    def expect(self, sequences: SequenceOf[Sequence]) -> list[TextDrafts] | None:
        """Return the drafts that each sequence of the next round could get from texts.

        The round is not planned yet, and its number of drafts may depend on the result. While
        rounds have no drafts, texts are searched only in some rounds, to save the host's time; in
        all other rounds, the result is None.
        """
        self._found.clear()
        idle, self._num_idle = self._num_idle, self._num_idle + 1
        if idle % LOOK_EVERY:
            return None
        self._begin_step()
        k, expected = self.max_drafts, []
        for sequence in sequences:
            found = self._find(sequence, k, sequence.max_tokens_in_flight)
            self._found[sequence] = found
            is_best = found.num_drafts and found.score >= self._means[sequence].drafter
            num_drafts = min(k, found.num_drafts)
            expected.append(TextDrafts(num_drafts, found.score, self._used if is_best else 0.0))
        return expected

    def _begin_step(self) -> None:
        for source in self.sources:
            source.begin_step()

    def _suggest(self, sequence: Sequence, k: int) -> Suggestion | None:
        found = self._found.get(sequence)
        if found is None:
            found = self._find(sequence, k, sequence.max_tokens_in_flight - (k + 1))
        score = min(found.score, k)
        if not found.best.tokens:
            return None
        if score < self._means[sequence].drafter:
            # The source may have become better, which only its drafts can show.
            ratio = self._ratios[found.source]
            self._ratios[found.source] += RETRY * (1.0 - ratio)
            return None
        tokens = found.best.tokens[: self.width]  # the K of another policy may be larger
        start = len(sequence.token_ids)
        return Suggestion(start, tokens, found.source, min(found.best.score, k))

    def _find(self, sequence: Sequence, k: int, most_in_flight: int) -> _Found:
        """Return the best continuation: expected tokens of rounds in flight, then drafts.

        Rounds in flight give at most `most_in_flight` tokens.
        """
        means = self._means.get(sequence)
        if means is None:
            means = self._means[sequence] = _Means(self._mean_of_drafter)
        if not sequence.draft_limit:
            return _Found(NOTHING, 0, "", 0.0)
        num_in_flight = min(most_in_flight, 1 + round(means.any))
        # If rounds in flight give fewer tokens than expected, drafts begin earlier in the path.
        count = k + most_in_flight - num_in_flight
        best, score, name = NOTHING, 0.0, ""
        for source in self.sources:
            found = source.continuation(sequence, num_in_flight, count)
            its_score = min(found.score, k) * self._ratios[source.name]
            if math.isnan(its_score):
                raise ValueError(
                    f"source {source.name!r}: the score of its drafts is NaN; it must be their "
                    "expected number of accepted drafts"
                )
            if its_score > score:
                best, score, name = found, its_score, source.name
                if found.score >= k:
                    break
        return _Found(best, max(0, len(best.tokens) - num_in_flight), name, score)

    def learn(
        self,
        sequences: SequenceOf[Sequence],
        suggested: SequenceOf[Suggestion | None],
        outputs: SequenceOf[RowOutput],
        num_kept: SequenceOf[int],
    ) -> None:
        """Learn from a round whose tokens have been appended to the sequences.

        `suggested` is the result of `suggest` for the round, and is not empty. `outputs` are the
        device's results for each sequence, and `num_kept` is the number of tokens that each
        sequence gained.
        """
        for sequence, path, row, kept in zip(sequences, suggested, outputs, num_kept, strict=True):
            if kept:
                self._learn(sequence, path, row.num_drafts, kept)

    def _learn(
        self, sequence: Sequence, suggestion: Suggestion | None, num_drafts: int, num_kept: int
    ) -> None:
        means = self._means[sequence]
        num_accepted = min(num_kept - 1, num_drafts)
        means.any += (1 - RECENT) * (num_accepted - means.any)
        if suggestion is not None:
            fits = is_used(suggestion, sequence, num_kept)
            self._used += SLOW * (fits - self._used)
            suggestion = suggestion if fits else None
        if num_drafts:
            source = suggestion.source if suggestion else self._drafter
            old = self.counts.get(source, SourceCounts())
            added = 1, num_drafts, num_accepted
            self.counts[source] = SourceCounts(*map(sum, zip(old, added, strict=True)))
        if suggestion is None:
            means.drafter += (1 - RECENT) * (num_accepted - means.drafter)
            self._mean_of_drafter += SLOW * (num_accepted - self._mean_of_drafter)
            return
        # The drafter may have become better for this sample, which only its drafts can show.
        means.drafter += SLOW * (self._mean_of_drafter - means.drafter)
        if num_drafts:
            found = min(1.0, num_accepted / min(suggestion.score, num_drafts))
            self._ratios[suggestion.source] += SLOW * (found - self._ratios[suggestion.source])

    def finish(self, sequence: Sequence) -> None:
        """Tell all sources that a sequence has finished."""
        for source in self.sources:
            source.finish(sequence)
