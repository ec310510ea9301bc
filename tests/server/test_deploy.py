"""The metrics, flags and paths in the files in deploy/ exist."""

import json
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.http import served

from specjax.cli import build_parser

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
METRIC = re.compile(r"\b(?:vllm|specjax):\w+")


def exposed(text: str) -> set[str]:
    """Return the names of all series, including histograms without values."""
    names = set()
    for family in text_string_to_metric_families(text):
        names |= {sample.name for sample in family.samples}
        if family.type == "histogram":
            names |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
    return names


def test_the_board_shows_metrics_that_the_server_has(simulated):
    board = json.loads((DEPLOY / "grafana/board.json").read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    names = {name for one in shown for name in METRIC.findall(one)}
    names |= set(METRIC.findall(json.dumps(board["templating"])))
    with served(simulated, rl=True) as server:
        assert server.post("/v1/completions", {"prompt": "abab", "max_tokens": 9}).status == 200
        found = exposed(server.get("/metrics").body.decode())
    assert names - found == set() and len(names) > 25
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def commands() -> dict[str, list[str]]:
    """Return the command lines in the files, by file."""
    entry, default = (
        json.loads(re.findall(rf"^{word} (\[.*\])$", DOCKERFILE, re.M)[0])
        for word in ("ENTRYPOINT", "CMD")
    )
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    unit = (DEPLOY / "specjax.service").read_text().replace("\\\n", "")
    return {
        "Dockerfile": [*entry, *default],
        "compose.yaml": [*entry, *compose["services"]["specjax"]["command"]],
        "specjax.service": shlex.split(re.findall(r"^ExecStart=(.*)$", unit, re.M)[0]),
    }


@pytest.mark.parametrize("name", commands())
def test_commands_have_flags_of_the_server(name):
    program, *argv = commands()[name]
    assert Path(program).name == "specjax" and argv[0] == "serve"
    args = build_parser().parse_args(argv)
    assert args.model == "demo-llama" and args.drafter == "demo-llama-eagle3"


def test_the_image_gets_the_files_that_it_copies():
    copied = [
        path
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.M)
        for path in line.split()[:-1]
    ]
    allowed = [
        line[1:]
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    assert sorted(copied) == sorted(allowed) and all((ROOT / path).exists() for path in copied)
    packages = ("specjax", "pallas_kernels", "checkpoints/demo-llama", "README.md", "LICENSE")
    assert all(any(fnmatch(one, f"{path}*") for path in copied) for one in packages)
