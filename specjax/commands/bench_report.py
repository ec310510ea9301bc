"""Runs `specjax bench report`, which draws a saved result."""

import argparse

from specjax.bench.reports import check_report, write_report
from specjax.bench.reports.saved import read
from specjax.commands.bench_reading import check_outputs


def run(args: argparse.Namespace) -> int:
    """Write the report of a saved result. The file of the result is never overwritten."""
    check_report("--output", args.output)
    check_outputs(result=args.result, output=args.output)
    write_report(args.output, read(args.result))
    print(f"wrote {args.output}")
    return 0
