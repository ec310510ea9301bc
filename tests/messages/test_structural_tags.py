"""Structural tags: any text, and JSON of a schema wherever a trigger occurs."""

import json

import pytest
from support.refusals import label, refusal
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specjax import StructuredOutputs
from specjax.host.grammar import GrammarCompiler

pytest.importorskip("llguidance")

F = {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}
G = {"begin": "<gg>", "schema": {"enum": ["a"]}, "end": ""}
PLACE = {"begin": "[CALL]h", "schema": {"type": "boolean"}, "end": "!"}
TAG = {"structures": [F, G, PLACE], "triggers": ["<f", "<g", "[CALL]"]}


@pytest.fixture(scope="module")
def tokenizer():
    letters = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("</s>", "[CALL]")])
    return tokenizer


TEXTS = [
    # a text, and the part of it that is allowed
    ("no tag < at all", None),
    ('<f>12</f> and <gg>"a"<f>3</f>é', None),
    ("say [CALL]htrue! again", None),
    ("<f>12</f", False),  # allowed, but not complete
    ("<f>x", "<f>"),
    ("<fg", "<f"),
    ('a <gg>"b', 'a <gg>"'),
    ("[CALL]g", "[CALL]"),
]


@pytest.mark.parametrize("text, allowed", TEXTS)
def test_texts(tokenizer, text, allowed):
    compiler = GrammarCompiler(tokenizer.to_str(), tokenizer.get_vocab_size(), (256,))
    matcher = compiler.compile(StructuredOutputs(structural_tag=json.dumps(TAG))).matcher()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if not isinstance(allowed, str):
        matcher.accept(ids)
        assert (256 in masked(matcher)) == (allowed is None)
        return
    known = tokenizer.encode(allowed, add_special_tokens=False).ids
    matcher.accept(known)
    assert ids[len(known)] not in masked(matcher) and masked(matcher)


def masked(matcher):
    """Return the tokens that may follow."""
    (row,) = matcher.masks(())
    return {i for i in range(32 * len(row)) if row[i // 32] >> (i % 32) & 1}


BAD = [
    ("{", ["not JSON"]),
    (5, ["structural_tag=5"]),
    ({"format": {}}, ["structures and triggers"]),
    (TAG | {"triggers": "<f"}, ["triggers='<f'"]),
    (TAG | {"triggers": ["<f"]}, ["'<gg>'", "['<f']"]),
    (TAG | {"triggers": [*TAG["triggers"], "<x"]}, ["'<x' begins no structure"]),
    (TAG | {"structures": []}, ["structures=[]"]),
    (TAG | {"structures": [{"begin": "<f"}]}, ["begin, schema and end"]),
    (TAG | {"structures": [F | {"schema": "x"}]}, ["schema a mapping"]),
    (TAG | {"structures": [F | {"begin": ""}]}, ["begin"]),
]


@pytest.mark.parametrize("tag, words", BAD, ids=label)
def test_bad_tags(tag, words):
    refusal(lambda: StructuredOutputs(structural_tag=tag), "structural_tag", *words)


def test_a_schema_that_cannot_be_followed(tokenizer):
    compiler = GrammarCompiler(tokenizer.to_str(), tokenizer.get_vocab_size(), (256,))
    tag = {"structures": [F | {"schema": {"type": "no"}}], "triggers": ["<f"]}
    outputs = StructuredOutputs(structural_tag=tag)
    refusal(lambda: compiler.compile(outputs), "structural_tag", "json_schema.md")
