"""Traces in their published formats: arrival times, lengths, shared prefixes, and wrong rows."""

import json
from dataclasses import replace

import numpy as np
import pytest
from support.refusals import refusal
from support.timed_server import timed_server

from specjax.bench.datasets import DATASETS
from specjax.bench.datasets.queries import DatasetSettings, make_queries
from specjax.bench.traffic.arrivals import Arrivals
from specjax.cli import main
from specjax.text.tokenizer import load_tokenizer

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,30,10
2023-11-16 18:17:04.2299600,400,4
2023-11-16 18:17:05.9799600,7,1
"""
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,30,10,40,Conversation log
5.5,GPT-4,9,0,9,API log
5.25,ChatGPT,400,4,404,Conversation log
7,ChatGPT,7,1,8,API log
"""
ROWS = [(1000, 30, 10, [4]), (1250, 1100, 4, [4, 5, 6]), (3000, 1030, 1, [4, 5, 9])]
NAMES = "timestamp", "input_length", "output_length", "hash_ids"
MOONCAKE = "\n".join(json.dumps(dict(zip(NAMES, row, strict=True))) for row in ROWS)


def settings(path=None, count=1, **own):
    trace = replace(DATASETS["trace"], **own)
    return DatasetSettings(
        name="trace", dataset=trace, path=path, num_prompts=count, template_kwargs={}
    )


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture
def made(tmp_path, tokenizer):
    def made(text, count, **own):
        path = tmp_path / "trace"
        path.write_text(text)
        return make_queries(settings(path, count, **own), tokenizer)

    return made


@pytest.mark.parametrize("text, lengths", [
    (AZURE, [30, 400, 7]),
    (BURST_GPT, [30, 400, 7]),
    (MOONCAKE, [30, 1100, 1030]),
], ids=["azure", "burst-gpt", "mooncake"])  # fmt: skip
def test_times_and_lengths_are_those_of_the_file(made, text, lengths):
    found = made(text, 3)
    assert [len(one.token_ids) for one in found.queries] == lengths
    assert [one.output_len for one in found.queries] == [10, 4, 1]
    assert [one.arrival for one in found.queries] == pytest.approx([0, 0.25, 2])
    assert bool(found.notes) == (text is BURST_GPT)  # one has no answer
    fast = made(text, 2, speed=2.0, max_total=100 + max(lengths) * (text is MOONCAKE))
    last = 2 if text is not MOONCAKE else 0.25
    assert [one.arrival for one in fast.queries] == pytest.approx([0, last / 2])


def test_prompts_share_the_blocks_that_the_trace_says(made):
    one, two, three = (query.token_ids for query in made(MOONCAKE, 3).queries)
    assert one == two[:30] and two[:1024] == three[:1024] and two[1024:1030] != three[1024:]


def test_a_run_has_the_times_of_the_trace():
    arrivals = Arrivals(trace=[0.0, 0.5, 0.5])
    assert arrivals.times(2, seed=1) == [0.0, 0.5]
    found = arrivals.check([0.0, 0.6], [0.0, 0.1])
    assert found["law"] == "trace" and found["max_late_ms"] == pytest.approx(100)
    for wrong in {"rate": 2.0}, {"burstiness": 3.0}:
        refusal(lambda wrong=wrong: Arrivals(trace=[0.0], **wrong), "--trace-speed", "leave out")


def test_a_server_gets_the_requests_of_a_trace(tmp_path, folder, capsys):
    pytest.importorskip("aiohttp")
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    with timed_server(seconds=[0.0], tokens=[1]) as server:
        options = ["--base-url", server.url, "--tokenizer", folder, "--num-prompts", 3]
        options += ["--dataset-name", "trace", "--dataset-path", path, "--trace-speed", 5]
        argv = ["bench", "serve", *map(str, options)]
        assert main([*argv, "--json"]) == 0
        times, bodies = zip(*server.bodies[1:], strict=True)
        assert main([*argv, "--request-rate", "3"]) == 2
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["request_rate"] == "trace" and "has its own times" in printed.err
    assert found["specjax"]["arrivals"]["law"] == "trace"
    assert [body["max_tokens"] for body in bodies] == [10, 4, 1]
    gaps = np.diff(times)
    assert gaps.min() > 0.02 and 0.3 < gaps.sum() < 1.0  # 0.05 and 0.35 s


@pytest.mark.parametrize("text, words", [
    ("a,b\n1,2\n", ["line 2", "TIMESTAMP, Timestamp, timestamp", "fields: a, b"]),
    (AZURE.replace("18:17:04.2299600", "18:61"), ["line 3", "'TIMESTAMP'", "18:61", "a time"]),
    (AZURE.replace(",400,", ",-4,"), ["line 3", "'ContextTokens' is '-4'", "at least 1"]),
    (AZURE.replace(",400,4", ",400"), ["line 3", "'GeneratedTokens' is None"]),
    (MOONCAKE.replace("1250", "null"), ["line 2", "'timestamp' is None"]),
    (MOONCAKE.replace("[4]", "[4.5]"), ["line 1", "'hash_ids' is [4.5]", "list of integers"]),
    ('{"timestamp"', ["line 1", "not JSON"]),
    (AZURE, ["--num-prompts 4", "has 3 requests"]),
], ids=range(8))  # fmt: skip
def test_a_wrong_row_is_named(made, text, words):
    refusal(lambda: made(text, 4), *words)


@pytest.mark.parametrize(
    "own, word", [({"speed": 0.0}, "--trace-speed 0"), ({"max_total": 1}, "max-total 1")]
)
def test_wrong_options(own, word):
    refusal(lambda: settings(**own), word)
