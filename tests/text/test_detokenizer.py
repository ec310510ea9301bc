"""Stop texts on every kind of decoder, compared with brute force; and bad words' tokens.

Brute force decodes the whole output after each token, and searches all of the text. The real search
takes linear time.
"""

import os
import random
from collections.abc import Sequence

import pytest
from support.decoders import (
    KINDS,
    SPELLED,
    TEXT,
    Case,
    make_byte_level,
    make_case,
    make_sentencepiece,
    make_words,
    random_ids,
    wrap,
)
from support.refusals import refusal
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from specjax.text.detokenizer import StopStrings, bad_word_ids, find_stop
from specjax.text.tokenizer import ChatTokenizer


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {kind: make_case(kind) for kind in KINDS}


def random_pieces(ids: Sequence[int], rng: random.Random) -> list[Sequence[int]]:
    pieces, start = [], 0
    while start < len(ids):
        end = start + rng.randint(1, 6)
        pieces.append(ids[start:end])
        start = end
    return pieces


def random_stop(text: str, rng: random.Random) -> str:
    start = rng.randrange(len(text))
    return text[start : start + rng.choice([1, 2, 3, 5, 20])]


def stop_by_force(
    case: Case, ids: Sequence[int], stop: Sequence[str], min_tokens: int, include: bool
) -> tuple[int | None, str | None, str]:
    """Return the number of tokens kept, the stop text, and the remaining text."""
    before = text = ""
    for num_tokens in range(1, len(ids) + 1):
        before, text = text, case.seen(ids[:num_tokens])
        same = len(os.path.commonprefix([before, text]))
        found = []
        for word in stop:
            start = text.find(word)
            while start >= 0:
                if start + len(word) > same:
                    found.append((start, -len(word), word))
                start = text.find(word, start + 1)
        if found and num_tokens >= min_tokens:
            start, _, word = min(found)
            return num_tokens, word, text[: start + len(word) * include]
    return None, None, text


def run(
    case: Case, stops: StopStrings, pieces: Sequence[Sequence[int]]
) -> tuple[int | None, str | None, str]:
    """Append pieces until a stop text is found. Until then, compare the text with decoding."""
    ids: list[int] = []
    for piece in pieces:
        num_kept = stops.append(piece)
        if num_kept is not None:
            assert 1 <= num_kept <= len(piece)
            return len(ids) + num_kept, stops.stop_reason, stops.text
        ids += piece
        assert stops.text == case.seen(ids), ids
    return None, stops.stop_reason, stops.text


@pytest.mark.parametrize("kind", KINDS)
def test_stops_where_brute_force_does(cases, kind):
    case, rng = cases[kind], random.Random(2)
    last = case.tokenizer.tokenizer.get_vocab()["."]  # it completes no character
    num_stopped = num_late = 0
    for _ in range(400):
        ids = random_ids(case, rng)
        # Texts of a part of the tokens may be taken back later (byte fallback).
        text = case.seen(ids[: rng.randint(1, len(ids))]) or "?"
        stop = tuple(random_stop(text, rng) for _ in range(rng.choice([0, 1, 2, 3, 4])))
        stop = tuple(dict.fromkeys([*stop, "never seen"]))
        min_tokens = rng.choice([0, 0, 1, rng.randint(1, len(ids) + 1)])
        include = rng.random() < 0.5
        expected = stop_by_force(case, ids, stop, min_tokens, include)
        options = {"min_tokens": min_tokens, "include_in_output": include}
        for _ in range(2):
            stops = StopStrings(case.tokenizer, stop, **options)
            found = run(case, stops, random_pieces(ids, rng))
            assert found == expected, (ids, stop, min_tokens)
            if found[0] is None and stop == ("never seen",):
                assert stops.append([last]) is None
                assert stops.text == case.tokenizer.decode([*ids, last]), ids
        num_stopped += expected[0] is not None
        num_late += expected[0] != stop_by_force(case, ids, stop, 0, include)[0]
    assert num_stopped > 150 and num_late > 15


# --- by hand --------------------------------------------------------------------------------------


def test_a_replacement_character_counts_once_something_follows(cases):
    """U+FFFD counts only where decoding puts it, not for the beginning of a character."""
    stops = StopStrings(cases["byte-level"].tokenizer, ("\ufffd",))
    assert stops.append([*b"a", *"€".encode(), 0xFF]) is None and stops.text == "a€"
    assert stops.append([*b"bc"]) == 1 and stops.text == "a€"


def test_byte_tokens_that_do_not_make_characters_undo_those_beside_them(cases):
    case = cases["llama-2"]
    ids = [case.byte_ids[byte] for byte in b"\n\xe2\x82\xac\xff\n"]
    assert case.tokenizer.decode(ids) == "\ufffd" * 6
    stops = StopStrings(case.tokenizer, ("never seen",))
    texts = []
    for token in ids:
        assert stops.append([token]) is None
        texts.append(stops.text)
    assert texts == ["\n"] * 3 + ["\n€", "\ufffd" * 5, "\ufffd" * 6]
    assert StopStrings(case.tokenizer, ("€",)).append(ids) == 4
    assert StopStrings(case.tokenizer, ("\ufffd\ufffd",)).append(ids) == 5
    assert StopStrings(case.tokenizer, ("\n",), min_tokens=2).append(ids) is None


# --- cost -----------------------------------------------------------------------------------------

LONG = {
    "text": TEXT.encode() * 30,
    "invalid": b"\xff" * 2000,
    "continuations": b"\x80" * 2000,
    "emoji": "🙂".encode() * 500,
    "undone late": "🙂".encode() * 500 + b"\xff" * 500,
    "undone often": ("🙂🙂".encode() + b"\xff.") * 200,
    "halves": b"\xf0\x9f\x98" * 700,
}


@pytest.mark.slow
@pytest.mark.parametrize("stream", LONG)
@pytest.mark.parametrize("kind", SPELLED)
def test_cost_is_linear_in_the_tokens(cases, kind, stream, monkeypatch):
    """Decoded tokens and searched characters are each at most a few per token."""
    case, decode, decoded, searched = cases[kind], ChatTokenizer.decode, [], []
    dot = case.tokenizer.tokenizer.get_vocab()["."]  # ends a run of byte tokens
    ids = [dot if byte == ord(".") else case.byte_ids[byte] for byte in LONG[stream]]
    expected = case.seen(ids)

    def count_tokens(tokenizer, token_ids, **options):
        decoded.append(len(token_ids))
        return decode(tokenizer, token_ids, **options)

    def count_characters(text, stop, new):
        searched.append(len(text))
        return find_stop(text, stop, new)

    monkeypatch.setattr(ChatTokenizer, "decode", count_tokens)
    monkeypatch.setattr("specjax.text.detokenizer.find_stop", count_characters)
    undone = len(ids) if stream.startswith("undone") else 0  # and searched once more
    stops = StopStrings(case.tokenizer, ("never seen", "never"))
    for start in range(0, len(ids), 4):
        assert stops.append(ids[start : start + 4]) is None
    assert sum(decoded) <= 9 * len(ids) and max(decoded, default=0) <= 8
    assert sum(searched) <= 10 * len(ids) + undone
    assert stops.text == expected
    decoded.clear()
    watched = StopStrings(case.tokenizer, ())
    for start in range(0, len(ids), 3):
        watched.append(ids[start : start + 3])
    assert watched.text == expected and sum(decoded) <= 9 * len(ids)


# --- bad words ------------------------------------------------------------------------------------


def prefixing() -> dict[str, Tokenizer]:
    """Tokenizers that add a space before a text, in the three possible ways."""
    metaspace = make_sentencepiece()
    metaspace.normalizer = normalizers.Sequence([])
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    return {
        "byte-level": make_byte_level(add_prefix_space=True),
        "prepend": make_sentencepiece(),
        "metaspace": metaspace,
    }


def test_bad_words_are_spelled_at_a_start_and_after_a_space(cases):
    tokenizer = cases["demo"].tokenizer
    for word in ["apples", "Question", "née", "a b", "3", "🙂", "\n"]:
        found = bad_word_ids(tokenizer, [word])
        assert 1 <= len(found) <= 2
        assert {tokenizer.decode(ids).removeprefix(" ") for ids in found} == {word}
        for text in word, " " + word:
            ids = tuple(tokenizer.tokenizer.encode(text, add_special_tokens=False).ids)
            assert any(ids[-len(some) :] == some for some in found)
        for some in found:
            assert not any(some != other and some[-len(other) :] == other for other in found)
        assert bad_word_ids(tokenizer, [" " + word]) == found


@pytest.mark.parametrize(
    "kind, words, expected",
    [
        ("byte-level", ["foo", " foo", "foo"], [["Ġ", "f", "o", "o"]]),
        ("prepend", ["foo", " foo", "foo"], [["▁foo"]]),  # not ▁ ▁foo as well
        ("metaspace", ["foo", " foo", "foo"], [["▁foo"]]),
        ("bare", ["foo"], [["f", "o", "o"]]),  # with which [space, f, o, o] ends
        ("prepend", ["sc", "foo", "a"], [["▁s", "c"], ["▁foo"], ["▁a"]]),
        ("prepend", [], []),
    ],
)
def test_bad_words_of_tokenizers_that_add_a_space_or_not(kind, words, expected):
    tokenizer = {**prefixing(), "bare": make_byte_level()}[kind]
    found = bad_word_ids(wrap(tokenizer), words)
    assert [[tokenizer.id_to_token(i) for i in ids] for ids in found] == expected


@pytest.mark.parametrize("word", ["", "\u4e17"])
def test_a_bad_word_without_tokens(word):
    tokenizer = make_words(None)
    tokenizer.model = models.BPE({"a": 0}, merges=[])  # drops what it does not know
    refusal(lambda: bad_word_ids(wrap(tokenizer), ["a", word]), repr(word), "no tokens")
