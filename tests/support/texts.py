"""Checkpoints with tokenizers, and LLMs on real or simulated devices, for tests of texts."""

import json
from pathlib import Path
from typing import Any

from support.checkpoints import Checkpoints
from support.engines import make_llm, simulated_engines
from support.scripts import Script
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specjax import LLM

VOCAB = 96
LETTERS_EOS = VOCAB - 1


def simulated_llm(
    folder: str | Path, method: str | None = None, *, script: Script | None = None, **options: Any
) -> LLM:
    """Return an LLM on a simulated device; see `make_llm` and `simulated_engines`."""
    with simulated_engines(script):
        return make_llm(folder, method, **options)


def byte_letters() -> list[str]:
    """Return the tokens of 96 bytes, some of which are only parts of characters."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB]


def byte_level(tokens: list[str]) -> Tokenizer:
    """Return a byte-level tokenizer with these tokens."""
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def with_bytes(checkpoints: Checkpoints, folder: Path, letters: list[str] | None = None) -> Path:
    """Return a copy of a checkpoint with 96 tokens, with a tokenizer whose tokens are bytes."""
    made = checkpoints.copy(folder)
    byte_level(letters or byte_letters()).save(str(made / "tokenizer.json"))
    return made


def letters_folder(checkpoints: Checkpoints) -> Path:
    """Return the target for tests of texts on real engines. Its outputs repeat themselves."""
    target = checkpoints.target("llama", tie_word_embeddings=True, eos_token_id=LETTERS_EOS)
    return checkpoints.with_letters(target.folder)


def write_files(folder: Path, files: dict[str, Any], *known: AddedToken) -> Path:
    """Write a byte-level tokenizer with the added tokens `known`, then `files`, to a folder.

    The file tokenizer.json in `files` has fields to replace.
    """
    tokenizer = byte_level([*sorted(pre_tokenizers.ByteLevel.alphabet()), "</s>"])
    tokenizer.add_tokens(list(known))
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in ({"config.json": {}} | files).items():
        path = folder / name
        if name == "tokenizer.json":
            content = json.loads(path.read_text()) | content
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder
