"""Finds earlier occurrences of a text's last tokens, and the tokens that followed them.

This is suffix decoding (Oliaro et al. 2024, SuffixDecoding) without a tree. A hash table has the
latest occurrence of every 2, 4 and 8 consecutive tokens, and each occurrence has a link to the one
before it. So a token takes constant time to append, and old texts are forgotten in the order in
which they came. Counts are over the latest occurrences only (at most `MOST`), which also predict
better than older ones.
"""

from collections.abc import Sequence
from typing import NamedTuple

GRAMS = 8, 4, 2  # numbers of consecutive tokens that are looked up, in this order
SHORTEST = GRAMS[-1]  # the least number of equal tokens that count as a match
MOST = 8  # number of occurrences that are compared
END = -1  # follows each text


class SuffixLimits(NamedTuple):
    """What a continuation may be, with vLLM's defaults (its options are `suffix_decoding_...`).

    A continuation of a match of m tokens has at most `spec_factor` * m drafts.
    """

    max_match: int = 24  # number of last tokens that are compared
    spec_factor: float = 1.0
    min_prob: float = 0.1  # least probability, by counts, that all drafts are accepted


class Continuation(NamedTuple):
    """Tokens that may follow a text.

    The first of them may be in flight: they are expected from rounds whose results are not known.
    The tokens after them are drafts. `score` is the expected number of accepted drafts if the
    tokens in flight turn out to be as expected.
    """

    tokens: list[int]
    score: float


NOTHING = Continuation([], 0.0)
_NO_TOKENS = (END,) * (GRAMS[0] - 1)


class TextIndex:
    """An index of texts. A text is a list of token ids, which are not negative."""

    def __init__(self):
        self._tokens: list[int] = []
        self._first = 0  # position of the first token in the list; earlier texts are forgotten
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in GRAMS)
        self._before: tuple[list[int], ...] = tuple([] for _ in GRAMS)
        self._last = _NO_TOKENS  # the last tokens of the last text

    def __len__(self) -> int:
        """The number of tokens, with the one that ends each text."""
        return len(self._tokens)

    @property
    def num_entries(self) -> int:
        """The number of entries in all tables."""
        return sum(map(len, self._latest))

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the last text."""
        text, first = self._tokens, self._first
        eights, fours, twos = self._latest
        before8, before4, before2 = (x.append for x in self._before)
        t, u, v, w, x, y, z = self._last
        append, position = text.append, first + len(text)
        for token in tokens:
            append(token)
            key = hash((z, token))
            before2(twos.get(key, -1))
            twos[key] = position
            key = hash((x, y, z, token))
            before4(fours.get(key, -1))
            fours[key] = position
            key = hash((t, u, v, w, x, y, z, token))
            before8(eights.get(key, -1))
            eights[key] = position
            t, u, v, w, x, y, z = u, v, w, x, y, z, token
            position += 1
        self._last = t, u, v, w, x, y, z

    def add(self, tokens: Sequence[int]) -> None:
        """Append a whole text."""
        self.extend(tokens)
        self.extend((END,))
        self._last = _NO_TOKENS

    def forget(self, count: int) -> None:
        """Remove the first `count` tokens, which must be whole texts with their ends."""
        text, last = self._tokens, _NO_TOKENS
        for position, token in enumerate(text[:count], self._first):
            ending = *last, token
            for gram, latest in zip(GRAMS, self._latest, strict=True):
                key = hash(ending[-gram:])
                if latest[key] == position:
                    del latest[key]
            last = _NO_TOKENS if token == END else ending[1:]
        for column in (text, *self._before):
            del column[:count]
        self._first += count

    def continuation(
        self, tokens: Sequence[int], count: int, num_in_flight: int, limits: SuffixLimits
    ) -> Continuation:
        """Return the best continuation of a text that ends with `tokens`.

        It has at most `num_in_flight` tokens and then `count` drafts. For each length of a match,
        the continuation is the most frequent next token, time after time. The one with the largest
        score is returned; among equals, that of the longest match.
        """
        matches = self._matches(list(tokens[-limits.max_match :]))
        best = NOTHING
        for length in sorted({length for _, length in matches}, reverse=True):
            most = min(count, int((length + num_in_flight) * limits.spec_factor + 1e-6))
            if best.tokens and best.score >= most:
                break
            starts = [start for start, its_length in matches if its_length >= length]
            found = self._follow(starts, num_in_flight, most, limits.min_prob)
            if found.score > best.score or not best.tokens:
                best = found
        return best

    def _matches(self, last: list[int]) -> list[tuple[int, int]]:
        """Return occurrences of the last tokens, the latest first: (index after it, its length)."""
        text, first = self._tokens, self._first
        size = len(text)
        for gram, latest, before in zip(GRAMS, self._latest, self._before, strict=True):
            if len(last) < gram:
                continue
            found: list[tuple[int, int]] = []
            ending = last[-gram:]
            index = latest.get(hash(tuple(ending)), -1) - first
            while index >= 0 and len(found) < MOST:
                start = index + 1
                if start < size and text[start] != END and text[start - gram : start] == ending:
                    length, longest = gram, min(len(last), start)
                    while length < longest and text[index - length] == last[-1 - length]:
                        length += 1
                    found.append((start, length))
                index = before[index] - first
            if found:
                return found
        return []

    def _follow(
        self, starts: list[int], num_in_flight: int, most: int, min_prob: float
    ) -> Continuation:
        text, size = self._tokens, len(self._tokens)
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        while len(tokens) < num_in_flight + most:
            if len(starts) == 1 and starts[0] < size:
                # Only one occurrence is left: copy what follows it.
                (start,) = starts
                copied = text[start : start + num_in_flight + most - len(tokens)]
                if END in copied:
                    copied = copied[: copied.index(END)]
                if not copied:
                    break
                tokens += copied
                num_drafts = len(tokens) - num_in_flight
                score += probability * max(0, min(len(copied), num_drafts))
                starts = [start + len(copied)]
                continue
            # A text that has no end yet continues with the tokens that were just found.
            following = [text[i] if i < size else tokens[i - size] for i in starts]
            counts: dict[int, int] = {}
            for token in following:
                counts[token] = counts.get(token, 0) + 1
            counts.pop(END, None)
            if not counts:
                break
            token = max(counts, key=counts.__getitem__)  # the first, thus latest, among equals
            if len(tokens) >= num_in_flight:
                probability *= counts[token] / len(starts)
                if probability < min_prob:
                    break
                score += probability
            tokens.append(token)
            starts = [i + 1 for i, one in zip(starts, following, strict=True) if one == token]
        return Continuation(tokens, score) if len(tokens) > num_in_flight else NOTHING


class RecentTexts(TextIndex):
    """An index of the latest texts: at most `max_texts`, with at most `max_tokens` in total."""

    def __init__(self, max_texts: int, max_tokens: int):
        super().__init__()
        self._max_texts, self._max_tokens = max_texts, max_tokens
        self._sizes: list[int] = []

    def add(self, tokens: Sequence[int]) -> None:
        """Append a whole text, and forget the oldest texts if there are too many."""
        super().add(tokens)
        self._sizes.append(len(tokens) + 1)
        # Some at a time, because removing moves all tokens that stay.
        if len(self._sizes) > 1.1 * self._max_texts or len(self) > 1.1 * self._max_tokens:
            count = num_texts = 0
            while (
                len(self._sizes) - num_texts > self._max_texts
                or len(self) - count > self._max_tokens
            ):
                count += self._sizes[num_texts]
                num_texts += 1
            self.forget(count)
            del self._sizes[:num_texts]
