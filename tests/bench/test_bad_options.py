"""Commands that measure end with 2 and one line, before anything is loaded."""

import pytest
from support.refusals import label

from specjax import LLM
from specjax.cli import main

BENCH = {
    "--k 0": "--k 0 alone drafts nothing; list a K of at least 1",
    "--k two": "--k two must list integers",
    "--k=-1,2": "--k -1,2 must list integers of at least 0",
    "--max-tokens 1": "--max-tokens 1 leaves nothing to time",
    "--num-prompts 99": "--num-prompts 99: there are 24",
    "--num-prompts 3 --batch-size 2": "does not fill batches",
    "--batch-size 0": "--batch-size 0 must be in 1..24",
    "--batch-size 0 --num-prompts 2": "--batch-size 0 must be at least 1",
    "--rounds 0": "--rounds 0 must be at least 1",
    "--temperature=-1": "temperature=-1.0 must be a number",
    f"--seed={2**64}": f"--seed={2**64} must be an integer of 64 bits",
    "--drafter eagle": "--drafter eagle lacks a checkpoint; give --drafter eagle=CHECKPOINT",
    "--drafter eagle=/": "--drafter eagle=... is given twice",
    "--drafter lookahead=/": "--drafter lookahead=/: 'lookahead' is no method",
    "--drafter medusa=/no/such/head": "no such folder: '/no/such/head'",
    "--output /no/such/folder/x.json": "--output /no/such/folder/x.json",
}
SWEEP = {
    "--k 1,x": "--k 1,x must list integers",
    "--k 0": "--k 0 alone drafts nothing",
    "--k=-1,2": "--k -1,2 must list integers of at least 0",
    "--batch-size 0,4": "--batch-size 0,4 must list integers of at least 1",
    "--rounds 0": "--rounds=0",
    "--max-tokens 1": "--max-tokens 1 leaves nothing to time",
    f"--seed={2**64}": f"--seed={2**64} must be",
    "--drafter eagle": "--drafter eagle lacks a checkpoint",
    "--synthetic-rates a": "--synthetic-rates a must list rates",
    "--output /no/such/x.json": "--output /no/such/x.json cannot be a file",
    "--temperature=-1": "temperature=-1",
}
PROFILE = {
    "--rounds 0": "--rounds=0",
    "--k 1,2": "--k 1,2 lacks 0",
    "--output /no/such/x.json": "--output /no/such/x.json cannot be a file",
}
BAD = [
    *(("bench", *case) for case in BENCH.items()),
    *(("bench sweep", *case) for case in SWEEP.items()),
    *(("profile", *case) for case in PROFILE.items()),
]


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(LLM, "__init__", None)


@pytest.mark.parametrize("command, options, message", BAD, ids=label)
def test_bad_options(capsys, folder, command, options, message):
    argv = [*command.split(), "--model", str(folder), "--drafter", f"eagle={folder}"]
    assert main([*argv, *options.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("specjax: error: ") and captured.err.count("\n") == 1
    assert message in captured.err and not captured.out


@pytest.mark.parametrize("command", ["bench", "bench sweep", "profile"])
def test_a_model_without_drafters(capsys, command):
    assert main([*command.split(), "--model", "no/such/model"]) == 2
    err = capsys.readouterr().err
    assert "has no default drafter" in err and "name one with --drafter" in err


def test_a_target_without_a_tokenizer(capsys, files):
    assert main(["bench", "--model", str(files.folder), "--drafter", "ngram"]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err
