"""Runs `examples/grpo_arithmetic.py` with several seeds, and reports learning and time saved.

    python benchmarks/grpo_arithmetic.py --seeds 0 1

Each seed is a run of the example with its default settings, in a separate process, with its output
in runs/grpo/SEED. The plot of the first run is kept.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from report import RESULTS, provenance, write_result

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "grpo_arithmetic.py"
RUNS = EXAMPLE.parents[1] / "runs" / "grpo"
PLOT = RESULTS.parent / "plots" / "grpo_arithmetic.png"


def run_seed(seed: int) -> Path:
    """Run the example; return its output folder."""
    output = RUNS / str(seed)
    options = ["--seed", str(seed), "--output", str(output)]
    subprocess.run([sys.executable, str(EXAMPLE), *options], check=True)
    return output


def tables(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tables of the policy's learning, the drafter's acceptance and rollout times."""
    learnt, drafts, times = [], [], []
    for run in runs:
        seed, summary, moments = run["settings"]["seed"], run["summary"], run["moments"]
        learnt.append(
            [
                seed,
                summary["reward_first_five"],
                summary["reward_last_five"],
                *summary["sampled_accuracy"][1:],
                *summary["greedy_accuracy"][1:],
            ]
        )
        lengths = [moment["acceptance_length"] for moment in moments]
        recovered = summary.get("part_recovered")
        drafts.append([seed, *summary["acceptance_length"], lengths[-1], recovered])
        updates = [step["update_seconds"] for step in run["steps"]]
        times.append(
            [
                seed,
                summary["times_as_fast_stale"],
                summary["times_as_fast_refitted"],
                [float(np.quantile(updates, q)) for q in (0.5, 0.25, 0.75)],
                summary["logprob_difference"],
                run["seconds"],
            ]
        )
    return [
        {
            "title": "Learning",
            "columns": [
                "seed",
                "reward, first 5 steps",
                "last 5",
                "held out, sampled, before GRPO",
                "after",
                "held out, greedy, before GRPO",
                "after",
            ],
            "rows": learnt,
            "notes": ["Rewards are the part of 64 rollouts that are right, at temperature 1."],
        },
        {
            "title": "Tokens per round of three drafts, on held-out questions at temperature 1",
            "columns": [
                "seed",
                "as shipped",
                "first refit: before",
                "after",
                "at the end",
                "part recovered by the first refit",
            ],
            "rows": drafts,
            "notes": [],
        },
        {
            "title": "Time of rollouts without a drafter over that with adaptive K, side by side",
            "columns": [
                "seed",
                "until the first refit",
                "thereafter",
                "update of the policy, s",
                "largest difference of log-probabilities",
                "the whole run, s",
            ],
            "rows": times,
            "notes": ["All rollouts were identical, token for token; the example ends if not."],
        },
    ]


def main() -> None:
    """Run every seed, and write results/grpo_arithmetic.json and its plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    args = parser.parse_args()
    source = provenance(("optax",))
    folders = [run_seed(seed) for seed in args.seeds]
    runs = [json.loads((folder / "results.json").read_text()) for folder in folders]
    shutil.copyfile(folders[0] / "plot.png", PLOT)
    result = {
        "title": "GRPO on sums, with speculative rollouts",
        "description": (
            "The demo model imitates worked sums, then learns by GRPO; two engines, one of them "
            "without a drafter, make the same rollouts with the same seeds."
        ),
        "provenance": source,
        "settings": runs[0]["settings"],
        "tables": tables(runs),
        "samples": [{name: run[name] for name in ("settings", "moments", "steps")} for run in runs],
    }
    write_result(RESULTS / "grpo_arithmetic.json", result)


if __name__ == "__main__":
    main()
