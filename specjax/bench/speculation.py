"""`specjax bench`: compares plain decoding with drafters, at several K (numbers of drafts)."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from specjax.bench.comparison import BenchRun
from specjax.bench.devices import Devices
from specjax.bench.drafters import label, read_config
from specjax.bench.engines import read_drafter, read_integers
from specjax.bench.report import Figures
from specjax.bench.reports import check_report, write_report
from specjax.bench.reports.saved import parse
from specjax.bench.screen import Screen, open_screen
from specjax.bench.settings import BenchSettings
from specjax.bench.workload import read_questions
from specjax.checkpoint.demo import DRAFTERS
from specjax.checkpoint.writing import check_writable
from specjax.serving.drafters import parse_drafter

FEW_KS, FULL_KS, FEW_PROMPTS = "0,3,5", "1,2,3,5", 8  # Ks usually, Ks with --full, prompts


def run(args: argparse.Namespace) -> int:
    """Run `specjax bench`. After an interrupt, show the results so far."""
    settings = read_settings(args)
    check_report("--report", args.report)
    output = Path(args.output).expanduser() if args.output else None
    if output:
        check_writable("--output", output)
    if args.report:
        check_writable("--report", Path(args.report))
        if output and output.resolve() == Path(args.report).expanduser().resolve():
            raise ValueError(f"--output and --report both write {args.report}; name two files")
    trial = BenchRun(settings)
    with ExitStack() as stack:
        names = [configuration.name for configuration in settings.configurations]
        screen = stack.enter_context(open_screen(names, sys.stdout, has_table=not args.json))
        try:
            trial.run(stack, screen)
        except KeyboardInterrupt:
            trial.is_interrupted = True
        # Report before closing the engines, which waits for programs that are being compiled.
        report = trial.report()
        text = json.dumps(report, indent=2)
        if output:
            output.write_text(text + "\n")
        screen.end(trial.lines(report))
        if args.json:
            print(text, flush=True)
        if args.report:
            write_report(args.report, parse(text, "speculation"))
        if trial.is_interrupted:  # as engines close, a second interrupt ends the process at once
            raise KeyboardInterrupt
    return 0


def bench(settings: BenchSettings) -> tuple[list[Figures], dict[str, Any]]:
    """Measure without showing anything. Return the figures per configuration, and a JSON report."""
    trial = BenchRun(settings)
    with ExitStack() as stack:
        trial.run(stack, Screen())
        return trial.figures, trial.report()


def read_settings(args: argparse.Namespace) -> BenchSettings:
    """Return the settings that the command's options describe."""
    available, devices = len(read_questions()), Devices.of(args)
    num_prompts = args.num_prompts
    if num_prompts is None:
        num_replicas = devices.data_parallel_size
        if not 1 <= args.batch_size <= available // num_replicas:
            of_all = f", for {num_replicas} replicas" if num_replicas > 1 else ""
            most = available // num_replicas
            raise ValueError(f"--batch-size {args.batch_size} must be in 1..{most}{of_all}")
        together = args.batch_size * num_replicas
        few = max(FEW_PROMPTS, together)
        num_prompts = (available if args.full else few) // together * together
    return BenchSettings(
        model=args.model,
        drafters=read_drafters(
            args.model, args.drafter, args.speculative_config, takes_all=args.full
        ),
        ks=read_integers("--k", args.k or (FULL_KS if args.full else FEW_KS)),
        batch_size=args.batch_size,
        num_prompts=num_prompts,
        max_tokens=args.max_tokens,
        max_model_len=args.max_model_len,
        temperature=args.temperature,
        seed=args.seed,
        rounds=args.rounds,
        dtype=args.dtype,
        quantization=args.quantization,
        devices=devices,
    )


def read_drafters(
    model: str,
    given: Sequence[str] | None,
    configs: Sequence[str] | None = None,
    *,
    takes_all: bool,
) -> dict[str, dict[str, Any]]:
    """Return the speculative config of each drafter, without K, by the drafter's name in results.

    If no drafter is given, return the drafters of a demo model, or an empty dict for other models.

    Args:
        given: the values of --drafter; None if there are none.
        configs: the values of --speculative-config; None if there are none.
        takes_all: whether to return all drafters of the demo model, or only the usual one.
    """
    if not given and not configs:
        if takes_all or model not in DRAFTERS:
            named = DRAFTERS.get(model, {}).items()
        else:
            named = [read_drafter(model, None)]
        return {method: {"method": method, "model": checkpoint} for method, checkpoint in named}
    found = [("--drafter", parse_drafter(one, target=model)._asdict()) for one in given or ()]
    found += [("--speculative-config", read_config(one, model)) for one in configs or ()]
    drafters: dict[str, dict[str, Any]] = {}
    for option, config in found:
        if (name := label(config)) in drafters:
            raise ValueError(f"{option} {name}=... is given twice; compare them in two runs")
        drafters[name] = config
    return drafters
