"""`specjax bench latency` and `throughput`, and their peers, on a simulated device."""

import contextlib
import io
import json
from types import SimpleNamespace

import pytest
from support.engines import simulated_engines
from support.refusals import refusal
from support.scripts import TextScript

from specjax.bench import warm_up
from specjax.bench.offline import BatchRun, Offline, round_over_plain
from specjax.bench.peers import process
from specjax.bench.peers.peer import compare_outputs, ratios
from specjax.bench.result import Accepted, Distribution
from specjax.bench.throughput import Rounds, peers_of
from specjax.bench.traffic.record import Record, by_group
from specjax.cli import main
from specjax.commands.bench_throughput import read_peers
from specjax.host.leaving import INTERRUPTED

VOCAB = 300
# The keys of `vllm bench` 0.33 in their order.
THROUGHPUT = "elapsed_time num_requests total_num_tokens requests_per_second tokens_per_second"
LATENCY = "avg_latency latencies percentiles model_id"


@pytest.fixture(scope="module", autouse=True)
def simulated():
    """Simulate engines whose outputs have full length and do not depend on the drafter."""
    with simulated_engines(TextScript(VOCAB, ids=range(2, VOCAB))):
        yield


@pytest.fixture(scope="module")
def bench(folder, tmp_path_factory):
    """Return a function that runs a benchmark with prompt lookup.

    It returns the printed text and the JSON file's content.
    """

    def run(command, *argv, code=0):
        file, printed = tmp_path_factory.mktemp("bench") / "result.json", io.StringIO()
        options = ["--model", folder, "--drafter", "ngram", "--k", 2, "--max-model-len", 256]
        options += ["--output-len", 12, "--output-json", file, *argv]
        with contextlib.redirect_stdout(printed):
            assert main(["bench", command, *map(str, options)]) == code
        return printed.getvalue(), json.loads(file.read_text())

    return run


@pytest.mark.slow
def test_throughput_and_what_speculation_did(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(warm_up, "ALLOWED", 0.0)
    options = ["--num-prompts", 4, "--rounds", 2, "--verify-lossless", "--max-num-seqs", 2]
    options += ["--report", tmp_path / "a.html"]
    printed, found = bench("throughput", *options)
    assert list(found)[:5] == THROUGHPUT.split() and "model_id" in found
    assert printed.startswith(f"Throughput: {found['requests_per_second']:.2f} requests/s, ")
    assert f'<data value="{found["elapsed_time"]!r}">' in (tmp_path / "a.html").read_text()
    assert found["num_requests"] == 4
    details = found["specjax"]
    num_prompt = round(4 * details["dataset"]["mean_prompt_len"])
    assert found["total_num_tokens"] == num_prompt + 4 * 12
    rate = found["total_num_tokens"] / found["elapsed_time"]
    assert found["tokens_per_second"] == pytest.approx(rate)
    assert details["warm_up"]["num_runs"] > 1, "the second has programs that the first had not"
    assert details["warm_up"]["is_settled"] and details["num_compiles"] == 0
    rounds = [one["elapsed_time"] for one in details["rounds"]]
    assert len(rounds) == 2 and found["elapsed_time"] == min(rounds)
    speculation = details["speculation"]
    total = speculation["total"]
    source = speculation["by_source"]["ngram"]
    assert source.items() <= total.items() and speculation["by_group"] == {"": total}
    assert total["num_drafts"] > 0 and sum(speculation["k_histogram"].values()) > 0
    assert total["acceptance_length"] == pytest.approx(1 + sum(total["rates_per_position"]))
    assert speculation["host_ms"] > 0 and speculation["ms_per_round"]["2"] > 0
    assert speculation["round_over_plain"]["2"] > 0
    lossless = details["lossless"]
    assert (lossless["num_outputs"], lossless["mismatches"]) == (4, [])
    assert "same tokens as plain decoding: yes, 4 outputs, 48 tokens" in printed
    assert {"versions", "commit", "cpu_model", "clocks"} <= details["environment"].keys()
    assert details["settings"]["max_num_seqs"] == 2 and details["dataset"]["name"] == "gsm8k"


def test_latency_of_a_batch(bench, monkeypatch):
    monkeypatch.setattr(warm_up, "ALLOWED", 0.0)
    monkeypatch.setattr(warm_up, "MAX_SECONDS", 0.0)
    options = ["--batch-size", 3, "--num-iters", 4, "--num-iters-warmup", 1]
    random = ["--dataset-name", "random", "--input-len", 9]
    printed, found = bench("latency", *options, *random)
    assert [key for key in found if key != "specjax"] == LATENCY.split()
    assert len(found["latencies"]) == 4
    assert found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 4)
    assert list(found["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert found["specjax"]["distributions"]["e2el_ms"]["count"] == 12
    assert found["specjax"]["dataset"]["mean_prompt_len"] == 9
    assert "99% percentile latency: " in printed
    assert found["specjax"]["warm_up"]["num_runs"] == 1
    assert "the warm-up ended after 0 s, before all programs were compiled" in printed


def test_an_interrupt_keeps_the_rounds_so_far(bench, monkeypatch):
    generate, calls = Offline.generate, []

    def interrupted(self, queries):
        calls.extend(self.timed)  # empty during the warm-up
        if len(calls) > 2:
            raise KeyboardInterrupt
        return generate(self, queries)

    monkeypatch.setattr(Offline, "generate", interrupted)
    printed, found = bench("throughput", "--num-prompts", 2, "--rounds", 9, code=INTERRUPTED)
    assert len(found["specjax"]["rounds"]) == 2 and found["specjax"]["is_interrupted"]
    assert "interrupted: the figures cover what was measured" in printed


def test_counts_of_drafts_follow_from_rounds():
    """The expected counts are computed by hand from a few rounds (drafts, accepted drafts)."""
    counts = Accepted.of_rounds([(3, 3), (3, 1), (1, 0)])
    assert counts.accepted_per_position == (2, 1, 1) and counts.drafted_per_position == (3, 2, 2)
    figures = (counts + Accepted.of_rounds([(4, 4)])).as_json()
    assert figures["accepted_per_position"] == (3, 2, 2, 1)
    assert figures["acceptance_rate"] == 8 / 11 and figures["acceptance_length"] == 3
    records = [
        Record(index=0, group="a", rounds=((3, 3), (3, 1))),
        Record(index=1, group="b", accepted=(1, 2, 0, 1), num_drafts=12),
    ]
    found = by_group(records)
    assert found["a"]["acceptance_length"] == 3
    assert found["b"]["accepted_per_position"] == (3, 1, 1) and found["b"]["num_drafts"] == 4
    assert Accepted().as_json()["acceptance_length"] is None
    drafting = {(1, 3): [2.0, 4.0], (8, 3): [9.0], (2, 3): [50.0], (1, 0): [7.0]}
    plain = {(1, 0): [1.5], (8, 0): [4.0, 2.0]}
    assert round_over_plain(drafting, plain) == {"3": (6 + 9) / (2 * 1.5 + 3)}
    assert Distribution.of([]) is None
    assert Distribution.of([1.0, 2.0, 6.0]).median == 2.0


def test_peers_are_compared():
    assert ratios({"a": 3, "b": 1.0, "c": 2, "d": "x"}, {"a": 2, "b": 0, "d": "x"}) == {"a": 1.5}
    own = [Record(index=i, token_ids=[1, 2, 3]) for i in range(3)]
    theirs = [Record(index=1, token_ids=[1, 5]), Record(index=0, token_ids=[1, 2, 3])]
    found = compare_outputs(own, [*theirs, Record(index=2, error="died")])
    assert found == {
        **{"compared": "token_ids", "num_compared": 2, "num_same": 1},
        "first_differences": [1],
    }
    assert compare_outputs(own, []) is None


def test_a_peer_keeps_each_round_and_needs_its_packages(monkeypatch):
    own = [BatchRun(seconds=s, records=[], before=None, after=None) for s in (1.0, 4.0, 2.0)]
    passes = [(2.0 * seconds, []) for seconds in (1.0, 4.0, 2.0)]
    queries, workers = SimpleNamespace(queries=[]), {"x": SimpleNamespace(version="1")}
    (peer,) = peers_of(Rounds(batches=own, peers={"x": passes}), workers, queries)
    assert [one["elapsed_time"] for one in peer.rounds] == [2, 8, 4]
    assert peer.figures["elapsed_time"] == 4 and peer.ratios["elapsed_time"] == 0.5
    monkeypatch.setattr(process, "find_spec", lambda name: None if name == "torch" else name)
    refusal(lambda: read_peers(["transformers"]), "the package torch; pip install 'specjax[peers]'")


def test_transformers_in_padded_batches_gives_what_it_gives_alone(folder, files):
    """Batches that are padded on the left have the same outputs as single prompts."""
    import torch
    from transformers import AutoModelForCausalLM

    from specjax.bench.peers.transformers_worker import Runner

    prompts, lengths = [[5, 9, 77], [8], [30, 31, 32, 33, 34]], [6, 9, 3]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    alone = [
        model.generate(
            torch.tensor([p]), do_sample=False, max_new_tokens=n, eos_token_id=VOCAB, pad_token_id=0
        )[0, len(p) :].tolist()
        for p, n in zip(prompts, lengths, strict=True)
    ]
    stop = alone[1][2]
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in alone]
    work = SimpleNamespace(
        model=str(folder), prompts=prompts, output_lens=lengths, batch_size=2, dtype="float32"
    )
    more = {"sampling": {"temperature": 0.0}, "stop_ids": [stop], "seed": 0, "num_threads": 0}
    found = Runner(vars(work) | more | {"is_compiled": False}).run()
    assert found["outputs"] == expected and found["seconds"] > 0
    assert len(expected[1]) < 9
