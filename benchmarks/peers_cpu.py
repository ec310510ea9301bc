"""Compares specjax with transformers, eager and compiled, and with vLLM, on this CPU.

    python benchmarks/peers_cpu.py
    python benchmarks/peers_cpu.py --vllm

The script runs `specjax bench throughput --against transformers --against transformers-compiled`.
With --vllm, it also runs `specjax bench serve --against vllm`. The program vllm must then be on the
PATH.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import RESULTS, provenance, summary, write_result

ENGINE = ["--drafter", "demo-llama-eagle3", "--k", "3", "--max-model-len", "512"]
OFFLINE = ["throughput", *ENGINE, "--output-len", "48", "--max-num-seqs", "8", "--rounds", "5"]
OFFLINE += ["--against", "transformers", "--against", "transformers-compiled"]
SERVED = ["serve", *ENGINE, "--output-len", "48", "--max-concurrency", "4", "--against", "vllm"]
SERVED += ["--peer-args=--max-model-len 512"]
SHOWN = {
    "output_throughput": "output tokens/s",
    "median_ttft_ms": "median TTFT (ms)",
    "median_tpot_ms": "median TPOT (ms)",
    "median_e2el_ms": "median E2EL (ms)",
}


def bench(words: list[str], folder: str) -> dict[str, Any]:
    """Run `specjax bench` with the arguments `words`, and return its result."""
    path = Path(folder, f"{words[0]}.json")
    command = [sys.executable, "-m", "specjax", "bench", *words, "--output-json", str(path)]
    subprocess.run(command, check=True)
    return json.loads(path.read_text())


def equal(peer: dict[str, Any]) -> str:
    """Return a text that says how many of a peer's outputs have the same tokens as specjax's."""
    return f"{peer['outputs']['num_same']} of {peer['outputs']['num_compared']}"


def offline_table(found: dict[str, Any]) -> dict[str, Any]:
    """Return a table of tokens per second, and of specjax's ratio to each engine in the same round.

    In a round, the engines take turns.
    """
    details, key = found["specjax"], "output_tokens_per_second"
    own = [one[key] for one in details["rounds"]]
    rows: list[list[Any]] = [["specjax, EAGLE-3, K = 3", summary(own), "", ""]]
    for peer in details["peers"]:
        theirs = [one[key] for one in peer["rounds"]]
        ratios = [a / b for a, b in zip(own, theirs, strict=True)]
        name = f"{peer['name']} {peer['version']}"
        rows.append([name, summary(theirs), summary(ratios), equal(peer)])
    return {
        "title": "All prompts at once, up to 8 at a time",
        "columns": ["engine", "output tokens/s", "specjax over it", "equal outputs"],
        "rows": rows,
        "notes": [_notes(details)],
    }


def served_table(found: dict[str, Any]) -> dict[str, Any]:
    """Return a table that compares two servers, which ran one after the other."""
    (peer,) = found["specjax"]["peers"]
    figures = peer["figures"]
    rows = [[name, found[k], figures[k], found[k] / figures[k]] for k, name in SHOWN.items()]
    return {
        "title": "Servers, 4 requests at a time",
        "columns": ["", "specjax, EAGLE-3, K = 3", "vllm", "specjax over vllm"],
        "rows": [*rows, ["equal outputs", "", equal(peer), ""]],
        "notes": ["The servers ran one after the other. " + _notes(found["specjax"])],
    }


def _notes(details: dict[str, Any]) -> str:
    prompts = f"{details['dataset']['num_requests']} prompts of gsm8k, 48 tokens each at most."
    doubts = "; ".join(details["machine"]["doubts"])
    return f"{prompts} Times are not reliable: {doubts}." if doubts else prompts


def main() -> None:
    """Run the benchmarks and write the result."""
    parser = argparse.ArgumentParser(description="specjax against other engines on this CPU")
    parser.add_argument("--vllm", action="store_true", help="also compare with the program vllm")
    parser.add_argument("--output", type=Path, default=RESULTS / "peers_cpu.json")
    args = parser.parse_args()
    source, samples = provenance(["torch", "transformers"]), {}
    with tempfile.TemporaryDirectory() as folder:
        found = bench(OFFLINE, folder)
        tables = [offline_table(found)]
        samples["seconds"] = {
            "specjax": [one["elapsed_time"] for one in found["specjax"]["rounds"]],
            **{
                peer["name"]: [one["elapsed_time"] for one in peer["rounds"]]
                for peer in found["specjax"]["peers"]
            },
        }
        if args.vllm:
            tables.append(served_table(bench(SERVED, folder)))
    write_result(
        args.output,
        {
            "title": "Against other engines on a CPU, by specjax bench",
            "description": "demo-llama in float32, greedy. transformers runs batches padded on "
            "the left; compiled: its forward pass through torch.compile, with a static cache.",
            "provenance": source,
            "settings": {"offline": OFFLINE, "served": SERVED if args.vllm else None},
            "tables": tables,
            "samples": samples,
        },
    )
    for table in tables:
        print(table["title"], *table["rows"], *table["notes"], sep="\n  ")


if __name__ == "__main__":
    main()
