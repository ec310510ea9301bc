"""Runs `specjax bench` on a demo target without and with its drafters, and writes the result.

python benchmarks/speculation_cpu.py
python benchmarks/speculation_cpu.py --model demo-qwen3.5
"""

import argparse
from dataclasses import asdict

from report import RESULTS, provenance, write_result

from specjax.bench.report import identity_line, repetition_line
from specjax.bench.speculation import bench, read_settings
from specjax.checkpoint.demo import TARGET
from specjax.commands.bench import add_arguments


def main() -> None:
    """Run `specjax bench` with its default options, unless arguments differ; write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.set_defaults(full=True)
    settings = read_settings(parser.parse_args())
    source = provenance()
    figures, report = bench(settings)
    rows = [
        [
            f.configuration,
            f.tokens_per_second,
            f.ratio.median,
            f"{f.ratio.p10:.2f}-{f.ratio.p90:.2f}",
            f.ms_per_step,
            f.ms_per_token.median,
            f.mean_acceptance_length,
            f.mean_acceptance_length_low_repeat or "-",
            " ".join(f"{rate:.2f}" for rate in f.acceptance_per_position),
        ]
        for f in figures
    ]
    table = {
        "title": f"Batch {settings.batch_size}, greedy",
        "columns": [
            "configuration", "tokens/s", "times plain", "p10-p90", "ms/step", "ms/token",
            "tokens/step", "on low-repeat outputs", "accepted by position",
        ],
        "rows": rows,
        "notes": [
            f"{identity_line(figures)}.",
            f"{repetition_line(figures)}.",
            f"Decoding alone is timed. {report['num_rounds']} rounds, each with all configurations "
            "in turn; ratios are paired within a round.",
        ],
    }  # fmt: skip
    result = {
        "title": f"Speculation on {settings.model}",
        "description": f"{settings.model} in {settings.dtype}, {settings.num_prompts} held-out "
        f"GSM8K questions, up to {settings.max_tokens} tokens each.",
        "provenance": source,
        "settings": asdict(settings),
        "tables": [table],
        "samples": {"configurations": report["configurations"]},
    }
    suffix = "" if settings.model == TARGET else f"_{settings.model}"
    write_result(RESULTS / f"speculation_cpu{suffix}.json", result)


if __name__ == "__main__":
    main()
