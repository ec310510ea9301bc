"""`specjax generate` on a simulated device: what is printed, when, and by engines of which size."""

import json
import signal
import subprocess
import sys

import pytest
from support.engines import simulated_engines
from support.scripts import TextScript
from support.texts import VOCAB, letters_folder

from specjax import LLM, SamplingParams
from specjax.cli import main

SMALL = ["--max-model-len", "64", "--page-size", "8"]


@pytest.fixture(scope="module")
def model(checkpoints):
    return str(letters_folder(checkpoints))


@pytest.fixture
def engines(monkeypatch):
    """The configs of the engines that are built, on a simulated device."""
    configs = []
    with simulated_engines(TextScript(VOCAB)):
        make = LLM.__init__

        def watched(self, *args, **options):
            make(self, *args, **options)
            configs.append(self.engine.config)

        monkeypatch.setattr(LLM, "__init__", watched)
        yield configs


def test_sizes_are_those_of_an_llm_whatever_the_prompts(engines, model, capsys):
    for prompts in ["a"], ["a"] * 7:
        assert main(["generate", "--model", model, "--max-tokens", "2", *prompts]) == 0
    LLM(model, verbose=False).close()
    one, many, plain = engines
    assert one == many == plain


OPTIONS = [
    ([], {"temperature": 0.0, "max_tokens": 128, "n": 1}),
    (
        ["--top-p", "0.5", "--top-k", "7", "--min-p", "0.1"],
        {"top_p": 0.5, "top_k": 7, "min_p": 0.1},
    ),
    (["--stop", "x", "--stop", "yz"], {"stop": ("x", "yz")}),
    (["--n", "3", "--temperature", "1"], {"n": 3, "temperature": 1.0}),
    (["--n", "3", "--sampling-params", '{"n": 2, "flat_logprobs": false}'], {"n": 2}),
]


@pytest.mark.parametrize("argv, fields", OPTIONS, ids=str)
def test_options_become_sampling_parameters(model, capsys, monkeypatch, argv, fields):
    given = []
    monkeypatch.setattr(LLM, "generate_stream", lambda *a, **_: given.append(a[2]) or iter(()))
    with simulated_engines(TextScript(VOCAB)):
        assert main(["generate", "--model", model, *SMALL, *argv, "a"]) == 0
    assert {name: getattr(given[0], name) for name in fields} == fields


@pytest.mark.usefixtures("engines")
def test_outputs_are_printed_as_they_finish(model, capsys, monkeypatch, tmp_path):
    """The longer prompt leaves room for a shorter output, which does not wait for the other."""
    file = tmp_path / "prompts.txt"
    file.write_text("ab\n" + "ab" * 20 + "\n")
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
    monkeypatch.setattr(LLM, "__init__", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(argv) == 130
    assert "2 of 2 prompts did not finish" in capsys.readouterr().err


@pytest.mark.usefixtures("engines")
def test_a_request_that_fails_is_told(model, capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such text")

    monkeypatch.setattr("specjax.text.completions.Completion._read", fail)
    argv = ["generate", "--model", model, *SMALL, "--max-tokens", "2", "ab"]
    assert main([*argv, "--json"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[0])
    assert row["error"] == "no such text" and len(row["token_ids"]) == 2
    assert main(argv) == 0
    assert "failed: no such text" in capsys.readouterr().out


def test_streams_that_wait_for_the_end_tell_how_far_they_are(model, monkeypatch, caplog):
    caplog.set_level("INFO", "specjax")
    monkeypatch.setattr("specjax.engine.progress.LINE_SECONDS", 0.0)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with simulated_engines(TextScript(VOCAB)), LLM(model, max_model_len=64) as llm:
        caplog.clear()
        list(llm.generate_stream("ab", params))
        assert not caplog.messages
        list(llm.generate_stream("ab", params, use_tqdm=True))
    assert "generated 8 tokens" in caplog.messages[-1] and len(caplog.messages) > 2


def test_a_reader_that_leaves_is_no_error(tmp_path):
    """As in `specjax generate ... | head -1`."""
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
