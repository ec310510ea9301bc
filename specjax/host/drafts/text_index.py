"""Finds earlier occurrences of a text's last tokens, and the tokens that followed them.

This is suffix decoding (Oliaro et al. 2024, SuffixDecoding) without a tree. Three hash tables hold
the latest occurrence of every 2, 4 and 8 consecutive tokens. Each occurrence has a link to the
previous one. So appending a token takes constant time, and the oldest texts can be forgotten first.
Next tokens are counted over the latest occurrences only (at most `MOST`). This limits the work, and
the latest occurrences predict better than older occurrences.
"""

from collections.abc import Sequence
from typing import NamedTuple

GRAMS = 8, 4, 2  # numbers of consecutive tokens that are looked up, in this order
SHORTEST = GRAMS[-1]  # number of tokens in the shortest match
MOST = 8  # maximum number of occurrences that are compared
END = -1  # the token that `TextIndex.add` appends to each text


class SuffixLimits(NamedTuple):
    """The limits of a continuation: vLLM's options `suffix_decoding_...`, with vLLM's defaults.

    After a match of m tokens, there are at most `spec_factor` * m drafts. Tokens in flight count as
    part of the match.
    """

    max_match: int = 24  # maximum number of tokens in a match
    spec_factor: float = 1.0
    min_prob: float = 0.1  # least estimated probability that all drafts are accepted


class Continuation(NamedTuple):
    """Tokens that may follow a text.

    The first tokens are expected from rounds in flight, whose results are not known yet. The tokens
    after them are drafts. `score` is the expected number of accepted drafts, on condition that the
    rounds in flight give the expected tokens.
    """

    tokens: list[int]
    score: float


NOTHING = Continuation([], 0.0)
_NO_TOKENS = (END,) * (GRAMS[0] - 1)


class TextIndex:
    """An index of texts. A text is a list of token ids."""

    def __init__(self):
        self._tokens: list[int] = []
        self._first = 0  # position of the first token that is not forgotten
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in GRAMS)
        self._before: tuple[list[int], ...] = tuple([] for _ in GRAMS)
        self._last = _NO_TOKENS  # the last seven tokens of the last text

    def __len__(self) -> int:
        """The number of tokens, including the `END` of each text."""
        return len(self._tokens)

    @property
    def num_entries(self) -> int:
        """The number of entries in all hash tables."""
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
        """Append a whole text, and then the token `END`, which marks the end of a text."""
        last = self._last
        self.extend(tokens)
        if tokens:
            self._unlink((*last, *tokens)[-GRAMS[0] :])
        for column in (self._tokens, *self._before):
            column.append(END)
        self._last = _NO_TOKENS

    def _unlink(self, ending: tuple[int, ...]) -> None:
        """Remove the latest occurrence of `ending`, the last tokens of a text that has ended.

        No token follows it. If many texts ended with the same tokens, a search would visit all of
        these ends.
        """
        for gram, latest, before in zip(GRAMS, self._latest, self._before, strict=True):
            key = hash(ending[-gram:])
            if before[-1] < 0:
                del latest[key]
            else:
                latest[key] = before[-1]

    def forget(self, count: int) -> None:
        """Remove the first `count` tokens. They must be whole texts, including each `END`."""
        text, last = self._tokens, _NO_TOKENS
        for position, token in enumerate(text[:count], self._first):
            ending = *last, token
            for gram, latest in zip(GRAMS, self._latest, strict=True):
                key = hash(ending[-gram:])
                if latest.get(key) == position:
                    del latest[key]
            last = _NO_TOKENS if token == END else ending[1:]
        for column in (text, *self._before):
            del column[:count]
        self._first += count

    def continuation(
        self, tokens: Sequence[int], count: int, num_in_flight: int, limits: SuffixLimits
    ) -> Continuation:
        """Return the best continuation of a text that ends with `tokens`.

        The result has `num_in_flight` expected tokens, followed by at most `count` drafts, or is
        `NOTHING` if no drafts are found.

        A match is an earlier occurrence of the last n of `tokens`. For each n that has matches, one
        continuation is built, token by token: the most frequent token after the matches comes next.
        The best continuation has the largest score. If several have this score, the best one has
        the largest n.
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
        """Return up to `MOST` earlier occurrences of the end of `last`, the latest first.

        `last` holds the last tokens of a text. An occurrence is a pair (index of the next token,
        number of equal tokens before it). The last 8 tokens are looked up first, then the last 4,
        and then the last 2, until an occurrence is found.
        """
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
            # Past the end of the index, the last text continues with the tokens found so far.
            following = [text[i] if i < size else tokens[i - size] for i in starts]
            counts: dict[int, int] = {}
            for token in following:
                counts[token] = counts.get(token, 0) + 1
            counts.pop(END, None)
            if not counts:
                break
            token = max(counts, key=counts.__getitem__)  # of equally frequent ones, the latest
            if len(tokens) >= num_in_flight:
                probability *= counts[token] / len(starts)
                if probability < min_prob:
                    break
                score += probability
            tokens.append(token)
            starts = [i + 1 for i, one in zip(starts, following, strict=True) if one == token]
        return Continuation(tokens, score) if len(tokens) > num_in_flight else NOTHING


class RecentTexts(TextIndex):
    """An index of the latest texts: about `max_texts`, with about `max_tokens` in total.

    The index can exceed each limit by 1 %, so that not every `add` removes texts.
    """

    def __init__(self, max_texts: int, max_tokens: int):
        super().__init__()
        self._max_texts, self._max_tokens = max_texts, max_tokens
        self._sizes: list[int] = []

    def add(self, tokens: Sequence[int]) -> None:
        """Append a whole text, and remove the oldest texts if a limit is exceeded by 1 %."""
        super().add(tokens)
        self._sizes.append(len(tokens) + 1)
        # Several texts are removed at once, because each removal moves all remaining tokens.
        if len(self._sizes) > 1.01 * self._max_texts or len(self) > 1.01 * self._max_tokens:
            count = num_texts = 0
            while (
                len(self._sizes) - num_texts > self._max_texts
                or len(self) - count > self._max_tokens
            ):
                count += self._sizes[num_texts]
                num_texts += 1
            self.forget(count)
            del self._sizes[:num_texts]
