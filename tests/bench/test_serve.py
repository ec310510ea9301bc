"""`specjax bench serve`, on servers with known times and on `specjax serve`."""

import contextlib
import io
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from support.engines import ANY_SHAPES
from support.scripts import TextScript
from support.texts import simulated_llm
from support.timed_server import timed_server

from specjax.bench.result import without_headers
from specjax.bench.ties import tell_ties
from specjax.bench.traffic.endpoint import Endpoint
from specjax.bench.traffic.forms import FORMS
from specjax.bench.traffic.record import Record
from specjax.cli import main

pytest.importorskip("aiohttp")
pytest.importorskip("starlette")
VOCAB = 300
SECONDS, TOKENS = [0.6, 0.3, 0.3, 0.3], [1, 3, 2, 4]
LATE = 250  # milliseconds that a busy machine may add, less than tell the times apart

# The keys of `vllm bench serve` 0.33 in their order, with the default options.
VLLM_KEYS = """date endpoint_type backend label model_id tokenizer_id num_prompts request_rate
burstiness max_concurrency duration completed failed total_input_tokens total_output_tokens
request_throughput request_goodput output_throughput total_token_throughput latencies queue_times
max_output_tokens_per_s max_concurrent_requests rtfx""".split()
STATISTICS = [
    f"{s}_{x}_ms" for x in ("ttft", "tpot", "itl") for s in ("mean", "median", "std", "p99")
]
DETAILED = """input_lens output_lens ttfts itls latencies start_times queue_times generated_texts
errors""".split()
SPECULATION = ["acceptance_rate", "acceptance_length", "num_drafts", "draft_tokens"]
SPECULATION += ["accepted_tokens", "per_position_acceptance_rates"]


def bench(*argv, code=0):
    """Run `specjax bench serve`, and return its JSON."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["bench", "serve", *map(str, argv), "--json"]) == code
    return json.loads(printed.getvalue())


@pytest.fixture
def asked(folder):
    """Options of `bench serve` that suit any model."""
    return ["--tokenizer", folder, "--num-prompts", 4, "--output-len", 10, "--num-warmups", 1]


@pytest.mark.slow
def test_times_are_those_of_the_server(asked):
    """The measured times equal the server's pauses, plus the delays of a busy machine."""
    with timed_server(seconds=SECONDS, tokens=TOKENS) as server:
        vllm = ["--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", 99]
        found = bench("--base-url", server.url, *asked, *vllm, "--goodput", "ttft:10s", "tpot:1ms")
    keys = list(found)
    assert keys == [*VLLM_KEYS, *STATISTICS, "specjax"]
    assert (found["completed"], found["failed"]) == (4, 0)
    assert found["total_output_tokens"] == 40 and found["request_rate"] == "inf"
    prompts = [len(body["prompt"]) for _, body in server.bodies[1:]]
    assert found["total_input_tokens"] == sum(prompts)
    assert 600 <= found["median_ttft_ms"] < 600 + LATE
    assert 250 <= found["median_itl_ms"] < 300 + LATE
    assert 1500 <= found["specjax"]["distributions"]["e2el_ms"]["median"] < 1500 + 2 * LATE
    assert found["median_tpot_ms"] == pytest.approx(900 / 9, rel=0.5)
    details = found["specjax"]
    assert details["distributions"]["tokens_per_chunk"]["mean"] == 2.5
    assert details["goodput"]["share_by_limit"] == {"ttft": 1.0, "tpot": 0.0}
    assert found["request_goodput"] == 0.0
    # All run at once: the steady window begins with the last first token.
    assert details["steady"]["rule"] == "all requests are running"
    assert details["steady"]["mean_running"] == pytest.approx(4)
    assert details["speculation"] is None and details["arrivals"] is None


def test_a_rate_a_limit_of_concurrency_and_the_lists(asked, tmp_path):
    options = ["--request-rate", 50, "--burstiness", "inf", "--max-concurrency", 1]
    options += ["--header", "Authorization=Bearer secret"]
    save = ["--save-result", "--result-dir", tmp_path, "--save-detailed", "--metadata", "a=b"]
    save += ["--report", tmp_path / "a.md"]
    with timed_server(seconds=[0.03, 0.03], tokens=[2, 3], counts=False) as server:
        found = bench("--base-url", server.url, *asked, *options, *save)
        times = np.diff([at for at, _ in server.bodies[1:]])
    assert times.min() >= 0.06  # one at a time
    assert found["a"] == "b" and found["max_concurrency"] == 1
    written = (tmp_path / "a.md").read_text()
    assert f"| {found['duration']:.2f} |" in written and "secret" not in written
    assert [key for key in DETAILED if key in found] == DETAILED
    assert all(len(found[key]) == 4 for key in DETAILED)
    assert found["output_lens"] == [5] * 4 and found["generated_texts"] == ["xxxxx"] * 4
    assert found["queue_times"][0] < 0.02 < found["queue_times"][3]
    assert found["mean_client_queue_time_ms"] == pytest.approx(1e3 * np.mean(found["queue_times"]))
    whole = np.add(found["queue_times"], found["latencies"])
    mean = found["mean_e2el_including_client_queue_ms"]
    assert mean == pytest.approx(1e3 * whole.mean())
    (file,) = tmp_path.glob("openai-50qps-*.json")
    assert json.loads(file.read_text()) == found and "secret" not in file.read_text()
    assert without_headers(["a", "--header", "K=s=t", "--header=K=s"]) == [
        *("a", "--header", "K=...", "--header=K=..."),
    ]


def test_a_server_that_dies_or_refuses_leaves_what_was_measured(asked, capsys):
    late = [*asked, "--num-prompts", 6, "--max-concurrency", 2]
    with timed_server(seconds=[0.01, 0.01], tokens=[1, 1], dies_at=4) as server:
        found = bench("--base-url", server.url, *late, code=1)
    details = found["specjax"]
    assert 2 <= found["completed"] < 6 and details["is_interrupted"]
    assert sum(details["failures"].values()) == found["failed"] > 0
    assert found["mean_ttft_ms"] > 0
    with timed_server(seconds=[], tokens=[]) as server:  # no answer has a token
        found = bench("--base-url", server.url, *asked)
    assert (found["completed"], found["failed"], found["mean_ttft_ms"]) == (4, 0, 0.0)
    assert found["specjax"]["steady"] is None
    with timed_server(seconds=[0.01], tokens=[1], status=400) as server:
        assert main(["bench", "serve", "--base-url", server.url, *map(str, asked)]) == 2
    assert "status 400: too long for this model" in capsys.readouterr().err


@pytest.fixture(scope="module")
def served(folder):
    """`specjax serve` on a simulated device, with drafts."""
    from support.http import served

    options = {"max_model_len": 512, "max_num_seqs": 4, **ANY_SHAPES}
    script = TextScript(VOCAB, ids=range(2, VOCAB))
    with (
        simulated_llm(folder, "ngram", k=2, script=script, **options) as llm,
        served(llm, per_request_spec_decode_metrics="summary") as running,
    ):
        yield running


def test_speculation_is_that_of_the_engine_and_outputs_are_verified(served, asked):
    before = served.llm.metrics()
    options = ["--verify-lossless", "--request-rate", 100]
    found = bench("--base-url", served.url, *asked, *options)
    after, details = served.llm.metrics(), found["specjax"]
    assert [key for key in found if key.startswith("spec_")] == [
        f"spec_decode_{key}" for key in SPECULATION
    ]
    total = details["speculation"]["total"]
    # The engine has also drafted for the request that warms up; it never drafts to verify.
    assert 0 < total["num_drafts"] <= after.num_drafts - before.num_drafts
    drafts, accepted = total["num_drafts"], total["num_accepted"]
    assert found["spec_decode_acceptance_length"] == pytest.approx(1 + accepted / drafts)
    (group,) = details["speculation"]["by_group"].values()
    assert group["num_drafts"] == drafts and group["num_accepted"] == accepted
    assert group["accepted_per_position"] == total["accepted_per_position"]
    assert sum(details["speculation"]["k_histogram"].values()) > 0
    assert details["speculation"]["host_ms"] > 0
    assert details["lossless"]["num_outputs"] == 4 and details["lossless"]["mismatches"] == []
    assert 0 <= details["arrivals"]["max_late_ms"] and details["num_compiles"] == 0


TIES = [  # tokens expected and given, the server's two best, a temperature, what is said
    (
        [1, 2, 3],
        [1, 5, 3],
        {5: -1.00005, 2: -1.0, 8: -9.0},
        0.0,
        (1, "2 and 5; the best are [2, 5]"),
    ),
    ([1, 2, 3], [1, 5, 3], {2: -1.0, 5: -1.001}, 0.0, (0, "1.0e-03 apart")),
    ([1, 2, 3], [1, 7, 3], {2: -1.0, 5: -1.00005}, 0.0, (0, "2 and 7; the best are [2, 5]")),
    ([1, 2, 3], [1, 5, 3], {}, 0.7, (0, "with a temperature, near-ties are not looked for")),
    ([1, 2, 3], [1, 2], {}, 0.0, (0, "lengths 3 and 2")),
]


@pytest.mark.parametrize("before, after, best, temperature, expected", TIES)
def test_near_ties_are_told_from_mismatches(before, after, best, temperature, expected):
    records = [Record(index=6, token_ids=ids, prompt_ids=[9]) for ids in (before, after)]
    with timed_server(seconds=[], tokens=[], best=best) as server:
        fields = {"temperature": temperature, "return_token_ids": True}
        endpoint = Endpoint(base_url=server.url, model="m", form=FORMS["openai"], fields=fields)
        found = tell_ties(endpoint, [records])
    num_ties, words = expected
    assert len(found[0]) == num_ties and len(found[1]) == 1 - num_ties
    (text,) = [*found[0], *found[1]]
    assert text.startswith("request 6 at output token ") and words in text
    if best:
        assert server.bodies[0][1]["prompt"] == [9, 1]


def test_chats_and_a_peer_that_is_started(served, asked, folder, tmp_path, monkeypatch):
    """The peer is a program named vllm, which answers like a `TimedServer`."""
    support = Path(__file__).parents[1]
    program = tmp_path / "vllm"
    code = f"""#!{sys.executable}
import asyncio, sys
sys.path.insert(0, {str(support)!r})
from support.timed_server import TimedServer
assert sys.argv[1:3] == ["serve", {str(folder)!r}], sys.argv
assert sys.argv[5:] == ["--dtype", "float32", "--more", "1"], sys.argv
async def main():
    made = TimedServer(seconds=[0.01, 0.01], tokens=[4, 6])
    await (await asyncio.start_server(made.answer, "127.0.0.1", int(sys.argv[4]))).serve_forever()
asyncio.run(main())
"""
    program.write_text(code)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    options = [
        "--model",
        folder,
        "--backend",
        "openai-chat",
        "--against",
        "vllm",
        "--peer-args",
        "--more 1",
    ]
    found = bench("--base-url", served.url, *asked, *options)
    (peer,) = found["specjax"]["peers"]
    assert peer["name"] == "vllm" and peer["figures"]["completed"] == 4
    assert peer["figures"]["total_output_tokens"] == 40
    ratio = found["output_throughput"] / peer["figures"]["output_throughput"]
    assert peer["ratios"]["output_throughput"] == pytest.approx(ratio)
    assert peer["outputs"]["num_compared"] == 4 and peer["outputs"]["num_same"] == 0
    assert found["specjax"]["dataset"]["chat_template"] == "the server's"
    assert math.isfinite(found["mean_ttft_ms"])
