"""Runs `specjax bench latency`."""

import argparse

from specjax.bench.describe import closing_lines, speculation_lines, step_lines
from specjax.bench.latency import figures, measure
from specjax.bench.offline import BatchRun
from specjax.checks import check_count, check_positive
from specjax.commands.bench_offline import OfflineRun


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and show its result. After an interrupt, show the completed runs."""
    check_positive(**{"--batch-size": args.batch_size, "--num-iters": args.num_iters})
    check_count(**{"--num-iters-warmup": args.num_iters_warmup})
    if args.max_num_seqs is None:  # the batch runs together
        args.max_num_seqs = args.batch_size
    asked = OfflineRun.read("latency", args, num_prompts=args.batch_size, ignore_eos=True)
    batches: list[BatchRun] = []
    is_interrupted = False
    with asked.opened() as offline:
        asked.warm_up(offline, args.num_iters_warmup)
        try:
            measure(offline, asked.prompts, args.num_iters, batches)
        except KeyboardInterrupt:
            is_interrupted = True
            if not batches:
                raise
        asked.finish(offline, batches[0])
        details = asked.details(batches, [{"avg_latency": one.seconds} for one in batches])
        details.is_interrupted = is_interrupted
    top = {**figures(batches), "model_id": asked.model}
    lines = [
        f"Avg latency: {top['avg_latency']} seconds",
        *(f"{p}% percentile latency: {value} seconds" for p, value in top["percentiles"].items()),
        *speculation_lines(details.speculation),
        *step_lines(details.speculation),
        *closing_lines(details, asked.model),
    ]
    asked.write(top, details, lines)
    if is_interrupted:
        raise KeyboardInterrupt
    return 0
