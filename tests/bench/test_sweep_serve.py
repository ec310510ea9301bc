"""`specjax bench sweep serve` on servers with known times."""

import contextlib
import io
import json
import re
from xml.etree import ElementTree

import pytest
from support.timed_server import timed_server

from specjax.cli import main

pytestmark = pytest.mark.slow

pytest.importorskip("aiohttp")
SECONDS, TOKENS = [0.03, 0.03], [2, 3]


@pytest.fixture
def sweep(folder, tmp_path):
    """Return a function that runs the command, and returns its exit code, printed text and JSON."""

    def sweep(server, *argv):
        printed, file = io.StringIO(), tmp_path / "sweep.json"
        options = ["--base-url", server.url, "--tokenizer", folder, "--num-prompts", 4]
        options += ["--output-json", file, *argv]
        with contextlib.redirect_stdout(printed):
            code = main(["bench", "sweep", "serve", *map(str, options)])
        return code, printed.getvalue(), json.loads(file.read_text())

    return sweep


def test_cells_are_results_of_serve_and_points_of_charts(sweep, tmp_path):
    options = ["--request-rate", "100,inf", "--max-concurrency", "1,4"]
    options += ["--save-result", "--result-dir", tmp_path, "--report", tmp_path / "a.html"]
    options += ["--goodput", "e2el:110ms"]
    with timed_server(seconds=SECONDS, tokens=TOKENS) as server:
        code, printed, found = sweep(server, *options, "--against", server.url)
    cells = found["results"]
    assert code == 0 and found["specjax"]["benchmark"] == "sweep serve"
    assert [(one["request_rate"], one["max_concurrency"]) for one in cells] == [
        *((100, 1), (100, 4), ("inf", 1), ("inf", 4)),
    ]
    # One request at a time takes 60 ms; four at a time are about four times as many.
    rates = [one["request_throughput"] for one in cells]
    assert rates[2] < 1 / 0.06 and rates[3] > 2 * rates[2]
    assert all(one["specjax"]["benchmark"] == "serve" for one in cells)
    files = {json.loads(path.read_text())["duration"] for path in tmp_path.glob("*qps-conc*.json")}
    assert files == {one["duration"] for one in cells}
    names = [re.split(r"\s{2,}", line)[0] for line in printed.splitlines()]
    assert "100 requests/s, 1 at a time" in names
    assert f"all at once, 4 at a time, {server.url}" in names
    assert re.search(r"most requests/s within all limits: [\d.]+, with ", printed)
    peer = re.escape(f"all at once, 4 at a time, {server.url}: ")
    assert re.search(peer + r"(all 4|\d of 4) outputs equal", printed)
    page = (tmp_path / "a.html").read_text()
    svg = re.search(r"Throughput against TTFT</h2>.*?(<svg.*?</svg>)", page, re.DOTALL)[1]
    told = [one.findtext("title") for one in ElementTree.fromstring(svg).iter("circle")]
    assert len(told) == 8  # four cells of two engines
    first = f"{cells[0]['median_ttft_ms']:.2f}: {cells[0]['output_throughput']:.2f}"
    assert told[0] == f"specjax, median, 1 at a time {first}"
    (tmp_path / "b.json").write_text(json.dumps(found))
    for name in "b.md", "b.png":
        assert main(["bench", "report", f"{tmp_path}/b.json", "-o", f"{tmp_path}/{name}"]) == 0
    assert "| all at once, 4 at a time |" in (tmp_path / "b.md").read_text()


@pytest.mark.parametrize("dies_at", [7, 9])
def test_a_server_that_dies_leaves_its_cells(sweep, dies_at):
    """A cell sends one warm-up request and four others, so the server dies in the second cell."""
    with timed_server(seconds=SECONDS, tokens=TOKENS, dies_at=dies_at) as server:
        code, printed, found = sweep(server, "--request-rate", "50,100,inf")
    assert code == 1 and "not measured: all at once" in printed
    first, second = found["results"]
    assert (first["completed"], first["failed"]) == (4, 0) and second["failed"] > 0
