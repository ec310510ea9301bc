"""Runs `specjax bench serve`.

The client never shares a process with a server: both would need the same interpreter lock, and the
client would record times too late. So without --base-url, this command starts `specjax serve` in
another process.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import split
from typing import Any, NamedTuple

from specjax.bench import provenance
from specjax.bench.datasets.queries import DatasetSettings, Queries, Query, make_queries
from specjax.bench.describe import (
    closing_lines,
    heading,
    peer_lines,
    row,
    speculation_lines,
    step_lines,
)
from specjax.bench.machine import CpuTime, Machine, Moment, load_now
from specjax.bench.peers import SERVED_PEERS
from specjax.bench.peers.peer import as_peer, compare_outputs
from specjax.bench.peers.server import free_port, serving
from specjax.bench.reports import check_report, write_report
from specjax.bench.reports.saved import parse
from specjax.bench.result import Details, Peer, as_json
from specjax.bench.serve import LoadSettings, as_traced, fill, head, top, verify, warm_up
from specjax.bench.stages import stages
from specjax.bench.traffic.drive import Traffic, drive
from specjax.bench.traffic.endpoint import Endpoint
from specjax.checkpoint.hub import resolve
from specjax.checkpoint.writing import write_whole
from specjax.commands.bench_load import (
    check_peers,
    is_url,
    read_fields,
    read_form,
    read_load,
    read_models,
    read_pairs,
    result_path,
    server_command,
)
from specjax.commands.bench_reading import (
    check_outputs,
    given_engine_options,
    read_dataset,
    read_model,
    read_tokenizer,
)

SHOWN = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "mean_ttft_ms": "mean TTFT (ms)",
    "mean_tpot_ms": "mean TPOT (ms)",
    "mean_itl_ms": "mean ITL (ms)",
    "mean_e2el_ms": "mean E2EL (ms)",
}
TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
    "client_queue_time": "Client Queue Time",
    "e2el_including_client_queue": "End-to-end Latency with Client Queue",
}


@dataclass(frozen=True, kw_only=True)
class ServeRun:
    """The options of a run.

    Attributes:
        model: the model's name in requests: its checkpoint, or its name at --base-url.
        tokenizer: the checkpoint of the tokenizer; None with --skip-tokenizer-init.
        checkpoint: the model's folder, for peers that are started; "" if none is started.
        fields: fields of every request body.
        path: the file of --save-result; None without it.
    """

    args: argparse.Namespace
    load: LoadSettings
    model: str
    tokenizer: str | None
    checkpoint: str
    queries: Queries
    fields: Mapping[str, Any]
    headers: Mapping[str, str]
    metadata: Mapping[str, str]
    path: str | None

    @property
    def prompts(self) -> Sequence[Query]:
        """The prompts."""
        return self.queries.queries

    def endpoint(self, url: str, model: str) -> Endpoint:
        """Return the endpoint at `url`, with the fields and headers of this run's requests."""
        return Endpoint(
            base_url=url,
            model=model,
            form=read_form(self.args),
            fields=self.fields,
            headers=self.headers,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The options, without the values of headers, which may be secret."""
        return {**vars(self.args), "model": self.model, "header": list(self.headers)}

    @contextmanager
    def own_server(self, *more: str) -> Iterator[Endpoint]:
        """Yield the endpoint to measure: --base-url, or a server that runs within the block.

        `more` are further arguments for starting the server.
        """
        args = self.args
        if args.base_url is not None:
            yield self.endpoint(args.base_url, self.model)
            return
        port = free_port()
        command = [*server_command(args, self.model, port), *more]
        with serving(command, port, args.ready_check_timeout_sec) as url:
            yield self.endpoint(url, self.model)

    @contextmanager
    def peer_server(self, name: str) -> Iterator[Endpoint]:
        """Yield the endpoint of another engine: a URL, or a server that runs within the block.

        --header is not sent to this endpoint, because its value may be another server's key.
        """
        if is_url(name):
            model = read_models(name, {}, option="--against")[0]["id"]
            yield replace(self.endpoint(name, model), headers={})
            return
        port, args = free_port(), self.args
        dtype = peer_dtype(args.dtype)
        words = SERVED_PEERS[name].words(model=self.checkpoint, port=port, dtype=dtype)
        words += split(args.peer_args)
        with serving(words, port, args.ready_check_timeout_sec) as url:
            served = read_models(url, {}, option="--against")[0]["id"]
            yield replace(self.endpoint(url, served), headers={})

    def run(self, endpoint: Endpoint) -> Traffic:
        """Send warm-up requests, then all requests. Return the requests and their responses."""
        warm_up(self.load, endpoint, self.prompts)
        with stages(len(self.prompts), show_progress=True) as begin:
            return drive(
                endpoint,
                self.prompts,
                self.load.arrivals,
                max_concurrency=self.load.max_concurrency,
                seed=self.load.seed,
                on_end=lambda record: begin("requests"),
            )


def peer_dtype(dtype: str) -> str:
    """Return the --dtype with which to start another engine. `dtype` is this engine's --dtype.

    On a CPU, specjax resolves "auto" to float32. Other engines might resolve it to another dtype,
    so "auto" becomes "float32".
    """
    is_cpu = provenance.describe_client()["platform"] == "cpu"
    return "float32" if dtype == "auto" and is_cpu else dtype


class Measured(NamedTuple):
    """The results of a run: its requests, the figures by vLLM's keys, and the details."""

    traffic: Traffic
    figures: dict[str, Any]
    details: Details


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and show its result. Return 1 if a request or a peer failed, else 0.

    After an interrupt, or if the server dies, the result covers the requests until then.
    """
    asked, load = read(args), load_now()
    with asked.own_server() as endpoint:
        found = measure(asked, endpoint, load)
    if not found.details.is_interrupted:
        for name in args.against:
            try:
                with asked.peer_server(name) as endpoint:
                    found.details.peers.append(measure_peer(asked, name, endpoint, found))
            except ValueError as error:  # keep the figures measured so far
                found.details.failures[f"--against {name}: {error}"] = 1
    write(asked, found.figures, found.details)
    if found.traffic.is_interrupted:
        raise KeyboardInterrupt
    return 1 if found.details.failures else 0


def measure(asked: ServeRun, endpoint: Endpoint, load: float) -> Measured:
    """Send all requests, and return the results.

    `load` is the machine's load average before any server was started.
    """
    args, moment = asked.args, Moment.now()
    traffic = asked.run(endpoint)
    machine = Machine.look(load, [CpuTime.since(moment)], num_gpus=0)
    lossless = None
    if args.verify_lossless and not (traffic.is_gone or traffic.is_interrupted):
        lossless = verify(endpoint, asked.prompts, traffic)
    figures = {
        **head(
            asked.load,
            backend=args.backend,
            label=args.label,
            model=asked.model,
            tokenizer=asked.tokenizer,
            num_prompts=len(asked.prompts),
            metadata=asked.metadata,
        ),
        **top(asked.load, traffic, args.save_detailed),
    }
    details = Details(
        benchmark="serve",
        settings=asked.settings,
        environment=provenance.describe_client(),
        machine={**vars(machine), "doubts": machine.doubts},
        dataset=asked.queries.as_json(),
        rounds=[{name: figures[name] for name in SHOWN if name in figures}],
        lossless=lossless,
    )
    fill(details, asked.load, traffic)
    return Measured(traffic, figures, details)


def measure_peer(asked: ServeRun, name: str, endpoint: Endpoint, measured: Measured) -> Peer:
    """Send the same requests to another engine. Compare its figures with this engine's."""
    found, figures = asked.run(endpoint), measured.figures
    own = {key: figures[key] for key in figures if key not in ("num_prompts", "burstiness")}
    theirs = top(asked.load, found, detailed=False)
    outputs = compare_outputs(measured.traffic.complete, found.complete)
    return as_peer(name, None, own=own, figures=theirs, outputs=outputs)


def read(args: argparse.Namespace) -> ServeRun:
    """Read the arguments and the data set, and check endpoints. No server is started.

    Raises:
        ValueError: an option, a file or an endpoint cannot be used.
    """
    load, dataset = read_load(args), read_dataset(args, args.num_prompts)
    headers = read_pairs("--header", args.header)
    metadata = read_pairs("--metadata", args.metadata)
    form = read_form(args)
    fields = read_fields(args, needs_tokens=args.verify_lossless or bool(args.against))
    check_peers(args.against)
    model, tokenizer = read_names(args, headers)
    is_started = any(name in SERVED_PEERS for name in args.against)
    checkpoint = str(resolve(args.model or tokenizer or model)) if is_started else ""
    path = result_path(args, model)
    check_report("--report", args.report)
    check_outputs(output_json=args.output_json, result_filename=path, report=args.report)
    queries = read_queries(args, dataset, tokenizer)
    form.prompt(queries.queries[0])
    return ServeRun(
        args=args,
        load=as_traced(load, queries.queries),
        model=model,
        tokenizer=tokenizer,
        checkpoint=checkpoint,
        queries=queries,
        fields=fields,
        headers=headers,
        metadata=metadata,
        path=path,
    )


def read_names(args: argparse.Namespace, headers: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the model's name in requests, and the checkpoint of the tokenizer.

    With --skip-tokenizer-init, the checkpoint is None.

    Raises:
        ValueError: nothing answers at --base-url, or options contradict each other.
    """
    if args.base_url is None:
        for name in "served_model_name", "tokenizer":
            if getattr(args, name) is not None:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} goes with --base-url, the address of a server")
        model = read_model(args)
        if args.verify_lossless and args.drafter is None and args.speculative_config is None:
            raise ValueError("--verify-lossless goes with --drafter, which is missing")
        server_command(args, model, 0)
        return model, None if args.skip_tokenizer_init else model
    if given := given_engine_options(args):
        raise ValueError(
            f"{given[0]} is an option of the server at --base-url {args.base_url}; give it there"
        )
    Endpoint(base_url=args.base_url, model="", form=read_form(args))
    models = read_models(args.base_url, headers)
    if args.verify_lossless and models[0].get("owned_by") != "specjax":
        raise ValueError(
            f"--verify-lossless: {args.base_url} is not served by specjax serve, so it cannot "
            "decode without drafts"
        )
    name = args.served_model_name or models[0]["id"]
    tokenizer = None if args.skip_tokenizer_init else args.tokenizer or args.model or name
    return name, tokenizer


def read_queries(
    args: argparse.Namespace, dataset: DatasetSettings, tokenizer: str | None
) -> Queries:
    """Return the prompts.

    Raises:
        ValueError: the tokenizer or the data set cannot be read.
    """
    loaded = None
    if tokenizer is not None:
        try:
            loaded = read_tokenizer(tokenizer)
        except ValueError as error:
            raise ValueError(
                f"{error}; name it with --tokenizer, or --skip-tokenizer-init"
            ) from error
    if args.backend == "openai-chat":  # the server applies its own chat template
        queries = make_queries(replace(dataset, applies_template=False, template_kwargs={}), loaded)
        return replace(queries, settings=dataset, template="the server's")
    return make_queries(dataset, loaded)


def write(asked: ServeRun, figures: Mapping[str, Any], details: Details) -> None:
    """Write the result to its files, and print it as text, or as JSON with --json."""
    args = asked.args
    text = json.dumps(as_json(figures, details), indent=2, default=str)
    for path in filter(None, (args.output_json, asked.path)):
        write_whole(Path(path).expanduser(), text + "\n")
    lines = describe(asked.load, figures, details, asked.model)
    print(text if args.json else "\n".join(lines), flush=True)
    if args.report:
        write_report(args.report, parse(text, details.benchmark))


def describe(
    load: LoadSettings, figures: Mapping[str, Any], details: Details, model: str
) -> list[str]:
    """Return the result as lines of text, in the form of `vllm bench serve`."""
    rows = {
        "Successful requests": figures["completed"],
        "Failed requests": figures["failed"],
        "Maximum request concurrency": load.max_concurrency,
        "Request rate configured (RPS)": load.arrivals.rate
        if load.arrivals.is_timed and load.arrivals.ramp is None
        else None,
        "Benchmark duration (s)": figures["duration"],
        "Total input tokens": figures["total_input_tokens"],
        "Total generated tokens": figures["total_output_tokens"],
        "Request throughput (req/s)": figures["request_throughput"],
        "Request goodput (req/s)": figures["request_goodput"],
        "Output token throughput (tok/s)": figures["output_throughput"],
        "Peak output token throughput (tok/s)": figures["max_output_tokens_per_s"],
        "Peak concurrent requests": figures["max_concurrent_requests"],
        "Total token throughput (tok/s)": figures["total_token_throughput"],
    }
    lines = [heading("Serving Benchmark Result", "=")]
    lines += [row(name, value) for name, value in rows.items() if value is not None]
    for name in load.times:
        lines.append(heading(TITLES[name]))
        short = name.upper()
        lines += [
            row(f"{kind.capitalize()} {short} (ms)", figures[f"{kind}_{name}_ms"])
            for kind in ("mean", "median", "std")
        ]
        lines += [
            row(f"P{p:g} {short} (ms)", figures[f"p{p:g}_{name}_ms"]) for p in load.percentiles
        ]
    return [*lines, *detail_lines(details), "=" * 50, *closing_lines(details, model)]


def detail_lines(details: Details) -> list[str]:
    """Return the lines with figures that `vllm bench serve` does not report."""
    lines = []
    if (chunk := details.distributions["tokens_per_chunk"]) is not None:
        lines += [heading("Tokens per Chunk"), row("Mean", chunk.mean), row("P90", chunk.p90)]
    if (window := details.steady) is not None:
        lines += [
            heading("Steady Window"),
            f"{window['begin']:.2f} s to {window['end']:.2f} s: {window['rule']}",
            row("Output token throughput (tok/s)", window["output_throughput"]),
            row("Running requests", window["mean_running"]),
        ]
    if (arrivals := details.arrivals) is not None and arrivals["p_value"] is not None:
        lines += [
            heading("Arrivals"),
            row("P-value of the gaps, against their law", arrivals["p_value"]),
            row("Mean lateness (ms)", arrivals["mean_late_ms"]),
        ]
    if (good := details.goodput) is not None:
        lines.append(heading("Goodput"))
        lines += [
            row(f"Within {name} {good['limits_ms'][name]:g} ms (%)", 100 * share)
            for name, share in good["share_by_limit"].items()
        ]
        lines.append(row("Within all (%)", 100 * good["share"]))
    lines += [*speculation_lines(details.speculation), *step_lines(details.speculation)]
    return [*lines, *peer_lines(details, SHOWN)]
