"""Declares the arguments of `specjax serve`, one for each option of `LLM` and of the server.

This module imports nothing slow, so that --help is fast.
"""

import argparse
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from specjax.commands.arguments import MODEL_HELP, add_speculation
from specjax.commands.vllm_arguments import (
    SHORT,
    ExtendTexts,
    is_switch,
    read_json,
    read_json_or_text,
    read_size,
)
from specjax.server.settings import Limits, ServerSettings
from specjax.serving.options import DEFAULTS, LLMOptions
from specjax.serving.vllm_options import ONE_VALUE, PASSED_OVER

DESCRIPTION = "Serve a model over HTTP, with OpenAI's API."
# Options of `LLM` without a flag: `params` is not text, and `add_speculation` has the drafter.
_NO_FLAGS = ("params", "speculative_config", "verbose")
# Flags of `vllm serve` for behaviour that is always on here.
_ALWAYS = (
    "disable_fastapi_docs",
    "disable_frontend_multiprocessing",
    "enable_server_load_tracking",
)


def engine_options() -> dict[str, Any]:
    """Return the type of each option of `LLM` that has a flag, by the option's name."""
    hints = get_type_hints(LLMOptions)
    return {name: hints[name] for name in hints if name not in _NO_FLAGS}


def vllm_options() -> list[str]:
    """Return the options of `vllm serve` that have no effect here or only one allowed value.

    They are accepted as flags, so that `LLM` can ignore or refuse them with a message.
    """
    known = {*engine_options(), *(one.name for one in fields(ServerSettings))}
    return sorted({*PASSED_OVER, *ONE_VALUE} - known)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that `serve.run` reads.

    A flag that is not given has no attribute in the parsed arguments.
    """
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    group = parser.add_argument_group("config file")
    text = "a YAML file with flags and their values; the command line takes precedence"
    group.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=text)
    for title, kind in ("server", ServerSettings), ("limits", Limits):
        group, hints = parser.add_argument_group(title), get_type_hints(kind)
        for one in fields(kind):
            _add(group, one.name, hints[one.name], one.default, one.metadata["help"])
    add_speculation(parser)
    group = parser.add_argument_group("engine", "Options of LLM, which docs/api.md describes.")
    for name, hint in engine_options().items():
        _add(group, name, hint, DEFAULTS[name], "")
    for name in *vllm_options(), *_ALWAYS:
        options: Any = {"default": argparse.SUPPRESS, "dest": name, "help": argparse.SUPPRESS}
        if is_switch(name):
            parser.add_argument(*_flags(name), action=argparse.BooleanOptionalAction, **options)
            continue
        options |= {"nargs": "?", "const": True, "type": read_json_or_text}
        parser.add_argument(*_flags(name), **options)


def _add(group: Any, name: str, hint: Any, default: Any, text: str) -> None:
    """Declare a flag for a value of the type `hint`."""
    if default not in (None, "", (), False):
        text = "; ".join(filter(None, [text, f"default: {default}"]))
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if hint is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif hint == tuple[str, ...]:
        options |= {"nargs": "+", "action": ExtendTexts, "metavar": "TEXT"}
    else:
        plain = [one for one in get_args(hint) or (hint,) if one in (int, float, str)]
        kind = plain[0] if plain else read_json
        options["type"] = read_size if kind is int else kind
        options["metavar"] = plain[0].__name__.upper() if plain else "JSON"
    group.add_argument(*_flags(name), **options)


def _flags(name: str) -> list[str]:
    """Return the long flag of an option, and before it vLLM's short flag if there is one."""
    short = [SHORT[name]] if name in SHORT else []
    return [*short, f"--{name.replace('_', '-')}"]


def given_options(args: argparse.Namespace, names: Mapping[str, Any] | list[str]) -> dict[str, Any]:
    """Return the options among `names` that were given."""
    return {name: getattr(args, name) for name in names if hasattr(args, name)}
