"""Tabulates the memory that published models need on an H200, as reported by `specjax info`.

    python benchmarks/memory_table.py

Nothing is measured, and no GPU is needed. The numbers follow from the models' configs, which
determine the shapes of the engine's arrays.
"""

import argparse
from typing import Any

from report import FOLDER, RESULTS, provenance, render, write_result

from specjax.commands.info import GPU_MEMORY_UTILIZATION, describe
from specjax.config import SpeculativeConfig
from specjax.inspect.gpus import GPU

# Drafter by model, in order of size. Models without an MTP module decode without drafts.
MODELS = {
    "Qwen3.5-0.8B": "mtp",
    "Qwen3.5-2B": "mtp",
    "Qwen3.5-4B": "mtp",
    "Qwen3.5-9B": "mtp",
    "Qwen3.5-27B": "mtp",
    "Qwen3.5-35B-A3B": "mtp",
    "Qwen3-Next-80B-A3B": "mtp",
    "Llama-3.1-8B": None,
}
SECTIONS = ("weights", "drafter", "cache", "h200")  # other sections depend on this machine
GIB, MIB, KIB = 2**30, 2**20, 2**10


def main() -> None:
    """Write the result, and print it as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--page-size", type=int, default=16)
    settings = parser.parse_args()
    result = {
        "title": "Memory of recurrent states on an H200",
        "description": "Lazily advanced states against a snapshot per draft, in bfloat16 with "
        f"float32 states, K = {settings.k} drafts of the model's own MTP module. Computed by "
        "`specjax info` from `benchmarks/configs/`, not measured.",
        "provenance": provenance(),
        "settings": vars(settings),
        **tables(settings.k, settings.page_size),
    }
    write_result(RESULTS / "memory_h200.json", result)
    print(render(result))


def tables(k: int, page_size: int) -> dict[str, Any]:
    """Return the tables, which have a row for each model, and the models' reports."""
    reports = {name: report(name, method, k, page_size) for name, method in MODELS.items()}
    usable = next(iter(reports.values()))["h200"]["usable_bytes"] / GIB
    total = GPU.named("h200").memory_bytes
    return {
        "tables": [
            {
                "title": "Memory of a request outside its pages",
                "columns": [
                    *("model", "parameters, 10^9", "KV KiB per token, target + MTP", "state, MiB"),
                    *("lazy slot, MiB", "slot / state"),
                    *(f"{k + 1} snapshots, MiB", "snapshots / state"),
                ],
                "rows": [slot_row(name, report) for name, report in reports.items()],
                "notes": [
                    "A lazy slot is one state and rings of tokens: raw inputs of W + K tokens, "
                    "where W is the width of the convolution, corrections of K + 1, keys and "
                    "decays of 2 (K + 1). Snapshots are K + 1 states, their convolution windows "
                    "not counted."
                ],
            },
            {
                "title": "Largest batch on one H200",
                "columns": [
                    *("model", "weights with MTP, GiB"),
                    *("4k, lazy", "4k, snapshots", "32k, lazy", "32k, snapshots"),
                ],
                "rows": [batch_row(name, report) for name, report in reports.items()],
                "notes": [
                    f"Weights, pages of {page_size} tokens for all requests at full length, and "
                    f"slots in {GPU_MEMORY_UTILIZATION:.0%} of the {total // MIB} MiB that "
                    f"nvidia-smi reports ({usable:.1f} GiB). Activations and logits are to fit the "
                    "rest. 0: the weights alone do not fit."
                ],
            },
        ],
        "samples": reports,
    }


def report(name: str, method: str | None, k: int, page_size: int) -> dict[str, Any]:
    """Return the report of `specjax info` on a model, without machine-dependent parts."""
    speculation = None
    if method is not None:
        speculation = SpeculativeConfig(method=method, num_speculative_tokens=k)
    full = describe(
        FOLDER / "configs" / name,
        speculation=speculation,
        dtype="bfloat16",
        page_size=page_size,
    )
    return {section: full[section] for section in SECTIONS}


def slot_row(name: str, report: dict[str, Any]) -> list[Any]:
    """Return a model's row of the first table."""
    cache = report["cache"]
    kv = cache["kv_bytes_per_token"]
    row = [name, report["weights"]["num_parameters"] / 1e9]
    row.append(f"{kv['target'] // KIB} + {(kv['drafter'] or 0) // KIB}")
    if cache["slot_bytes"] is None:
        return [*row, *["-"] * 5]
    return [
        *row,
        cache["slot_bytes"]["state"] / MIB,
        cache["slot_bytes"]["all"] / MIB,
        f"{cache['slot_over_state']:.3f}",
        cache["snapshot_bytes"] / MIB,
        f"{cache['snapshots_over_state']:.3f}",
    ]


def batch_row(name: str, report: dict[str, Any]) -> list[Any]:
    """Return a model's row of the second table."""
    h200 = report["h200"]
    lazy, snapshots = h200["largest_batch"], h200["largest_batch_with_snapshots"]
    cells = [[n, "-" if snapshots is None else snapshots[length]] for length, n in lazy.items()]
    return [name, h200["weight_bytes"] / GIB, *sum(cells, [])]


if __name__ == "__main__":
    main()
