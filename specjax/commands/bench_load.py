"""Reads the arguments of `specjax bench serve` about requests, servers and output files."""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from specjax.bench.peers import SERVED_PEERS
from specjax.bench.serve import LoadSettings
from specjax.bench.traffic.arrivals import Arrivals
from specjax.bench.traffic.figures import TIMES
from specjax.bench.traffic.forms import FORMS, RequestForm
from specjax.bench.traffic.goodput import read_limits
from specjax.checks import check_count, check_positive, did_you_mean, read_object
from specjax.commands.bench_reading import read_engine, read_sampling

_PATIENCE_SECONDS = 10.0


def read_load(args: argparse.Namespace) -> LoadSettings:
    """Return the settings of the load: when requests are sent, and which figures are reported.

    Raises:
        ValueError: a rate, a limit, a name or a percentile is wrong.
    """
    if args.max_concurrency is not None:
        check_positive(**{"--max-concurrency": args.max_concurrency})
    check_count(**{"--num-warmups": args.num_warmups})
    times = [name for name in args.percentile_metrics.split(",") if name]
    for name in times:
        if name not in TIMES:
            raise ValueError(
                f"--percentile-metrics {name} is none of {', '.join(TIMES)}"
                f"{did_you_mean(name, TIMES)}"
            )
    return LoadSettings(
        arrivals=Arrivals(
            rate=args.request_rate,
            burstiness=args.burstiness,
            ramp=args.ramp_up_strategy,
            start_rate=args.ramp_up_start_rps,
            end_rate=args.ramp_up_end_rps,
        ),
        max_concurrency=args.max_concurrency,
        num_warmups=args.num_warmups,
        times=times,
        percentiles=_read_percentiles(args.metric_percentiles),
        limits=read_limits(args.goodput),
        seed=args.seed,
    )


def _read_percentiles(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise ValueError(f"--metric-percentiles {text} must list numbers in 0..100, like 90,99")
    return values


def read_form(args: argparse.Namespace) -> RequestForm:
    """Return the kind of requests that --backend names.

    Raises:
        ValueError: --backend names no kind of requests.
    """
    if args.backend not in FORMS:
        raise ValueError(f"--backend {args.backend} is none of {', '.join(FORMS)}")
    return FORMS[args.backend]


def read_fields(args: argparse.Namespace, *, needs_tokens: bool) -> dict[str, Any]:
    """Return the fields of every request body, apart from its prompt and length.

    If `needs_tokens`, the fields also ask the server for the ids of output tokens.

    Raises:
        ValueError: an option is invalid.
    """
    fields = read_sampling(args, ignore_eos=args.ignore_eos)
    if args.chat_template_kwargs != "{}" and args.backend == "openai-chat":
        fields["chat_template_kwargs"] = read_object(
            "--chat-template-kwargs", args.chat_template_kwargs
        )
    if needs_tokens:
        fields["return_token_ids"] = True
    if args.temperature:
        fields["seed"] = args.seed
    return fields | read_object("--extra-body", args.extra_body)


def read_pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """Parse values like NAME=VALUE.

    Raises:
        ValueError: a value has no "=", a name is empty, or a name is given twice.
    """
    pairs: dict[str, str] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ValueError(f"{option} {text} must be like NAME=VALUE")
        if name in pairs:
            raise ValueError(f"{option} {name} is given twice")
        pairs[name] = value
    return pairs


def check_peers(names: Sequence[str]) -> None:
    """Check that each name is an installed server, or the URL of a running server.

    Raises:
        ValueError: a server is unknown, not installed or named twice, or its URL does not answer.
    """
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--against {name} is given twice")
        if is_url(name):
            read_models(name, {}, option="--against")
        elif name in SERVED_PEERS:
            SERVED_PEERS[name].check(name)
        else:
            raise ValueError(
                f"--against {name}: bench serve runs against {', '.join(SERVED_PEERS)} or a URL, "
                f"and bench throughput against libraries{did_you_mean(name, SERVED_PEERS)}"
            )


def is_url(text: str) -> bool:
    """Return whether the name of an engine to compare with is a URL."""
    return "://" in text


def read_models(
    url: str, headers: Mapping[str, str], *, option: str = "--base-url"
) -> list[dict[str, Any]]:
    """Return the list of models that the server at `url` reports.

    Raises:
        ValueError: no server answers, or the server is not an OpenAI endpoint or has no models.
    """
    root = url.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        with urlopen(
            Request(f"{root}/v1/models", headers=dict(headers)), timeout=_PATIENCE_SECONDS
        ) as answer:
            models = json.load(answer)["data"]
    except HTTPError as error:
        raise ValueError(
            f"{option} {url}: /v1/models answers with status {error.code}; is it an OpenAI "
            "endpoint, and does it need --header?"
        ) from None
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise ValueError(
            f"{option} {url}: nothing answers there ({reason}); start the server first"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{option} {url}: /v1/models is not that of an OpenAI endpoint") from None
    if not models:
        raise ValueError(f"{option} {url}: the server lists no models")
    return models


def server_command(args: argparse.Namespace, model: str, port: int) -> list[str]:
    """Return the command that starts `specjax serve` with the options of the engine.

    Raises:
        ValueError: options contradict each other.
    """
    words = [sys.executable, "-m", "specjax", "serve", model, "--port", str(port)]
    words += ["--disable-uvicorn-access-log", "--per-request-spec-decode-metrics", "summary"]
    for name, value in read_engine(args, model).items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif isinstance(value, dict):
            words += [flag, json.dumps(value)]
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words


def result_path(args: argparse.Namespace, model: str) -> str | None:
    """Return the path of the file that --save-result writes, named as by vLLM.

    Return None without --save-result.

    Raises:
        ValueError: an option needs --save-result.
    """
    if not args.save_result:
        for name in "result_filename", "save_detailed":
            if getattr(args, name) and not (name == "save_detailed" and args.output_json):
                raise ValueError(f"--{name.replace('_', '-')} goes with --save-result")
        return None
    limit = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    rate = f"{args.request_rate:g}qps{limit}"
    label = args.label or args.backend
    date = time.strftime("%Y%m%d-%H%M%S")
    name = args.result_filename or f"{label}-{rate}-{Path(model).name}-{date}.json"
    return str(Path(args.result_dir).expanduser() / name)
