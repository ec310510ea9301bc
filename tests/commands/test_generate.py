"""`specjax generate` on a simulated device: its printed outputs, and the sizes of its engine."""

import json
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest
from support.engines import simulated_engines
from support.scripts import TextScript
from support.texts import VOCAB, letters_folder

from specjax import LLM, SamplingParams
from specjax.cli import main

SMALL = ["--max-model-len", "64", "--page-size", "8"]
SHORT = [*SMALL, "--max-tokens", "4"]
CHAT = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


@pytest.fixture(scope="module")
def model(checkpoints):
    folder = checkpoints.copy(letters_folder(checkpoints))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    return str(folder)


@pytest.fixture(autouse=True)
def engines(monkeypatch):
    """The configs of all engines that the test builds, on a simulated device."""
    configs = []
    with simulated_engines(TextScript(VOCAB)):
        make = LLM.__init__

        def watched(self, *args, **options):
            make(self, *args, **options)
            configs.append(self.engine.config)

        monkeypatch.setattr(LLM, "__init__", watched)
        yield configs


@pytest.fixture
def given(monkeypatch):
    """The sampling parameters with which `LLM.generate_stream` was called."""
    seen, stream = [], LLM.generate_stream
    monkeypatch.setattr(
        LLM, "generate_stream", lambda *a, **b: seen.append(a[2]) or stream(*a, **b)
    )
    return seen


def generate(capsys, *argv):
    """Run the command; return the printed outputs, in the order of prompts, and the metrics."""
    assert main(["generate", *argv, "--json"]) == 0
    *outputs, last = map(json.loads, capsys.readouterr().out.splitlines())
    return sorted(outputs, key=lambda one: one["request_id"]), last["metrics"]


def test_sizes_are_those_of_an_llm_whatever_the_prompts(engines, model, capsys):
    for prompts in ["a"], ["a"] * 7:
        assert main(["generate", "--model", model, "--max-tokens", "2", *prompts]) == 0
    LLM(model, verbose=False).close()
    one, many, plain = engines
    assert one == many == plain


OPTIONS = [
    ("", {"temperature": 0.0, "max_tokens": 128, "n": 1}),
    ("--top-p 0.5 --top-k 7 --min-p 0.1", {"top_p": 0.5, "top_k": 7, "min_p": 0.1}),
    ("--stop x --stop yz", {"stop": ("x", "yz")}),
    ("--n 3 --temperature 1 --max-tokens 4", {"n": 3, "temperature": 1.0, "max_tokens": 4}),
    ('--n 3 --min-p 0.1 --sampling-params {"n":2,"flat_logprobs":false}', {"n": 2, "min_p": 0.1}),
    ('--sampling-params {"logit_bias":{"5":100.0}}', {"logit_bias": {5: 100.0}}),
]


@pytest.mark.parametrize("argv, fields", OPTIONS, ids=str)
def test_options_become_sampling_parameters(model, given, capsys, argv, fields):
    assert main(["generate", "--model", model, *SMALL, *argv.split(), "a"]) == 0
    assert {name: getattr(given[0], name) for name in fields} == fields


def test_samples_and_their_logprobs(model, capsys):
    text = '{"n": 2, "seed": 3, "logprobs": 0}'
    argv = ["--model", model, *SHORT, "--temperature", "1", "two", "--sampling-params", text]
    (first, second), _ = generate(capsys, *argv)
    assert (first["index"], second["index"]) == (0, 1) and first["prompt"] == second["prompt"]
    for one in first, second:
        assert [list(entry) for entry in one["logprobs"]] == [[str(t)] for t in one["token_ids"]]
    assert main(["generate", *argv]) == 0
    assert len(capsys.readouterr().out.split("\n--\n")) == 2


def test_outputs_are_printed_as_they_finish(model, capsys, monkeypatch, tmp_path):
    """The longer prompt has a shorter output, which is printed first."""
    file = tmp_path / "prompts.txt"
    file.write_text("ab\n\n" + "ab" * 20 + "\n")
    argv = ["generate", "--model", model, *SMALL, "--prompts-file", str(file), "--ignore-eos"]
    argv += ["--json", "--max-tokens", "64"]
    assert main(argv) == 0
    *rows, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert [row["request_id"] for row in rows] == ["1", "0"]
    assert [row["prompt"] for row in rows] == ["ab" * 20, "ab"] and list(last) == ["metrics"]
    # An interrupt keeps what has finished.
    stream = LLM.generate_stream

    def interrupted(*args, **options):
        yield next(stream(*args, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "generate_stream", interrupted)
    assert main(argv) == 130
    captured = capsys.readouterr()
    assert [json.loads(line) for line in captured.out.splitlines()] == rows[:1]
    assert captured.err.endswith("specjax: 1 of 2 prompts did not finish\nspecjax: interrupted\n")
    monkeypatch.setattr(LLM, "__init__", Mock(side_effect=KeyboardInterrupt))
    assert main(argv) == 130
    assert "2 of 2 prompts did not finish" in capsys.readouterr().err


def test_a_request_that_fails_is_told(model, capsys, monkeypatch):
    error = Mock(side_effect=RuntimeError("no such text"))
    monkeypatch.setattr("specjax.text.completions.Completion._read", error)
    argv = ["--model", model, *SMALL, "--max-tokens", "2", "ab"]
    (row,), _ = generate(capsys, *argv)
    assert row["error"] == "no such text" and len(row["token_ids"]) == 2
    assert main(["generate", *argv]) == 0
    assert "failed: no such text" in capsys.readouterr().out


def test_texts_of_a_chat(model, capsys):
    argv = ["--model", model, *SHORT, "--chat", "What is two?"]
    (output,), _ = generate(capsys, *argv)
    assert main(["generate", *argv]) == 0
    assert capsys.readouterr().out == output["text"].strip() + "\n"
    assert main(["generate", *argv, "And four?"]) == 0
    assert "> What is two?\n" in (printed := capsys.readouterr().out) and "> And four?" in printed


def test_token_ids_without_a_tokenizer(checkpoints, capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    argv = ["generate", "--model", str(checkpoints.target(vocab_size=VOCAB).folder), *SHORT]
    prompts = ["--prompts-file", str(file)]
    assert main([*argv, *prompts]) == 0
    assert len(capsys.readouterr().out.split()) == 4
    for more, word in ([*prompts, "--chat"], "--chat needs prompts"), (["hi"], "no tokenizer"):
        assert main([*argv, *more]) == 2
        assert word in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["eagle3", "config", "mtp"])
def test_drafts_of_a_checkpoint_or_the_models_own_module(checkpoints, capsys, tmp_path, kind):
    if kind == "mtp":
        made = checkpoints.mtp(checkpoints.target("qwen3_5_text"))
        drafter = ["--method", "mtp", "--k", "2"]
    else:
        made = checkpoints.target(vocab_size=VOCAB)
        drafter = ["--drafter", str(checkpoints.eagle3(made).folder), "--k", "2"]
    if kind == "config":
        text = {"method": "eagle3", "model": drafter[1], "num_speculative_tokens": 2}
        drafter = ["--speculative-config", json.dumps(text)]
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_token_ids": [5, 6, 7]}\n\n{"prompt_token_ids": [8]}\n')
    argv = ["--model", str(made.folder), "--prompts-file", str(file), *SHORT, "--ignore-eos"]
    outputs, metrics = generate(capsys, *argv)
    drafted, others = generate(capsys, *argv, *drafter)
    assert drafted == outputs and [len(output["token_ids"]) for output in outputs] == [4, 4]
    assert metrics["num_drafts"] == 0 < others["num_drafts"]


def test_streams_that_wait_for_the_end_tell_how_far_they_are(model, monkeypatch, caplog):
    caplog.set_level("INFO", "specjax")
    monkeypatch.setattr("specjax.engine.progress.LINE_SECONDS", 0.0)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(model, max_model_len=64) as llm:
        caplog.clear()
        list(llm.generate_stream("ab", params))
        assert not caplog.messages
        list(llm.generate_stream("ab", params, use_tqdm=True))
    assert "generated 8 tokens" in caplog.messages[-1] and len(caplog.messages) > 2


def test_a_reader_that_leaves_is_no_error():
    """The reader closes the pipe early, as in `specjax generate ... | head -1`."""
    code = (
        "import sys, types\nfrom specjax import cli\n"
        "def run(args):\n    print('first', flush=True)\n    sys.stdin.readline()\n"
        "    print('second', flush=True)\n    return 0\n"
        "cli.import_module = lambda name: types.SimpleNamespace(run=run)\n"
        "sys.exit(cli.main(['info', 'x']))\n"
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:
        assert process.stdout.readline() == "first\n"
        process.stdout.close()
        process.stdin.write("go on\n")
        process.stdin.close()
        assert process.stderr.read() == "" and process.wait() == 128 + signal.SIGPIPE
