"""Measurements of divided and replicated models, on simulated devices."""

import contextlib
import io
import json

import pytest
from support.engines import simulated_engines
from support.scripts import TextScript

from specjax import LLM
from specjax.bench.devices import Devices
from specjax.cli import main

VOCAB, MAX_TOKENS = 300, 10
DIVIDED = ("--tensor-parallel-size", "2", "--data-parallel-size", "2", "--collectives", "nccl")


@pytest.fixture(scope="module", autouse=True)
def simulated():
    """Simulate engines whose outputs do not depend on the drafter, and have full length."""
    with simulated_engines(TextScript(VOCAB, ids=range(2, VOCAB))):
        yield


@pytest.fixture(scope="module")
def options(checkpoints, files, folder):
    head = checkpoints.eagle(files).folder
    return ["--model", str(folder), "--drafter", f"eagle={head}", "--max-tokens", str(MAX_TOKENS)]


def run(*argv):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(list(argv)) == 0
    return printed.getvalue()


@pytest.mark.slow
def test_replicas_are_compared_as_one_engine_is(options, tmp_path):
    """Steps and acceptance are counted per replica, and tokens per second over both replicas."""
    sizes = ["--k", "2,0", "--num-prompts", "4", "--batch-size", "1"]
    files = tmp_path / "one.json", tmp_path / "divided.json"
    run("bench", *options, *sizes, "--output", str(files[0]))
    printed = run("bench", *options, *sizes, *DIVIDED, "--output", str(files[1]))
    one, divided = (json.loads(file.read_text()) for file in files)
    assert (one["num_rounds"], divided["num_rounds"]) == (4, 2)
    assert divided["outputs_identical"] is True
    assert divided["num_compiles_while_measuring"] == 0
    for before, now in zip(one["configurations"], divided["configurations"], strict=True):
        for name in "configuration", "num_outputs":
            assert now[name] == before[name]
        # Tokens of a replica that has prefilled before the other are not timed.
        assert 0 < now["num_tokens"] <= before["num_tokens"]
        length = 1 + sum(now["acceptance_per_position"])
        assert now["mean_acceptance_length"] == pytest.approx(length)
        # A replica that ends first may have run one more step in vain in each of two rounds.
        assert 0 <= now["num_steps"] - now["num_tokens"] / length < 2.001
        assert now["ms_per_step"] == pytest.approx(2e3 * now["seconds"] / now["num_steps"])
        assert len(one["configurations"]) == len(divided["configurations"]) == 3
    assert divided["settings"]["devices"] == {
        "tensor_parallel_size": 2,
        "data_parallel_size": 2,
        "enable_expert_parallel": False,
        "collectives": "nccl",
    }
    assert "4 devices (tensor parallel 2, data parallel 2, collectives nccl): " in printed
    assert Devices(tensor_parallel_size=2, enable_expert_parallel=True).describe("H200") == (
        "2 devices (tensor parallel 2, data parallel 1, expert parallel, collectives auto): H200"
    )


def test_a_profile_is_of_each_replica(options, tmp_path, checkpoints, files, folder):
    file = tmp_path / "profile.json"
    sizes = ["--k", "0,2", "--batch-size", "2", "--rounds", "1", *DIVIDED]
    run("profile", *options, *sizes, "--output", str(file))
    measured = json.loads(file.read_text())["measured"]
    assert measured["devices"]["tensor_parallel_size"] == 2
    # Rounds of both replicas, each with both of its requests.
    assert MAX_TOKENS - 1 < measured["num_rounds_timed"]["2"]["0"] <= 2 * MAX_TOKENS
    head = {"method": "eagle", "model": str(checkpoints.eagle(files).folder)}
    speculation = head | {"dynamic_config_path": str(file)}
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "verbose": False}
    with pytest.raises(ValueError, match="number of devices"):
        LLM(folder, speculative_config=speculation, **sizes)
    LLM(folder, speculative_config=speculation, tensor_parallel_size=2, **sizes).close()


@pytest.mark.slow
def test_a_sweep_of_replicas(options, tmp_path):
    sizes = ["--k", "0,2", "--batch-size", "1", "--rounds", "1", "--data-parallel-size", "2"]
    file, plot = tmp_path / "sweep.json", tmp_path / "sweep.png"
    printed = run("bench", "sweep", *options, *sizes, "--output", str(file), "--plot", str(plot))
    policies = json.loads(file.read_text())["batches"]["1"]["policies"]
    assert list(policies) == ["off", "K=0", "K=2", "adaptive"]
    for name, policy in policies.items():
        assert policy["num_differing"] == 0
        assert set(policy["k_histogram"]) <= {"0", name[2:], *("012" if name == "adaptive" else "")}
    assert "2 devices (tensor parallel 1, data parallel 2, collectives auto)" in printed


BAD = [
    (["bench", "--data-parallel-size", "9"], "data_parallel_size=9 must be an integer from 1 to 4"),
    (["bench", "--tensor-parallel-size", "0"], "--tensor-parallel-size"),
    (["bench", "--data-parallel-size", "0"], "--data-parallel-size"),
    (["bench", "--data-parallel-size", "4", "--batch-size", "7"], "must be in 1..6, for 4 repl"),
    (["bench", "--data-parallel-size", "4", "--num-prompts", "6"], "use a multiple of 4"),
    (["profile", "--enable-expert-parallel", "--k", "0,1"], "needs a model with experts"),
]


@pytest.mark.parametrize("argv, words", BAD)
def test_what_is_refused(argv, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    assert words in capsys.readouterr().err
