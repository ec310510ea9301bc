"""Commands that cannot run exit with 2 and a line that names the option and its value.

Before that line, errors of argparse print the usage. Engines are simulated, and nothing is trained.
In a command, MODEL is replaced by a target with a tokenizer, and PROFILE by a profile.
"""

import json
import shlex
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.dynamic_k import write_profile
from support.engines import simulated_engines
from support.refusals import label
from support.scripts import TextScript
from support.texts import VOCAB

from specjax import LLM
from specjax.cli import main
from specjax.inspect import compile as compiler

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    return write_profile(tmp_path_factory.mktemp("profile"))


@pytest.fixture
def refused(capsys, letters, profile, monkeypatch):
    """Return a function that runs a command that must fail before compiling.

    The command's last line must have the given words.
    """
    monkeypatch.setattr(compiler, "check_tools", lambda: None)
    monkeypatch.setattr(compiler.subprocess, "run", Mock(side_effect=AssertionError("compiled")))

    def run(command: str, *words: str) -> None:
        named = command.replace("MODEL", str(letters)).replace("PROFILE", str(profile))
        argv = shlex.split(named)
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


JSON = "sampling-params", "speculative-config"
BIAS = """--sampling-params '{"logit_bias": {"KEY": 1}}'"""
SIZES = ",", "1,", "x", "1.5", "0", "-1,4"
NO_DRAFTER = ["has no default drafter", "name one with --drafter"]
LLAMA = CONFIGS / "Llama-3.1-8B"
INFO = f"info {CONFIGS / 'Qwen3.5-0.8B'}"
SERVE = "bench serve --base-url http://127.0.0.1:9"
CONFIG = "--speculative-config"
OFFLINE = "bench throughput --model MODEL"
LOADS = [
    ("bench serve --dataset-name share", ["--dataset-name share", "'sharegpt'"]),
    ("bench latency --dataset-name custom", ["--dataset-path is missing", ".jsonl"]),
    (f"{OFFLINE} --dataset-path none.jsonl", ["none.jsonl", "No such file", "grade-school"]),
    (f"{OFFLINE} --random-input-len 4", ["--random-input-len goes with --dataset-name random"]),
    (f"{OFFLINE} --dataset-name random --random-range-ratio 1", ["--random-range-ratio 1.0"]),
    (f"{OFFLINE} --num-prompts 0", ["--num-prompts=0"]),
    (f"{OFFLINE} --rounds 0", ["--rounds=0"]),
    (f"{OFFLINE} --output-json none/a", ["--output-json none/a"]),
    (f"{OFFLINE} --against vllm", ["--against vllm", "bench serve against servers"]),
    (f"{OFFLINE} --against transformers --against transformers", ["given twice"]),
    (f"{OFFLINE} --verify-lossless", ["--verify-lossless goes with --drafter"]),
    (f"{OFFLINE} --synthetic-rates 0.5", ["--synthetic-rates goes with --drafter"]),
    (f"{OFFLINE} --temperature=-1", ["temperature=-1.0"]),
    (f"{OFFLINE} --chat-template-kwargs []", ["--chat-template-kwargs must be a JSON object"]),
    ("bench latency --report a.pdf", ["--report a.pdf must end in .html, .md, .png"]),
    ("bench serve --model MODEL --report a", ["--report a must end in .html"]),
    (f"{OFFLINE} --output-json a.md --report ./a.md", ["--output-json and --report both write"]),
    ("bench sweep serve --request-rate 1", ["must list several values, like 1,4"]),
    ("bench sweep serve --request-rate 1,0", ["--request-rate 0 must be above 0"]),
    ("bench sweep serve --request-rate 1,x", ["--request-rate 1,x must list numbers"]),
    ("bench sweep serve --max-concurrency 1,1", ["--max-concurrency 1,1 has a value twice"]),
    ("bench sweep --k 3 serve", ["--k precedes serve"]),
    (f"bench {CONFIG} '{{}}'", ["speculative_config lacks ['method'"]),
    (f"bench sweep {CONFIG} []", [f"{CONFIG} must be a JSON object"]),
    (f"bench {CONFIG} '{{\"adaptive\": true}}'", [f"{CONFIG} sets adaptive", "with --k"]),
    (f"bench sweep {CONFIG} '{{}}' --drafter ngram", ["leave out --drafter"]),
    ("bench compare a,a b", ["a is named twice"]),
    ("bench compare a b --fail-over 5", ["--fail-over 5 must be per cent, like 5%"]),
    ("bench latency --batch-size 0", ["--batch-size=0"]),
    ("bench latency --num-iters 0", ["--num-iters=0"]),
    ("bench serve --request-rate 0", ["--request-rate 0 must be above 0"]),
    ("bench serve --goodput ttft:200", ["needs a unit", "ttft:200ms"]),
    ("bench serve --percentile-metrics ttf", ["ttf is none of", "'ttft'"]),
    ("bench serve --metric-percentiles 101", ["--metric-percentiles 101"]),
    ("bench serve --max-concurrency 0", ["--max-concurrency=0"]),
    ("bench serve --backend grpc", ["--backend grpc is none of openai"]),
    ("bench serve --header key", ["--header key must be like NAME=VALUE"]),
    ("bench serve --metadata a=1 a=2", ["--metadata a is given twice"]),
    ("bench serve --tokenizer MODEL", ["--tokenizer goes with --base-url"]),
    ("bench serve --save-detailed", ["--save-detailed goes with --save-result"]),
    ("bench serve --verify-lossless", ["--verify-lossless goes with --drafter"]),
    ("bench serve --model MODEL --k 3", ["--k goes with --drafter"]),
    ("bench serve --against sglang", ["--against sglang needs the program sglang", "install"]),
    ("bench serve --against transformers", ["bench serve runs against vllm, sglang or a URL"]),
    ("bench serve --against http://127.0.0.1:9", ["--against http://127.0.0.1:9: nothing answers"]),
    (SERVE, ["nothing answers there (", "refused", "start the server first"]),
    (f"{SERVE} --drafter ngram", ["--drafter is an option of the server"]),
    ("bench serve --base-url localhost:80", ["'localhost:80' is not a URL like http"]),
    (
        "bench serve --model MODEL --save-result --result-filename a --output-json ./a",
        ["--output-json and --result-filename both write"],
    ),
]
COMMANDS = [
    ("", ["COMMAND"]),
    ("dance", ["'dance'", "generate"]),
    ("--k 1", ["generate"]),
    ("generate --fast", ["--fast"]),
    ("bench --fast", ["--fast"]),
    ("generate", ["no prompts", "--prompts-file"]),
    ("generate /nope hi", ["'/nope'", "--model", "--prompts-file"]),
    ("generate hi demo-llama", ["'demo-llama'", "--model"]),
    ("generate --model none hi", ["no such folder", "'none'", "demo"]),
    ("info", ["no model", "--model"]),
    ("info none", ["no such folder", "'none'", "demo"]),
    ("info demo-nothing", ["'demo-nothing'", "demo-llama"]),
    ("info none --check", ["--check", "--drafter"]),
    ("info none --check --compile h100", ["--check"]),
    ("info none --data a", ["--data", "--check"]),
    ("info MODEL --model MODEL", ["given twice"]),
    ("info MODEL --max-model-len 9999", ["9999", "512"]),
    (f"{INFO} --max-model-len 262145", ["262145", "262144"]),
    (f"{INFO} --max-num-seqs 0", ["max_num_seqs=0"]),
    (f"{INFO} --page-size 0", ["page_size=0"]),
    (f"{INFO} --k 3", ["--k goes with --drafter"]),
    (f"{INFO} --method eagle3", ["eagle3 lacks a checkpoint"]),
    (f"{INFO} --method mtp --k 0", ["num_speculative_tokens=0"]),
    (f"info {LLAMA} --method mtp", ["mtp", "an MTP module"]),
    ("info --compile h200", ["no model is given"]),
    ("info / --compile h200", ["cannot be read"]),
    (f"info {LLAMA} --resources", ["--resources goes with --compile"]),
    *(
        (f"info {LLAMA} --{name} 4", [f"--{name} goes with --compile"])
        for name in ("batch-size", "context", "layers", "tensor-parallel-size")
    ),
    ("profile show", ["FILE"]),
    ("profile show none.json", ["none.json", "cannot be read"]),
    *((f"profile show PROFILE --batch-size={x}", [f"{x} must"]) for x in SIZES),
    *((f"{one} --model no/model", NO_DRAFTER) for one in ("bench", "bench sweep", "profile")),
    ("bench simulate", ["--profile, --policy"]),
    ("bench --seed 3 simulate --profile x --policy table", ["--seed precedes simulate"]),
    ("bench --json simulate --profile x --policy table", ["--json precedes simulate"]),
    (f"{OFFLINE} --num-prom 0", ["unrecognized arguments: --num-prom 0"]),
    ("bench latency --batch-s 0", ["unrecognized arguments: --batch-s 0"]),
    ("bench serve --num-prom 0", ["unrecognized arguments: --num-prom 0"]),
    ("bench sweep serve --num-prom 0", ["unrecognized arguments: --num-prom 0"]),
    ("profile show PROFILE --batch-s 0", ["unrecognized arguments: --batch-s 0"]),
    *(
        (f"train {kind} --data a --out b --target c --see 1", ["unrecognized arguments: --see 1"])
        for kind in ("answers", "eagle3")
    ),
    ("train target --data a --out b --see 1", ["unrecognized arguments: --see 1"]),
    ("train", ["KIND"]),
    ("train target", ["--data, --out"]),
]
GENERATE = [
    ("--k 2", ["--k goes with --drafter"]),
    ("--k 1.5", ["--k", "'1.5'"]),
    ("--k", ["--k"]),
    ("--adaptive", ["--adaptive goes with --drafter"]),
    ("--method guess", ["--method", "'guess'", "eagle3"]),
    ("--method mtp", ["'mtp'", "llama"]),
    ("--method eagle", ["eagle lacks a checkpoint"]),
    *((f"--{name} none", ["'none'", "demo"]) for name in ("drafter", "model")),
    ("--model ''", ["''", "demo"]),
    ("--dtype fp8", ["--dtype", "'fp8'", "bfloat16"]),
    ("--max-tokens many", ["--max-tokens", "'many'"]),
    ("--stop-token-id 96", ["stop_token_ids", "96", "0..95"]),
    ("--chat", ["no chat template"]),
    ("--sampling-params 5", ["--sampling-params", "5"]),
    *((f"--{name} '{{'", [f"--{name}", "not JSON"]) for name in JSON),
    ("""--sampling-params '{"top": 1}'""", ["top"]),
    *((f"""--sampling-params '{{"{x}": 5}}'""", [f"{x}=5"]) for x in ("stop", "logit_bias")),
    ("""--sampling-params '{"n": 0}'""", ["n=0"]),
    *((BIAS.replace("KEY", key), ["logit_bias", f"'{key}'"]) for key in ("a", "-1")),
    ("--speculative-config []", ["--speculative-config", "JSON object"]),
    ("--speculative-config {} --drafter ngram", ["leave out --drafter"]),
    ("--speculative-config {} --adaptive", ["leave out --adaptive"]),
    ("""--speculative-config '{"method": "ngram"}'""", ["num_speculative_tokens"]),
]
COMPILE = [
    ("--compile h300", "compile='h300'"),
    ("--batch-size 0", "batch_size=0"),
    ("--k -1 --method eagle", "k=-1"),
    *(("--context 0", "context=0"), ("--context 131072", "131072")),
    *(("--layers 0", "layers=0"), ("--layers 33", "1..32")),
    ("--gemm cutlass", "gemm='cutlass'"),
    ("--page-size 0", "page_size=0"),
    ("--tensor-parallel-size 0", "tensor_parallel_size=0"),
    ("--collectives ring", "collectives='ring'"),
    ("--k 3", "k=3"),
    ("--method eagle3", "eagle3 lacks a checkpoint"),
    ("--drafter / --method eagle", "/"),
    ("--method ngram", "'ngram' drafts without a model"),
    ("--method mtp", "an MTP module"),
    ("--adaptive --method eagle", "--adaptive does not go with --compile"),
    *((f"{one} 2", f"{one} does not go with") for one in ("--max-model-len", "--max-num-seqs")),
    ("--devices 2", "--devices does not go with"),
    ("--speculative-config 2", "--speculative-config must be a JSON object"),
]
# Values of options of `generate` that are refused as those of an LLM or of its parameters.
OF_LLM = {
    **dict.fromkeys(("page-size", "max-num-seqs", "max-model-len"), [0, -1]),
    **dict.fromkeys(("tensor-parallel-size", "data-parallel-size"), [0, 9]),
    "max-num-batched-tokens": [0],
    **{"max-tokens": [0], "temperature": [-1.0, "nan"], "seed": [2**64]},
}
# Options of what measures, of which the error repeats the words.
REPEATED = {
    "generate --model MODEL hi": ["--prompts-file none.txt", "--prompts-file /"],
    "profile": ["--output none/p", "--output /", "--k -1", "--k a", "--batch-size 0,4"],
    "profile --max-tokens 0": ["--max-tokens 0"],
    "bench": ["--k -1", "--batch-size 0", "--num-prompts 0", "--output none/b.json"],
    "bench sweep": ["--plot none/s.png", "--synthetic-rates a"],
}
BENCH = [
    ("bench --report none/b.md", "--report none/b.md cannot be a file"),
    ("bench --report b.txt", "--report b.txt must end in"),
    ("bench --report b.md --output ./b.md", "--output and --report both write b.md"),
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
SIMULATE = [
    ("--policy static:9", ["--policy static:9", "max_num_speculative_tokens=3"]),
    ("--policy best", ["--policy best is not one of", "adaptive", "static:K"]),
    ("--seeds 0", ["--seeds=0", "at least 1"]),
    ("--requests -1", ["--requests=-1", "at least 1"]),
    ("--acceptance-shift nan", ["--acceptance-shift nan", "-50..50"]),
    ("--acceptance-shift=-51", ["--acceptance-shift -51.0", "-50..50"]),
    ("--context 10000001", ["--context 10000001", "0..10000000"]),
    ("--profile none.json", ["none.json", "cannot be read"]),
]
RUN = "generate --model MODEL --max-model-len 64 --json hi"
ALL = [
    *COMMANDS,
    *LOADS,
    *((f"{RUN} {options}", words) for options, words in GENERATE),
    *((f"info {LLAMA} --compile h200 {options}", [word]) for options, word in COMPILE),
    *((f"{RUN} --method ngram --k {k}", [f"num_speculative_tokens={k}"]) for k in (-1, 0, 100)),
    *(
        (f"{RUN} --{name} {value}", [f"{name.replace('-', '_')}={value}"])
        for name, values in OF_LLM.items()
        for value in values
    ),
    *(
        (f"{command} {option} --drafter ngram --model MODEL", [option])
        for command, options in REPEATED.items()
        for option in options
    ),
    *(
        (f"bench simulate --profile PROFILE --policy table {options}", words)
        for options, words in SIMULATE
    ),
    ("profile --rounds 0 --drafter ngram --model MODEL", ["--rounds=0"]),
    ("bench sweep --profile none.json --drafter ngram --model MODEL", ["none.json"]),
    ("profile --drafter guess --model MODEL", ["--drafter guess", "no such folder"]),
]
NAMES = [command.replace(f"{CONFIGS}/", "").split(" hi ")[-1] for command, _ in ALL]


@pytest.mark.parametrize("command, words", ALL, ids=NAMES)
def test_bad_commands(refused, command, words):
    refused(command, *words)


@pytest.mark.slow
@pytest.mark.parametrize("command, words", BENCH, ids=label)
def test_bad_options_of_what_measures(refused, monkeypatch, command, words):
    """Benchmarks refuse these options before anything is loaded."""
    monkeypatch.setattr(LLM, "__init__", None)
    refused(f"{command} --drafter eagle=MODEL --model MODEL", words)


ROWS = [
    ("prompts.txt", b"\xff\xfe", ["--prompts-file", "utf-8"]),
    ("a.jsonl", "{", ["a.jsonl:2", "is not JSON"]),
    ("a.jsonl", "3", ["a.jsonl:2", "prompt_token_ids"]),
    ("a.jsonl", '{"text": "hi"}', ["a.jsonl:2", "prompt_token_ids"]),
    ("a.jsonl", '{"prompt": 3}', ["a.jsonl:2", "prompt", "3"]),
    ("a.jsonl", '{"prompt_token_ids": "3"}', ["a.jsonl:2", "prompt_token_ids"]),
    ("a.jsonl", '{"prompt_token_ids": [1.5]}', ["prompt 0 has 1.5"]),
    ("a.jsonl", '{"prompt_token_ids": []}', ["prompt 0 is empty"]),
    ("a.jsonl", '{"prompt_token_ids": [96]}', ["96", "0..95"]),
    ("a.jsonl", '{"prompt": ""}', ["prompt 0 is empty: ''"]),
    ("a.jsonl", "\n", ["no prompts"]),
    ("data.jsonl", "{", ["data.jsonl:2", "is not JSON"]),
    ("data.jsonl", "5", ["data.jsonl:2", "JSON object", "5"]),
    ("data.jsonl", '{"text": 5}', ["data.jsonl:2", "text=5"]),
    ("data.jsonl", '{"question": "a", "answer": 3}', ["data.jsonl:2", "answer=3"]),
    ("data.jsonl", '{"question": "a"}', ["data.jsonl:2", '"answer"']),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, row, words", ROWS, ids=label)
def test_bad_rows(refused, tmp_path, name, row, words):
    """Bad rows in files of prompts and of training data."""
    command, file = (
        "generate --model MODEL --max-model-len 64 --json --prompts-file",
        tmp_path / name,
    )
    before = b"\n"
    if name == "data.jsonl":
        before = b'{"text": "a"}\n'
        command = f"train target --out {tmp_path / 'out'} --data"
    file.write_bytes(row if isinstance(row, bytes) else before + row.encode())
    refused(f"{command} {file}", *words)


# Files of prompts and arguments.
EARLY = [
    *(
        (f'{{"prompt_token_ids": [1, {token}]}}', "", [f"prompt 0 has {token}", "0..95"])
        for token in (96, -1, 1.5)
    ),
    ('{"prompt": "a\\ud83d"}', "", ["a.jsonl:1: prompt", "surrogate"]),
    ('{"prompt": "a"}', "b 'a\udcff'", ["prompt 1", "surrogate"]),
]


@pytest.mark.parametrize("row, more, words", EARLY, ids=label)
def test_prompts_that_are_refused_before_a_model_loads(
    refused, monkeypatch, tmp_path, row, more, words
):
    monkeypatch.setattr(LLM, "__init__", None)
    (file := tmp_path / "a.jsonl").write_text(row)
    refused(f"generate --model MODEL {more} --prompts-file {file}", *words)


def test_a_prompt_that_names_a_model_in_this_folder(refused, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    refused("generate mine hi", "'mine'", "--model")


@pytest.mark.slow
def test_files_that_are_of_another_kind(refused, checkpoints, monkeypatch, tmp_path):
    config = tmp_path / "config.json"
    for place in config, f"--model {config}", tmp_path:
        refused(f"info {place}", str(config), "cannot be read")
    config.write_text('{"hidden_size": 32}')
    refused(f"info {config}", "model_type=None")
    config.write_text("[]")
    refused(f"info {tmp_path}", "is not a JSON object")
    fields = json.loads((CONFIGS / "Qwen3.5-0.8B" / "config.json").read_text())
    fields["text_config"]["mtp_num_hidden_layers"] = 2
    config.write_text(json.dumps(fields))
    refused(f"info {config} --method mtp", "only one layer")
    for text in "", "{", "[]", "5", "{}":
        config.write_text(text)
        word = "profile again" if text == "{}" else "JSON"
        refused(f"profile show {config}", str(config), word)
    other = checkpoints.eagle3(checkpoints.target(hidden_size=64, vocab_size=300)).folder
    refused(f"info MODEL --drafter {other}", "vocab")
    without = checkpoints.target(hidden_size=64, vocab_size=300).folder
    monkeypatch.setattr(LLM, "__init__", Mock(side_effect=AssertionError("loaded")))
    for command in "bench", "bench sweep", "profile", "info --check":
        model = without if command == "info --check" else f"--model {without}"
        refused(f"{command} {model} --drafter {other}", "has no tokenizer.json")
    refused(f"generate --model {without} hi", "has no tokenizer.json")


@pytest.mark.parametrize("command", ["profile --output", "bench --output", "bench sweep --plot"])
def test_a_folder_that_may_not_be_written(refused, command, monkeypatch, tmp_path):
    """The error is simulated, because the user of the tests may be allowed to write anywhere."""

    def refuse(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    place, option = tmp_path / "a.file", command.split()[-1]
    words = f"{option} {place}", "Permission denied"
    refused(f"{command} {place} --drafter ngram --model MODEL", *words)


@pytest.fixture
def data(tmp_path):
    """The path of a data file with one document."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "hello"}\n')
    return path


COUNTS = "steps", "batch-size", "length", "vocab-size", "num-layers"
TRAIN = [
    *((f"target --{name} {x}", [f"--{name}={x}"]) for name in COUNTS for x in (0, -1)),
    ("target --seed -1", ["--seed=-1"]),
    ("target --hidden-size 63", ["--hidden-size=63"]),
    ("target --learning-rate 0", ["--learning-rate=0.0"]),
    ("target --learning-rate nan", ["--learning-rate=nan"]),
    ("target --data none.jsonl", ["--data none.jsonl", "no such file"]),
    ("dflash --target MODEL --mask-token-id 9999", ["--mask-token-id=9999"]),
    ("dflash --target MODEL --init none --block-size 4", ["--block-size", "--init none"]),
    ("dflash --target MODEL --block-size 1", ["--block-size=1"]),
]


@pytest.mark.slow
@pytest.mark.parametrize("options, words", TRAIN, ids=label)
def test_bad_options_of_training(refused, data, tmp_path, options, words):
    kind, _, rest = options.partition(" ")
    refused(f"train {kind} --data {data} --out {tmp_path / 'out'} {rest}", *words)
    assert [*tmp_path.iterdir()] == [data]


def test_a_place_that_cannot_be_written(refused, data, tmp_path):
    """The output path is refused before anything is trained or generated."""
    refused(f"train target --data {data} --out {data}", f"--out {data}", "is a file")
    answers = f"train answers --target MODEL --data {data} --out"
    refused(f"{answers} {tmp_path}", f"--out {tmp_path}", "is a folder")
    refused(f"{answers} {data / 'answers' / 'a.jsonl'}", str(data / "answers"), "directory")
