"""Mutation testing: small faults are put into the sources, one at a time, and tests should fail.

    python tests/mutation/run.py --out runs/mutants.jsonl
    python tests/mutation/run.py --out runs/after.jsonl --like runs/mutants.jsonl

cosmic-ray makes the faults. A seeded sample of them, with a fixed number for each table of
`reach.toml`, runs against the tests that the table lists for the module. `--like` repeats another
run's faults, if their lines still exist, to compare two test suites. Results are appended to the
file as they come. Faults that already have a result are not run again.

A fault is detected if a test fails, or if the tests take three times as long as without it. A fault
that does not change behaviour cannot be detected, so undetected faults must be read one by one.
"""

import argparse
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, astuple, dataclass
from itertools import groupby, islice
from pathlib import Path
from signal import SIGKILL, SIGXCPU
from typing import Any

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[2]
REACH = Path(__file__).with_name("reach.toml")
LEFT_BEHIND = shutil.ignore_patterns(".git", ".cache", ".venv*", "__pycache__", "runs", "build")
TESTS = "not nightly and not optimized and not gpu"  # marks: tests of the day
MIN_SECONDS, MAX_BYTES = 60, 16 << 30


class DeleteStatement(Operator):
    """Deletes a statement that is a call, or that changes an existing object."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "simple_stmt":
            what = node.children[0]
            code = [child.get_code().strip() for child in getattr(what, "children", ())]
            is_call = what.type == "atom_expr" and code[-1].endswith(")")
            is_member = what.type == "expr_stmt" and what.children[0].type == "atom_expr"
            is_change = what.type == "expr_stmt" and re.fullmatch(r"\W+=", code[1])
            if is_call or is_member or is_change:
                yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        return parso.parse(f"{node.get_first_leaf().prefix}pass\n")

    @classmethod
    def examples(cls) -> Sequence[Any]:
        return ()


OPERATORS = {name: get_operator(name)() for name in operator_names() if "Variable" not in name} | {
    "DeleteStatement": DeleteStatement()
}


@dataclass(frozen=True)
class Mutant:
    """A fault: in a module, the nth occurrence of some lines is replaced."""

    module: str
    line: int
    function: str
    operator: str
    old: str
    new: str
    nth: int

    def put_into(self, source: str) -> str | None:
        """Return the source with the fault; None if the lines no longer occur."""
        at = -1
        for _ in range(self.nth + 1):
            at = source.find("\n" + self.old, at + 1)
            if at < 0:
                return None
        return source[: at + 1] + self.new + source[at + 1 + len(self.old) :]

    def __str__(self) -> str:
        lines = [f"-{line}" for line in self.old.splitlines()]
        lines += [f"+{line}" for line in self.new.splitlines()]
        return "\n".join([f"{self.module}:{self.line} {self.function} {self.operator}", *lines])


def _says_nothing(node: Any) -> bool:
    """Return whether a node is part of a type hint, or the star in a list of parameters."""
    if node.parent is not None and node.parent.type == "parameters":
        return True
    while (parent := node.parent) is not None:
        if parent.type == "annassign" and node is parent.children[1]:
            return True
        if parent.type == "tfpdef" and node is not parent.children[0]:
            return True
        if parent.type == "funcdef" and node is parent.annotation:
            return True
        node = parent
    return False


def find_places(source: str) -> dict[tuple[Any, Any], list[tuple[str, int, str]]]:
    """Return all possible changes (operator, occurrence, function), by place."""
    nodes = list(ast_nodes(get_ast(source)))
    places = defaultdict(list)
    for name, operator in OPERATORS.items():
        occurrence = 0
        for node in nodes:
            for position in operator.mutation_positions(node):
                if not _says_nothing(node):
                    around = parso.python.tree.search_ancestor(node, "funcdef", "classdef")
                    places[position].append((name, occurrence, around.name.value if around else ""))
                occurrence += 1
    return dict(sorted(places.items()))


def make_mutant(module: str, source: str, change: tuple[str, int, str]) -> Mutant | None:
    """Return the mutant of a change; None if the code does not change, or is not valid Python."""
    operator, occurrence, function = change
    mutated = mutate_code(source, OPERATORS[operator], occurrence)
    try:
        compile(mutated, module, "exec")
    except (SyntaxError, TypeError):
        return None
    before, after = source.splitlines(keepends=True), mutated.splitlines(keepends=True)
    start = len(os.path.commonprefix([before, after]))
    rest = before[start:][::-1], after[start:][::-1]
    end = len(os.path.commonprefix(list(rest)))
    old, new = ("".join(lines[start : len(lines) - end]) for lines in (before, after))
    nth = "".join(before[:start]).count("\n" + old)
    return Mutant(module, start + 1, function, operator, old, new, nth)


def draw_mutants(root: Path, modules: Sequence[str], rng: random.Random) -> Iterator[Mutant]:
    """Yield mutants of some modules in random order, one random change for each place."""
    sources = {module: (root / module).read_text(encoding="utf-8") for module in modules}
    places = [
        (module, changes)
        for module, source in sources.items()
        for changes in find_places(source).values()
    ]
    rng.shuffle(places)
    for module, changes in places:
        rng.shuffle(changes)
        found = (make_mutant(module, sources[module], change) for change in changes)
        if (mutant := next(filter(None, found), None)) is not None:
            yield mutant


def run_tests(copy: Path, tests: Sequence[str], seconds: float) -> tuple[str, float, str]:
    """Run tests for at most `seconds` of CPU time; return outcome, time and failed tests."""
    limit = int(seconds) + 1

    def set_limits() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))

    options = "-x", "-q", "-n0", "-p", "no:cacheprovider", "-m", TESTS
    command = [sys.executable, "-m", "pytest", *options, *tests]
    env = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    before = os.times()
    try:
        done = subprocess.run(
            command, cwd=copy, env=env, preexec_fn=set_limits, timeout=10 * limit,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "timeout", 10.0 * limit, ""
    after = os.times()
    spent = round(sum(after[2:4]) - sum(before[2:4]), 1)
    # Nothing was run; but a fault may keep tests from being imported.
    if done.returncode == 5 or "file or directory not found" in done.stdout:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}")
    if not done.returncode:
        return "survived", spent, ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    outcome = "timeout" if -done.returncode in (SIGKILL, SIGXCPU) else "killed"
    return outcome, spent, failed[1] if failed else done.stdout[-200:]


class Worker:
    """A copy of the source tree, in which a process tests one mutant at a time."""

    copy: Path

    @classmethod
    def begin(cls, root: Path, folder: str) -> None:
        cls.copy = Path(folder, str(os.getpid()))
        shutil.copytree(root, cls.copy, ignore=LEFT_BEHIND)
        (root / ".cache").mkdir(exist_ok=True)  # of programs, by what they compute
        (cls.copy / ".cache").symlink_to((root / ".cache").resolve())

    @classmethod
    def time(cls, tests: Sequence[str]) -> float:
        """Return the CPU seconds of tests, which must pass."""
        outcome, seconds, failed = run_tests(cls.copy, tests, 3600)
        if outcome != "survived":
            raise RuntimeError(f"tests fail without any mutant: {outcome} {failed}")
        return seconds

    @classmethod
    def run(cls, mutant: Mutant, tests: Sequence[str], seconds: float) -> dict[str, Any]:
        path = cls.copy / mutant.module
        source = path.read_text(encoding="utf-8")
        mutated = mutant.put_into(source)
        if mutated is None:
            return asdict(mutant) | {"outcome": "gone", "seconds": 0.0, "by": ""}
        path.write_text(mutated, encoding="utf-8")
        try:
            outcome, spent, failed = run_tests(cls.copy, tests, seconds)
        finally:
            path.write_text(source, encoding="utf-8")
        return asdict(mutant) | {"outcome": outcome, "seconds": spent, "by": failed}


def choose_mutants(options: argparse.Namespace, reach: dict[str, Any]) -> list[Mutant]:
    """Return the mutants of another run, or a sample for each table of `reach.toml`."""
    wanted = tuple(options.modules)
    if options.like:
        rows = (json.loads(line) for line in options.like.read_text().splitlines())
        mutants = [Mutant(*(row[name] for name in Mutant.__annotations__)) for row in rows]
        return [mutant for mutant in mutants if mutant.module.startswith(wanted)]
    chosen: list[Mutant] = []
    for name, table in reach.items():
        modules = [module for module in table["tests"] if module.startswith(wanted)]
        drawn = draw_mutants(options.root, modules, random.Random(f"{options.seed} {name}"))
        kept = (m for m in drawn if not options.skip or not re.search(options.skip, str(m)))
        count = table["sample"] if options.sample is None else options.sample
        chosen += sorted(islice(kept, count), key=lambda mutant: (mutant.module, mutant.line))
    return chosen


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Return the scores by module, then the undetected mutants."""
    counts: dict[str, Counter] = defaultdict(Counter)
    for row in rows:
        counts[row["module"]][row["outcome"]] += 1
        counts["all"][row["outcome"]] += 1
    lines = []
    for module, count in counts.items():
        tried = count.total() - count["gone"]
        noticed = count["killed"] + count["timeout"]
        lines.append(f"{module:45} {noticed:4} of {tried:4} noticed, {count['timeout']} by time")
    survivors = [row for row in rows if row["outcome"] == "survived"]
    shown = [str(Mutant(*(row[name] for name in Mutant.__annotations__))) for row in survivors]
    return "\n\n".join(["\n".join(lines), *shown])


def main() -> None:
    """Run the command; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--like", type=Path, help="results of another run, to try the same")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree, which is left as it is")
    parser.add_argument("--reach", type=Path, default=REACH, help="which tests reach what")
    parser.add_argument("--modules", nargs="*", default=[""], help="paths that these begin with")
    parser.add_argument("--skip", help="expression; mutants that show it are left out")
    parser.add_argument("--sample", type=int, help="mutants for each table, instead of its own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, help="processor seconds for tests, if known")
    options = parser.parse_args()
    reach = tomllib.loads(options.reach.read_text())
    tests = {module: t for table in reach.values() for module, t in table["tests"].items()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.touch()
    rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    done = {tuple(row[name] for name in Mutant.__annotations__) for row in rows}
    mutants = [m for m in choose_mutants(options, reach) if astuple(m) not in done]
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(
            options.jobs, initializer=Worker.begin, initargs=(options.root, folder)
        ) as pool,
        options.out.open("a") as out,
    ):
        for module, group in groupby(mutants, lambda mutant: mutant.module):
            seconds = None if options.limit else pool.submit(Worker.time, tests[module]).result()
            limit = options.limit or max(MIN_SECONDS, 3 * seconds)
            print(f"{module}: at most {limit} s", flush=True)
            futures = [pool.submit(Worker.run, m, tests[module], limit) for m in group]
            for future in as_completed(futures):
                row = future.result()
                rows.append(row)
                print(json.dumps(row), file=out, flush=True)
                print(f"  {row['outcome']} {row['line']} {row['seconds']} s", flush=True)
    print(report(rows))


if __name__ == "__main__":
    main()
