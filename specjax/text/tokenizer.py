"""Converts text to token ids and back, for checkpoints with a tokenizer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer, pre_tokenizers

from specjax.checkpoint.config_json import read_json
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.tokenizer_files import read_tokenizer
from specjax.checks import check_flags
from specjax.sampling_params import MAX_STOP_IDS
from specjax.text.chat_template import DEFAULT, TOOL_USE, cut_after_last, read_templates, render
from specjax.text.tokenizer_names import TokenizerNames

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_TOKENS_PER_CHARACTER = 4  # UTF-8 has at most 4 bytes, and a token at least 1
_LONG = 2**12  # characters of a text, or tokens
_CHARACTERS_PER_TOKEN = 16  # more than texts of any language have on average


@dataclass(frozen=True)
class ChatTokenizer(TokenizerNames):
    """A tokenizer and its checkpoint's chat templates, if there are any."""

    tokenizer: Tokenizer
    template: str | None  # the default chat template
    special_tokens: Mapping[str, str]  # bos_token, eos_token, ...
    origin: str
    skips_special_tokens: bool = True  # default of `decode`
    named_templates: Mapping[str, str] = field(default_factory=dict)  # other chat templates
    response_template: Any = None  # how responses are read; None if the checkpoint does not say

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of a text. While a long text is encoded, other threads can run.

        With `add_special_tokens`, the ids include the special tokens that the model expects in a
        prompt.

        Raises:
            ValueError: a part of the text has more than twice `max_tokens` tokens. So a text that
                is much too long is refused without encoding all of it.
        """
        if max_tokens is not None:
            self._check_length(text, max_tokens)
        return self._encode(text, add_special_tokens).ids

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        if len(text) < _LONG:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        # Only the methods for batches release Python's lock.
        (found,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return found

    def _check_length(self, text: str, max_tokens: int) -> None:
        size = _CHARACTERS_PER_TOKEN * max_tokens
        while size < len(text):
            # Cut within a word, a part may have a few other tokens than in the whole text.
            if len(self._encode(text[:size], False)) > 2 * max_tokens:
                raise ValueError(
                    f"the text has more than {2 * max_tokens} tokens, and at most {max_tokens} fit"
                )
            size *= 2

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None) -> str:
        """Return the text of token ids.

        If `skip_special_tokens` is None, the attribute `skips_special_tokens` is used instead.
        """
        skips = self.skips_special_tokens if skip_special_tokens is None else skip_special_tokens
        if len(token_ids) < _LONG:
            return self.tokenizer.decode(list(token_ids), skip_special_tokens=skips)
        # Only this method releases Python's lock.
        return self.tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skips)[0]

    def for_outputs(self, *, skip_special_tokens: bool) -> "ChatTokenizer":
        """Return a tokenizer whose `decode` has `skip_special_tokens` as its default."""
        if skip_special_tokens == self.skips_special_tokens:
            return self
        return replace(self, skips_special_tokens=skip_special_tokens)

    @cached_property
    def passed_over(self) -> frozenset[str]:
        """The names of the tokens that `decode` omits."""
        if not self.skips_special_tokens:
            return frozenset()
        added = self.tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @cached_property
    def has_byte_tokens(self) -> bool:
        """Whether tokens like <0x0A> are decoded as bytes, as in SentencePiece."""
        decoder = self.tokenizer.decoder
        return decoder is not None and decoder.decode(["<0x41>"]) == "A"

    def decode_token(self, token_id: int, before: Sequence[int] = ()) -> str:
        """Return the text of one token as in vLLM's logprobs. Special tokens have a text, too.

        If several tokens form a character, the last of them has the character as its text, and the
        text of the others is empty. `before` are the previous tokens. Only the last
        `MAX_TOKENS_PER_CHARACTER` of them matter.
        """
        text = self._decode_all([token_id])
        if self._space is not None:
            name = self.tokenizer.id_to_token(token_id) or ""
            num_missing = _count_leading(name, self._space) - _count_leading(text, " ")
            text = " " * num_missing + text
        if not text.endswith(REPLACEMENT):
            return text
        for count in range(1, min(len(before), MAX_TOKENS_PER_CHARACTER) + 1):
            context = list(before[-count:])
            whole = self._decode_all([*context, token_id])
            if not whole.endswith(REPLACEMENT):
                while context and self._decode_all(context[-1:]).endswith(REPLACEMENT):
                    del context[-1]  # parts of the character, without text
                return whole[len(commonprefix([self._decode_all(context), whole])) :]
        return ""

    @cached_property
    def _space(self) -> str | None:
        """The character that replaces spaces in token names, as in SentencePiece.

        None if the tokenizer does not replace spaces.
        """
        found = self.tokenizer.pre_tokenizer
        steps = found if isinstance(found, pre_tokenizers.Sequence) else [found]
        return next((s.replacement for s in steps if isinstance(s, pre_tokenizers.Metaspace)), None)

    def _decode_all(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        max_seconds: float = math.inf,
        **variables: Any,
    ) -> Any:
        """Render a conversation in the form that the model expects.

        Return token ids, or the text if `tokenize` is False.

        Args:
            add_generation_prompt: whether to end with the beginning of the assistant's turn.
            continue_final_message: whether to end with the content of the last message, which the
                model then continues.
            tools: functions that the model may call, as JSON schemas. With tools, the default
                template is tool_use, if the checkpoint has a template with this name.
            chat_template: a template in Jinja, or the name of a template in the checkpoint.
            max_seconds: the maximum time to render the text.
            variables: further variables of the template, like enable_thinking.

        Raises:
            CheckpointError: there is no chat template.
            ValueError: the template is malformed, refuses the messages or takes too long, or
                arguments are not True or False, or contradict each other.
        """
        check_flags(
            tokenize=tokenize,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        template = self.find_template(chat_template, has_tools=tools is not None)
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "continue_final_message=True goes with add_generation_prompt=False: the last "
                "message is continued, and no new one begins"
            )
        variables = {**self.special_tokens, **variables}
        try:
            text = render(
                template,
                messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                max_seconds=max_seconds,
                **variables,
            )
        except Exception as error:  # a template may raise anything
            if template != chat_template:
                raise ValueError(f"the chat template of {self.origin} failed: {error}") from error
            # Without its text, which a server's clients would see: it may be the operator's.
            raise ValueError(
                "the chat template given as chat_template failed; mend it, or the messages: "
                f"{error}"
            ) from error
        if continue_final_message:
            text = cut_after_last(text, messages)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def has_templates(self) -> bool:
        """Whether there is a chat template, named or default."""
        return self.template is not None or bool(self.named_templates)

    def find_template(self, chosen: str | None, *, has_tools: bool) -> str:
        """Return the text of a chat template.

        `chosen` is the name of a template, the text of a template, or None for the default. With
        `has_tools`, the default is the template tool_use, if the checkpoint has it.

        Raises:
            CheckpointError: there is no chat template, or no default template.
            ValueError: `chosen` is neither a name nor a template.
        """
        named = dict(self.named_templates)
        if self.template is not None:
            named[DEFAULT] = self.template
        listed = ", ".join(sorted(named)) or "none"
        if chosen is None:
            names = [name for name in (TOOL_USE, DEFAULT)[not has_tools :] if name in named]
            if names:
                return named[names[0]]
            if not named:
                raise CheckpointError(
                    f"{self.origin} has no chat template; use generate with a prompt of your own "
                    "format"
                )
            raise CheckpointError(
                f"{self.origin} has several chat templates and none is the default; pass "
                f"chat_template with one of the names {listed}"
            )
        if not isinstance(chosen, str):
            raise ValueError(f"chat_template={chosen!r} must be a Jinja template, as text")
        if chosen and chosen not in named and "{" not in chosen:
            raise ValueError(
                f"chat_template={chosen!r} is neither a Jinja template nor the name of one in "
                f"{self.origin}, which has: {listed}; pass one of them, or a text"
            )
        return named.get(chosen, chosen)


def load_tokenizer(folder: Path) -> ChatTokenizer | None:
    """Load the tokenizer of a checkpoint folder, or return None if it has none.

    Raises:
        CheckpointError: a tokenizer file cannot be read.
    """
    stored = read_tokenizer(folder)
    if stored is None:
        if (folder / "tokenizer.model").exists():
            raise CheckpointError(
                f"{folder} has a tokenizer.model (sentencepiece) and no tokenizer.json, which is "
                "read here; make one, with transformers and sentencepiece installed: "
                f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
            )
        return None
    named = read_templates(folder, stored.config)
    return ChatTokenizer(
        stored.tokenizer,
        named.pop(DEFAULT, None),
        stored.special_tokens,
        str(folder),
        named_templates=named,
        response_template=stored.config.get("response_template"),
    )


def read_eos_ids(folder: Path, tokenizer: ChatTokenizer | None) -> tuple[int, ...]:
    """Return the end-of-sequence ids of a checkpoint.

    They are the ids in generation_config.json (or, if this file has none, in config.json), and the
    id of the tokenizer's end-of-sequence token.

    Raises:
        CheckpointError: an id is invalid, or there are more than `MAX_STOP_IDS`.
    """
    file, listed = _read_eos_ids(folder)
    text = None if tokenizer is None else tokenizer.special_tokens.get("eos_token")
    own = None if tokenizer is None or text is None else tokenizer.tokenizer.token_to_id(text)
    ids = tuple(dict.fromkeys(listed if own is None else (*listed, own)))
    if len(ids) > MAX_STOP_IDS:
        raise CheckpointError(
            f"{file}: eos_token_id={[*listed]} and the tokenizer's end of sequence come to "
            f"{len(ids)} ids; at most {MAX_STOP_IDS} are supported; list fewer"
        )
    return ids


def _read_eos_ids(folder: Path) -> tuple[Path, tuple[int, ...]]:
    """Return the file that lists the ids, and the ids without the tokenizer's own."""
    for name in "generation_config.json", "config.json":
        ids = read_json(folder, name).get("eos_token_id") if (folder / name).exists() else None
        if ids is not None:
            listed = ids if isinstance(ids, list) else [ids]
            if not all(type(token) is int and 0 <= token < 2**31 for token in listed):
                raise CheckpointError(
                    f"{folder / name}: eos_token_id={ids!r} must be a token id or a list of such; "
                    "mend the file"
                )
            return folder / name, tuple(listed)
    return folder / "config.json", ()


def _count_leading(text: str, character: str) -> int:
    return len(text) - len(text.lstrip(character))
