"""Tokenizers with every kind of decoder, and token ids that are hard to decode."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specjax.text.tokenizer import ChatTokenizer, load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXT = "naïve café 🙂🙃 — 世界 says\n\n“hi”  twice  over, ends. 👩‍👩‍👧 Ω\n"
# Parts of characters, and bytes that never occur in UTF-8.
BYTES = bytes.fromhex("e2 82 ac f0 9f 98 80 ed a0 e0 f4 90 c3 a9 c0 ff 41 20 0a")

# One of these completes any character of which a prefix is given.
CONTINUATIONS = [b""] + [bytes([b]) + b"\x80" * k for b in (0x80, 0x90, 0xA0) for k in range(3)]


@dataclass(frozen=True)
class Case:
    """A tokenizer, and the ids of its byte tokens and special tokens."""

    tokenizer: ChatTokenizer
    byte_ids: list[int] | None = None  # of bytes 0 to 255, if each is a token
    has_fallback: bool = False

    @cached_property
    def ids(self) -> list[int]:
        return sorted(self.tokenizer.tokenizer.get_vocab().values())

    @cached_property
    def byte_of(self) -> dict[int, int]:
        return {token: byte for byte, token in enumerate(self.byte_ids or [])}

    @cached_property
    def skipped(self) -> set[int]:
        """The ids of special tokens, and an id that does not exist."""
        added = self.tokenizer.tokenizer.get_added_tokens_decoder()
        return {i for i, token in added.items() if token.special} | {max(self.ids) + 7}

    def seen(self, ids: Sequence[int]) -> str:
        """Return the decoded text without incomplete characters at its end."""
        if not self.has_fallback:
            return self.tokenizer.decode(ids).removesuffix("\ufffd")
        ids = [i for i in ids if i not in self.skipped]
        run = len(ids)
        while run and ids[run - 1] in self.byte_of:
            run -= 1
        data = bytes(self.byte_of[i] for i in ids[run:])
        if any(is_utf8(data + rest) for rest in CONTINUATIONS):
            while not is_utf8(data):
                data = data[:-1]
        return self.tokenizer.decode(ids[: run + len(data)])


def is_utf8(data: bytes) -> bool:
    return data.decode(errors="ignore").encode() == data


def make_byte_level(add_prefix_space: bool = False) -> Tokenizer:
    """Return a byte-level tokenizer.

    It has a token for each byte, and tokens of several bytes that begin or end inside characters.
    """
    names = bytes_to_unicode()
    rng = random.Random(0)
    joined = [bytes(rng.choices(BYTES, k=rng.randint(2, 5))) for _ in range(60)]
    tokens = [bytes([byte]) for byte in range(256)] + joined + [b" foo", b"foo"]
    vocab = {"".join(names[byte] for byte in token): i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["<tool>", "ü x"])
    return tokenizer


def make_sentencepiece(*last: decoders.Decoder) -> Tokenizer:
    """Return a tokenizer like Llama 2's. `last` are decoders to add at the end.

    Words begin with ▁. Text without a token of its own is spelled with byte tokens.
    """
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [*"▁abcfos.\ufffd", "fo", "foo", "▁foo", "▁a", "▁▁", "▁s", "a\ufffd", "世"]
    merges = [("f", "o"), ("fo", "o"), ("▁", "foo"), ("▁", "a"), ("▁", "s"), ("▁", "▁")]
    tokenizer = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, merges, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return tokenizer


def make_words(decoder: decoders.Decoder | None) -> Tokenizer:
    """Return a tokenizer of whole words. Its decoder may treat the first word differently."""
    words = ["<s>", "▁", "▁▁", "▁a", "b", "▁c", "##d", "##\ufffd", ".", "n't", "ß▁", "世"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<s>"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def wrap(tokenizer: Tokenizer) -> ChatTokenizer:
    return ChatTokenizer(tokenizer, None, {}, "a test")


def make_case(kind: str) -> Case:
    if kind == "demo":
        tokenizer = load_tokenizer(ROOT / "checkpoints" / "demo-llama")
        assert tokenizer is not None
        names = bytes_to_unicode()
        vocab = tokenizer.tokenizer.get_vocab()
        return Case(tokenizer, [vocab[names[byte]] for byte in range(256)])
    if kind == "byte-level":
        return Case(wrap(make_byte_level()), list(range(256)))
    if kind in ("llama-2", "gemma"):
        last = [decoders.Strip(" ", 1, 0)] if kind == "llama-2" else []
        return Case(wrap(make_sentencepiece(*last)), list(range(2, 258)), has_fallback=True)
    makers = {"metaspace": decoders.Metaspace, "wordpiece": decoders.WordPiece, "none": lambda: 0}
    return Case(wrap(make_words(makers[kind]() or None)))


KINDS = ["demo", "byte-level", "llama-2", "gemma", "metaspace", "wordpiece", "none"]
SPELLED = ["demo", "byte-level", "llama-2", "gemma"]  # those that spell any text


def random_ids(case: Case, rng: random.Random) -> list[int]:
    """Return random ids: words, texts, single bytes, special tokens, and ids that do not exist."""
    ids, skipped = [], sorted(case.skipped)
    for _ in range(rng.randint(1, 8)):
        ids += rng.choices(case.ids, k=rng.randint(0, 3))
        ids += rng.choices(skipped, k=rng.choice([0, 0, 1]))
        if case.byte_ids is not None:
            start = rng.randrange(len(TEXT))
            text = TEXT[start : start + rng.randint(0, 6)]
            if rng.random() < 0.5:
                ids += case.tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
            else:
                ids += [case.byte_ids[byte] for byte in text.encode()]
            ids += [case.byte_ids[b] for b in rng.choices(BYTES, k=rng.choice([0, 0, 1, 4]))]
    return ids or [case.ids[-1]]
