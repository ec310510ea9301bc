"""Docstrings, comments, messages and pages avoid phrases that must be read twice."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GLOBS = "specjax/**/*.py", "pallas_kernels/**/*.py", "docs/*.md", "README.md"
PATHS = [path for pattern in GLOBS for path in sorted(ROOT.glob(pattern))]
REFUSED = re.compile(
    r"\bso many\b|\bso much\b(?! that)|\b(?:what|who|which)ever\b|\bas many as there\b|\bwho asks\b"
    r"|\bwhat (?:\w+ )?(?:is|are|was|were) (?:asked|given|served)\b|\bof what\b"
    r"|(?<!each )(?<!one )(?<!, )\bof which\b|\bstands?\b|\bof (?:its|their) own\b|\bbeside\b"
    r"|(?:^|[.:;] |\b(?:is|are|has|gives|to) )(?:that|those) of\b|\b(?:anew|alike|thereof)\b"
    r"|\b(?:hereafter|otherwise than|nothing of|the while)\b"
    r"|(?<!there )\b(?:is|are) no (?!longer|more|less|\w+er\b)",
    re.IGNORECASE,
)


def texts(path: Path) -> list[str]:
    """Return the strings and comments of a module, or a page without its code."""
    source = path.read_text()
    if path.suffix == ".md":
        return [re.sub(r"```.*?```|`[^`]*`", "", source, flags=re.DOTALL)]
    strings = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    comments = [re.sub(r"\n *# ", " ", found) for found in re.findall(r"# .*(?:\n *# .*)*", source)]
    return [*filter(lambda text: isinstance(text, str), strings), *comments]


def found_in(path: Path) -> list[str]:
    """Return the refused phrases."""
    found = [REFUSED.search(" ".join(text.split())) for text in texts(path)]
    return [match[0] for match in found if match]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_phrase_must_be_read_twice(path):
    assert found_in(path) == []


@pytest.mark.parametrize("source", ['"""What\n  it is given."""', "x = 0  # for so\n  # many rows"])
def test_a_phrase_is_found_across_lines(tmp_path, source):
    (tmp_path / "a.py").write_text(source)
    assert found_in(tmp_path / "a.py")
