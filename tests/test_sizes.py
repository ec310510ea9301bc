"""No file, function or list of parameters is longer than a reader can hold in mind."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = "specjax", "pallas_kernels", "benchmarks", "examples"
FILE_LINES, TEST_FILE_LINES, FUNCTION_LINES, PARAMETERS = 450, 500, 80, 10
# What is larger, with the reason; an entry that is no longer needed must go.
OPERANDS = "a parameter for each operand of the operation"
REFS = "a kernel takes a reference for each of its operands"
SCRIPT = "a script's options and output, read from top to bottom"
ENGINES = "its tests share engines that are built once for the module"
EXCEPTIONS = {
    "benchmarks/h200/snapshots.py:_kernel": REFS,
    "benchmarks/sampler_cpu.py:main": SCRIPT,
    "benchmarks/transformers_cpu.py:main": SCRIPT,
    "pallas_kernels/gated_delta_rule/__init__.py:gated_delta_rule": OPERANDS,
    "pallas_kernels/gated_delta_rule/triton/__init__.py:gated_delta_rule_triton": OPERANDS,
    "pallas_kernels/paged_attention/reference.py:paged_attention_reference": OPERANDS,
    "pallas_kernels/paged_attention/triton.py:_attention_kernel": REFS,
    "pallas_kernels/rope_write/__init__.py:rope_write": OPERANDS,
    "pallas_kernels/rope_write/reference.py:rope_write_reference": OPERANDS,
    "pallas_kernels/rope_write/reference.py:split_heads": OPERANDS,
    "pallas_kernels/rope_write/triton.py:_kernel": REFS,
    "pallas_kernels/rope_write/triton.py:rope_write_triton": OPERANDS,
    "pallas_kernels/truncation/triton.py:_kernel": REFS,
    "pallas_kernels/truncation/triton.py:_kernel._": "the branch that holds most of its kernel",
    "tests/engine/test_precompile.py": ENGINES,
    "tests/host/test_grammar.py": "one brute-force reader of grammars serves all its tests",
    "tests/support/simulated_device.py:SimulatedPrograms.__init__": "options beside `Programs`'",
    "tests/test_async_llm.py": ENGINES,
}


def functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function by its dotted name."""
    for node in ast.iter_child_nodes(tree):
        name = f"{owner}.{node.name}" if owner and hasattr(node, "name") else owner
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{owner}.{node.name}".lstrip(".")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, node
        yield from functions(node, name)


def too_large(folder: str, max_lines: int) -> Iterator[str]:
    """What exceeds a limit, named as in `EXCEPTIONS`."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        source, where = path.read_text(), path.relative_to(ROOT).as_posix()
        if len(source.splitlines()) > max_lines:
            yield where
        for name, node in functions(ast.parse(source)):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            num_parameters = sum(one.arg not in ("self", "cls") for one in arguments)
            if node.end_lineno - node.lineno >= FUNCTION_LINES or num_parameters > PARAMETERS:
                yield f"{where}:{name}"


def test_nothing_is_larger_than_it_may_be():
    found = {one for folder in SOURCES for one in too_large(folder, FILE_LINES)}
    found |= set(too_large("tests", TEST_FILE_LINES))
    assert found == set(EXCEPTIONS), "split it, or say why it is one"


@pytest.mark.parametrize("reason", EXCEPTIONS.values(), ids=EXCEPTIONS)
def test_exceptions_have_reasons(reason):
    assert len(reason.split()) > 3
