"""The import order of the packages, read from the sources without importing them."""

import ast
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A room imports from its own line or from those above it, and no two rooms of a line from each
# other; the longest entry that fits a module is its room. The root's modules are doors.
LAYERS = [
    ["pallas_kernels", "specjax.checkpoint", "specjax.checks"],
    ["specjax.methods", "specjax.vllm_names"],
    ["specjax.config", "specjax.sampling_params", "specjax.outputs"],
    [
        "specjax.host",
        "specjax.host.grammar",
        "specjax.host.residents",
        "specjax.host.speculation",
        "specjax.device",
    ],
    ["specjax.engine", "specjax.text"],
    ["specjax.messages"],
    ["specjax.serving"],
    ["specjax.llm", "specjax.engine_args", "specjax.following"],
    ["specjax.async_llm", "specjax.inspect", "specjax.train"],
    ["specjax.rl", "specjax.bench"],
    ["specjax.ray", "specjax.server"],
    ["specjax.commands"],
    ["specjax.cli", "specjax"],
    ["specjax.__main__"],
]
RANKS = {prefix: rank for rank, layer in enumerate(LAYERS) for prefix in layer}
# Everything that these import; None is any package.
ONLY = {
    "pallas_kernels": {"jax", "jax_triton", "pallas_kernels", *sys.stdlib_module_names},
    "specjax.host": {"specjax", *sys.stdlib_module_names},
    "specjax.host.grammar": {"specjax", "numpy", "llguidance", *sys.stdlib_module_names},
    "specjax.host.residents": {"specjax", "numpy", *sys.stdlib_module_names},
    "specjax.host.speculation": {"specjax", "numpy", *sys.stdlib_module_names},
}
LAZY = {"specjax", "specjax.cli"}  # may import inside functions


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def is_kin(one: str, other: str) -> bool:
    return is_within(one, other) or is_within(other, one)


def area(module: str) -> str | None:
    """Return the longest entry of LAYERS that contains the module.

    "specjax" contains only itself.
    """
    fitting = [p for p in RANKS if is_within(module, p) and (p != "specjax" or module == p)]
    return max(fitting, key=len, default=None)


@cache
def read_sources() -> dict[str, str]:
    """Return the source of every module of the two packages, by name."""
    sources = {}
    for package in "specjax", "pallas_kernels":
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            sources[name] = path.read_text()
    return sources


@cache
def imports(source: str) -> list[tuple[str, str, bool]]:
    """Return each imported (package, name), and whether the import is inside a function."""
    found, tree = [], ast.parse(source)
    functions = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = {node for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, "", node in inner) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = "." * node.level or str(node.module)
            found += [(package, alias.name, node in inner) for alias in node.names]
    return found


def violations(sources: dict[str, str]) -> list[str]:
    """Return a line for each violation of the import order."""
    found = []
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        mine = area(module)
        if mine is None:
            found.append(f"{module} is not in LAYERS")
            continue
        for package, member, is_inner in imports(source):
            whole = f"{package}.{member}"
            name = whole if whole in sources else package
            is_ours = name.startswith(("specjax", "pallas_kernels"))
            where = f"{module} imports {name}"
            if name.startswith("."):
                found.append(f"{where}: relative")
            elif mine in ONLY and name.partition(".")[0] not in ONLY[mine]:
                found.append(f"{where}: a foreign package")
            elif is_ours and (theirs := area(name)) is None:
                found.append(f"{where}: not in LAYERS")
            elif is_ours and RANKS[theirs] > RANKS[mine]:
                found.append(f"{where}: upwards")
            elif is_ours and RANKS[theirs] == RANKS[mine] and not is_kin(mine, theirs):
                found.append(f"{where}: sideways")
            if is_ours and is_inner and module not in LAZY:
                found.append(f"{where}: inside a function")
            if is_ours and not is_inner and name != module and module not in LAZY:
                graph.setdefault(module, set()).add(name)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"a cycle: {' -> '.join(error.args[1])}")
    return found


def shared_names(sources: dict[str, str]) -> list[str]:
    """Return a line for each name that public classes in several modules have."""
    places: dict[str, list[str]] = {}
    for module, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module)
    return [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]


def test_no_two_classes_share_a_name():
    sources = read_sources()
    assert shared_names(sources) == []
    sources = sources | {"specjax.host.pages": "class Engine:\n    pass\n"}
    assert len(shared_names(sources)) == 1


def test_imports_keep_the_order():
    sources = read_sources()
    known = {"specjax.engine.engine", "specjax.host.scheduler", "pallas_kernels.dispatch"}
    assert known <= sources.keys()
    assert violations(sources) == []


PLANTED = [  # a case of each rule; "" is what is allowed
    ("specjax.config", "import specjax.engine.engine", "upwards"),
    ("specjax.llm", "from specjax import LLM", "upwards"),
    ("specjax.engine.engine", "from specjax.text.detokenizer import StopStrings", "sideways"),
    ("specjax.host.pages", "from specjax.device.step import StepModel", "sideways"),
    ("specjax.device.step", "from specjax.host.grammar import GrammarMatcher", "sideways"),
    ("specjax.host.pages", "import jax.numpy as jnp", "a foreign package"),
    ("specjax.host.grammar", "def f():\n    import jax", "a foreign package"),
    ("specjax.engine.engine", "def f():\n    from specjax.config import A", "inside a function"),
    ("specjax.device.step", "from . import state", "relative"),
    ("specjax.brand_new", "import os", "not in LAYERS"),
    ("specjax.llm", "from specjax.brand_new import thing", "not in LAYERS"),
    ("specjax.device.noise", "from specjax.device.step import prefill", "a cycle"),
    ("specjax.cli", "def f():\n    from specjax.llm import LLM", ""),
    ("specjax.host.pages", "import heapq", ""),
    ("specjax.host.grammar", "def f():\n    import llguidance", ""),
    ("specjax.text.prompts", "from specjax.host.grammar import Grammar", ""),
    ("specjax.engine.engine", "def f():\n    import rich", ""),
]


@pytest.mark.parametrize("module, line, reason", PLANTED)
def test_a_planted_violation_is_found_and_what_is_allowed_is_not(module, line, reason):
    sources = read_sources()
    sources = sources | {module: f"{sources.get(module, '')}\n{line}\n"}
    found = violations(sources)
    assert [text for text in found if reason in text] if reason else found == []
