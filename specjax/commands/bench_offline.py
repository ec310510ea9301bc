"""Runs an `LLM` for `specjax bench latency` and `throughput`, and writes their results."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specjax.bench import provenance
from specjax.bench.datasets.queries import Queries, Query, make_queries
from specjax.bench.machine import CpuTime, Machine, Moment, load_now
from specjax.bench.offline import BatchRun, Offline, RoundTimes, describe_speculation
from specjax.bench.reports import check_report, write_report
from specjax.bench.reports.saved import parse
from specjax.bench.result import Details, Speculation, as_json, count_failures
from specjax.bench.traffic.figures import distributions
from specjax.bench.warm_up import WarmUp, warm_up
from specjax.checkpoint.writing import write_whole
from specjax.commands.bench_reading import (
    check_outputs,
    read_dataset,
    read_engine,
    read_model,
    read_sampling,
    read_tokenizer,
)
from specjax.llm import LLM


@dataclass(kw_only=True)
class OfflineRun:
    """A benchmark of an `LLM` in this process: its options, and its results so far.

    Attributes:
        lossless: the comparison of outputs with plain decoding; None before the comparison.
        plain: the times of steps without drafts; None before they were measured.
        drafting: the times of the benchmark's rounds, which draft and verify.
        warmed: how the engine was warmed up; None if it was not.
    """

    benchmark: str
    args: argparse.Namespace
    model: str
    sampling: Mapping[str, Any]
    options: Mapping[str, Any]
    queries: Queries
    load: float = field(default_factory=load_now)
    start: Moment = field(default_factory=Moment.now)
    lossless: dict[str, Any] | None = None
    plain: RoundTimes | None = None
    drafting: RoundTimes = field(default_factory=dict)
    warmed: WarmUp | None = None
    environment: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(
        cls, benchmark: str, args: argparse.Namespace, *, num_prompts: int, ignore_eos: bool
    ) -> "OfflineRun":
        """Read the arguments and the data set, before a model is loaded.

        Raises:
            ValueError: an option, the file of the data set, or a prompt cannot be used.
        """
        check_report("--report", args.report)
        check_outputs(output_json=args.output_json, report=args.report)
        model = read_model(args)
        dataset = read_dataset(args, num_prompts)
        sampling = read_sampling(args, ignore_eos=ignore_eos)
        options = read_engine(args, model)
        if args.verify_lossless and options["speculative_config"] is None:
            raise ValueError("--verify-lossless goes with --drafter, which is missing")
        queries = make_queries(dataset, read_tokenizer(model))
        return cls(
            benchmark=benchmark,
            args=args,
            model=model,
            sampling=sampling,
            options=options,
            queries=queries,
        )

    @property
    def prompts(self) -> Sequence[Query]:
        """The prompts."""
        return self.queries.queries

    @contextmanager
    def opened(self) -> Iterator[Offline]:
        """Load the LLM, yield it, and close it afterwards."""
        options: dict[str, Any] = {**self.options, "verbose": True}
        with LLM(self.model, **options) as llm:
            yield Offline(llm=llm, sampling=self.sampling, seed=self.args.seed)

    def warm_up(self, offline: Offline, min_runs: int) -> None:
        """Warm the engine up with at least `min_runs` runs of all prompts; not at all if 0."""
        if min_runs:
            self.warmed = warm_up(offline, self.prompts, min_runs)

    def finish(self, offline: Offline, batch: BatchRun) -> None:
        """Keep the times of rounds and a description of the machine, for `details`.

        With --verify-lossless, also verify the outputs of `batch`.
        """
        self.drafting = offline.round_times
        if self.args.verify_lossless:
            self.lossless, self.plain = offline.verify(self.prompts, batch)
        self.environment = provenance.describe()

    def speculation(self, batches: Sequence[BatchRun]) -> Speculation:
        """Return counts and times of speculation over `batches`."""
        config = self.options["speculative_config"]
        rates = config.get("synthetic_acceptance_rates") if config else None
        return describe_speculation(
            batches,
            source=config.get("method") if config else None,
            drafting=self.drafting,
            plain=self.plain,
            synthetic_rates=rates,
        )

    def details(self, batches: Sequence[BatchRun], rounds: Sequence[Mapping[str, Any]]) -> Details:
        """Return the `Details` of the result, without the results of other engines.

        `rounds` has the main figures of each batch in `batches`.
        """
        num_gpus = len(self.environment.get("clocks", ()))
        machine = Machine.look(self.load, [CpuTime.since(self.start)], num_gpus=num_gpus)
        records = [record for batch in batches for record in batch.records]
        return Details(
            benchmark=self.benchmark,
            settings={**vars(self.args), "model": self.model},
            environment=self.environment,
            machine={**vars(machine), "doubts": machine.doubts},
            dataset=self.queries.as_json(),
            rounds=[dict(one) for one in rounds],
            distributions=distributions(records),
            speculation=self.speculation(batches),
            warm_up=None if self.warmed is None else asdict(self.warmed),
            num_compiles=batches[-1].after.num_compilations - batches[0].before.num_compilations,
            failures=count_failures([one.error for one in records if one.error]),
            lossless=self.lossless,
        )

    def write(self, top: Mapping[str, Any], details: Details, lines: Sequence[str]) -> None:
        """Print the result as `lines`, or as JSON with --json. Write --output-json and --report."""
        text = json.dumps(as_json(top, details), indent=2, default=str)
        if self.args.output_json:
            write_whole(Path(self.args.output_json).expanduser(), text + "\n")
        print(text if self.args.json else "\n".join(lines), flush=True)
        if self.args.report:
            write_report(self.args.report, parse(text, self.benchmark))
