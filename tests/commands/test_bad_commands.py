"""Commands that cannot be carried out end with 2 and one line that names option, value and remedy.

What argparse refuses has a usage before it. Engines are simulated, and nothing is trained.
"""

import json

import pytest
from support.engines import simulated_engines
from support.refusals import label
from support.scripts import TextScript
from support.texts import VOCAB, letters_folder

from specjax.cli import main

SIZES = ["--max-model-len", "64", "--max-num-batched-tokens", "32", "--max-num-seqs", "1"]


@pytest.fixture(scope="module")
def model(checkpoints):
    return str(letters_folder(checkpoints))


@pytest.fixture
def refused(capsys):
    """Run a command that must fail, and look at its last line."""

    def run(argv: list[str], *words: str) -> None:
        try:
            with simulated_engines(TextScript(VOCAB)):
                code, has_usage = main(argv), False
        except SystemExit as end:
            code, has_usage = end.code, True
        captured = capsys.readouterr()
        *usage, last = captured.err.splitlines()
        assert code == 2 and "error: " in last and not captured.out
        assert bool(usage) == has_usage and "Traceback" not in captured.err
        assert all(word in last for word in words), last

    return run


COMMANDS = [
    ([], ["COMMAND"]),
    (["dance"], ["'dance'", "generate"]),
    (["--k", "1"], ["generate"]),
    (["generate", "--fast"], ["--fast"]),
    (["generate"], ["no prompts", "--prompts-file"]),
    (["info"], ["no model", "--model"]),
    (["info", "none"], ["'none'", "hub id", "demo"]),
    (["info", "none", "--check"], ["--check", "--drafter"]),
    (["info", "none", "--check", "--compile", "h100"], ["--check", "leave one out"]),
    (["info", "none", "--data", "a"], ["--data", "--check"]),
    (["profile", "show"], ["FILE"]),
    (["profile", "show", "none.json"], ["none.json", "cannot be read", "specjax profile"]),
    (["bench", "simulate"], ["--profile, --policy"]),
    (["train"], ["KIND"]),
    (["train", "target"], ["--data, --out"]),
]


@pytest.mark.parametrize("argv, words", COMMANDS, ids=label)
def test_bad_commands(refused, argv, words):
    refused(argv, *words)


GENERATE = [
    (["--k", "-1", "--method", "ngram"], ["num_speculative_tokens=-1", "at least 1"]),
    (["--k", "0", "--method", "ngram"], ["num_speculative_tokens=0", "at least 1"]),
    (["--k", "100", "--method", "ngram"], ["num_speculative_tokens=100", "64", "lower"]),
    (["--k", "1.5"], ["--k", "'1.5'"]),
    (["--k"], ["--k", "expected one argument"]),
    (["--method", "guess"], ["--method", "'guess'", "eagle3"]),
    (["--method", "mtp"], ["'mtp'", "llama"]),
    (["--drafter", "none"], ["'none'", "hub id", "demo"]),
    (["--model", "none"], ["'none'", "hub id", "demo"]),
    (["--model", ""], ["''", "hub id", "demo"]),
    (["--dtype", "fp8"], ["--dtype", "'fp8'", "bfloat16"]),
    (["--max-tokens", "0"], ["max_tokens=0", "at least 1"]),
    (["--max-tokens", "many"], ["--max-tokens", "'many'"]),
    (["--temperature", "-1"], ["temperature=-1.0", "0 means greedy"]),
    (["--temperature", "nan"], ["temperature=nan", "0 means greedy"]),
    (["--seed", str(2**64)], [f"seed={2**64}", "-9223372036854775808..18446744073709551615"]),
    (["--stop-token-id", "96"], ["stop_token_ids", "96", "0..95"]),
    (["--page-size", "0"], ["page_size=0", "at least 1"]),
    (["--max-num-seqs", "-1"], ["max_num_seqs=-1", "at least 1"]),
    (["--max-model-len", "0"], ["max_model_len=0", "at least 1"]),
    (["--max-num-batched-tokens", "0"], ["max_num_batched_tokens=0", "at least 1"]),
    (["--prompts-file", "none.txt"], ["--prompts-file none.txt", "cannot be read", "No such"]),
    (["--prompts-file", "/"], ["--prompts-file /", "cannot be read", "directory"]),
    (["--chat"], ["no chat template", "generate"]),
    (["--sampling-params", "5"], ["--sampling-params", "JSON object", "5"]),
    (["--sampling-params", '{"n": 0}'], ["n=0", "at least 1"]),
    (["--sampling-params", '{"stop": 5}'], ["stop=5", "texts"]),
    (["--sampling-params", '{"logit_bias": 5}'], ["logit_bias=5", "mapping"]),
    (["--sampling-params", '{"logit_bias": {"a": 1}}'], ["logit_bias", "'a'", "integer"]),
    (["--sampling-params", '{"logit_bias": {"-1": 1}}'], ["logit_bias", "'-1'", "integer"]),
    (["--speculative-config", "[]"], ["--speculative-config", "JSON object"]),
    (["--speculative-config", '{"method": "ngram"}'], ["num_speculative_tokens", "add"]),
]


@pytest.mark.parametrize("options, words", GENERATE, ids=label)
def test_bad_options_of_generate(refused, model, options, words):
    refused(["generate", "--model", model, *SIZES, "--json", "hi", *options], *words)


ROWS = [
    ('{"prompt_token_ids": [1.5]}', ["prompt 0 has 1.5", "integers"]),
    ('{"prompt_token_ids": []}', ["prompt 0 is empty"]),
    ('{"prompt_token_ids": [96]}', ["96", "0..95"]),
    ('{"prompt": ""}', ["prompt 0 is empty: ''"]),
    ("\n", ["no prompts"]),
]


@pytest.mark.parametrize("row, words", ROWS, ids=label)
def test_bad_rows(refused, model, tmp_path, row, words):
    file = tmp_path / "prompts.jsonl"
    file.write_text(row)
    refused(["generate", "--model", model, *SIZES, "--json", "--prompts-file", str(file)], *words)


def test_prompts_that_are_no_text(refused, model, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xff\xfe")
    argv = ["generate", "--model", model, "--prompts-file", str(file)]
    refused(argv, f"--prompts-file {file}", "utf-8")


PROFILES = "", "{", "[]", "{}", "5"


@pytest.mark.parametrize("text", PROFILES)
def test_a_profile_that_is_none(refused, tmp_path, text):
    file = tmp_path / "profile.json"
    file.write_text(text)
    refused(["profile", "show", str(file)], str(file), "JSON" if text != "{}" else "profile again")


MEASURE = [
    (["profile", "--output", "none/p.json"], ["--output none/p.json", "existing folder"]),
    (["profile", "--output", "/"], ["--output /", "existing folder"]),
    (["profile", "--k", "-1"], ["--k -1", "at least 0"]),
    (["profile", "--k", "a"], ["--k a", "1,2,3"]),
    (["profile", "--batch-size", "0,4"], ["--batch-size 0,4", "at least 1"]),
    (["profile", "--rounds", "0"], ["--rounds=0", "at least 1"]),
    (["profile", "--max-tokens", "0"], ["--max-tokens 0", "at least 2"]),
    (["profile", "--drafter", "guess"], ["--drafter guess", "no such folder"]),
    (["bench", "--k", "-1"], ["--k -1", "at least 0"]),
    (["bench", "--batch-size", "0"], ["--batch-size 0"]),
    (["bench", "--num-prompts", "0"], ["--num-prompts 0", "at least 1"]),
    (["bench", "--output", "none/b.json"], ["--output none/b.json", "existing folder"]),
    (["bench", "sweep", "--plot", "none/s.png"], ["--plot none/s.png", "existing folder"]),
    (["bench", "sweep", "--profile", "none.json"], ["none.json", "cannot be read"]),
    (["bench", "sweep", "--synthetic-rates", "a"], ["--synthetic-rates a", "0.8,0.5"]),
]


@pytest.mark.parametrize("argv, words", MEASURE, ids=label)
def test_bad_options_of_measurements(refused, model, argv, words):
    argv = argv if "--drafter" in argv else [*argv, "--drafter", "ngram"]
    refused([*argv, "--model", model], *words)


@pytest.mark.parametrize(
    "argv",
    [["profile", "--output"], ["bench", "--output"], ["bench", "sweep", "--plot"]],
    ids=label,
)
def test_a_folder_that_may_not_be_written(refused, model, argv, monkeypatch, tmp_path):
    """Whoever runs the tests may be allowed to write everywhere."""

    def refuse(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    place = str(tmp_path / "a.file")
    words = f"{argv[-1]} {place}", "Permission denied", "elsewhere"
    refused([*argv, place, "--drafter", "ngram", "--model", model], *words)


TRAIN = [
    *((f"--{name} 0", [f"--{name}=0", "at least 1"]) for name in ("steps", "batch-size", "length")),
    *((f"--{name} -1", [f"--{name}=-1", "at least 1"]) for name in ("vocab-size", "num-layers")),
    ("--seed -1", ["--seed=-1", "at least 0"]),
    ("--hidden-size 63", ["--hidden-size=63", "multiple of 64"]),
    ("--learning-rate 0", ["--learning-rate=0.0", "above 0"]),
    ("--learning-rate nan", ["--learning-rate=nan", "finite"]),
    ("--data none.jsonl", ["--data none.jsonl", "no such file"]),
]


@pytest.fixture
def data(tmp_path):
    """A file of one document."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "hello"}\n')
    return path


@pytest.mark.parametrize("options, words", TRAIN, ids=label)
def test_bad_options_of_training(refused, data, tmp_path, options, words):
    argv = ["train", "target", "--data", str(data), "--out", str(tmp_path / "out")]
    refused([*argv, *options.split()], *words)
    assert [*tmp_path.iterdir()] == [data]


@pytest.mark.parametrize(
    "options, words",
    [
        ("--mask-token-id 9999", ["--mask-token-id=9999", "of the target's"]),
        ("--init none --block-size 4", ["--block-size is for new heads", "--init none"]),
        ("--block-size 1", ["--block-size=1", "at least 2"]),
    ],
)
def test_bad_sizes_of_a_new_drafter(refused, data, model, tmp_path, options, words):
    out = str(tmp_path / "out")
    argv = ["train", "dflash", "--target", model, "--data", str(data), "--out", out]
    refused([*argv, *options.split()], *words)
    assert [*tmp_path.iterdir()] == [data]


def test_a_place_that_cannot_be_written(refused, data, model, tmp_path):
    """It is noticed before anything is trained or generated."""
    given = ["--data", str(data), "--out"]
    refused(["train", "target", *given, str(data)], f"--out {data} is a file", "folder")
    answers = ["train", "answers", "--target", model, *given]
    refused([*answers, str(tmp_path)], f"--out {tmp_path} is a folder", ".jsonl")
    refused([*answers, str(data / "answers" / "a.jsonl")], str(data / "answers"), "directory")


@pytest.mark.parametrize(
    "row, words",
    [
        ("{", ["is not JSON"]),
        ("5", ["a JSON object", "5"]),
        ('{"text": 5}', ["text=5", "a text"]),
        ('{"question": "a", "answer": 3}', ["answer=3", "a text"]),
        ('{"question": "a"}', ['"answer"']),
    ],
)
def test_bad_rows_of_data(refused, data, tmp_path, row, words):
    data.write_text(json.dumps({"text": "a"}) + "\n" + row + "\n")
    out = str(tmp_path / "out")
    refused(["train", "target", "--data", str(data), "--out", out], f"{data}:2", *words)
