"""Commands that measure end with 2 and one line, before anything is loaded."""

import pytest
from support.refusals import label

from specjax import LLM
from specjax.cli import main

# What both commands check alike is among `tests/commands/test_bad_commands.py`.
BAD = [
    ("bench --k 0", "--k 0 alone drafts nothing; also list a K of at least 1"),
    ("bench --k two", "--k two must list integers"),
    ("bench --max-tokens 1", "--max-tokens 1 leaves nothing to time"),
    ("bench --num-prompts 99", "--num-prompts 99: there are 24"),
    ("bench --num-prompts 3 --batch-size 2", "does not fill batches"),
    ("bench --batch-size 0 --num-prompts 2", "--batch-size 0 must be at least 1"),
    ("bench --rounds 0", "--rounds 0 must be at least 1"),
    ("bench --temperature=-1", "temperature=-1.0 must be a number"),
    (f"bench --seed={2**64}", f"--seed={2**64} must be an integer of 64 bits"),
    ("bench --drafter eagle", "lacks a checkpoint; give --drafter eagle=CHECKPOINT"),
    ("bench --drafter eagle=/", "--drafter eagle=... is given twice"),
    ("bench --drafter lookahead=/", "--drafter lookahead=/: 'lookahead' is not a method"),
    ("bench --drafter medusa=/no/such/head", "no such folder: '/no/such/head'"),
    ("bench sweep --k 0", "--k 0 alone drafts nothing"),
    ("bench sweep --max-tokens 1", "--max-tokens 1 leaves nothing to time"),
    (f"bench sweep --seed={2**64}", f"--seed={2**64} must be"),
    ("bench sweep --temperature=-1", "temperature=-1"),
    ("bench sweep --output /no/such/x.json", "--output /no/such/x.json cannot be a file"),
    ("profile --k 1,2", "--k 1,2 lacks 0"),
]


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(LLM, "__init__", None)


@pytest.mark.parametrize("argv, message", BAD, ids=label)
def test_bad_options(capsys, folder, argv, message):
    words = argv.split()
    command = words[: 1 + (words[1] == "sweep")]
    given = ["--model", str(folder), "--drafter", f"eagle={folder}", *words[len(command) :]]
    assert main([*command, *given]) == 2
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
