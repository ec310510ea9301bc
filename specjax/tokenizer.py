"""Text to token ids and back, for checkpoints that bring a tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from specjax.chat_template import cut_after_last, render
from specjax.checkpoint.config_json import read_json
from specjax.checkpoint.errors import CheckpointError


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer and the chat template that came with it, if any."""

    tokenizer: Tokenizer
    template: str | None
    special_tokens: Mapping[str, str]  # bos_token, eos_token, ...
    origin: str
    skips_special_tokens: bool = True  # in the text of token ids, unless `decode` is told

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model expects around it."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None) -> str:
        """Text of token ids; None for special tokens as `skips_special_tokens` says."""
        skips = self.skips_special_tokens if skip_special_tokens is None else skip_special_tokens
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skips)

    def for_outputs(self, *, skip_special_tokens: bool) -> "ChatTokenizer":
        """The tokenizer that reads outputs with special tokens, or without."""
        if skip_special_tokens == self.skips_special_tokens:
            return self
        return replace(self, skips_special_tokens=skip_special_tokens)

    def decode_token(self, token_id: int) -> str:
        """Text of one token by itself, special ones included."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> Any:
        """A conversation as the model expects it: token ids, or text with `tokenize=False`.

        Args:
            add_generation_prompt: end with the beginning of the assistant's turn.
            continue_final_message: end with the content of the last message, to be gone on with.
            tools: functions that the model may call, as JSON schemas.
            chat_template: in place of the checkpoint's.
            variables: further ones of the template, like enable_thinking.

        Raises:
            CheckpointError: there is no chat template.
            ValueError: the template refuses the messages, or settings contradict each other.
        """
        template = self.template if chat_template is None else chat_template
        if template is None:
            raise CheckpointError(
                f"{self.origin} has no chat template; use generate with a prompt of your own format"
            )
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "continue_final_message=True goes with add_generation_prompt=False: the last "
                "message is gone on with, and no other begun"
            )
        variables = {**self.special_tokens, **variables}
        try:
            text = render(
                template,
                messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **variables,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template of {self.origin} failed: {error}") from error
        if continue_final_message:
            text = cut_after_last(text, messages)
        return self.encode(text, add_special_tokens=False) if tokenize else text


def load_tokenizer(folder: Path) -> ChatTokenizer | None:
    """The tokenizer of a checkpoint folder, or None if it has none.

    Raises:
        CheckpointError: tokenizer files that cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        if (folder / "tokenizer.model").exists():
            raise CheckpointError(
                f"{folder} has a tokenizer.model (sentencepiece) and no tokenizer.json, which is "
                "read here; make one, with transformers and sentencepiece installed: "
                f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
            )
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} is not a tokenizer ({error}); restore the file") from error
    has_config = (folder / "tokenizer_config.json").exists()
    config = read_json(folder, "tokenizer_config.json") if has_config else {}
    template_file = folder / "chat_template.jinja"
    template = template_file.read_text() if template_file.exists() else config.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    special = {
        name: _content(value)
        for name, value in config.items()
        if name.endswith("_token") and value is not None and not isinstance(value, bool)
    }
    return ChatTokenizer(tokenizer, template, special, str(folder))


def read_eos_ids(folder: Path) -> tuple[int, ...]:
    """Ends of sequence of a checkpoint: generation_config.json's, else config.json's."""
    for name in "generation_config.json", "config.json":
        ids = read_json(folder, name).get("eos_token_id") if (folder / name).exists() else None
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, Mapping) else str(token)
