"""The parser accepts all commands in the documentation."""

import re
import shlex
from pathlib import Path

import pytest

from specjax.cli import build_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))


def commands_of(page):
    """Yield the arguments of each `specjax` command in the code blocks of a page."""
    text = re.sub(r"\$\w+", "1", page.read_text().replace("\\\n", " "))  # variables of the shell
    fenced = "".join(re.findall(r"^```bash\n(.*?)^```", text, re.S | re.M))
    indented = re.findall(r"^    (.*)", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    for line in (*fenced.splitlines(), *indented):
        for command in line.split("&&"):
            if command.strip().startswith("specjax "):
                yield shlex.split(command, comments=True)[1:]


COMMANDS = [command for page in PAGES for command in commands_of(page)]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_on_pages_are_parsed(command):
    build_parser().parse_args(command)


def test_commands_are_found():
    assert len(COMMANDS) > 20
