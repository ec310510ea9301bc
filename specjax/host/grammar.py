"""Computes which tokens may come next in a constrained output: wraps llguidance.

The engine sees token ids and bit masks; parsers, byte tries and JSON schemas stay in this file.
llguidance is the optional extra `structured`, so it is imported when the first grammar is compiled.

Three things are done here instead of by llguidance (1.9.1). Ends of sequence: llguidance gets an
artificial end token, which masks replace with the model's own, so that a model may have several,
none, or one that reads as text. Drafts: they are tried on a copy, because llguidance's `rollback`
keeps an outdated mask and refuses some grammars. Spelling: where a grammar forces a text,
llguidance allows only the tokenizer's own spelling, which turns a "</s>" in the text into the end
of the sequence; here any tokens that spell the text are allowed.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.sampling_params import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED_GRAMMARS = 256
# The format of json.dumps; a schema may change it in its "x-guidance".
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY_SPELLING = '\n%llguidance {"no_forcing": true}\n'
DOCS = "https://github.com/guidance-ai/llguidance/blob/main/docs"
REMEDIES = {
    "json": f"correct the schema; {DOCS}/json_schema.md says what is supported",
    "regex": "correct it; the syntax is Rust's: no look-around, no back-references",
    "choice": "list texts that the model's tokens can spell",
    "grammar": f"correct it; {DOCS}/syntax.md describes the syntax",
}


@dataclass(frozen=True, eq=False)
class GrammarVocabulary:
    """A tokenizer as llguidance reads it, and masks of a model's tokens, W words of 32 bits.

    llguidance never treats special tokens as text: a grammar has to name them.
    """

    tokenizer: "LLTokenizer"
    end: int  # llguidance's artificial end token, the first id past the tokenizer's
    eos_ids: frozenset[int]
    text: np.ndarray  # i32[W], tokens of the model that do not end a sequence
    ends: np.ndarray  # i32[W], the model's ends of sequence

    def read(self, state: "LLMatcher") -> tuple[np.ndarray, bool]:
        """Return the text tokens that may come next, i32[W], and whether the output may end.

        If llguidance's limits are used up: no token, and False.
        """
        bits = np.frombuffer(state.compute_bitmask(), np.dtype("<i4"))
        text = np.zeros_like(self.text)
        if state.is_error():
            return text, False
        text[: len(bits)] = bits[: len(text)]
        return text & self.text, is_set(bits, self.end)


class GrammarCompiler:
    """Compiles grammars of outputs; equal ones are compiled once.

    Without `eos_ids` an output ends when the grammar allows no further token; with a grammar that
    always allows more (a+) it runs to the request's token limit.

    Args:
        tokenizer_json: the tokenizer, as `tokenizers.Tokenizer.to_str` writes it.
        vocab_size: size of the model's logits; ids that the tokenizer lacks are never allowed.
        eos_ids: end-of-sequence ids; any of them may end an output, none can be part of its text.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: tuple[int, ...]):
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._cached = lru_cache(MAX_CACHED_GRAMMARS)(_compile)

    def compile(self, outputs: StructuredOutputs) -> "Grammar":
        """Return the grammar of `outputs`.

        Raises:
            ValueError: llguidance is not installed, or cannot read the tokenizer or the grammar; no
                output fits; no token of the model can start an output.
        """
        vocabulary = self._vocabulary
        name, value = next((n, v) for n, v in vars(outputs).items() if v is not None)
        try:
            lark = _as_lark(name, value)
            lark.encode()
            grammar = self._cached(vocabulary, lark)
            if grammar.is_exhausted:
                self._cached.cache_clear()
                grammar = self._cached(vocabulary, lark)
        except (TypeError, ValueError) as error:
            shown = repr(value) if len(repr(value)) <= 200 else f"{repr(value)[:200]}..."
            reason = str(error) if name == "grammar" else str(error).removeprefix("at 1(8): ")
            raise ValueError(
                f"structured_outputs.{name}={shown} cannot be followed: {reason}; {REMEDIES[name]}"
            ) from error
        return grammar

    @cached_property
    def _vocabulary(self) -> GrammarVocabulary:
        try:
            import llguidance
        except ImportError as error:
            raise ValueError(
                "structured_outputs needs llguidance, which is not installed; "
                "pip install 'specjax[structured]'"
            ) from error
        document = json.loads(self._tokenizer_json)
        names = document["model"]["vocab"]  # a mapping, or pairs of name and score
        names = {name if isinstance(name, str) else name[0] for name in names}
        end = len(names.union(token["content"] for token in document["added_tokens"]))
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = {"id": end, "content": "<|end of the grammar|>", "special": True, **flags}
        document["added_tokens"].append(added)
        try:
            tokenizer = llguidance.LLTokenizer(json.dumps(document), eos_token=end)
        except ValueError as error:
            raise ValueError(
                f"structured_outputs does not work with this model's tokenizer: {error}; use a "
                "model whose tokenizer is byte-level or falls back to bytes"
            ) from error
        eos_ids = frozenset(id for id in self._eos_ids if 0 <= id < self._vocab_size)
        ids = np.arange(-(-self._vocab_size // 32) * 32)
        is_eos = np.isin(ids, list(eos_ids))
        is_text = (ids < min(self._vocab_size, end)) & ~is_eos
        return GrammarVocabulary(tokenizer, end, eos_ids, _pack(is_text), _pack(is_eos))


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar, shared by its requests."""

    _root: "LLMatcher"
    _vocabulary: GrammarVocabulary

    def matcher(self) -> "GrammarMatcher":
        """Return a matcher at the start of an output."""
        return GrammarMatcher(self._root.deep_copy(), self._vocabulary)

    @property
    def first(self) -> np.ndarray:
        """The tokens that may come first, i32[ceil(V/32)]; see `GrammarMatcher.masks`."""
        return self.matcher().masks(())[0]

    @property
    def is_exhausted(self) -> bool:
        """Whether llguidance's limits, which all matchers share, are used up for good."""
        probe = self._root.deep_copy()
        probe.compute_bitmask()
        return probe.is_error()


class GrammarMatcher:
    """The position of one output in its grammar. Masks are computed on demand, never cached."""

    def __init__(self, state: "LLMatcher", vocabulary: GrammarVocabulary):
        self._state = state
        self._vocabulary = vocabulary
        self._has_ended = False

    @property
    def is_finished(self) -> bool:
        """Whether the output ended, or is complete and the model has no end of sequence."""
        if self._has_ended or self._vocabulary.eos_ids:
            return self._has_ended
        return self._legal(self._state) is None

    @property
    def dead_end(self) -> str | None:
        """The reason why no token may come next; None if one may."""
        text, may_end = self._vocabulary.read(self._state)
        return None if may_end or text.any() else _reason(self._state)

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by committed tokens; those after the end of the output are ignored.

        Raises:
            ValueError: the masks forbid a token.
        """
        for token in tokens:
            if self._has_ended:
                return
            if token in self._vocabulary.eos_ids:
                self._has_ended = True
            elif self._state.is_stopped() and not self._vocabulary.eos_ids:
                self._has_ended = True
            elif not self._state.consume_token(int(token)):
                raise ValueError(f"structured_outputs: token {token} is not allowed there")

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """Return masks of the tokens allowed at each position of a round, i32[len(drafts) + 1, W].

        Bit v % 32 of word v // 32 in row i is set iff token v may follow drafts[:i]; no bit is set
        if no token of the model fits, or llguidance's limits are used up. Rows after a draft that
        is illegal or ends the output are never used; they are all ones. A draft of -1 means no
        draft.
        """
        rows = np.full((len(drafts) + 1, len(self._vocabulary.text)), -1, np.int32)
        if self._has_ended:
            return rows
        state = self._state
        for row, draft in zip(rows, [*drafts, -1], strict=True):
            legal = self._legal(state)
            if legal is None:
                break
            row[:] = legal
            if not is_set(legal, draft) or draft in self._vocabulary.eos_ids:
                break
            if state is self._state:
                state = state.deep_copy()
            state.consume_token(int(draft))
        return rows

    def _legal(self, state: "LLMatcher") -> np.ndarray | None:
        """Return the allowed next tokens, i32[W]; None if complete and the model has no ends."""
        text, may_end = self._vocabulary.read(state)
        if may_end and not (self._vocabulary.eos_ids or text.any()):
            return None
        return text | self._vocabulary.ends if may_end else text


def is_set(words: np.ndarray, token: int) -> bool:
    """Return whether the bit of a token is set in a mask i32[W]."""
    return 0 <= token < 32 * len(words) and bool(words[token // 32] >> (token % 32) & 1)


def _pack(bits: np.ndarray) -> np.ndarray:
    return np.packbits(bits, bitorder="little").view(np.dtype("<i4")).astype(np.int32)


def _compile(vocabulary: GrammarVocabulary, lark: str) -> Grammar:
    import llguidance

    limits = llguidance.LLParserLimits(verbose_errors=False)
    root = llguidance.LLMatcher(
        vocabulary.tokenizer, lark + ANY_SPELLING, log_level=0, limits=limits
    )
    text, may_end = vocabulary.read(root)
    can_start = text.any() or (may_end and vocabulary.ends.any())
    if root.is_error() or not can_start:
        raise ValueError(_reason(root))
    return Grammar(root, vocabulary)


def _as_lark(name: str, value: Any) -> str:
    """Return the value of a field as a grammar in llguidance's Lark."""
    if name == "grammar":
        return value
    if name == "json":
        return f"start: %json {_styled_schema(value)}"
    if name == "choice":
        value = "|".join("".join(map(_as_regex, text)) for text in value)
    import llguidance

    return f"start: /{llguidance.regex_to_lark(value)}/"


def _as_regex(char: str) -> str:
    return char if char.isalnum() or ord(char) > 127 else f"\\x{{{ord(char):x}}}"


def _styled_schema(schema: Any) -> str:
    schema = json.loads(schema) if isinstance(schema, str) else dict(schema)
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise ValueError(f"{schema!r} is neither an object nor a boolean")
    style = schema.get("x-guidance", {})
    if isinstance(style, dict):
        schema["x-guidance"] = JSON_STYLE | style
    # The order of keys is kept: it is the order in which properties are generated.
    return json.dumps(schema, allow_nan=False)


def _reason(state: "LLMatcher") -> str:
    """Return why no token can follow, without the state and source that llguidance appends."""
    error = re.split(r"\n(?:<non-verbose/>| +\d+ \| )", state.get_error())[0].strip()
    return "no token of the model fits" if error in ("", "NoExtensionBias") else error
