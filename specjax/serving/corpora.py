"""Corpora: texts that an engine drafts from, added and removed while it runs."""

import asyncio
from collections.abc import Sequence
from typing import Any

from specjax.checks import is_integer
from specjax.host.drafts.sources import Corpora
from specjax.sampling_params import check_text
from specjax.text.tokenizer import ChatTokenizer


def read_corpus(
    name: str, texts: Any, tokenizer: ChatTokenizer | None, vocab_size: int
) -> list[list[int]]:
    """Return the texts of the corpus `name` as lists of token ids.

    Raises:
        ValueError: the name is empty or not a text, `texts` is malformed, has unknown token ids or
            has no tokens, or a text needs a tokenizer.
    """
    where = f"corpus {name!r}"
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: its name must be a text")
    if isinstance(texts, str | bytes) or not isinstance(texts, Sequence) or not texts:
        raise ValueError(f"{where}: texts={texts!r:.60} must be a list of texts or of token ids")
    tokens = [
        _tokens_of(f"{where}, text {i}", text, tokenizer, vocab_size)
        for i, text in enumerate(texts)
    ]
    if not any(tokens):  # a single text without tokens, like an empty file among others, is fine
        raise ValueError(f"{where}: texts={texts!r:.60} have no tokens; give texts to draft from")
    return tokens


def corpora_of(engine: Any) -> list[Corpora]:
    """Return the corpora of each replica of an engine.

    Raises:
        ValueError: the engine does not draft from texts.
    """
    found = [one.scheduler.suggester.named(Corpora.name) for one in engine.engines]
    if None in found:
        raise ValueError(
            "this engine does not draft from texts; build it with "
            'speculative_config={"method": "suffix", ...}, or {..., "with": ["suffix"]}'
        )
    return found


def _tokens_of(
    where: str, text: Any, tokenizer: ChatTokenizer | None, vocab_size: int
) -> list[int]:
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError(f"{where} is a text, and there is no tokenizer; give token ids")
        check_text(where, text)
        return list(tokenizer.encode(text, add_special_tokens=False))
    if isinstance(text, bytes | bytearray | memoryview):
        raise ValueError(f"{where} is bytes; decode them to text, as with .decode('utf-8')")
    if not isinstance(text, Sequence) and not getattr(text, "ndim", 0):  # an array has dimensions
        raise ValueError(f"{where}: {text!r:.60} must be a list of token ids, or a string")
    tokens = text if isinstance(text, Sequence) else text.tolist()
    for token in tokens:
        if not is_integer(token) or not 0 <= token < vocab_size:
            raise ValueError(
                f"{where}: {token!r:.60} must be a token id in 0..{vocab_size - 1}, or the text "
                "a string"
            )
    return list(map(int, tokens))


class CorpusMethods:
    """Methods of an `LLM` that add and remove texts to draft from."""

    engine: Any
    target: Any
    tokenizer: ChatTokenizer | None
    _lock: Any
    _check_open: Any

    def add_corpus(self, name: str, texts: Sequence[str | Sequence[int]]) -> None:
        """Add a corpus: texts, or lists of token ids, from which drafts can be copied.

        This helps if outputs quote the texts, for example code. Corpora do not change outputs. A
        token takes about 350 bytes of host memory.

        Raises:
            ValueError: the engine does not draft from texts, the name is empty or in use, `texts`
                is malformed, has unknown token ids or has no tokens, or a text needs a tokenizer.
        """
        self._index_corpus(name, self._read_corpus(name, texts))

    def _read_corpus(self, name: str, texts: Any) -> list[list[int]]:
        """Return the tokens of a corpus. For errors, see `add_corpus`."""
        self._check_open()
        corpora_of(self.engine)  # no texts are read for an engine that cannot use them
        return read_corpus(name, texts, self.tokenizer, self.target.vocab_size)

    def _index_corpus(self, name: str, tokens: list[list[int]]) -> None:
        """Add a corpus. `tokens` is a result of `_read_corpus`. Meanwhile, no step is planned."""
        with self._lock:
            self._check_open()
            for corpora in corpora_of(self.engine):
                corpora.add(name, tokens)

    def remove_corpus(self, name: str) -> None:
        """Remove a corpus.

        All other corpora are indexed again, which takes about a second per million tokens.

        Raises:
            ValueError: the engine does not draft from texts, or there is no corpus of this name.
        """
        with self._lock:
            self._check_open()
            for corpora in corpora_of(self.engine):
                corpora.remove(name)


class AsyncCorpusMethods:
    """The methods of `CorpusMethods` for an `AsyncLLM`."""

    apply: Any
    _llm: Any

    async def add_corpus(self, name: str, texts: Sequence[str | Sequence[int]]) -> None:
        """See `LLM.add_corpus`.

        Requests run while the texts are tokenised. Requests wait while the tokens are indexed,
        which takes about a second per million tokens.
        """
        tokens = await asyncio.to_thread(self._llm._read_corpus, name, texts)
        await asyncio.wrap_future(self.apply(lambda llm: llm._index_corpus(name, tokens)))

    async def remove_corpus(self, name: str) -> None:
        """See `LLM.remove_corpus`."""
        await asyncio.wrap_future(self.apply(lambda llm: llm.remove_corpus(name)))
