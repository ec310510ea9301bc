"""`specjax bench` on a simulated device."""

import contextlib
import io
import json
import re
import time

import numpy as np
import pytest
from support.engines import simulated_engines
from support.scripts import TextScript

from specjax.bench import comparison, speculation
from specjax.bench.comparison import load_llm
from specjax.bench.engines import open_engines, read_setup
from specjax.bench.machine import CpuTime
from specjax.bench.measure import PLAIN
from specjax.bench.reports.compare import compare
from specjax.bench.reports.saved import parse
from specjax.checkpoint.demo import DRAFTERS
from specjax.cli import build_parser, main

VOCAB, NUM_PROMPTS, MAX_TOKENS = 300, 2, 6
SUFFIX = {"method": "eagle3", "with": ["suffix"]}


class SlowScript(TextScript):
    """A script whose rounds take long enough to be compared, even on a busy machine."""

    def draft(self, *arguments):
        """See `Script`."""
        time.sleep(0.003)
        return super().draft(*arguments)


@pytest.fixture(scope="module", autouse=True)
def simulated():
    """Simulate engines whose outputs do not depend on the drafter, and have full length."""
    with simulated_engines(SlowScript(VOCAB, ids=range(2, VOCAB))):
        yield


@pytest.fixture(scope="module")
def options(checkpoints, files, folder):
    """Options for a tiny target and two drafters, one of them with a further source of drafts."""
    head, with_suffix = checkpoints.eagle3(files, draft_vocab=200).folder, SUFFIX
    return [
        *("bench", "--model", str(folder), "--k", "2,0"),
        *("--num-prompts", str(NUM_PROMPTS), "--max-tokens", str(MAX_TOKENS)),
        *("--drafter", f"eagle={checkpoints.eagle(files).folder}"),
        *("--speculative-config", json.dumps({**with_suffix, "model": str(head)})),
    ]


@pytest.fixture(scope="module")
def result(options, tmp_path_factory):
    """The printed text and the JSON report of a run."""
    file, printed = tmp_path_factory.mktemp("bench") / "report.json", io.StringIO()
    with contextlib.redirect_stdout(printed):
        paths = "--output", str(file), "--report", str(file.with_suffix(".md"))
        assert main([*options, "--rounds", "2", *paths]) == 0
    drawn = file.with_suffix(".md").read_text()
    assert all(f"\n| {name} | " in drawn for name in ("plain", "eagle K=2", "eagle3+suffix K=2"))
    assert "\n| eagle3+suffix K=2: suffix | " in drawn
    return printed.getvalue(), json.loads(file.read_text())


@pytest.mark.slow
def test_figures_are_consistent(result):
    _, report = result
    rounds = 2 * NUM_PROMPTS
    assert report["num_rounds"] == rounds
    names = ["plain", "eagle K=0", "eagle K=2", "eagle3+suffix K=0", "eagle3+suffix K=2"]
    assert [f["configuration"] for f in report["configurations"]] == names
    for figures in report["configurations"]:
        assert figures["num_outputs"] == NUM_PROMPTS
        assert figures["num_tokens"] == rounds * (MAX_TOKENS - 1)
        length = figures["num_tokens"] / figures["num_steps"]
        assert figures["mean_acceptance_length"] == pytest.approx(length)
        assert length == pytest.approx(1 + sum(figures["acceptance_per_position"]))
        assert len(figures["acceptance_per_position"]) == figures["k"]
        # At batch 1 the time per token is the inverse of the rate, and so is its median, nearly.
        assert 5e2 / figures["tokens_per_second"] < figures["ms_per_token"]["median"]
        assert figures["ms_per_token"]["median"] < 2e3 / figures["tokens_per_second"]
        for spread in figures["ms_per_token"], figures["ratio"]:
            assert 0 < spread["p10"] <= spread["median"] <= spread["p90"]
        # Each prompt is measured twice, and the sums of its rounds are the totals.
        prompts = [one["prompts"] for one in figures["rounds"]]
        assert sorted(prompts) == [[0], [0], [1], [1]]
        ratios = [one["times_plain"] for one in figures["rounds"]]
        assert np.percentile(ratios, 50) == pytest.approx(figures["ratio"]["median"])
    by_source = report["configurations"][-1]["by_source"]
    assert sum(one["num_accepted"] for one in by_source.values()) > 0
    assert {"eagle3", "suffix"} >= by_source.keys() and "suffix" in by_source
    assert report["configurations"][0]["ratio"] == {"median": 1.0, "p10": 1.0, "p90": 1.0}


def test_two_reports_are_compared_by_their_rounds(result):
    _, report = result
    half = json.loads(json.dumps(report))
    for figures in half["configurations"]:
        for of in figures, *figures["rounds"]:
            of["tokens_per_second"] /= 2
    before, after = (parse(json.dumps(one), "x") for one in (report, half))
    found = {one.key: one for one in compare([before], [after]).changes}
    change = found["eagle K=2: tokens_per_second"]
    assert change.interval == pytest.approx((0.5, 0.5)) and change.source == "2 pairs"
    assert found["eagle K=2: times_plain"].is_beyond_noise is False


def test_the_report_says_what_it_is_of(result):
    printed, report = result
    assert re.search(r"eagle3\+suffix K=2, drafts accepted: .*\d of \d+ of suffix", printed)
    assert report["outputs_identical"] is True and report["is_interrupted"] is False
    assert f"token for token: yes ({NUM_PROMPTS} prompts)" in printed
    assert report["num_compiles_while_measuring"] == 0
    assert report["schema_version"] == 2 and report["benchmark"] == "speculation"
    assert {"python", "jax", "specjax"} <= report["environment"]["versions"].keys()
    assert report["environment"]["platform"] == "cpu" and report["environment"]["cpu_model"]
    assert report["settings"]["ks"] == [0, 2] and report["settings"]["dtype"] == "float32"
    assert report["timestamp"].endswith("+00:00")
    assert report["setup_seconds"] > 0 and report["measuring_seconds"] > 0


def test_what_a_round_costs_is_printed_and_whether_times_are_in_doubt(options, monkeypatch, capsys):
    """In this test, the process gets only a third of the CPU time that its threads need."""
    monkeypatch.setattr(CpuTime, "since", lambda start: CpuTime(1.0, 0.3, 0.6))
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert "DO NOT TRUST THESE TIMES: this process got 33% of the CPU time" in printed
    assert re.search(
        r"a round of 3 rows \(eagle(?:3.suffix)? K=2\) costs [\d.]+ plain steps on", printed
    )


def test_a_batch_decodes_together_above_temperature_0(options, capsys):
    batch = ["--batch-size", "2", "--temperature", "1", "--k", "1", "--json"]
    assert main([*options[:-2], *batch]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_rounds"] == 1 and report["outputs_identical"] is True
    for figures in report["configurations"]:
        assert figures["num_outputs"] == 2
        assert figures["mean_acceptance_length_low_repeat"] is None
        assert figures["num_steps"] < figures["num_tokens"]


def test_a_large_batch_has_room_for_what_drafting_adds(checkpoints, files, folder):
    """24 requests with 11 drafts and 10 further rows for drafting need more than 512 rows."""
    k, batch = 11, 24
    head = checkpoints.p_eagle(files, mask_token_id=0).folder
    argv = ["--model", str(folder), "--drafter", f"p_eagle={head}", "--k", str(k)]
    argv += ["--batch-size", str(batch)]
    settings = speculation.read_settings(build_parser().parse_args(["bench", *argv]))
    setup = read_setup(build_parser().parse_args(["bench", "sweep", *argv]))
    with (
        load_llm(settings, PLAIN) as plain,
        load_llm(settings, "p_eagle") as drafting,
        open_engines(setup, show_progress=False) as engines,
    ):
        for llm in plain, drafting, *engines:
            rows = k + 1 + llm.engine.drafter.draft_slots(k)
            assert llm.engine.config.max_num_batched_tokens >= batch * rows
        assert drafting.engine.drafter.draft_slots(k) == k - 1


ALL = [*DRAFTERS["demo-llama"]]
DEFAULTS = [
    ("--full", ALL, (1, 2, 3, 5), 24),
    ("--full --k 3 --num-prompts 2", ALL, (3,), 2),
    ("--batch-size 5", ["eagle3"], (0, 3, 5), 5),
    ("--batch-size 12", ["eagle3"], (0, 3, 5), 12),
    ("--model demo-qwen3.5", ["mtp"], (0, 3, 5), 8),
]


@pytest.mark.parametrize("given, drafters, ks, num_prompts", DEFAULTS)
def test_by_default_little_of_the_demo_is_measured(given, drafters, ks, num_prompts):
    settings = speculation.read_settings(build_parser().parse_args(["bench", *given.split()]))
    assert list(settings.drafters) == drafters
    assert (settings.ks, settings.num_prompts) == (ks, num_prompts)
    assert len(settings.configurations) == 1 + len(drafters) * len(ks)


def test_rows_and_work_are_told_in_turn_without_a_terminal(options, capsys, caplog, monkeypatch):
    """Each row is printed as soon as it is measured, before the next drafter is compiled."""
    printed = []

    def emit(record):
        printed.append((record.getMessage(), capsys.readouterr().out))

    monkeypatch.setattr(caplog.handler, "emit", emit)
    with caplog.at_level("INFO", "specjax"):
        assert main(options) == 0
    work, rows = zip(*printed, strict=True)
    names = ["plain decoding", "eagle, K = 0, 2", "eagle3+suffix, K = 0, 2"]
    told = [f"{do} {name}" for name in names for do in ("loading and compiling", "measuring")]
    assert [line.removesuffix(", alternating with plain decoding") for line in work] == told
    firsts = [[row.split("  ")[0] for row in text.splitlines()] for text in rows]
    assert firsts == [[], [], ["", "plain"], [], ["eagle K=0", "eagle K=2"], []]
    assert "eagle3+suffix K=2" in capsys.readouterr().out


def test_an_interrupt_shows_what_has_been_measured(options, monkeypatch, capsys, tmp_path):
    measure, calls, file = comparison.measure, [], tmp_path / "report.json"

    def interrupted(engines, configurations, batches):
        calls.append(len(configurations))
        for i, one in enumerate(measure(engines, configurations, batches)):
            if len(calls) == 2 and i == 1:
                raise KeyboardInterrupt
            yield one

    monkeypatch.setattr(comparison, "measure", interrupted)
    assert main([*options, "--output", str(file)]) == 130
    report, out = json.loads(file.read_text()), capsys.readouterr().out
    assert report["is_interrupted"] is True and len(report["configurations"]) == 3
    assert [f["num_outputs"] for f in report["configurations"]] == [2, 1, 1]
    rows = [line.split("  ")[0] for line in out.split("\n\n")[0].splitlines()]
    assert rows == ["", "plain", "eagle K=0", "eagle K=2"]
    assert "interrupted after 2 rounds; not measured: eagle3+suffix K=0, eagle3+suffix K=2\n" in out


def test_an_interrupt_before_the_first_row_is_said(options, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "load_llm", interrupted)
    assert main(options) == 130
    assert capsys.readouterr().out.startswith("interrupted after 0 rounds; not measured: plain, ")


def test_a_terminal_shows_a_table_that_grows_and_whose_turn_it_is(options, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", screen)
    assert main(options) == 0
    drawn, place = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()), 0
    for words in (
        "loading and compiling plain decoding",
        "measuring plain decoding",
        "\nplain ",
        "loading and compiling eagle, K = 0, 2",
        "\neagle K=0 ",
        "measuring eagle3+suffix, K = 0, 2",
        "\neagle3+suffix K=2 ",
        "outputs identical to plain decoding's",
    ):
        place = drawn.index(words, place)
    table = drawn[:place]
    table = table[table.rindex(" tokens ") :].splitlines()[:7]
    rows = [line.split("  ")[0] for line in table[2:]]
    assert rows == ["plain", "eagle K=0", "eagle K=2", "eagle3+suffix K=0", "eagle3+suffix K=2"]
    assert max(map(len, table)) <= 80
