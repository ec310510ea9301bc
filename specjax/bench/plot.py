"""Plots the results of `specjax bench sweep`."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def plot_sweep(report: dict[str, Any], path: Path) -> None:
    """Write a PNG with the time per output token and the regret of each policy, by batch size.

    The regret is the fraction of throughput that a policy loses against the best static K.
    """
    batches = report["batches"]
    sizes = [int(batch) for batch in batches]
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name in next(iter(batches.values()))["policies"]:
        at_sizes = [batch["policies"][name] for batch in batches.values()]
        is_dynamic = not name.startswith(("K=", "off"))
        style = {"marker": "o", "linewidth": 2.5 if is_dynamic else 1.0}
        style["linestyle"] = "--" if name == "off" else "-"
        tpot = [one["tpot_ms"] for one in at_sizes]
        (line,) = left.plot(sizes, [t["median"] for t in tpot], label=name, **style)
        bands = [t["p10"] for t in tpot], [t["p90"] for t in tpot]
        left.fill_between(sizes, *bands, color=line.get_color(), alpha=0.1)
        regret = [100 * one["regret"] for one in at_sizes]
        right.plot(sizes, regret, label=name, color=line.get_color(), **style)
    right.axhline(0, color="gray", linewidth=0.5)
    for axes, label in (left, "ms per output token"), (right, "% slower than the best static K"):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xlabel("batch size")
        axes.set_ylabel(label)
    left.set_yscale("log")
    left.legend(fontsize="small")
    figure.suptitle(f"{report['settings']['model']}, {report['settings']['method']}")
    figure.savefig(path, dpi=120)
