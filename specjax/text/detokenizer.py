"""Finds stop strings in outputs, and the token sequences of bad words.

An output is decoded as it grows. `tokenizers.decoders.DecodeStream` does that, too. But it fails on
byte tokens that do not form a character, and it takes quadratic time over a run of invalid bytes.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from specjax.sampling_params import SamplingParams
from specjax.text.tokenizer import MAX_TOKENS_PER_CHARACTER, REPLACEMENT, ChatTokenizer

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_MAX_WINDOW = 8  # tokens; a shorter window, whose text is known, becomes the next context
TEXT = -1  # the result of `_kind` for a token that has text and is not a byte token


class StopStrings:
    """Watches the output of one request for texts that end it.

    The text of an output is the text that its tokens add to the prompt's text. `context` holds the
    last tokens of the prompt (see `prompt_context`). Bytes that are not UTF-8 become U+FFFD. If
    several tokens spell a character, the last token adds the character. A byte-level tokenizer also
    decodes an incomplete character to U+FFFD. Such a U+FFFD is added only when another token
    follows.

    Stop texts are ignored until the output has `min_tokens` tokens. From then on, a token ends the
    output if a stop text ends in the text that the token adds. If several stop texts end there, the
    one that begins first counts. If several begin there, the longest counts.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        stop: tuple[str, ...],
        *,
        context: Sequence[int] = (),
        min_tokens: int = 0,
        include_in_output: bool = False,
    ):
        self.stop_reason: str | None = None
        self._text = _GrowingText(tokenizer, context)
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self._min_tokens = min_tokens
        self._include_in_output = include_in_output
        self._num_tokens = 0
        self._known = ""  # the stable text that was read before; it only grows

    @property
    def text(self) -> str:
        """The text so far, without an incomplete character.

        If a stop text was found, the text ends before it, or with it if `include_in_output`.
        """
        return "".join(self._text.characters)

    @property
    def stable(self) -> str:
        """The part of the text that no later token can change.

        The end of the text is excluded if a later token could complete a stop text or a character.
        """
        if self.stop_reason is not None:
            return self.text
        fresh = self._text.characters[len(self._known) : self._text.num_stable]
        self._known = text = self._known + "".join(fresh)
        max_held = 0 if self._include_in_output else min(len(text), self._longest - 1)
        held = (n for n in range(max_held, 0, -1) if self._starts_a_stop(text[-n:]))
        return text[: len(text) - next(held, 0)]

    def _starts_a_stop(self, text: str) -> bool:
        return any(word.startswith(text) for word in self._stop)

    def append(self, tokens: Sequence[int]) -> int | None:
        """Append tokens. If one of them completes a stop text, ignore the tokens after it.

        Return the number of tokens up to and including the token that completes a stop text; None
        if no stop text is complete. Do not call this once a stop text was completed.
        """
        assert self.stop_reason is None, "the output has stopped"
        if not self._stop:
            self._text.extend(tokens)
            return None
        for num_kept, token in enumerate(tokens, start=1):
            new = self._text.append(token)
            self._num_tokens += 1
            if self._num_tokens >= self._min_tokens and self._stops(new):
                return num_kept
        return None

    def _stops(self, new: int) -> bool:
        """Return whether a stop text ends after the index `new`.

        If so, set `stop_reason`, and end `text` before the stop text or, if the user asked for
        it, after it.
        """
        if not self._stop:
            return False
        characters = self._text.characters
        first = max(0, new + 1 - self._longest)
        found = find_stop("".join(characters[first:]), self._stop, new - first)
        if found is None:
            return False
        start, self.stop_reason = found
        end = start + len(self.stop_reason) if self._include_in_output else start
        del characters[first + end :]
        return True


def watch_for(
    tokenizer: ChatTokenizer | None, params: SamplingParams, prompt: Sequence[int]
) -> Callable[[], StopStrings] | None:
    """Return a function that creates a `StopStrings` for each sample.

    Return None if the parameters have no stop texts.

    Raises:
        ValueError: there is no tokenizer.
    """
    if not params.stop:
        return None
    if tokenizer is None:
        raise ValueError(
            "stop looks for texts, but the checkpoint has no tokenizer; use stop_token_ids"
        )
    tokenizer = tokenizer.for_outputs(skip_special_tokens=params.skip_special_tokens)
    return partial(
        StopStrings,
        tokenizer,
        tuple(params.stop),
        context=prompt_context(tokenizer, prompt),
        min_tokens=params.min_tokens,
        include_in_output=params.include_stop_str_in_output,
    )


def prompt_context(tokenizer: ChatTokenizer, prompt: Sequence[int]) -> list[int]:
    """Return the last tokens of a prompt, with which the tokens of its output are decoded.

    A SentencePiece decoder omits the space before the first text that it decodes, so the output
    cannot be decoded alone. With SentencePiece, byte tokens at the end of the prompt are left out.
    With other tokenizers, the list is empty if the prompt's text ends with U+FFFD: the prompt may
    then end inside a character.
    """
    end, size = len(prompt), MAX_TOKENS_PER_CHARACTER
    if tokenizer.has_byte_tokens:  # bytes of the output are decoded separately
        while end and _kind(tokenizer, prompt[end - 1]) != TEXT:
            end -= 1
    while size < end and not tokenizer.decode(prompt[end - size : end]).strip(REPLACEMENT):
        size *= 2
    context = list(prompt[max(0, end - size) : end])
    is_complete = tokenizer.has_byte_tokens or not tokenizer.decode(context).endswith(REPLACEMENT)
    return context if is_complete else []


def decode_after(tokenizer: ChatTokenizer, context: Sequence[int], token_ids: Sequence[int]) -> str:
    """Return the text that `token_ids` add to the tokens `context` (see `prompt_context`)."""
    known = tokenizer.decode(context) if context else ""
    return tokenizer.decode([*context, *token_ids])[len(known) :]


def _kind(tokenizer: ChatTokenizer, token: int) -> int | None:
    """Return the byte that a byte token spells, None if `decode` omits the token, else TEXT."""
    name = tokenizer.tokenizer.id_to_token(token)
    if name is None or name in tokenizer.passed_over:
        return None
    byte = BYTE_TOKEN.fullmatch(name) if tokenizer.has_byte_tokens else None
    return TEXT if byte is None else int(byte[1], 16)


def find_stop(text: str, stop: Sequence[str], new: int) -> tuple[int, str] | None:
    """Return the start and the text of the stop text that ends after the index `new` of `text`.

    If several stop texts end there, return the one that begins first. If several begin there,
    return the longest of them. If no stop text ends there, return None.
    """
    found = [(text.find(word, max(0, new + 1 - len(word))), word) for word in stop]
    return min(
        (match for match in found if match[0] >= 0),
        key=lambda match: (match[0], -len(match[1])),
        default=None,
    )


def bad_word_ids(tokenizer: ChatTokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return token sequences that spell each word at the start of a text and after a space.

    If one sequence ends with another sequence, only the shorter is returned: forbidding the shorter
    also forbids the longer.

    Raises:
        ValueError: a word has no tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}  # a set that keeps the order
    for word in words:
        bare = word.lstrip(" ") or word
        for text in bare, " " + bare:
            ids = tuple(tokenizer.tokenizer.encode(text, add_special_tokens=False).ids)
            if not ids:
                raise ValueError(
                    f"bad_words has {word!r}, for which the tokenizer of {tokenizer.origin} has "
                    "no tokens; leave it out"
                )
            sequences[ids] = None
    lengths = {len(ids) for ids in sequences}
    return tuple(
        ids
        for ids in sequences
        if not any(ids[-size:] in sequences for size in lengths if size < len(ids))
    )


@dataclass
class _ByteRun:
    """A run of byte tokens. If their bytes are not UTF-8, each byte is decoded to U+FFFD."""

    start: int  # index of the run's first character
    length: int = 0
    is_valid: bool = True
    # Tokens and bytes of the incomplete character at the run's end, if there is one.
    incomplete: list[tuple[int, int]] = field(default_factory=list)


class _GrowingText:
    """Computes `tokenizer.decode` of tokens that arrive one at a time, in linear time.

    Each token is decoded together with only the last few tokens before it, because earlier tokens
    do not change the text that the token adds. SentencePiece's byte tokens are an exception: one
    invalid byte changes the characters of the whole run of byte tokens around this byte. Therefore
    this class tracks these runs.
    """

    def __init__(self, tokenizer: ChatTokenizer, context: Sequence[int]):
        self.characters: list[str] = []
        self._tokenizer = tokenizer
        self._has_byte_tokens = tokenizer.has_byte_tokens
        self._context = list(context)
        self._context_text = self._stable(self._context) if context else ""
        self._run: _ByteRun | None = None

    @property
    def num_stable(self) -> int:
        """The number of characters that no later token can change.

        If the text ends with a run of valid byte tokens, the run's characters are not counted: a
        later invalid byte would turn all of them into U+FFFD.
        """
        if self._run is None or not self._run.is_valid:
            return len(self.characters)
        return self._run.start

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. Unless the tokenizer has byte tokens, decode all tokens in one call."""
        if self._has_byte_tokens:
            for token in tokens:
                self.append(token)
        elif shown := [token for token in tokens if _kind(self._tokenizer, token) is not None]:
            self._decode(shown)

    def append(self, token: int) -> int:
        """Append a token. Return the index of the first character that it adds or changes."""
        kind = _kind(self._tokenizer, token)
        if kind is None:
            return len(self.characters)
        if kind != TEXT:
            return self._append_byte(token, kind)
        run, self._run = self._run, None
        new = self._undo(run) if run and run.incomplete else len(self.characters)
        self._decode([token])
        return new

    def _append_byte(self, token: int, byte: int) -> int:
        new = len(self.characters)
        self._run = run = self._run or _ByteRun(start=new)
        run.length += 1
        if not run.is_valid:
            self.characters.append(REPLACEMENT)
            return new
        run.incomplete.append((token, byte))
        try:
            bytes(
                byte for _, byte in run.incomplete
            ).decode()  # codecs' incremental decoder reports some errors late
        except UnicodeDecodeError as error:
            return new if error.reason == "unexpected end of data" else self._undo(run)
        self._decode([token for token, _ in run.incomplete])
        run.incomplete = []
        return new

    def _undo(self, run: _ByteRun) -> int:
        self.characters[run.start :] = REPLACEMENT * run.length
        self._set_context([run.incomplete[-1][0]])  # any token of the run works
        run.incomplete, run.is_valid = [], False
        return run.start

    def _decode(self, tokens: list[int]) -> None:
        """Append the text of `tokens`: either text tokens, or one character's byte tokens."""
        window = self._context + tokens
        text = self._stable(window)
        self.characters += text[len(self._context_text) :]
        # A byte run in the context must begin with a character; elsewhere decode resynchronizes.
        if self._has_byte_tokens:
            self._set_context(tokens)
        elif len(window) >= _MAX_WINDOW:
            self._set_context(window[-MAX_TOKENS_PER_CHARACTER:])
        else:
            self._context, self._context_text = window, text

    def _set_context(self, tokens: list[int]) -> None:
        self._context, self._context_text = tokens, self._stable(tokens)

    def _stable(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens)
        return text if self._has_byte_tokens else text.removesuffix(REPLACEMENT)
