"""Measures plain decoding and drafters. An interrupted measurement keeps its results so far."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from specjax.bench.devices import set_policies, share_target
from specjax.bench.engines import step_budget
from specjax.bench.environment import describe_environment, describe_processors
from specjax.bench.machine import CpuTime, Machine, Moment, load_now
from specjax.bench.measure import PLAIN, PLAIN_ONE, Configuration, Round, decode, measure
from specjax.bench.report import (
    Figures,
    cost_line,
    identity_line,
    repetition_line,
    source_lines,
    summarise,
)
from specjax.bench.screen import Screen
from specjax.bench.settings import BenchSettings
from specjax.bench.workload import make_requests, read_questions, tokenize
from specjax.checkpoint.hub import resolve
from specjax.checkpoint.tokenizer_files import check_tokenizer
from specjax.engine.compile_progress import watch_compiling
from specjax.engine.engine import Engine
from specjax.host.request import Request
from specjax.host.speculation.policy import StaticPolicy
from specjax.llm import LLM
from specjax.text.tokenizer import load_tokenizer, read_eos_ids

SCHEMA_VERSION = 2
_WARM_UP_TOKENS = 4


class BenchRun:
    """A measurement of plain decoding, and of drafters that alternate with plain decoding.

    Attributes:
        figures: figures of the configurations measured so far, plain decoding first.
        is_interrupted: whether the caller interrupted `run`.
    """

    def __init__(self, settings: BenchSettings):
        self.settings = settings
        self.figures: list[Figures] = []
        self.is_interrupted = False
        self._load, self._start = load_now(), time.perf_counter()
        self._spans: list[CpuTime] = []  # CPU times of the rounds
        self._measuring_seconds = 0.0
        self._num_rounds = 0
        self._engines: dict[str, Engine] = {}

    def run(self, stack: ExitStack, screen: Screen) -> None:
        """Load, compile, warm up and measure all configurations.

        `stack` closes the engines when it exits.

        Raises:
            ValueError: settings or checkpoints do not fit each other.
        """
        settings = self.settings
        for method, config in settings.drafters.items():
            settings.speculation(method)
            if config.get("model") is not None:
                resolve(config["model"])
        batches = load_workload(settings)
        for method in PLAIN, *settings.drafters:
            shown, name = settings.of_method(method), settings.describe(method)
            screen.begin(f"loading and compiling {name}")
            with watch_compiling(screen.progress):
                llm = stack.enter_context(load_llm(settings, method))
            self._engines[method] = engine = llm.engine
            # All engines share one copy of the target's weights.
            share_target(engine, self._engines[PLAIN])
            warm_up(self._engines, shown, batches[0])
            in_turn = "" if method == PLAIN else ", alternating with plain decoding"
            screen.begin(f"measuring {name}{in_turn}")
            start = time.perf_counter()
            try:
                self._measure(shown, list(batches) * settings.rounds, screen)
            finally:
                self._measuring_seconds += time.perf_counter() - start

    def _measure(
        self, shown: Sequence[Configuration], batches: Sequence[Sequence[Request]], screen: Screen
    ) -> None:
        """Measure plain decoding and the configurations in `shown`, which take turns.

        The figures of the configurations in `shown` are kept. After an interrupt, these are the
        figures of the completed rounds.

        Raises:
            ValueError: no output reached a second token.
        """
        rounds: list[Round] = []
        configurations = dict.fromkeys((PLAIN_ONE, *shown))
        try:
            start = Moment.now()
            for one in measure(self._engines, list(configurations), batches):
                self._spans.append(CpuTime.since(start))
                rounds.append(one)
                screen.progress(len(rounds), len(batches))
                if has_tokens(rounds):
                    screen.preview(summarise_rounds(shown, rounds))
                start = Moment.now()
        finally:
            self._num_rounds = max(self._num_rounds, len(rounds))
            if has_tokens(rounds):
                figures = summarise_rounds(shown, rounds)
                self.figures += figures
                screen.show(figures)
        if not has_tokens(rounds):
            raise ValueError("no output reached a second token, so there is nothing to time")

    def report(self) -> dict[str, Any]:
        """Return everything that was measured, as plain types."""
        environment = describe_environment()
        machine = self._machine(environment["platform"])
        num_late = [one.metrics().num_compiles_after_warmup for one in self._engines.values()]
        seconds = time.perf_counter() - self._start
        return {
            "schema_version": SCHEMA_VERSION,
            "benchmark": "speculation",
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": environment,
            "machine": asdict(machine) | {"doubts": machine.doubts},
            "settings": asdict(self.settings),
            "is_interrupted": self.is_interrupted,
            "num_rounds": self._num_rounds,
            "outputs_identical": not any(f.num_differing for f in self.figures),
            "num_compiles_while_measuring": sum(num_late),
            "setup_seconds": seconds - self._measuring_seconds,
            "measuring_seconds": self._measuring_seconds,
            "configurations": [asdict(f) for f in self.figures],
        }

    def _machine(self, platform: str) -> Machine:
        num_gpus = self.settings.devices.num_devices if platform == "gpu" else 0
        return Machine.look(self._load, self._spans, num_gpus=num_gpus)

    def lines(self, report: Mapping[str, Any]) -> list[str]:
        """Return the lines that are shown below the table of a report."""
        settings, figures = self.settings, self.figures
        platform = report["environment"]["platform"]
        missing = [c.name for c in settings.configurations][len(figures) :]
        lines: list[str | None] = []
        if self.is_interrupted:
            left = f"not measured: {', '.join(missing)}" if missing else "rows have fewer prompts"
            lines.append(f"interrupted after {report['num_rounds']} rounds; {left}")
        if figures:
            lines += [
                self._machine(platform).line,
                identity_line(figures),
                cost_line(figures, batch_size=settings.batch_size, platform=platform),
                repetition_line(figures),
                *source_lines(figures),
                *describe(settings, report),
            ]
        return [line for line in lines if line is not None]


def has_tokens(rounds: Sequence[Round]) -> bool:
    """Return whether there is a round in which every configuration decoded tokens."""
    return any(all(run.num_tokens for run in one.values()) for one in rounds)


def summarise_rounds(shown: Sequence[Configuration], rounds: Sequence[Round]) -> list[Figures]:
    """Return the figures of each configuration, compared with plain decoding."""
    baseline = [one[PLAIN_ONE] for one in rounds]
    return [summarise(shape, [one[shape] for one in rounds], baseline) for shape in shown]


def load_workload(settings: BenchSettings) -> list[list[Request]]:
    """Return the prompts as batches of requests."""
    folder = resolve(settings.model)
    check_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    requests = make_requests(
        tokenize(read_questions()[: settings.num_prompts], tokenizer),
        max_tokens=settings.max_tokens,
        max_model_len=settings.max_model_len,
        temperature=settings.temperature,
        seed=settings.seed,
        stop_ids=read_eos_ids(folder, tokenizer),
    )
    size = settings.num_together
    return [requests[i : i + size] for i in range(0, len(requests), size)]


def load_llm(settings: BenchSettings, method: str) -> LLM:
    """Load an `LLM` for a drafting method or for `PLAIN`, and compile all of its steps.

    Prefill steps have a single shape, because only decoding is timed.
    """
    batch_size = settings.batch_size
    budget = step_budget(batch_size, settings.ks[-1])
    return LLM(
        settings.model,
        speculative_config=settings.speculation(method),
        enable_prefix_caching=False,  # every run must do the same work
        dtype=settings.dtype,
        quantization=settings.quantization,
        max_model_len=settings.max_model_len,
        max_num_seqs=batch_size,
        max_num_batched_tokens=budget,
        prefill_shapes=((batch_size, min(-(-budget // batch_size), settings.max_model_len)),),
        compile_ahead=True,
        verbose=False,
        **asdict(settings.devices),
    )


def warm_up(
    engines: Mapping[str, Engine],
    configurations: Sequence[Configuration],
    requests: Sequence[Request],
) -> None:
    """Run each configuration once without timing it, to warm up memory and caches."""
    short = [
        replace(request, max_tokens=min(request.max_tokens, _WARM_UP_TOKENS))
        for request in requests
    ]
    for configuration in configurations:
        engine = engines[configuration.method]
        set_policies(engine, partial(StaticPolicy, configuration.k))
        decode(engine, short)


def describe(settings: BenchSettings, report: Mapping[str, Any]) -> list[str]:
    """Return lines that say what was measured and how."""
    environment, versions = report["environment"], report["environment"]["versions"]
    device = environment["device_kind"]
    if environment["platform"] == "cpu":
        device = describe_processors(environment)
    device = settings.devices.describe(device)
    numbers = ", ".join(filter(None, [settings.dtype, settings.quantization]))
    mode = f"temperature {settings.temperature}" if settings.temperature else "greedy"
    prompts = f"{settings.num_prompts} prompts, up to {settings.max_tokens} tokens each"
    return [
        f"{settings.model}, {numbers}, batch {settings.batch_size}, {prompts}, {mode}; "
        f"{device}; jax {versions['jax']}, specjax {versions['specjax']}",
        "timed: decoding only, from the first token of a batch's last prompt to its last token; "
        "plain /s: plain decoding in turn with the row, batch by batch; x plain: tokens/s over "
        f"plain /s, with the p10-p90 of {report['num_rounds']} rounds; plain steps: ms/step over "
        "that of plain decoding; AL, acceptance length: tokens per step",
        f"loading, compiling and warming up took {report['setup_seconds']:.0f} s, measuring "
        f"{report['measuring_seconds']:.0f} s",
    ]
