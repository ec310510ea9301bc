"""Renders the result lines of a card as a section of RESULTS.md."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu.pairs import key
from gpu.seed import BAR, PEAK_TBPS, peak_gbps

TITLE = "On a GPU"
PREPARED = (
    "Prepared, not run: there are no results yet. `python benchmarks/gpu/run.py` on a machine "
    "with the card fills the tables of this section."
)
MIN_OF_COPY, MIN_OF_FLOOR, MAX_STEP, MAX_TAX = 0.7, 0.75, 1.1, 1.01
HOST_WAYS = "device", "async", "sync"
Line = Mapping[str, Any]


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a results file, or an empty list if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def render_section(lines: Sequence[Line]) -> str:
    """Return the section as Markdown."""
    if not lines:
        return f"## {TITLE}\n\n{PREPARED}"
    results = latest(line for line in lines if line["status"] == "result")
    logged = [x["message"] for x in pick(results, "log")]
    results = [x for x in results if x["what"] != "log"]
    device = lines[-1]["provenance"]["device"]
    parts = [f"## {TITLE}: {device}", "", *_sources(lines), ""]
    for title, make in TABLES.items():
        columns, rows = make(results, device)
        if rows:
            parts += [f"### {title}", "", *_table(columns, rows), ""]
    parts += [f"- Logged: {message}" for message in dict.fromkeys(logged)] + [""] * bool(logged)
    columns, rows = _endings(lines)
    return "\n".join([*parts, "### How the cases ended", "", *_table(columns, rows)])


def latest(lines: Iterable[Line]) -> list[Line]:
    """Return the last line of each measurement."""
    return list({key(line): line for line in lines}.values())


def _sources(lines: Sequence[Line]) -> list[str]:
    last = lines[-1]["provenance"]
    gpu = last.get("gpu") or {}
    versions = ", ".join(f"{name} {v}" for name, v in last["versions"].items())
    commands = dict.fromkeys(line["provenance"]["command"] for line in lines)
    commits = dict.fromkeys(line["provenance"]["commit"] for line in lines)
    days = sorted({line["date"][:10] for line in lines})
    return [
        "Weights are random; times are medians. Bytes are the least that the work must move, so "
        "that a share of the copy bandwidth is a share of the card's limit. Plot: plots/gpu.png.",
        "",
        f"- Commands: {', '.join(f'`{c}`' for c in commands)}",
        f"- Device: {last['device']}, driver {gpu.get('driver_version', 'unknown')}, power limit "
        f"{gpu.get('power.limit', 'unknown')}",
        f"- Versions: {versions}",
        f"- Time and commit: {' to '.join(days)}, {', '.join(commits)}",
    ]


def _bars(results: Sequence[Line], device: str) -> tuple[list[str], list[list[Any]]]:
    rows = []

    def add(what: str, values: list[float], bar: float, is_least: bool) -> None:
        for value in values:
            meets = value >= bar if is_least else value <= bar
            sign = ">=" if is_least else "<="
            rows.append([what, value, f"{sign} {bar:g}", "yes" if meets else "no"])

    for name in "paged_attention", "gated_delta_rule":
        for x in pick(results, name):
            of_copy = x.get("of_copy")
            if of_copy and x["batch"] == 64 and x.get("context", 4096) == 4096:
                add(f"{kernel_name(x)}, of copy", [of_copy], MIN_OF_COPY, True)
    for x in pick(results, "step"):
        if x["case"] == "grid/1" and x["k"] == 0 and "gbps" in x:
            add("Llama-8B, 1 request, K = 0, of copy", [x.get("of_copy", 0)], MIN_OF_FLOOR, True)
            if peak := peak_gbps(device):
                add("the same, of the datasheet", [x["gbps"] / peak], MIN_OF_FLOOR, True)
    for x in pick(results, "drafts"):
        if "ratio" in x:
            what = f"step of K = 3 / (target + 3 drafts), {x['batch']} requests"
            add(what, [x["ratio"]], MAX_STEP, False)
    for x in pick(results, "K=0 tax"):
        if "ratio" in x:
            what = f"K = 0 with a drafter / without, {x['batch']} requests"
            add(what, [x["ratio"]], MAX_TAX, False)
    cells = [m for x in pick(results, "step") if (m := _to_seed(x, device, "ms_per_step"))]
    if cells:
        met = sum(ratio <= BAR for ratio in cells)
        rows.append([
            "cells of the seed's grid within its figure, scaled by memory bandwidth",
            f"{met} of {len(cells)}", f"<= {BAR:g} each", "yes" if met == len(cells) else "no",
        ])  # fmt: skip
    return ["what", "measured", "bar", "met"], rows


def _card(results: Sequence[Line], device: str) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [x["what"], x.get("size", ""), x["ms"]["median"], x.get("gbps", ""), x.get("tflops", "")]
        for x in results
        if x["case"] == "card" and "ms" in x
    ]
    return ["what", "size", "ms", "GB/s", "TFLOP/s"], rows


def _correct(results: Sequence[Line], device: str) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [x["what"], _words(x["shape"]), x["dtype"], *_or_error(x, "error", "tolerance", "passes",
         "is_repeatable")]
        for x in results
        if x["case"].startswith("correct/") or x["what"] == "smoke"
    ]  # fmt: skip
    return ["kernel", "shape", "type", "error", "tolerance", "passes", "repeats bitwise"], rows


def _kernels(results: Sequence[Line], device: str) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [kernel_name(x), x.get("device_us") or "", *_or_error(x, "wall_us", "gbps", "of_copy")]
        for x in results
        if x["case"].startswith("kernels/") and "tiles" not in x["what"]
    ]
    columns = ["kernel", "device us", "wall us", "GB/s", "of copy"]
    return columns, rows


def _tiles(results: Sequence[Line], device: str) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [kernel_name(x), f"`{x['config']}`", f"`{x['default']}`", x["speedup"] or ""]
        for x in results
        if x["what"].endswith("best tiles")
    ]
    return ["kernel", "best", "default", "best / default, GB/s"], rows


def _projections(results: Sequence[Line], device: str) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [x["part"], x["rows"], x["way"], x.get("device_us") or "",
         *_or_error(x, "wall_us", "gbps", "of_copy")]
        for x in pick(results, "projection")
    ]  # fmt: skip
    return [
        "projection", "rows", "depth", "device us", "wall us", "GB/s", "of copy",
    ], rows  # fmt: skip


def _profiles(results: Sequence[Line], device: str) -> tuple[list[str], list[list[Any]]]:
    """Return a table of the kinds of kernel that take at least 1 % of a step's time."""
    rows = []
    for x in pick(results, "profile"):
        step = x["model"], x["batch"], x["k"]
        for kind, (count, us) in x.get("kinds", {}).items():
            if us >= x["device_us"] / 100:
                rows.append([*step, kind, count, us, us / count, us / x["device_us"]])
    return ["model", "requests", "K", "kernels", "launches", "us", "us each", "part"], rows


def _steps(results: Sequence[Line], device: str) -> tuple[list[str], list[list[Any]]]:
    rows = []
    for x in sorted(pick(results, "step"), key=lambda x: (x["model"], x["batch"], x["k"])):
        seeds = [x.get(f"h100_{name}", "") for name in ("ms_per_step", "ms_per_token")]
        ratio = _to_seed(x, device, "ms_per_step")
        cells = _or_error(x, "ms_per_step", "ms_per_token", "of_copy")
        rows.append([x["model"], x["batch"], x["k"], *cells, *seeds, ratio or ""])
    return [
        "model", "requests", "K", "ms per step", "ms per token", "of copy", "H100, ms per step",
        "H100, ms per token", "ms per step / H100's, scaled",
    ], rows  # fmt: skip


def _lazy(results: Sequence[Line], device: str) -> tuple[list[str], list[list[Any]]]:
    def us(x: Line) -> float:
        return x.get("device_us") or x["wall_us"]["median"]

    kept = {
        (x["model"], x["batch"], x["rows"]): us(x)
        for x in pick(results, "snapshots")
        if "error" not in x
    }
    rows = []
    for x in pick(results, "gated_delta_rule"):
        key = x.get("model"), x.get("batch"), x.get("rows")
        if key in kept and "error" not in x:
            rows.append([*key, us(x), kept[key], kept[key] / us(x)])
    return [
        "model", "requests", "T", "lazy, us", "a state after every token, recurrence alone, us",
        "ratio",
    ], rows  # fmt: skip


def _host(results: Sequence[Line], device: str) -> tuple[list[str], list[list[Any]]]:
    # Lines "host gap" come from an earlier method, but their engine times are still valid.
    rows = [
        [x["model"], x["batch"], x["k"], x["way"],
         *_or_error(x, "ms_per_step", "busy", "host_ms", "wait_ms")]
        for x in [*pick(results, "host gap"), *pick(results, "host")]
        if x["way"] in HOST_WAYS
    ]  # fmt: skip
    return [
        "model", "requests", "K", "how", "ms per step", "device busy", "host ms", "wait ms",
    ], rows  # fmt: skip


def _adaptive(results: Sequence[Line], device: str) -> tuple[list[str], list[list[Any]]]:
    rows = []
    for x in pick(results, "adaptive K"):
        speeds = x.get("tokens_per_second", {})
        shown = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
        rows.append([x["model"], x["batch"], shown, *_or_error(x, "ratio")])
    return ["model", "requests", "tokens/s", "adaptive / best static"], rows


def _prompts(results: Sequence[Line], device: str) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [x["model"], x["batch"], x["tokens"],
         *_or_error(x, "ms", "tokens_per_second", "tflops", "of_product")]
        for x in pick(results, "prefill")
    ]  # fmt: skip
    return [
        "model", "prompts", "tokens each", "ms", "tokens/s", "TFLOP/s", "of the card's product",
    ], rows  # fmt: skip


def _starts(results: Sequence[Line], device: str) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [x["model"], x["k"], x["way"], *_or_error(x, "ms", "programs_at_first_token",
         "ms_to_all", "programs", "compile_ms")]
        for x in pick(results, "start")
    ]  # fmt: skip
    return [
        "model", "K", "how", "ms until the first token", "programs then",
        "ms until the last program", "programs", "ms compiling",
    ], rows  # fmt: skip


def _loading(results: Sequence[Line], device: str) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [x["model"], *_or_error(x, "ms", "file_gbps", "plain_gbps")]
        for x in pick(results, "loading")
    ]
    return ["model", "ms", "GB/s", "GB/s of a plain read"], rows


def _outputs(results: Sequence[Line], device: str) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [x["model"], x["dtype"], x.get("way", ""), f"{x['differ']} of {x['outputs']}"
         if "differ" in x else x.get("absent") or _or_error(x, "error")[0]]
        for x in pick(results, "same outputs")
    ]  # fmt: skip
    return ["model", "type", "how", "outputs that differ"], rows


def _watched(results: Sequence[Line], device: str) -> tuple[list[str], list[list[Any]]]:
    names = "way", "updates_per_step", "joined_steps"
    rows = [
        [x["what"], x["model"], x["batch"], x.get("k", ""), *(x.get(name, "") for name in names),
         x["steps_ms"], x["steps_ms"]["p99"]]
        for x in results
        if "steps_ms" in x
    ]  # fmt: skip
    return [
        "what", "model", "batch", "K", "how", "graphs recorded again per step", "joined steps",
        "ms of a step", "99 of 100 take less",
    ], rows  # fmt: skip


def _buffers(results: Sequence[Line], device: str) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [x["buffers"], x["k"], *_or_error(x, "ms", "of_copy")]
        for x in pick(results, "command buffers")
    ]
    return ["command buffers", "K", "ms per step", "of copy"], rows


def _early(results: Sequence[Line], device: str) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [x["model"], x["k"], *_or_error(x, "ms_per_step", "ratio", "is_same")]
        for x in pick(results, "early launch")
    ]
    return ["model", "K", "ms per step", "as usual / launched early", "same results"], rows


def _peers(results: Sequence[Line], device: str) -> tuple[list[str], list[list[Any]]]:
    rows = []
    for x in results:
        if x["case"].startswith("peers/"):
            times = [x.get("absent", "")] if "absent" in x else _or_error(x, _time_field(x))
            shape = _words(x.get(n, "") for n in ("model", "batch", "rows", "context"))
            rows.append([x["what"], shape, x["peer"], *times, x.get("gbps", "")])
    return ["what", "shape", "whose", "wall us, or ms of a step", "GB/s"], rows


def _endings(lines: Sequence[Line]) -> tuple[list[str], list[list[Any]]]:
    last = {line["case"]: line for line in lines if line["status"] != "result"}
    rows = []
    for case, line in last.items():
        said = line.get("stderr", "").strip().splitlines()
        why = line.get("reason") or (said[-1][:160] if said else "")
        rows.append([case, line["status"], line["seconds"], why.replace("|", "\\|")])
    return ["case", "ended", "seconds", "why"], rows


TABLES: dict[str, Callable[[Sequence[Line], str], tuple[list[str], list[list[Any]]]]] = {
    "Against the bars": _bars,
    "The card": _card,
    "Results of kernels": _correct,
    "Times of kernels": _kernels,
    "Other tiles": _tiles,
    "Projections, whole and split": _projections,
    "Steps": _steps,
    "Kernels of a step": _profiles,
    "Lazy states": _lazy,
    "The host": _host,
    "Prompts": _prompts,
    "Adaptive K": _adaptive,
    "Start": _starts,
    "Loading": _loading,
    "Outputs": _outputs,
    "Steps while something else happens": _watched,
    "Command buffers": _buffers,
    "Kernels launched before the one before has ended": _early,
    "Others' programs": _peers,
}


def pick(results: Sequence[Line], what: str) -> list[Line]:
    return [x for x in results if x["what"] == what]


def _to_seed(x: Line, device: str, name: str) -> float | None:
    """Return the ratio to the H100's published figure, which is scaled to this card's bandwidth."""
    peak, seed = peak_gbps(device), x.get(f"h100_{name}")
    if not peak or not seed or name not in x:
        return None
    return x[name] / (seed * 1e3 * PEAK_TBPS["H100"] / peak)


def kernel_name(x: Line) -> str:
    shape = {"batch": "B", "rows": "T" if "batch" in x else "N", "context": "c", "tokens": "N"}
    sizes = [f"{letter}={x[name]}" for name, letter in shape.items() if name in x]
    others = [str(x[name]) for name in ("model", "part", "dim") if name in x]
    return " ".join([x["what"], *others, *sizes])


def _time_field(x: Line) -> str:
    return "wall_us" if "wall_us" in x else "ms"


def _or_error(x: Line, *names: str) -> list[Any]:
    if "error" in x and isinstance(x["error"], str):
        return [x["error"][:80].replace("|", "\\|").replace("\n", " "), *[""] * (len(names) - 1)]
    return [x.get(name, "") for name in names]


def _words(values: Iterable[Any]) -> str:
    return " ".join(str(v) for v in values if v != "")


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *([_cell(v) for v in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):  # a spread
        return f"{_cell(value['median'])} ({_cell(value['p10'])} to {_cell(value['p90'])})"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)
