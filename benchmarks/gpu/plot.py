"""Plots the results of a run on the card."""

from collections.abc import Sequence
from pathlib import Path

from gpu.section import MIN_OF_COPY, Line, kernel_name, latest, pick
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def plot(lines: Sequence[Line], path: Path) -> None:
    """Plot milliseconds per token by batch size, and the kernels' bandwidths.

    A kernel's bandwidth is shown as a fraction of the copy bandwidth.
    """
    results = latest(line for line in lines if line["status"] == "result")
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps = [x for x in pick(results, "step") if x["case"].startswith("grid/") and "error" not in x]
    for k in sorted({x["k"] for x in steps}):
        cells = sorted((x["batch"], x["ms_per_token"]) for x in steps if x["k"] == k)
        left.plot(*zip(*cells, strict=True), marker="o", label=f"K={k}")
    left.set(xlabel="requests", ylabel="ms per token", xscale="log", yscale="log")
    left.set_title("Llama-3.1-8B shapes, EAGLE-1, synthetic acceptance", fontsize=9)
    kernels = [
        x for x in results if x["case"].startswith("kernels/") and "of_copy" in x
        and x["what"] in ("paged_attention", "gated_delta_rule")
    ]  # fmt: skip
    for i, x in enumerate(kernels):
        color = "tab:blue" if x["what"] == "paged_attention" else "tab:orange"
        right.barh(i, x["of_copy"], color=color)
    right.set_yticks(range(len(kernels)), [kernel_name(x) for x in kernels], fontsize=5)
    right.axvline(MIN_OF_COPY, color="grey", linewidth=0.8)
    right.set_xlabel("part of the card's copy bandwidth")
    if steps:
        left.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
