"""Text to token ids and back, for checkpoints with a tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from specjax.checkpoint.config_json import read_json
from specjax.checkpoint.errors import CheckpointError
from specjax.text.chat_template import cut_after_last, render
from specjax.text.tokenizer_names import TokenizerNames

CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class ChatTokenizer(TokenizerNames):
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
            continue_final_message: end with the content of the last message, to continue it.
            tools: functions that the model may call, as JSON schemas.
            chat_template: in place of the checkpoint's.
            variables: further ones of the template, like enable_thinking.

        Raises:
            CheckpointError: there is no chat template.
            ValueError: the template refuses the messages, or settings contradict each other.
        """
        if not isinstance(chat_template, str | None):
            raise ValueError(f"chat_template={chat_template!r} must be a text of Jinja's")
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
        except Exception as error:  # whatever a template does
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
    config = read_json(folder, CONFIG) if (folder / CONFIG).exists() else {}
    special = {
        name: _content(value, f"{folder / CONFIG}: {name}")
        for name, value in config.items()
        if name.endswith("_token") and value is not None and not isinstance(value, bool)
    }
    return ChatTokenizer(tokenizer, _read_template(folder, config), special, str(folder))


def read_eos_ids(folder: Path) -> tuple[int, ...]:
    """Ends of sequence of a checkpoint: generation_config.json's, else config.json's."""
    for name in "generation_config.json", "config.json":
        ids = read_json(folder, name).get("eos_token_id") if (folder / name).exists() else None
        if ids is not None:
            listed = ids if isinstance(ids, list) else [ids]
            if not all(type(token) is int and token >= 0 for token in listed):
                raise CheckpointError(
                    f"{folder / name}: eos_token_id={ids!r} must be a token id or a list of such; "
                    "mend the file"
                )
            return tuple(listed)
    return ()


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: a file's, or else the config's, one or the default of several."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); restore the file") from error
    match config.get("chat_template"):
        case None | str() as template:
            return template
        case list() as several if all(_is_named(one) for one in several):
            return {one["name"]: one["template"] for one in several}.get("default")
        case other:
            raise CheckpointError(
                f"{folder / CONFIG}: chat_template={other!r} must be a text, or a list of "
                '{"name", "template"}; mend the file'
            )


def _is_named(template: Any) -> bool:
    return isinstance(template, Mapping) and all(
        isinstance(template.get(key), str) for key in ("name", "template")
    )


def _content(token: Any, where: str) -> str:
    if not isinstance(token, Mapping):
        return str(token)
    if not isinstance(token.get("content"), str):
        raise CheckpointError(f'{where}={token!r} must have a "content", its text; mend the file')
    return token["content"]
