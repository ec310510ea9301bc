"""Plots a run of `grpo_arithmetic.py`."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PANELS = {
    "reward": ("mean reward", None),
    "acceptance_length": ("acceptance length", 1.0),
    "mean_k": ("mean K", 0.0),
}


def plot_steps(results: dict[str, Any], path: Path) -> None:
    """Plot reward, acceptance length and mean K by step, as a PNG. Dashed lines mark refits."""
    steps, settings = results["steps"], results["settings"]
    refits = range(settings["refit_every"], settings["steps"], settings["refit_every"])
    figure = Figure(figsize=(7, 7), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(PANELS), 1, sharex=True)
    for axes, (name, (label, least)) in zip(all_axes, PANELS.items(), strict=True):
        axes.plot([step["number"] for step in steps], [step[name] for step in steps], marker=".")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=least)
        for refit in refits:
            axes.axvline(refit + 0.5, color="gray", linestyle="--", linewidth=0.8)
    all_axes[0].set_ylim(0, 1)
    all_axes[0].set_title("GRPO on sums; dashed: the drafter is refitted")
    all_axes[-1].set_xlabel("step")
    figure.savefig(path, dpi=120)
