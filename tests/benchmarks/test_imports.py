"""Benchmarks import only names that exist."""

import ast
import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[2] / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_is_imported_exists(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("specjax"):
            module = importlib.import_module(node.module)
            names = [one.name for one in node.names if not hasattr(module, one.name)]
            assert all(find_spec(f"{node.module}.{name}") for name in names), names
