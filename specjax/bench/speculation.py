"""`specjax bench`: compares plain decoding with each drafter and K, on the same prompts."""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specjax.bench.engines import step_budget
from specjax.bench.environment import describe_environment
from specjax.bench.measure import PLAIN, Configuration, decode, measure
from specjax.bench.report import Figures, identity_line, repetition_line, show, summarise
from specjax.bench.workload import make_requests, read_questions, tokenize
from specjax.checkpoint.demo import DRAFTERS
from specjax.checkpoint.hub import resolve
from specjax.checkpoint.writing import check_writable
from specjax.checks import check_seed
from specjax.engine.engine import Engine
from specjax.host.request import Request
from specjax.host.speculation.policy import StaticPolicy
from specjax.llm import LLM
from specjax.sampling_params import SamplingParams
from specjax.serving.drafters import parse_drafter
from specjax.text.tokenizer import load_tokenizer, read_eos_ids

SCHEMA_VERSION = 1
_WARM_UP_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Options of `specjax bench`."""

    model: str
    drafters: Mapping[str, str | None]  # checkpoint by method
    ks: tuple[int, ...]
    batch_size: int
    num_prompts: int
    max_tokens: int
    max_model_len: int
    temperature: float
    seed: int
    rounds: int
    dtype: str

    def __post_init__(self):
        for name in "batch_size", "rounds", "num_prompts":
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} {getattr(self, name)} must be at least 1")
        if self.max_tokens < 2:
            raise ValueError(
                f"--max-tokens {self.max_tokens} leaves nothing to time: the first token comes "
                "with the prompt; use at least 2"
            )
        if not self.drafters:
            raise ValueError(
                f"--model {self.model} has no default drafters; name one with "
                "--drafter METHOD=CHECKPOINT"
            )
        if not self.ks or min(self.ks) < 0:
            given = ",".join(map(str, self.ks))
            raise ValueError(f"--k {given} must list integers of at least 0, like 1,2,3")
        if not any(self.ks):
            raise ValueError("--k 0 alone drafts nothing; list a K of at least 1, too")
        available = len(read_questions())
        if self.num_prompts > available:
            raise ValueError(f"--num-prompts {self.num_prompts}: there are {available}")
        if self.num_prompts % self.batch_size:
            raise ValueError(
                f"--num-prompts {self.num_prompts} does not fill batches of --batch-size "
                f"{self.batch_size}; use a multiple"
            )
        check_seed(**{"--seed": self.seed})
        SamplingParams(temperature=self.temperature)

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        """All configurations, plain decoding first."""
        return (
            Configuration(PLAIN, 0),
            *(Configuration(method, k) for method in self.drafters for k in self.ks),
        )


def run(args: argparse.Namespace) -> int:
    """Run `specjax bench`."""
    settings = read_settings(args)
    output = Path(args.output).expanduser() if args.output else None
    if output:
        check_writable("--output", output)
    is_terminal = sys.stdout.isatty() and not args.json
    figures, report = bench(settings, show_progress=is_terminal)
    text = json.dumps(report, indent=2)
    if output:
        output.write_text(text + "\n")
    if args.json:
        print(text)
    else:
        show(figures, describe(settings, figures, report), sys.stdout)
    return 0


def read_settings(args: argparse.Namespace) -> BenchSettings:
    """Return the settings for the command's options."""
    available = len(read_questions())
    num_prompts = args.num_prompts
    if num_prompts is None:
        if not 1 <= args.batch_size <= available:
            raise ValueError(f"--batch-size {args.batch_size} must be in 1..{available}")
        num_prompts = available // args.batch_size * args.batch_size
    try:
        ks = tuple(sorted({int(k) for k in args.k.split(",")}))
    except ValueError as error:
        raise ValueError(f"--k {args.k} must list integers, like 1,2,3") from error
    return BenchSettings(
        model=args.model,
        drafters=read_drafters(args.model, args.drafter),
        ks=ks,
        batch_size=args.batch_size,
        num_prompts=num_prompts,
        max_tokens=args.max_tokens,
        max_model_len=args.max_model_len,
        temperature=args.temperature,
        seed=args.seed,
        rounds=args.rounds,
        dtype=args.dtype,
    )


def read_drafters(model: str, given: Sequence[str] | None) -> dict[str, str | None]:
    """Parse drafters into checkpoints by method (None if it needs none).

    Without options, the drafters of a demo model are returned.
    """
    if not given:
        return dict(DRAFTERS.get(model, {}))
    drafters: dict[str, str | None] = {}
    for option in given:
        method, checkpoint = parse_drafter(option, target=model)
        if method in drafters:
            raise ValueError(f"--drafter {method}=... is given twice; compare them in two runs")
        drafters[method] = checkpoint
    return drafters


def bench(settings: BenchSettings, *, show_progress: bool) -> tuple[list[Figures], dict[str, Any]]:
    """Load, compile, warm up and measure; returns figures by configuration and a JSON report."""
    start = time.perf_counter()
    batches = load_workload(settings)
    with ExitStack() as stack:
        engines = load_engines(settings, stack, show_progress=show_progress)
        warm_up(engines, settings.configurations, batches[0])
        ready = time.perf_counter()
        total = settings.rounds * len(batches) * len(settings.configurations)
        columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(
            *columns, console=Console(stderr=True), disable=not show_progress, transient=True
        ) as progress:
            task = progress.add_task("", total=total)
            runs = measure(
                engines,
                settings.configurations,
                list(batches) * settings.rounds,
                on_run=lambda: progress.advance(task),
            )
        num_late = sum(engine.metrics().num_compiles_after_warmup for engine in engines.values())
    baseline = runs[settings.configurations[0]]
    figures = [summarise(configuration, runs[configuration], baseline) for configuration in runs]
    report = {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "speculation",
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": describe_environment(),
        "settings": asdict(settings),
        "num_rounds": len(baseline),
        "outputs_identical": not any(f.num_differing for f in figures),
        "num_compiles_while_measuring": num_late,
        "setup_seconds": ready - start,
        "measuring_seconds": time.perf_counter() - ready,
        "configurations": [asdict(f) for f in figures],
    }
    return figures, report


def load_workload(settings: BenchSettings) -> list[list[Request]]:
    """Return the prompts as batches of requests."""
    folder = resolve(settings.model)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer.json, and the prompts are text; add it")
    requests = make_requests(
        tokenize(read_questions()[: settings.num_prompts], tokenizer),
        max_tokens=settings.max_tokens,
        max_model_len=settings.max_model_len,
        temperature=settings.temperature,
        seed=settings.seed,
        stop_ids=read_eos_ids(folder, tokenizer),
    )
    size = settings.batch_size
    return [requests[i : i + size] for i in range(0, len(requests), size)]


def load_engines(
    settings: BenchSettings, stack: ExitStack, *, show_progress: bool
) -> dict[str, Engine]:
    """Return engines by method, PLAIN included, with every step of the measurement compiled."""
    engines: dict[str, Engine] = {}
    for method, checkpoint in {PLAIN: None, **settings.drafters}.items():
        speculation = {
            "method": method,
            "model": checkpoint,
            "num_speculative_tokens": settings.ks[-1],
        }
        llm = LLM(
            settings.model,
            speculative_config=None if method == PLAIN else speculation,
            enable_prefix_caching=False,  # every run must do the same work
            dtype=settings.dtype,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.batch_size,
            max_num_batched_tokens=step_budget(settings.batch_size, settings.ks[-1]),
            compile_ahead=True,
            verbose=show_progress,
        )
        engine = engines[method] = stack.enter_context(llm).engine
        # All engines share one copy of the target's weights.
        engine.params = engine.params._replace(target=engines[PLAIN].params.target)
        for k in () if method == PLAIN else settings.ks:
            engine.set_policy(StaticPolicy(k), show_progress=show_progress)
    return engines


def warm_up(
    engines: Mapping[str, Engine],
    configurations: Sequence[Configuration],
    requests: Sequence[Request],
) -> None:
    """Run each configuration once, untimed, to warm up memory and caches."""
    short = [
        replace(request, max_tokens=min(request.max_tokens, _WARM_UP_TOKENS))
        for request in requests
    ]
    for configuration in configurations:
        engines[configuration.method].set_policy(StaticPolicy(configuration.k))
        decode(engines[configuration.method], short)


def describe(
    settings: BenchSettings, figures: Sequence[Figures], report: Mapping[str, Any]
) -> list[str]:
    """Return the lines below the table."""
    environment, versions = report["environment"], report["environment"]["versions"]
    device = environment["device_kind"]
    if environment["platform"] == "cpu":
        device = f"{environment['cpu_model']}, {environment['num_cpus']} CPUs"
    mode = f"temperature {settings.temperature}" if settings.temperature else "greedy"
    prompts = f"{settings.num_prompts} prompts, up to {settings.max_tokens} tokens each"
    return [
        identity_line(figures),
        repetition_line(figures[0]),
        f"{settings.model}, {settings.dtype}, batch {settings.batch_size}, {prompts}, {mode}; "
        f"{device}; jax {versions['jax']}, specjax {versions['specjax']}",
        "timed: decoding alone, from the first token of a batch's last prompt to its last token; "
        f"medians over {report['num_rounds']} rounds,",
        "in each of which every configuration decodes the same batch in turn; 'x plain' is the "
        "median of the ratios within a round; AL: tokens per step",
        f"loading, compiling and warming up took {report['setup_seconds']:.0f} s, measuring "
        f"{report['measuring_seconds']:.0f} s",
    ]
