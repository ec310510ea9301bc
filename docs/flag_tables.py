"""Makes the tables of the page "Flags" from the parser of `specjax serve`."""

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from specjax.commands.serve_arguments import add_arguments, vllm_options
from specjax.serving.options import DEFAULTS
from specjax.serving.vllm_options import ONE_VALUE

ROOT = Path(__file__).resolve().parents[1]
MARK = "<!-- flags -->"  # the place of the tables in the page
_ENTRY = re.compile(r"^    (\w[\w, ]*): (.*(?:\n     .*)*)", re.M)


def fill(page: str) -> str:
    """Return a page with the tables in place of `MARK`."""
    return page.replace(MARK, "\n".join(_tables()))


def _tables() -> Iterator[str]:
    parser, described = argparse.ArgumentParser(add_help=False), _engine_help()
    add_arguments(parser)
    for group in parser._action_groups[2:]:  # the first two are argparse's own
        yield f"## {str(group.title).capitalize()}\n"
        yield "| flag | default | |"
        yield "|---|---|---|"
        for action in group._group_actions:
            text, default = _help(action)
            if group.title == "engine":
                text, default = described[action.dest], repr(DEFAULTS[action.dest])
            yield _row(_names(action), f"`{default}`" if default else "", text.rstrip("."))
        yield ""
    one = {name: ONE_VALUE[name] for name in vllm_options() if name in ONE_VALUE}
    yield "## Flags of vLLM with one value\n"
    yield "Any other value is refused, with the reason.\n"
    yield "| flag | accepted | reason |"
    yield "|---|---|---|"
    for name, (values, reason) in one.items():
        yield _row([_flag(name)], ", ".join(f"`{value!r}`" for value in values), reason)
    yield "\n## Flags of vLLM without effect\n"
    yield "They are accepted with a line in the log: "
    yield ", ".join(f"`{_flag(name)}`" for name in vllm_options() if name not in one) + ".\n"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _names(action: argparse.Action) -> list[str]:
    value = action.metavar or (action.choices and "|".join(action.choices)) or ""
    value = "" if action.nargs == 0 else f" {value}"
    return [f"{name}{value}" for name in action.option_strings]


def _help(action: argparse.Action) -> tuple[str, str]:
    """Return the text of a flag's help, and the default with which the help ends."""
    text, _, default = (action.help or "").replace("%%", "%").rpartition("default: ")
    return (text.rstrip("; "), default) if text else ((action.help or ""), "")


def _row(names: Sequence[str], *cells: str) -> str:
    escaped = [cell.replace("|", "\\|") for cell in (*names, *cells)]
    shown = ", ".join(f"`{name}`" for name in escaped[: len(names)])
    return f"| {shown} | {' | '.join(escaped[len(names) :])} |"


def _engine_help() -> dict[str, str]:
    """Return the text of each option in the docstring of `LLM`."""
    tree = ast.parse((ROOT / "specjax/llm.py").read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "LLM")
    args = (ast.get_docstring(found) or "").partition("Args:\n")[2].partition("\n\n")[0]
    return {
        name: " ".join(text.split())
        for names, text in _ENTRY.findall(args)
        for name in names.split(", ")
    }
