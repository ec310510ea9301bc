"""Text to token ids and back, for checkpoints that bring a tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from specjax.checkpoint.config_json import read_json
from specjax.checkpoint.errors import CheckpointError


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer and the chat template that came with it, if any."""

    tokenizer: Tokenizer
    template: str | None
    special_tokens: Mapping[str, str]  # bos_token, eos_token, ...
    origin: str

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model expects around it."""
        return self.tokenizer.encode(text).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def decode_token(self, token_id: int) -> str:
        """Text of one token by itself, special ones included."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn.

        Raises:
            CheckpointError: the checkpoint has no chat template.
            ValueError: the template refuses the messages.
        """
        if self.template is None:
            raise CheckpointError(
                f"{self.origin} has no chat template; use generate with a prompt of your own format"
            )

        def refuse(message: str):
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        try:
            text = environment.from_string(self.template).render(
                messages=messages, add_generation_prompt=True, **self.special_tokens
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template of {self.origin} failed: {error}") from error
        return self.tokenizer.encode(text, add_special_tokens=False).ids


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
