"""Reads flags from a file: `specjax serve --config FILE`."""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from specjax.server.settings import check_private

SECRETS = ("api-key",)


def with_config(argv: Sequence[str]) -> list[str]:
    """Return the arguments of `specjax serve`, with the flags from the file that --config names.

    The file is YAML: the names of flags, with dashes or underscores, and their values. The key
    `model` sets the model. Arguments take precedence over the file.

    Raises:
        ValueError: the file cannot be read, or has content other than flags. Or it has an API key,
            and other users can read the file.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config")
    try:
        path = finder.parse_known_args(argv)[0].config
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    if path is None:
        return list(argv)
    command, *given = argv
    flags = _read(Path(path))
    has_model = given and not given[0].startswith("-")
    model = flags.pop("model", None)
    first = [] if has_model or model is None else [str(model)]
    return [command, *first, *_arguments(flags, given), *given]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} is not YAML: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"--config {path} must have flags and their values, like port: 8000")
    flags = {name.replace("_", "-"): value for name, value in found.items()}
    if len(flags) < len(found) or "config" in flags:
        raise ValueError(f"--config {path} has config, or a flag in two spellings; leave it out")
    if empty := [name for name, value in flags.items() if value is None]:
        raise ValueError(f"--config {path}: {empty[0]} has no value; leave it out or give one")
    if any(name in flags for name in SECRETS):
        check_private("--config", path)
    return flags


def _arguments(flags: dict[str, Any], given: Sequence[str]) -> Iterator[str]:
    """Yield the flags of a file as arguments, except flags that are also in `given`."""
    taken = {one.partition("=")[0] for one in given}
    for name, value in flags.items():
        if {f"--{name}", f"--no-{name}"} & taken:
            continue
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        else:
            yield f"--{name}={value if isinstance(value, str) else json.dumps(value)}"
