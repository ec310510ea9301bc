"""Grammar masks, compared with languages that are small enough to list, and with each other."""

import itertools
import json
import re
import sys
from functools import cache, partial, reduce
from pathlib import Path

import numpy as np
import pytest

llguidance = pytest.importorskip("llguidance")
tokenizers = pytest.importorskip("tokenizers")

from specjax.host.grammar import GrammarCompiler  # noqa: E402
from specjax.host.lark import styled_schema  # noqa: E402
from specjax.sampling_params import StructuredOutputs  # noqa: E402

DEMO = Path(__file__).parents[2] / "checkpoints" / "demo-llama" / "tokenizer.json"
EOS = 1


def byte_alphabet():
    """Return the characters that represent bytes 0..255 in a byte-level vocabulary (GPT-2)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in kept else next(others)) for byte in range(256)]


def tiny_tokenizer():
    """Return a tokenizer of bytes, longer tokens, two special tokens, and an added plain token."""
    texts = ["ab", "abc", "bc", "a.", '":', '", "', "é", "日本", "本語", " true", "<|", "|>", "]]"]
    alphabet = byte_alphabet()
    longer = ["".join(alphabet[byte] for byte in text.encode()) for text in texts]
    longer.append("".join(alphabet[byte] for byte in "日".encode()[:2]))  # not whole characters
    longer.append("".join(alphabet[byte] for byte in b"a" + "日".encode()[:1]))
    vocab = {text: i for i, text in enumerate([*alphabet, *longer])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", "<|call|>"])
    tokenizer.add_tokens(["zebra"])
    return tokenizer


def byte_fallback_tokenizer():
    """Return a tokenizer like Llama 2's, in which "a" is both a piece and a byte token."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁ab"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    decoders = tokenizers.decoders
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


class Texts:
    """A tokenizer, and the bytes of each of its tokens (None for special tokens)."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.json = tokenizer.to_str()
        self.size = tokenizer.get_vocab_size()
        byte_of = {char: byte for byte, char in enumerate(byte_alphabet())}
        self.of = []
        added = tokenizer.get_added_tokens_decoder()
        is_byte_level = '"ByteFallback"' not in self.json
        for i in range(self.size):
            piece = tokenizer.id_to_token(i)
            if i in added:
                text = None if added[i].special else added[i].content.encode()
            elif is_byte_level:
                text = bytes(byte_of[char] for char in piece)
            elif match := re.fullmatch("<0x(..)>", piece):
                text = bytes([int(match[1], 16)])
            else:
                text = piece.replace("▁", " ").encode()
            self.of.append(text)

    def id(self, text):
        return self.of.index(text.encode())

    def ids(self, text):
        """Return one token per byte of the text."""
        return [self.of.index(bytes([byte])) for byte in text.encode()]

    def join(self, tokens):
        return b"".join(self.of[token] for token in tokens)


@cache
def texts_of(name):
    makers = {"tiny": tiny_tokenizer, "fallback": byte_fallback_tokenizer}
    return Texts(makers[name]() if name in makers else tokenizers.Tokenizer.from_file(str(DEMO)))


@cache
def make_compiler(name, vocab_size=None, eos_ids=(EOS,)):
    texts = texts_of(name)
    return GrammarCompiler(texts.json, vocab_size or texts.size, eos_ids)


def matcher_of(name, vocab_size=None, eos_ids=(EOS,), **outputs):
    return make_compiler(name, vocab_size, eos_ids).compile(StructuredOutputs(**outputs)).matcher()


def unpack(row, size):
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:size]
    return set(np.flatnonzero(bits).tolist())


def next_ids(matcher, size):
    (row,) = matcher.masks([])
    return unpack(row, size)


def expected_ids(texts, language, prefix, size, eos_ids):
    """Return the tokens after which a text of the language can still be reached.

    Every token is tried.
    """
    rest = {text[len(prefix) :] for text in language if text.startswith(prefix)}
    heads = {text[:end] for text in rest for end in range(1, len(text) + 1)}
    spelt = {i for i, text in enumerate(texts.of) if text in heads and i < size}
    return spelt - set(eos_ids) | (set(eos_ids) if b"" in rest else set())


def strings(alphabet, longest):
    for length in range(longest + 1):
        yield from map("".join, itertools.product(alphabet, repeat=length))


def matching(regex, alphabet, longest):
    return [text for text in strings(alphabet, longest) if re.fullmatch(regex, text)]


PAIRS = {"type": "array", "prefixItems": [{"enum": ["a.", None, "日"]}, {"type": "boolean"}]}
NESTED = {
    "type": "object",
    "properties": {"a": PAIRS | {"items": False, "minItems": 1}, "b": {"const": {"x": [1, 2]}}},
    "required": ["a"],
    "additionalProperties": False,
}


def nested_values():
    for first in "a.", None, "日":
        for pair in [first], [first, True], [first, False]:
            yield {"a": pair}
            yield {"a": pair, "b": {"x": [1, 2]}}


METACHARACTERS = ["a.c", "a\\", "(a|b)*", "/", '"', "a\nb", "\x00", "[^x]$", "a b", "\u2028\x85"]
CHOICES = {
    "prefixes": ["a", "ab", "abc", "b"],
    "metacharacters": METACHARACTERS,
    "special": ["a</s>b", "<|call|>"],
    "unicode": ["日本語", "日曜", "é", "e"],
    "added": ["zebra", "zeb"],
}
OWN_STYLE = {"const": [1, 2], "x-guidance": {"item_separator": ","}}
LEXEMES = 'start: A X B | C X D\nA: "("\nC: "["\nX: "th"\nB: "e"\nD: "at"'
LANGUAGES = {
    "own style": ({"json": OWN_STYLE}, ["[1,2]"]),
    "same lexemes": ({"grammar": LEXEMES}, ["(the", "[that"]),
    **{name: ({"choice": texts}, texts) for name, texts in CHOICES.items()},
    "regex": ({"regex": "a(b|c){1,3}/?a?"}, matching("a(b|c){1,3}/?a?", "abc/", 6)),
    "anchored": ({"regex": "^[ab]{0,4}$"}, matching("^[ab]{0,4}$", "ab", 5)),
    "json": ({"json": NESTED}, [json.dumps(v, ensure_ascii=False) for v in nested_values()]),
    "lark": (
        {"grammar": 'start: "a" tail | "[" start "]"\ntail: "b" | "bc" B?  // or not\nB: "b"'},
        ["[" * n + f"a{t}" + "]" * n for n in range(40) for t in ("b", "bc", "bcb")],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGES)
@pytest.mark.parametrize(
    "tokenizer, vocab_size, eos_ids",
    [
        ("tiny", None, (EOS,)),
        ("tiny", 400, (272, 300)),  # the model has more ids, and an end past the tokenizer's
        ("tiny", 270, (5,)),  # the model has fewer ids than the tokenizer
        ("tiny", 257, ()),
        ("fallback", None, (EOS,)),
        ("demo", None, (EOS,)),
    ],
)
def test_masks_are_what_brute_force_finds(name, tokenizer, vocab_size, eos_ids):
    """Masks of rounds of random walks, with drafts that are legal, illegal, or no tokens."""
    texts = texts_of(tokenizer)
    size = vocab_size or texts.size
    outputs, language = LANGUAGES[name]
    language = {text.encode() for text in language}
    rng = np.random.default_rng([size, *map(ord, name)])
    compiler = make_compiler(tokenizer, vocab_size, eos_ids)
    for _ in range(3):
        matcher = compiler.compile(StructuredOutputs(**outputs)).matcher()
        committed = []
        for _ in range(8):
            prefix = texts.join(committed)
            drafts = []
            for row in itertools.count():
                legal = expected_ids(texts, language, prefix, size, eos_ids)
                if not legal or row == 3:
                    break
                drafts.append(int(rng.choice(sorted(legal))))
                if drafts[-1] in eos_ids:
                    break
                prefix += texts.of[drafts[-1]]
            committable = [draft for draft in drafts if draft not in eos_ids]
            if rng.random() < 0.5:
                junk = [-1, *eos_ids, int(rng.integers(size))]
                drafts.insert(int(rng.integers(len(drafts) + 1)), int(rng.choice(junk)))
            rows = matcher.masks(drafts)
            assert rows.shape == (len(drafts) + 1, -(-size // 32)) and rows.dtype == np.int32
            check_rows(rows, drafts, texts.join(committed), texts, language, size, eos_ids)
            if not committable:
                break
            advance = committable[: rng.integers(1, len(committable) + 1)]
            matcher.accept(advance)
            committed += advance
        legal = expected_ids(texts, language, texts.join(committed), size, eos_ids)
        assert matcher.is_finished == (not legal)


def check_rows(rows, drafts, prefix, texts, language, size, eos_ids):
    """Check the rows up to the first illegal draft. All later rows must permit everything."""
    is_reached = True
    for row, draft in zip(rows, [*drafts, -1], strict=True):
        legal = expected_ids(texts, language, prefix, size, eos_ids)
        is_reached = is_reached and bool(legal)
        if not is_reached:
            assert (row == -1).all()
            continue
        assert unpack(row, size) == legal
        is_reached = draft in legal and draft not in eos_ids
        prefix += texts.of[draft] if is_reached else b""


@pytest.mark.parametrize("text", ['{"a": [1, {"b": null}, "c"]}', '[{"a": [1, 2]}, [], {}, true]'])
@pytest.mark.parametrize("schema", [{}, "true", {"type": ["object", "array"]}])
def test_json_of_any_shape_has_no_free_whitespace(schema, text):
    """Outside of strings, whitespace is allowed only where json.dumps writes it."""
    texts = texts_of("tiny")
    matcher = matcher_of("tiny", json=schema)
    for at, char in enumerate(text):
        legal = next_ids(matcher, texts.size)
        assert texts.id(char) in legal
        if text[:at].count('"') % 2 == 0:
            spaces = {" "} if char == " " else set()
            assert {c for c in " \t\n\r" if texts.id(c) in legal} == spaces
        matcher.accept([texts.id(char)])
    assert next_ids(matcher, texts.size) == {EOS}


def test_masks_with_drafts_are_those_of_a_matcher_that_steps():
    """Rejected drafts leave no trace, for a grammar that llguidance cannot roll back."""
    texts, outputs = texts_of("demo"), {"grammar": 'start: x "!"\nx[stop="b"]: /[a-z]*/'}
    for seed in range(12):
        rng = np.random.default_rng(seed)
        matcher, committed = matcher_of("demo", **outputs), []
        while not matcher.is_finished and len(committed) < 25:
            scout, drafts = matcher_of("demo", **outputs), []
            scout.accept(committed)
            before, expected = matcher.masks([]), [scout.masks([])[0]]
            while len(drafts) < 3 and not scout.is_finished:
                legal = sorted(next_ids(scout, texts.size))
                drafts.append(int(rng.choice(legal if rng.random() < 0.8 else [-1, 0, EOS, 7])))
                if drafts[-1] not in legal:
                    break
                scout.accept(drafts[-1:])
                expected += [] if scout.is_finished else [scout.masks([])[0]]
            rows = matcher.masks(drafts)
            np.testing.assert_array_equal(rows[: len(expected)], expected)
            assert (rows[len(expected) :] == -1).all()
            np.testing.assert_array_equal(matcher.masks([]), before)
            np.testing.assert_array_equal(matcher.masks(drafts), rows)
            committed.append(int(rng.choice(sorted(unpack(before[0], texts.size)))))
            matcher.accept(committed[-1:])


def test_any_of_several_ends_of_sequence_ends_the_output():
    texts = texts_of("tiny")
    a, *ends = (texts.id("a"), texts.tokenizer.token_to_id("</s>"), texts.id("!"))
    for end in ends:
        matcher = matcher_of("tiny", None, tuple(ends), choice=["a", "abc", "ab!", "ac"])
        matcher.accept([a, end, a, a])
        assert matcher.is_finished and (matcher.masks([a, a]) == -1).all()


@pytest.mark.parametrize(
    "eos_ids", [(), (9999,), (-1,)], ids=["none", "past the vocabulary", "before it"]
)
def test_without_ends_of_sequence_an_output_is_finished_when_nothing_can_follow(eos_ids):
    texts = texts_of("tiny")
    matcher = matcher_of("tiny", None, eos_ids, choice=["a", "ab"])
    matcher.accept(texts.ids("a"))
    assert not matcher.is_finished and next_ids(matcher, texts.size) == {texts.id("b")}
    matcher.accept(texts.ids("bab"))  # what comes after the end is ignored
    assert matcher.is_finished and (matcher.masks([3, 4]) == -1).all()
    endless = matcher_of("tiny", None, eos_ids, regex="a+")
    endless.accept(texts.ids("a" * 50))
    assert not endless.is_finished and texts.id("a") in next_ids(endless, texts.size)


def test_special_tokens_are_not_text_unless_a_grammar_names_them():
    texts = texts_of("tiny")
    call = texts.tokenizer.token_to_id("<|call|>")
    special = {i for i, text in enumerate(texts.of) if text is None}
    assert special and not special & next_ids(matcher_of("tiny", regex=r"[\s\S]+"), texts.size)
    named = matcher_of("tiny", grammar='start: <|call|> "a"')
    assert next_ids(named, texts.size) == {call}
    named.accept([call])
    assert next_ids(named, texts.size) == {texts.id("a")}


def test_a_text_that_the_model_cannot_spell_allows_no_token():
    """The model has no token for "x" in "ax", which matters only after "a" was chosen."""
    texts = texts_of("tiny")
    size = texts.id("c")
    matcher = matcher_of("tiny", size, (EOS,), choice=["ax", "b"])
    assert matcher.dead_end is None
    matcher.accept(texts.ids("a"))
    assert next_ids(matcher, size) == set() and not matcher.is_finished
    assert matcher.dead_end == "no token of the model fits"
    endless = matcher_of("tiny", size, (), choice=["ax", "b"])
    rows = endless.masks(texts.ids("ab"))
    assert unpack(rows[0], size) == set(texts.ids("ab")) and not rows[1].any()
    assert (rows[2] == -1).all() and not endless.is_finished


def test_a_forbidden_token_is_refused():
    texts = texts_of("tiny")
    matcher = matcher_of("tiny", choice=["ab"])
    with pytest.raises(ValueError, match=f"token {texts.id('b')} is not allowed"):
        matcher.accept(texts.ids("ba"))


REFUSED = [
    ({"json": {"type": "string", "enum": []}}, "Unsatisfiable.*; .*json_schema.md"),
    ({"json": {"type": "strin"}}, "Invalid type: strin.*; correct the schema"),
    ({"json": {"not": {}}}, "Unimplemented.*; .*what is supported"),
    ({"json": "false"}, "Unsatisfiable.*; correct the schema"),
    ({"json": "[1]"}, r"\[1\] is neither.*; correct the schema"),
    ({"json": {"const": float("nan")}}, "not JSON compliant.*; correct the schema"),
    ({"json": {"const": {1, 2}}}, "not JSON serializable.*; correct the schema"),
    ({"regex": "(a"}, "unclosed group.*; .*Rust's"),
    ({"regex": "(?=a)b"}, "look-ahead.*; .*no look-around"),
    ({"regex": r"[^\s\S]"}, "no token of the model fits.*; correct it"),
    ({"regex": "\ud800"}, "surrogates not allowed.*; correct it"),
    ({"choice": ["a", "\ud800"]}, "surrogates not allowed.*; list texts"),
    ({"grammar": "start"}, "Expected token.*; .*syntax.md"),
    ({"grammar": 'start: "a" b'}, 'unknown name: "b".*; correct it'),
    ({"grammar": 'start: start "a"'}, "no token of the model fits.*; correct it"),
    ({"grammar": 'start: "\ud800"'}, "surrogates.*; correct it"),
]


@pytest.mark.parametrize("outputs, words", REFUSED, ids=lambda x: str(x)[:60])
def test_what_cannot_be_generated_is_refused(outputs, words):
    (field,) = outputs
    message = rf"(?s)^structured_outputs\.{field}=.* cannot be followed: .*{words}"
    with pytest.raises(ValueError, match=message):
        make_compiler("demo").compile(StructuredOutputs(**outputs))


def test_a_schema_that_is_nested_too_deeply_is_refused():
    """Its error shows only a part of it, as its whole text cannot be written either."""
    deep = reduce(lambda schema, _: {"items": schema}, range(3000), {})
    structure = {"begin": "<f>", "schema": deep, "end": "</f>"}
    tag = {"triggers": ["<f"], "structures": [structure]}
    for outputs in {"json": deep}, {"structural_tag": tag}:
        (field,) = outputs
        message = rf"^structured_outputs\.{field}={{.* cannot be followed: .*too deeply; correct"
        with pytest.raises(ValueError, match=message) as error:
            make_compiler("demo").compile(StructuredOutputs(**outputs))
        assert len(str(error.value)) < 500
    for bad in {"triggers": deep, "structures": []}, tag | {"structures": [deep]}, deep:
        with pytest.raises(ValueError, match=r"^structured_outputs\.structural_tag"):
            StructuredOutputs(structural_tag=bad)


def test_a_boolean_is_a_schema():
    for value in True, False:
        assert styled_schema(value) == styled_schema(json.dumps(value))
    for other in None, 5, [1]:
        with pytest.raises(ValueError, match="neither an object nor a boolean"):
            styled_schema(other)


def test_what_a_model_or_an_installation_cannot_follow_is_refused(monkeypatch):
    size = texts_of("tiny").id("c")
    with pytest.raises(
        ValueError, match=r"^structured_outputs\.choice=\('x', 'y'\) .*no token .*; l"
    ):
        matcher_of("tiny", size, (EOS,), choice=["x", "y"])
    with pytest.raises(ValueError, match=r"^structured_outputs\.regex='a\{0\}' .*no token .*; "):
        matcher_of("tiny", None, (), regex="a{0}")
    assert next_ids(matcher_of("tiny", regex="a{0}"), 300) == {EOS}  # an empty output
    words = tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")
    for is_installed, message in (
        (True, "this model's tokenizer: .*; use a model whose"),
        (False, r"not installed; pip install 'specjax\[structured\]'"),
    ):
        compiler = GrammarCompiler(tokenizers.Tokenizer(words).to_str(), 2, ())
        if not is_installed:
            monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(ValueError, match=message):
            compiler.compile(StructuredOutputs(regex="a"))


@pytest.mark.parametrize("gaps", [range(40, 100), ()])
def test_a_tokenizer_without_some_ids(gaps):
    """Tokens after a gap keep their ids. Missing ids are never allowed."""
    letters = byte_alphabet()
    ids = [i for i in range(2, 2 + len(letters) + len(gaps)) if i not in gaps]
    vocab = {"<x>": 0, "</s>": EOS, **dict(zip(letters, ids, strict=True))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", "<x>"])
    size = max(vocab.values()) + 1
    compiler = GrammarCompiler(tokenizer.to_str(), size + 5, (EOS,))
    matcher = compiler.compile(StructuredOutputs(choice=["zebra~", "😀"])).matcher()
    assert next_ids(matcher, size + 5) == {vocab["z"], vocab[letters[0xF0]]}
    matcher.accept([vocab[letter] for letter in "zebra"])
    assert next_ids(matcher, size + 5) == {vocab["~"]}
    anything = compiler.compile(StructuredOutputs(regex="(?s:.*)")).matcher()
    possible = {*vocab.values()} - {vocab["<x>"]}
    assert {vocab["z"], vocab[letters[0xF0]], EOS} < next_ids(anything, size + 5) <= possible


def test_the_same_wish_is_compiled_once():
    compiler = make_compiler("demo")
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
    swapped = {"type": "object", "properties": dict(reversed(schema["properties"].items()))}
    grammar = compiler.compile(StructuredOutputs(json=schema))
    assert compiler.compile(StructuredOutputs(json=json.dumps(schema, indent=1))) is grammar
    assert compiler.compile(StructuredOutputs(json=dict(schema))) is grammar
    assert compiler.compile(StructuredOutputs(json=swapped)) is not grammar  # written b first
    choice = compiler.compile(StructuredOutputs(choice=["a", "b"]))
    assert compiler.compile(StructuredOutputs(choice=("a", "b"))) is choice


def test_a_grammar_whose_limits_are_used_up_is_compiled_anew(monkeypatch):
    """All matchers of a grammar share llguidance's limits, so one matcher can use them up."""
    limits = partial(llguidance.LLParserLimits, max_lexer_states=200)
    monkeypatch.setattr(llguidance, "LLParserLimits", limits)
    texts = texts_of("tiny")
    compiler = GrammarCompiler(texts.json, texts.size, (EOS,))
    outputs = StructuredOutputs(regex="(a|b)*a(a|b){14}c")
    grammar = compiler.compile(outputs)
    assert compiler.compile(outputs) is grammar
    matcher, rng = grammar.matcher(), np.random.default_rng(0)
    while next_ids(matcher, texts.size):
        matcher.accept([texts.id("ab"[rng.integers(2)])])
    assert "too many states" in matcher.dead_end
    anew = compiler.compile(outputs)
    assert anew is not grammar
    assert texts.id("a") in next_ids(anew.matcher(), texts.size)
