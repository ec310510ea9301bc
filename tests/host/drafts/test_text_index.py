"""The index of texts, compared with a search through all positions."""

import random
from pathlib import Path

import pytest

from specjax.host.drafts.text_index import (
    END,
    GRAMS,
    MOST,
    RecentTexts,
    SuffixLimits,
    TextIndex,
)


def search(text, last, count, num_in_flight, limits):
    """Return the tokens and the score of a continuation, by its definition.

    `text` is all texts joined, with an `END` after each of them but the last.
    """
    last = last[-limits.max_match :]
    for gram in GRAMS:
        ends = [i for i in range(gram, len(text)) if text[i - gram : i] == last[-gram:]]
        found = [i for i in reversed(ends) if text[i] != END][:MOST] if len(last) >= gram else []
        if found:
            break
    lengths = {i: gram for i in found}
    for i in found:
        longest = min(len(last), i)
        while lengths[i] < longest and text[i - lengths[i] - 1] == last[-lengths[i] - 1]:
            lengths[i] += 1
    best = [], 0.0
    for m in range(limits.max_match, 0, -1):
        most = min(count, int(m * limits.spec_factor + num_in_flight * limits.spec_factor + 1e-6))
        tokens, score, prob = [], 0.0, 1.0
        alive = [i for i in found if lengths[i] >= m]
        while alive and len(tokens) < num_in_flight + most:
            grown = [*text, *tokens]
            following = [grown[i + len(tokens)] for i in alive]
            inside = [token for token in following if token != END]
            if not inside:
                break
            token = max(inside, key=inside.count)
            if len(tokens) >= num_in_flight:
                prob *= following.count(token) / len(alive)
                if prob < limits.min_prob:
                    break
                score += prob
            tokens.append(token)
            alive = [i for i, one in zip(alive, following, strict=True) if one == token]
        if len(tokens) > num_in_flight and score > best[1] + 1e-12:
            best = tokens, score
    return best


def random_texts(rng, count, alphabet, longest):
    return [
        [rng.randrange(alphabet) for _ in range(rng.randrange(1, longest))] for _ in range(count)
    ]


def real_texts():
    """Return the words of two source files, as one list of numbers."""
    words = "".join(
        Path(name).read_text() for name in (__file__, TextIndex.add.__code__.co_filename)
    )
    numbers = {}
    return [[numbers.setdefault(w, len(numbers)) for w in words.split()]]


LIMITS = SuffixLimits(), SuffixLimits(6, 0.5, 0.4), SuffixLimits(40, 3.0, 0.0)


@pytest.mark.parametrize("limits", LIMITS)
def test_continuations_are_those_of_a_search(limits):
    rng, num_found = random.Random(0), 0
    groups = [random_texts(rng, 5, alphabet, 60) for alphabet in (2, 3, 8)] * 3
    for texts in [*groups, real_texts()]:
        index, text = TextIndex(), []
        for one in texts[:-1]:
            index.add(one)
            text += [*one, END]
        for start in range(0, len(texts[-1]), 7):
            new = texts[-1][start : start + 7]
            index.extend(new)
            text += new
            for last in (new, text[-50:], rng.choice(texts)[-limits.max_match :]):
                last = [token for token in last if token != END]
                count, num_in_flight = rng.randrange(1, 9), rng.choice((0, 0, 1, 4))
                found = index.continuation(last, count, num_in_flight, limits)
                tokens, score = search(text, last, count, num_in_flight, limits)
                assert found.tokens == tokens and found.score == pytest.approx(score)
                num_found += bool(tokens)
    assert num_found > 100


def test_texts_that_came_and_went_leave_no_trace():
    rng = random.Random(1)
    index, latest = RecentTexts(20, 10_000), TextIndex()
    texts = random_texts(rng, 10_000, 50, 12)
    most = 0
    for text in texts:
        index.add(text)
        most = max(most, len(index))
    assert most <= 22 * 12
    last = len(index)
    kept = []
    while sum(len(text) + 1 for text in kept) < last:
        kept.insert(0, texts[-1 - len(kept)])
    for text in kept:
        latest.add(text)
    assert len(index) == len(latest) and index.num_entries == latest.num_entries
    for text in texts[-500:]:
        for end in range(2, len(text)):
            arguments = text[:end], 4, 0, SuffixLimits()
            assert index.continuation(*arguments) == latest.continuation(*arguments)
    index.forget(len(index))
    assert not len(index) and not index.num_entries


def test_a_search_visits_no_ends_of_texts():
    """Many texts may end with the same tokens, like lines of code or short answers."""

    class Counting(list):
        num_reads = 0

        def __getitem__(self, key):
            self.num_reads += 1
            return super().__getitem__(key)

    index, line = TextIndex(), list(range(9))
    for _ in range(1000):
        index.add(line)
    index._tokens = read = Counting(index._tokens)
    for end in 2, 4, 8, 9:
        found = index.continuation(line[:end], 4, 0, SuffixLimits(24, 4.0))
        assert found.tokens == line[end : end + 4]
    assert 20 < read.num_reads < 500


def test_the_oldest_texts_make_room_for_tokens():
    index = RecentTexts(1000, 100)
    for i in range(50):
        index.add([i] * 9)
        assert len(index) <= 101
    arguments = 4, 0, SuffixLimits()
    assert index.continuation([49, 49], *arguments).tokens == [49] * 2
    assert not index.continuation([30, 30], *arguments).tokens
