"""Reads the tokenizer of a checkpoint: tokenizer.json, and tokens declared in other files.

All code that needs a tokenizer calls `read_tokenizer`, and so has the same tokens as the tokenizers
backend of transformers.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from specjax.checkpoint.config_json import read_json
from specjax.checkpoint.errors import CheckpointError

CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"  # from older versions of transformers, like ADDED_TOKENS
ADDED_TOKENS = "added_tokens.json"
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
FLAGS = "add_bos_token", "add_eos_token"  # fields that matter only without a tokenizer.json


class StoredTokenizer(NamedTuple):
    """A tokenizer as described by its files."""

    tokenizer: Tokenizer  # neither truncates nor pads
    special_tokens: Mapping[str, str]  # texts of bos_token, eos_token, ...
    config: Mapping[str, Any]  # tokenizer_config.json


class _Declared(NamedTuple):
    """Tokens declared in files next to tokenizer.json."""

    named: dict[str, AddedToken]  # special tokens by name: bos_token, eos_token, ...
    extra: list[AddedToken]  # special tokens without a name
    added: list[AddedToken]  # tokens with declared ids, special or not, in ascending order of ids


def read_tokenizer(folder: Path) -> StoredTokenizer | None:
    """Return the tokenizer of a checkpoint folder; None if the folder has no tokenizer.json.

    Truncation and padding in tokenizer.json are ignored, as they belong to a training run.

    Raises:
        CheckpointError: a file cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} is not a tokenizer ({error}); restore the file") from error
    config = _read_optional(folder, CONFIG)
    declared = _read_declared(folder, config)
    if tokenizer.padding is not None:
        pad = AddedToken(tokenizer.padding["pad_token"], special=True)
        declared.named.setdefault("pad_token", pad)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))
    _add(tokenizer, declared)
    special = {name: token.content for name, token in declared.named.items()}
    return StoredTokenizer(tokenizer, special, config)


def check_tokenizer(folder: Path) -> None:
    """Check that a checkpoint folder has a tokenizer, which prompts of text need.

    Raises:
        CheckpointError: the folder has no tokenizer.
    """
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        raise CheckpointError(f"{folder} has no tokenizer.json, and the prompts are text; add it")


def _read_declared(folder: Path, config: Mapping[str, Any]) -> _Declared:
    where = str(folder / CONFIG)
    fields, listed = _named(config), _unnamed(config, where)
    is_old = "added_tokens_decoder" not in config
    if is_old:  # otherwise transformers reads no other file
        found = _read_optional(folder, SPECIAL_TOKENS)
        theirs, more = _named(found), _unnamed(found, str(folder / SPECIAL_TOKENS))
        # The config has precedence, except for the seven names that all tokenizers have.
        fields = theirs | fields | {name: theirs[name] for name in NAMED if name in theirs}
        if listed is None:
            listed = more
        elif isinstance(found.get("extra_special_tokens"), list):
            listed = listed + (more or [])
    texts = listed or []
    ordered = {name: fields[name] for name in NAMED if name in fields} | fields
    named = {n: _token(t, f"{where}: {n}", special=True) for n, t in ordered.items()}
    unnamed = [_token(t, f"{where}: extra_special_tokens", special=True) for t in texts]
    if is_old:
        special = {token.content for token in (*named.values(), *unnamed)}
        added = _read_added_tokens(folder, special)
    else:
        ids = _by_id(config["added_tokens_decoder"], f"{where}: added_tokens_decoder")
        added = {id: _token(token, f"{where}: token {id}") for id, token in ids.items()}
    by_text = {token.content: token for token in added.values()}
    named = {name: by_text.get(token.content, token) for name, token in named.items()}
    return _Declared(named, unnamed, [token for _, token in sorted(added.items())])


def _named(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config's fields that hold special tokens, such as bos_token or image_token."""
    fields = {
        name: value
        for name, value in config.items()
        if name.endswith("_token") and name not in FLAGS and value is not None
    }
    extra = config.get("extra_special_tokens")
    return fields | (dict(extra) if isinstance(extra, Mapping) else {})


def _unnamed(config: Mapping[str, Any], where: str) -> list[Any] | None:
    """Return the special tokens that the config lists without names; None without such a list."""
    extra = config.get("extra_special_tokens")
    if extra is not None and not isinstance(extra, Mapping):
        return _list(extra, f"{where}: extra_special_tokens")
    older = config.get("additional_special_tokens")
    return None if older is None else _list(older, f"{where}: additional_special_tokens")


def _read_added_tokens(folder: Path, special: Collection[str]) -> dict[int, AddedToken]:
    where = f"{folder / ADDED_TOKENS}: its ids"
    ids = _by_id({id: text for text, id in _read_optional(folder, ADDED_TOKENS).items()}, where)
    return {
        id: AddedToken(text, special=text in special, normalized=text not in special)
        for id, text in ids.items()
    }


def _add(tokenizer: Tokenizer, declared: _Declared) -> None:
    """Add the declared tokens that the tokenizer lacks, or has with other properties.

    As in transformers, the order of the added tokens determines their ids; declared ids are
    ignored.
    """
    known = tokenizer.get_added_tokens_decoder().values()
    properties = {repr(token) for token in known}
    new = [token for token in declared.added if repr(token) not in properties]
    names = {token.content for token in declared.named.values()}
    texts = {token.content for token in new}
    new += [t for t in known if t.content in names - texts and not t.special]
    texts |= {token.content for token in known}
    new += [t for t in (*declared.named.values(), *declared.extra) if t.content not in texts]
    for token in new:
        token.special |= token.content in names
    tokenizer.add_tokens(new)


def _token(value: Any, where: str, *, special: bool = False) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=special)
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        raise CheckpointError(
            f'{where}={value!r} must be a text, or have a text as "content"; mend the file'
        )
    known = ("single_word", "lstrip", "rstrip", "normalized", "special")
    properties = {name: bool(value[name]) for name in known if name in value}
    return AddedToken(value["content"], **({"special": special} | properties))


def _by_id(value: Any, where: str) -> dict[int, Any]:
    if not isinstance(value, Mapping) or not all(str(key).isdigit() for key in value):
        raise CheckpointError(f"{where}={value!r} must map token ids to tokens; mend the file")
    return {int(id): token for id, token in value.items()}


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise CheckpointError(f"{where}={value!r} must be a list of tokens; mend the file")
    return value


def _read_optional(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder, name) if (folder / name).exists() else {}
