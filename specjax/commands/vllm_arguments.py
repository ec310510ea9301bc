"""Rewrites arguments that `vllm serve` takes in several spellings.

This module imports nothing slow, so that --help is fast.
"""

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

# vLLM's short flags, by the name of the option.
SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "enable_expert_parallel": "-ep",
    "quantization": "-q",
    "compilation_config": "-O",
}
# An option whose name begins with one of these is a flag without a value.
_SWITCHES = ("enable_", "disable_", "enforce_", "skip_", "trust_", "use_", "language_model_only")
_FLAG = re.compile(r"--([A-Za-z]\w*(?:-\w+)*)((?:\.\w+)+)?(?:=(.*))?", re.DOTALL)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG])")


def is_switch(name: str) -> bool:
    """Return whether an option of vLLM is a flag without a value."""
    return name.startswith(_SWITCHES)


def respelled(argv: Sequence[str]) -> list[str]:
    """Return arguments in the spelling that `specjax serve` declares.

    Flags have dashes instead of underscores. Flags with dots become one JSON object:
    `--speculative-config.method ngram --speculative-config.num_speculative_tokens 3` is
    `--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'`.
    """
    found: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    left = list(argv)
    while left:
        argument = left.pop(0)
        if (flag := _FLAG.fullmatch(argument)) is None:
            found.append(argument)
            continue
        name, dots, value = f"--{flag[1].replace('_', '-')}", flag[2], flag[3]
        if dots is None:
            found.append(name if value is None else f"{name}={value}")
            continue
        if value is None:
            value = left.pop(0) if left and not left[0].startswith("--") else "true"
        *outer, last = dots[1:].split(".")
        place = objects.setdefault(name, {})
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = read_json_or_text(value)
    for name, value in objects.items():
        found += [name, json.dumps(value)]
    return found


def read_json_or_text(text: str) -> Any:
    """Return the JSON value in a text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_json(text: str) -> Any:
    """Return the JSON value in an argument.

    Raises:
        argparse.ArgumentTypeError: the text is not JSON.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None


def read_size(text: str) -> int:
    """Return the integer that a text means. "32k" is 32,000, and "32K" 32,768; also m, M, g and G.

    Raises:
        argparse.ArgumentTypeError: the text is neither an integer nor a number with such a letter.
    """
    if found := _SIZE.fullmatch(text):
        power, base = "kmg".index(found[2].lower()) + 1, 1000 if found[2].islower() else 1024
        return int(float(found[1]) * base**power)
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer, like 4096 or 4k") from None


class ExtendTexts(argparse.Action):
    """Appends the values of a flag to a list. A value may be a JSON list of several values."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """See `argparse.Action`."""
        texts: list[str] = [*getattr(namespace, self.dest, ())]
        for value in values:
            listed = read_json_or_text(value)
            texts += [str(one) for one in listed] if isinstance(listed, list) else [value]
        setattr(namespace, self.dest, texts)
