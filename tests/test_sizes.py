"""No file, function or list of parameters is longer than a reader can keep in mind."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = "specjax", "pallas_kernels", "benchmarks", "examples", "tests"
FILE_LINES, TEST_FILE_LINES, FUNCTION_LINES, PARAMETERS = 450, 500, 80, 10
# What is larger, with the reason; an entry that is no longer needed must go.
OPERANDS = "a parameter for each operand of the operation"
REFS = "a kernel takes a reference for each of its operands"
SCRIPT = "a script's options and output, read from top to bottom"
EXCEPTIONS = {
    "benchmarks/gpu/snapshots.py:_kernel": REFS,
    "benchmarks/sampler_cpu.py:main": SCRIPT,
    "benchmarks/transformers_cpu.py:main": SCRIPT,
    "pallas_kernels/gated_delta_rule/triton/__init__.py:gated_delta_rule_triton": OPERANDS,
    "pallas_kernels/grouped_packed_matmul/triton.py:grouped_packed_matmul_triton": OPERANDS,
    "pallas_kernels/paged_attention/__init__.py:paged_attention": OPERANDS,
    "pallas_kernels/paged_attention/reference.py:paged_attention_reference": OPERANDS,
    "pallas_kernels/paged_attention/triton.py:_attention_kernel": REFS,
    "pallas_kernels/paged_attention/triton.py:paged_attention_triton": OPERANDS,
    "pallas_kernels/rope_write/__init__.py:rope_write": OPERANDS,
    "pallas_kernels/rope_write/reference.py:rope_write_reference": OPERANDS,
    "pallas_kernels/rope_write/reference.py:split_heads": OPERANDS,
    "pallas_kernels/rope_write/triton.py:_kernel": REFS,
    "pallas_kernels/rope_write/triton.py:rope_write_triton": OPERANDS,
    "tests/support/simulated_device.py:SimulatedPrograms.__init__": "how a device behaves",
}


def functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield every function with its dotted name."""
    for node in ast.iter_child_nodes(tree):
        name = owner
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{owner}.{node.name}".lstrip(".")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, node
        yield from functions(node, name)


def too_large(where: str, source: str) -> Iterator[str]:
    """Yield everything in a file that exceeds a limit, named as in `EXCEPTIONS`."""
    max_lines = TEST_FILE_LINES if where.startswith("tests/") else FILE_LINES
    if len(source.splitlines()) > max_lines:
        yield where
    for name, node in functions(ast.parse(source)):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        num_parameters = sum(one.arg not in ("self", "cls") for one in arguments)
        if node.end_lineno - node.lineno >= FUNCTION_LINES or num_parameters > PARAMETERS:
            yield f"{where}:{name}"


def test_nothing_is_larger_than_it_may_be():
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    assert {where.partition("/")[0] for where in sources} == set(FOLDERS)
    found = {one for where, source in sources.items() for one in too_large(where, source)}
    assert found == set(EXCEPTIONS), "split it, or say why it is one"
    assert all(len(reason.split()) > 3 for reason in EXCEPTIONS.values())


def test_a_line_or_a_parameter_more_than_the_limit_is_found():
    planted = {
        "specjax/a.py": ["\n" * (FILE_LINES + more) for more in range(2)],
        "tests/a.py": ["\n" * (TEST_FILE_LINES + more) for more in range(2)],
        "tests/a.py:f": [
            "async def f():\n" + "    x = 1\n" * (FUNCTION_LINES - 1 + more) for more in range(2)
        ],
        "specjax/a.py:A.f": [
            f"class A:\n  def f(self, a, b, c, d, e, /, g, h, *, i, j, k{more}): ..."
            for more in ("", ", l")
        ],
    }
    for name, (allowed, too_much) in planted.items():
        where = name.partition(":")[0]
        assert list(too_large(where, allowed)) == []
        assert list(too_large(where, too_much)) == [name]
