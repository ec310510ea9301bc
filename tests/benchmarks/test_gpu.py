"""The runner of benchmarks/gpu: a failed case does not lose other results. No test needs a GPU."""

import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FOLDER = BENCHMARKS / "gpu"
DEFAULTS = {"about": "", "least": 1.0}
CASES = """
import os
import subprocess
import sys
import time


def good(setting, value=1, **_):
    yield {"what": "copy", "gbps": 100.0, "is_cpu": setting.is_cpu}
    yield {"what": "other", "gbps": 50.0, "value": value, "flag": os.environ.get("FLAG")}
    yield {"what": "sources", "root": os.path.basename(os.environ["PYTHONPATH"].split(":")[0])}


def hangs(setting):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield {"what": "before", "pid": child.pid}
    time.sleep(600)


def raises(setting):
    yield {"what": "before"}
    raise RuntimeError("the reason why")


def dies(setting):
    yield {"what": "before"}
    os.abort()
"""


@pytest.fixture
def runner(monkeypatch):
    """The modules run, cases, machine and pairs of benchmarks/gpu."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield [importlib.import_module(name) for name in ("run", "cases", "machine", "pairs")]
    for path in FOLDER.glob("*.py"):  # plain names, which others may have, too
        sys.modules.pop(path.stem, None)


@pytest.fixture
def results(runner, tmp_path, monkeypatch):
    """Return a function that runs cases of `CASES`, and returns the lines of results."""
    run, cases, machine, _ = runner
    (tmp_path / "made_up.py").write_text(CASES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def go(*given, budget=60.0, roots=(run.ROOT,)):
        made = [
            cases.Case(name=name, function=f"made_up:{made}", seconds=seconds, **DEFAULTS | others)
            for name, made, seconds, others in given
        ]
        output = tmp_path / "lines.jsonl"
        file = run.Results(output, machine.describe(is_cpu=True))
        checkouts = [run.Checkout(root, file) for root in roots]
        go.num_hung = run.run_cases(
            made, checkouts, budget=budget, is_cpu=True, cache=tmp_path / "cache"
        )
        return [json.loads(line) for line in output.read_text().splitlines()]

    return go


def endings(lines):
    return {line["case"]: line["status"] for line in lines if line["status"] != "result"}


@pytest.mark.slow
def test_cases_that_fail_lose_nothing(results):
    lines = results(
        ("hangs", "hangs", 9.0, {}),
        ("raises", "raises", 30.0, {}),
        ("dies", "dies", 30.0, {}),
        ("absent", "nobody", 30.0, {}),
        ("good", "good", 30.0, {"arguments": {"value": 7}, "environment": {"FLAG": "set"}}),
    )
    failed = dict.fromkeys(("raises", "dies", "absent"), "failed")
    assert endings(lines) == {"hangs": "timeout", **failed, "good": "done"}
    found = {(line["case"], line.get("what")): line for line in lines}  # None: how it ended
    assert ("hangs", "before") in found and ("dies", "before") in found
    assert "the reason why" in found["raises", None]["stderr"]
    assert "nobody" in found["absent", None]["stderr"]
    assert found["hangs", None]["seconds"] < 20
    other = found["good", "other"]
    assert (other["value"], other["flag"]) == (7, "set")
    assert not is_running(found["hangs", "before"]["pid"])


def test_two_cases_that_give_nothing_end_a_run(results):
    """After two hung cases, the GPU is probably hung, and further cases would only waste time."""
    hung = [(f"hung {i}", "good", 0.3, {"least": 0.1}) for i in range(2)]  # ends in its imports
    lines = results(*hung, ("late", "good", 30.0, {}))
    assert list(endings(lines).values()) == ["timeout", "timeout", "skipped"]
    assert lines[-1]["reason"] == "2 cases hung" and results.num_hung == 2


def is_running(pid):
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":  # ended, and nobody asked how
            return False
        time.sleep(0.1)
    return True


@pytest.mark.slow
def test_what_lines_say(results, tmp_path):
    """Lines have their provenance, the fraction of the copy bandwidth, and the skipped cases."""
    given = ("good", "good", 30.0, {}), ("late", "good", 30.0, {"least": 30.0})
    lines = results(*given, budget=20, roots=(tmp_path / "old", BENCHMARKS.parent))
    for line in lines:
        assert {"case", "status", "seconds", "date"} <= line.keys()
        source = line["provenance"]
        assert {"command", "commit", "versions", "device", "gpu", "system"} <= source.keys()
        assert {"python", "jax", "jaxlib"} <= source["versions"].keys()
        assert str(BENCHMARKS.parent) not in json.dumps(line)
    assert [line["of_copy"] for line in lines if "gbps" in line] == [1.0, 0.5] * 2
    roots = [line["root"] for line in lines if "root" in line]
    assert roots == ["old", BENCHMARKS.parent.name]  # whose specjax each of them imports
    assert endings(lines) == {"good": "done", "late": "skipped"}
    assert "budget left" in lines[-1]["reason"]


def test_a_pair_of_commits_is_compared_line_by_line(runner):
    pairs = runner[-1]

    def line(side, old="a", case="kernels/others", **fields):
        pair = {"side": side, "old": old, "new": "b"}
        result = {"case": case, "status": "result", "provenance": {"pair": pair}}
        return result | {"what": "truncation", "rows": 256} | fields

    lines = [
        line("old", device_us=1.0, old="earlier"),  # of another pair
        *(line("old", device_us=us, wall_us={"median": 999.0}) for us in (8.0, 6.0)),
        *(line("new", device_us=us) for us in (3.0, 4.0)),
        line("old", rows=1, device_us=5.0),  # the new one failed
        line("new", rows=1, error="no"),
        *(line(side, case="prefill", ms={"median": 2.0}) for side in ("old", "new")),
        {"case": "grid/1", "status": "done", "provenance": line("new")["provenance"]},
    ]
    name = "kernels/others truncation 256"
    assert pairs.ratios(lines) == [(name, 7.0, 3.5), ("prefill truncation 256", 2.0, 2.0)]
    assert "2.000  " + name in pairs.show(lines)
    assert pairs.ratios([{"case": "card", "status": "result", "provenance": {}}]) == []


def test_cases_by_name_and_group(runner):
    _, cases, *_ = runner
    names = ["grid/64", "card", "grid"]
    found = [case.name for case in cases.select(names)]
    assert found[:3] == ["grid/64", "card", "grid/1"]  # in the order given, each once
    assert len(found) == len(set(found)) == 1 + len(cases.select(["grid"]))
    assert {case.group for case in cases.select(["peers"])} == {"peers"}
    assert cases.select(None) == list(cases.CASES)
    with pytest.raises(ValueError, match="no case nothing"):
        cases.select(["nothing"])
    names = [case.name for case in cases.CASES]
    assert names[0] == "card" and len(set(names)) == len(names)
    assert all((FOLDER / f"{case.function.split(':')[0]}.py").exists() for case in cases.CASES)


@pytest.fixture
def report(monkeypatch):
    """The module benchmarks/report.py, imported as when it runs."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("report")
    for name in [name for name in sys.modules if name in ("gpu", "report") or name[:4] == "gpu."]:
        del sys.modules[name]


@pytest.mark.slow
def test_the_report_is_of_what_was_recorded(report, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "FOLDER", tmp_path)
    (tmp_path / "plots").mkdir()
    report.main()
    assert (tmp_path / "RESULTS.md").read_text() == (BENCHMARKS / "RESULTS.md").read_text()
    assert (tmp_path / "plots" / "gpu.png").stat().st_size > 1000


MS = {"median": 2.0, "p10": 1.0, "p90": 3.0, "p99": 9.0}
SOURCE = {"command": "run", "commit": "abc", "versions": {}, "device": "another card"}
ROWS = {
    # What was recorded has no such cells: case, fields, and the row that is shown.
    "| smoke | route 16 | bfloat16 | 0.001 | 0.05 | yes | NO |": (
        *("smoke", {"what": "smoke", "shape": ["route", "16"], "dtype": "bfloat16"}),
        {"error": 1e-3, "tolerance": 0.05, "passes": True, "is_repeatable": False},
    ),
    "| m | float32 |  | no m |": (
        *("tokens", {"what": "same outputs", "model": "m", "dtype": "float32"}),
        {"absent": "no m"},
    ),
    "| graph updates | m | 1 | 3 |  | 1.5 |  | 2 (1 to 3) | 9 |": (
        *("watch/updates", {"what": "graph updates", "model": "m", "batch": 1, "k": 3}),
        {"steps_ms": MS, "updates_per_step": 1.5},
    ),
    "| Llama-1B | 3 | 1.5 | 2 (1 to 3) | yes |": (
        *("early_launch", {"what": "early launch", "model": "Llama-1B", "k": 3}),
        {"ms_per_step": 1.5, "ratio": MS, "is_same": True},
    ),
    "| paged_attention m B=1 |  | ValueError: a \\| b |  |  |": (
        *("kernels/attention", {"what": "paged_attention", "model": "m", "batch": 1}),
        {"error": "ValueError: a | b"},
    ),
    "| step | m 1 | other | no other |  |": (
        *("peers/step", {"what": "step", "model": "m", "batch": 1, "k": 0, "peer": "other"}),
        {"absent": "no other"},
    ),
}


def sample_lines():
    common = {"seconds": 1.0, "date": "2026-01-01", "provenance": SOURCE}
    for case, what, fields in ROWS.values():
        yield {"case": case, "status": "result", **what, **fields, **common}
    yield {"case": "grid/64", "status": "failed", "stderr": "first\nRuntimeError: why"} | common


def test_rows_of_a_report(report, tmp_path):
    lines = list(sample_lines())
    text = report.render_section(lines)
    assert all(row in text for row in ROWS)
    assert "| grid/64 | failed | 1 | RuntimeError: why |" in text
    assert "cells of the seed" not in text  # which are held against the bandwidth of known cards
    again = lines[0] | {"error": 0.025}  # a figure measured again counts once
    text = report.render_section([*lines, again])
    assert "| 0.025 | 0.05 |" in text and "| 0.001 | 0.05 |" not in text
    assert "Prepared, not run" in report.render_section(report.read_lines(tmp_path / "absent"))


def test_the_readme_shows_what_was_recorded():
    """The README has milliseconds per step and, in brackets, the figures of vLLM's pull request."""
    root = BENCHMARKS.parent
    recorded = (root / "benchmarks" / "results" / "gpu.jsonl").read_text().splitlines()
    steps = {
        (line["batch"], line["k"]): line
        for line in map(json.loads, recorded)
        if line["case"].startswith("grid/") and line.get("what") == "step"
    }
    rows = re.findall(
        r"^\| (\d+) \|((?: [\d.]+ \([\d.]+\) \|){4})$", (root / "README.md").read_text(), re.M
    )
    assert [int(batch) for batch, _ in rows] == [1, 64, 256]
    for batch, cells in rows:
        figures = [steps[int(batch), k] for k in (0, 1, 3, 5)]
        shown = [f"{x['ms_per_step']:.2f} ({x['h100_ms_per_step']:.2f})" for x in figures]
        assert [cell.strip() for cell in cells.split("|")[:-1]] == shown


@pytest.mark.slow
def test_the_profiler_is_given_what_it_does_not_jit(runner, monkeypatch):
    from jax.experimental.mosaic.gpu import profiler
    from jax.stages import Wrapped

    timing = importlib.import_module("timing")
    monkeypatch.setitem(sys.modules, "timing", timing)

    def measure(f, *, aggregate, iterations):
        assert isinstance(f, Wrapped) and not aggregate
        kernels = [("one", 0.5), ("two", 0.25), ("one", 1.0)]
        return lambda: (f(), [kernels] * iterations)

    monkeypatch.setattr(profiler, "measure", measure)
    row = timing.measure(lambda: 0, timing.Setting(is_cpu=False), calls=2, num_bytes=1.75e6)
    assert row["kernels_us"] == {"one": 750, "two": 125} and row["device_us"] == 875
    assert row["timed_by"] == "device" and row["gbps"] == pytest.approx(2)


@pytest.fixture
def plan(runner):
    return importlib.import_module("plan")


def packed(plan, minutes=30, command=10, size=64, sizes=(40, 4, 5, 7, 42), rest=4):
    limits = plan.Limits(60 * minutes, 60 * command, size)
    return list(limits.pack(dict(zip((*plan.LLAMA, *plan.QWEN), sizes, strict=True)), rest))


@pytest.mark.parametrize("limits", [{}, {"minutes": 12, "command": 6}, {"size": 10**9}])
def test_a_plan_keeps_to_its_limits_and_order(plan, runner, limits):
    _, cases, *_ = runner
    machines = packed(plan, **limits)
    blocks = [block for calls in machines for call in calls for block in call]
    assert blocks == list(plan.BLOCKS)
    names = [case.name for block in blocks for case in cases.select(list(block.cases))]
    assert sorted(names) == sorted(case.name for case in cases.CASES)
    minutes, command = (limits.get(name, most) for name, most in (("minutes", 30), ("command", 10)))
    for calls in machines:
        seconds = [sum(block.seconds for block in call) for call in calls]
        assert sum(seconds) < 60 * minutes - 60 and max(seconds) < 60 * command
        for call in calls:
            assert "size" in limits or not {*plan.LLAMA, *plan.QWEN} <= plan.needed_by(call)


@pytest.mark.parametrize("limits", [{"size": 59}, {"command": 4}, {"minutes": 5}])
def test_a_plan_that_cannot_be_says_what_to_raise(plan, limits):
    with pytest.raises(ValueError, match="raise --total-minutes, --command-minutes or --size-mib"):
        packed(plan, **limits)


def test_commands_of_a_plan(plan):
    lines = list(plan.show(plan.Limits(1800, 600, 64 * plan.MIB), "there"))
    commands = [line for line in lines if line.startswith("run()")]
    assert "; run --only grid/1 grid/64 --budget 140; run --only" in commands[0]
    assert all("--output there/gpu.jsonl --cache" in c and len(c) < 2000 for c in commands)
    moved = [line for line in lines if line.startswith("mkdir")]
    assert "checkpoints/demo-qwen3.5" in moved[0] and "demo-llama" not in moved[0]


@pytest.mark.parametrize("statuses, ran", [((11, 11, 0), 2), ((12, 0), 1), ((11, 0, 11, 1, 0), 5)])
def test_commands_end_once_two_cases_in_a_row_hung(plan, tmp_path, statuses, ran):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/ran\nexit $7\n")
    python.chmod(0o755)
    blocks = [plan.Block(1, (f"{status}",)) for status in statuses]
    command = plan.command_of(blocks, "--output here --cache").replace("--only", "there --only")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["bash", "-c", command], check=True, env=environment)
    assert len((tmp_path / "ran").read_text().splitlines()) == ran


def test_the_report_names_what_is_wrong(plan):
    lines = [
        {"case": "card", "status": "done"},
        {"case": "smoke", "status": "result", "what": "smoke", "shape": ["route"], "passes": False},
        {"case": "grid/1", "status": "result", "what": "step", "k": 3, "error": "why"},
        {"case": "correct/float32", "status": "result", "what": "route", "error": 1e-6},
        {"case": "grid/64", "status": "timeout"},
    ]
    assert plan.report(map(json.dumps, lines)) == [
        "smoke smoke ['route']: passes is false",
        "grid/1 step 3: why",
        "grid/64: timeout",
    ]


def test_every_kernel_is_in_the_smoke_and_has_its_results(runner):
    smoke = importlib.import_module("smoke")
    cases = list(smoke.cases())
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    for is_tiny in True, False:
        kernels = {case.name.split()[0] for case in cases if case.is_tiny == is_tiny}
        assert {one.removeprefix("add_") for one in kernels} == {
            path.parent.name for path in (BENCHMARKS.parent / "pallas_kernels").glob("*/triton*")
        }
    assert smoke.FILE.stat().st_size < 5 * 2**20
    with np.load(smoke.FILE) as kept:
        assert {name.rpartition("/")[0] for name in kept} == set(names)


def test_one_wrong_row_of_many_is_an_error(runner):
    smoke, correct = map(importlib.import_module, ("smoke", "correct"))
    truth = np.random.default_rng(0).normal(size=(4096, 64)).astype(np.float32)
    wrong = truth.copy()
    wrong[77] += 1e-3
    assert smoke.worst_error(smoke.digest(truth), smoke.digest(truth)) == 0
    assert smoke.worst_error(smoke.digest(wrong), smoke.digest(truth)) > smoke.TOLERANCES["float32"]
    norm, row = map(float, correct.largest_errors([wrong], [truth]))
    assert norm < correct.TOLERANCE_F32 < correct.ROW_TOLERANCE_F32 < row
    wrong[77, 0] = np.nan
    assert smoke.worst_error(smoke.digest(wrong), smoke.digest(truth)) == np.inf


def test_what_xla_says_of_graphs_is_read(runner):
    watch = importlib.import_module("watch")
    with watch._said() as lines:
        os.write(
            2, b"I command_buffer_thunk.cc:1] Updated command buffer in 7 us; num_commands=42\n"
        )
        os.write(2, b"another line\n")
    (line,) = lines
    assert [watch._number_after(mark, line) for mark in (" in ", "num_commands=")] == [7, 42]


@pytest.mark.parametrize("code, passes", [(86, False), (0, True), (None, None)])
def test_the_sanitizer_is_asked_where_it_is_there(runner, tmp_path, monkeypatch, code, passes):
    memory, timing = map(importlib.import_module, ("memory", "timing"))
    if code is not None:
        tool = tmp_path / memory.TOOL
        tool.write_text(f"#!/bin/sh\necho 'RESULT {{}}'\necho out of bounds\nexit {code}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    *results, last = memory.check_memory(timing.Setting(is_cpu=False))
    assert results == [{"way": memory.TOOL}] * (code is not None)
    assert last.get("passes") is passes and ("absent" in last) == (code is None)


# Groups of cases that run here in this process, which has imported JAX, and in the nightly dry run.
GROUPS = "loading", "parallel", "peers", "projections"
# Whole engines; and comparisons of kernels with references, which tests/kernels have, too.
NIGHTLY = (
    *("grid", "host", "smoke", "kernels", "tokens"),
    *("watch", "adaptive", "models", "profile", "correct"),
)
DRY = "card", "memory"  # in processes of their own, as on a GPU machine


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_cases_run_on_the_cpu(runner, plan, monkeypatch, group):
    timing = importlib.import_module("timing")
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)  # as in a process of its own
    lines = []
    for case in runner[1].select([group]):
        if case.on_cpu:
            module, _, name = case.function.partition(":")
            measure = getattr(importlib.import_module(module), name)
            rows = measure(timing.Setting(is_cpu=True), **case.arguments)
            lines += [{"case": case.name, "status": "result", **row} for row in rows]
    assert lines and not plan.report(json.dumps(line, default=float) for line in lines)


def test_every_group_of_cases_runs_on_the_cpu(runner):
    groups = {case.group for case in runner[1].CASES if case.on_cpu}
    assert groups == {*GROUPS, *NIGHTLY, *DRY}


@pytest.mark.nightly
def test_the_plan_runs_on_the_cpu():
    command = [sys.executable, str(FOLDER / "plan.py"), "--dry-run"]
    assert subprocess.run(command, timeout=900).returncode == 0
