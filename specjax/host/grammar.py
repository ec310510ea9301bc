"""Wraps llguidance, which computes the tokens that may come next in a constrained output.

The engine sees only token ids and bit masks. Parsers, byte tries and JSON schemas stay in this
file. llguidance is the optional extra `structured`, so it is imported when the first grammar is
compiled.

Three tasks are done here because llguidance 1.9.1 does not do them as needed:

- Ends of sequence: llguidance gets an artificial end token. In masks, it is replaced with the
  model's end-of-sequence tokens. So a model may have several such tokens, none, or one that also
  spells a text.
- Drafts: each draft is tried on a copy of the state, because llguidance's `rollback` keeps an
  outdated mask and refuses some grammars.
- Spelling: where a grammar forces a text, llguidance allows only the tokens that the tokenizer
  makes from the text. A "</s>" in the text would then end the sequence. Here, any tokens that spell
  the text are allowed.
"""

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.host.lark import structural_tags, styled_schema
from specjax.sampling_params import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED_GRAMMARS = 256
ANY_SPELLING = '\n%llguidance {"no_forcing": true}\n'
DOCS = "https://github.com/guidance-ai/llguidance/blob/main/docs"
REMEDIES = {
    "json": f"correct the schema; {DOCS}/json_schema.md says what is supported",
    "regex": "correct it; the syntax is Rust's: no look-around, no back-references",
    "choice": "list texts that the model's tokens can spell",
    "grammar": f"correct it; {DOCS}/syntax.md describes the syntax",
    "structural_tag": f"correct its schemas; {DOCS}/json_schema.md says what is supported",
}


@dataclass(frozen=True, eq=False)
class GrammarVocabulary:
    """A tokenizer in llguidance's form, and masks of a model's tokens.

    A mask has W words of 32 bits. llguidance does not treat special tokens as text. So a grammar
    allows a special token only where it names this token.
    """

    tokenizer: "LLTokenizer"
    end: int  # the artificial end token: the first id after the tokenizer's ids
    eos_ids: frozenset[int]
    text: np.ndarray  # i32[W], mask of the model's tokens that do not end a sequence
    ends: np.ndarray  # i32[W], mask of the model's end-of-sequence tokens

    def read(self, state: "LLMatcher") -> tuple[np.ndarray, bool]:
        """Return a mask of the text tokens that can come next, and whether the output can end.

        The mask i32[W] has a bit for each token, in W words of 32 bits. If llguidance's limits are
        used up, no bit is set and the output cannot end.
        """
        bits = np.frombuffer(state.compute_bitmask(), np.dtype("<i4"))
        text = np.zeros_like(self.text)
        if state.is_error():
            return text, False
        text[: len(bits)] = bits[: len(text)]
        return text & self.text, is_set(bits, self.end)


class GrammarCompiler:
    """Compiles grammars that constrain outputs. Equal grammars are compiled once.

    If `eos_ids` is empty, an output ends when its grammar allows no further token. If the grammar
    always allows another token (like a+), the output runs to the request's token limit.

    Args:
        tokenizer_json: the tokenizer, as `tokenizers.Tokenizer.to_str` writes it.
        vocab_size: size of the model's logits. Token ids that the tokenizer lacks are never
            allowed.
        eos_ids: end-of-sequence ids. Any of them may end an output, and none can be part of its
            text.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: tuple[int, ...]):
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._cached = lru_cache(MAX_CACHED_GRAMMARS)(_compile)

    def compile(self, outputs: StructuredOutputs) -> "Grammar":
        """Return the compiled grammar for the constraint `outputs`.

        Raises:
            ValueError: llguidance is not installed, llguidance cannot read the tokenizer or the
                grammar, no output matches the grammar, or no token of the model can start an
                output.
        """
        vocabulary = self._vocabulary
        name, value = next((n, v) for n, v in vars(outputs).items() if v is not None)
        try:
            lark = _as_lark(name, value, self._special_ids)
            lark.encode()
            grammar = self._cached(vocabulary, lark)
            if grammar.is_exhausted:
                self._cached.cache_clear()
                grammar = self._cached(vocabulary, lark)
        except (TypeError, ValueError) as error:
            shown = _shortened(value)
            reason = str(error) if name == "grammar" else str(error).removeprefix("at 1(8): ")
            raise ValueError(
                f"structured_outputs.{name}={shown} cannot be followed: {reason}; {REMEDIES[name]}"
            ) from error
        return grammar

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        added = json.loads(self._tokenizer_json)["added_tokens"]
        return {token["content"]: token["id"] for token in added if token["special"]}

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
        _fill_gaps(document)
        names = document["model"]["vocab"]  # a mapping, or pairs of name and score
        names = {name if isinstance(name, str) else name[0] for name in names}
        end = len(names.union(token["content"] for token in document["added_tokens"]))
        document["added_tokens"].append(_special(end, "<|end of the grammar|>"))
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


def _fill_gaps(document: dict[str, Any]) -> None:
    """Add a special token for each id that a tokenizer's vocabulary lacks.

    llguidance assumes that the ids are 0 to the number of tokens minus 1. If n ids were missing, it
    would ignore the n largest ids. Special tokens are never text, so no grammar allows the added
    tokens.
    """
    vocab = document["model"]["vocab"]
    if not isinstance(vocab, dict):  # pairs, whose ids are their places
        return
    known = set(vocab.values())
    for missing in sorted(set(range(max(known, default=-1))) - known):
        name = f"<|missing-{missing}|>"
        vocab[name] = missing
        document["added_tokens"].append(_special(missing, name))


def _special(token: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": content, "special": True, **flags}


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar, shared by the requests that use it."""

    _root: "LLMatcher"
    _vocabulary: GrammarVocabulary

    def matcher(self) -> "GrammarMatcher":
        """Return a matcher for a new output."""
        return GrammarMatcher(self._root.deep_copy(), self._vocabulary)

    @property
    def first(self) -> np.ndarray:
        """A mask i32[ceil(V/32)] of the tokens that may come first (see `GrammarMatcher.masks`)."""
        return self.matcher().masks(())[0]

    @property
    def is_exhausted(self) -> bool:
        """Whether the grammar has used up llguidance's limits on work, which all matchers share."""
        probe = self._root.deep_copy()
        probe.compute_bitmask()
        return probe.is_error()


class GrammarMatcher:
    """Tracks the position of one output in its grammar, and computes masks from there."""

    def __init__(self, state: "LLMatcher", vocabulary: GrammarVocabulary):
        self._state = state
        self._vocabulary = vocabulary
        self._has_ended = False

    @property
    def is_finished(self) -> bool:
        """Whether the output has ended.

        If the model has no end-of-sequence tokens, an output has also ended if it is complete and
        no token can follow it.
        """
        if self._has_ended or self._vocabulary.eos_ids:
            return self._has_ended
        return self._legal(self._state) is None

    @property
    def dead_end(self) -> str | None:
        """The reason why the output is stuck (it can neither continue nor end), or None."""
        text, may_end = self._vocabulary.read(self._state)
        return None if may_end or text.any() else _reason(self._state)

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by committed tokens. Tokens after the end of the output are ignored.

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

        A mask has W words of 32 bits. In row i, bit v % 32 of word v // 32 is set if token v may
        follow drafts[:i]. A draft of -1 means that there is no draft.

        A row has no bit set if no token of the model fits, or if llguidance's limits are used up.
        Rows after a draft that is illegal or ends the output are never used, and have all bits set.
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
        """Return a mask i32[W] of the tokens that may come next, with W words of 32 bits.

        Return None if the output is complete, no text can follow it, and the model has no
        end-of-sequence tokens.
        """
        text, may_end = self._vocabulary.read(state)
        if may_end and not (self._vocabulary.eos_ids or text.any()):
            return None
        return text | self._vocabulary.ends if may_end else text


def is_set(words: np.ndarray, token: int) -> bool:
    """Return whether the bit of `token` is set in the mask `words`, an array of 32-bit words."""
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


def _as_lark(name: str, value: Any, special_ids: Mapping[str, int]) -> str:
    """Return a field of `StructuredOutputs` as a grammar in llguidance's Lark syntax.

    `name` and `value` are the field's name and value.
    """
    if name == "grammar":
        return value
    if name == "structural_tag":
        return structural_tags(value, special_ids)
    if name == "json":
        return f"start: %json {styled_schema(value)}"
    if name == "choice":
        value = "|".join("".join(map(_as_regex, text)) for text in value)
    import llguidance

    return f"start: /{llguidance.regex_to_lark(value)}/"


def _shortened(value: Any) -> str:
    """Return the beginning of `repr(value)`, or less if the value is nested too deeply for it."""
    try:
        text = repr(value)
    except RecursionError:
        text = reprlib.repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _as_regex(char: str) -> str:
    return char if char.isalnum() or ord(char) > 127 else f"\\x{{{ord(char):x}}}"


def _reason(state: "LLMatcher") -> str:
    """Return llguidance's reason why no token can follow.

    llguidance's message also contains its state and the grammar's source. Both are left out.
    """
    error = re.split(r"\n(?:<non-verbose/>| +\d+ \| )", state.get_error())[0].strip()
    return "no token of the model fits" if error in ("", "NoExtensionBias") else error
