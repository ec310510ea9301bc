"""`specjax serve`: what is wrong is told in one line before a model is loaded; signals end it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from specjax.cli import build_parser, main
from specjax.commands.serve import read_engine_args
from specjax.commands.serve_arguments import engine_options, vllm_options
from specjax.engine_args import EngineArgs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def nothing_loads(monkeypatch):
    def load(*_):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("specjax.async_llm.AsyncLLM.__init__", load)


def fail(capsys, *argv):
    assert main(["serve", "demo-llama", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("specjax: error: ")
    return captured.err


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield str(one.getsockname()[1])


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "key"
    path.write_text("k")
    path.chmod(0o644)
    return str(path)


def test_a_port_in_use_and_files_that_others_can_read(capsys, taken, key, tmp_path):
    assert f"--port {taken} cannot be used: Address already in use" in fail(capsys, "--port", taken)
    assert f"chmod 600 {key}" in fail(capsys, "--api-key-file", key)
    assert "chmod 600" in fail(capsys, "--ssl-keyfile", key, "--ssl-certfile", key)
    os.chmod(key, 0o600)
    Path(key).write_text(" \n")
    assert "has no keys" in fail(capsys, "--api-key-file", key)
    assert "No such file" in fail(capsys, "--api-key-file", str(tmp_path / "none"))
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path := str(tmp_path / "socket"))
        one.listen()
        assert f"--uds {path} is in use" in fail(capsys, "--uds", path)


@pytest.mark.parametrize("argv, words", [
    (["--port", "70000"], "--port 70000 must be in 0..65535"),
    (["--uds", "/tmp/a", "--port", "80"], "leave out --host and --port"),
    (["--ssl-certfile", "c"], "--ssl-keyfile, which is missing"),
    (["--max-log-len", "5"], "--enable-log-requests"),
    (["--api-key", ""], "--api-key is empty"),
    (["--per-request-spec-decode-metrics", "all"], "none, summary, detailed"),
    (["--max-body-bytes", "0"], "--max-body-bytes=0 must be"),
    (["--max-stall-seconds", "-1"], "must be a number above 0"),
    (["--max-request-seconds", "nan"], "must be a number above 0"),
    (["--k", "3"], "--k goes with --drafter"),
    (["--speculative-config", "[1]"], "--speculative-config must be a JSON object"),
    (["--response-template", "x"], "neither a file nor one of qwen3_coder"),
    (["--response-template", __file__], "--response-template"),
    (["--enable-lora"], "enable_lora=True is not supported"),
    (["--load-format", "dummy"], "load_format='dummy' is not supported"),
    (["--host", "no.such.host.invalid"], "cannot be used"),
], ids=str)  # fmt: skip
def test_settings_that_contradict_each_other(capsys, argv, words):
    assert words in fail(capsys, *argv)


def test_every_option_of_an_engine_is_a_flag():
    parse = build_parser().parse_args
    assert vars(read_engine_args(parse(["serve", "m"]))) == vars(EngineArgs("m", verbose=True))
    given = {
        **{"dtype": "float32", "max_model_len": 64, "max_num_seqs": 3, "page_size": 8},
        **{"decode_batches": [4], "prefill_shapes": [[2, 32]], "gpu_memory_utilization": 0.5},
        **{"enable_prefix_caching": False, "compile_ahead": True, "seed": 3, "num_pages": 40},
        **{"compilation_cache": "/x", "scheduling_policy": "priority", "kernels": "reference"},
    }
    argv = ["serve", "m"]
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            argv += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    found = vars(read_engine_args(parse([*argv, "--drafter", "ngram", "--k", "2"])))
    assert {name: found[name] for name in given} == given
    assert found["speculative_config"]["num_speculative_tokens"] == 2
    assert not set(vllm_options()) & set(engine_options())


def test_flags_of_vllm_without_effect_are_accepted():
    argv = [
        "--enforce-eager",
        "--enable-prompt-tokens-details",
        "--no-enable-chunked-prefill",
        "--kv-cache-dtype",
        "auto",
    ]
    with pytest.warns(UserWarning, match="enforce_eager"):
        read_engine_args(build_parser().parse_args(["serve", "m", *argv]))
    with pytest.warns(UserWarning, match="enable_prompt_tokens_details"):
        EngineArgs("m", enable_prompt_tokens_details=True)


STUB = """
import sys, jax, time
jax.config.update("jax_platforms", "cpu")
from unittest.mock import patch
from specjax.cli import main
from support.texts import simulated_llm
llm = simulated_llm(sys.argv[1], max_model_len=256, decode_batches=None, prefill_shapes=None)
step = llm.engine.step
llm.engine.step = lambda: time.sleep(0.02) or step()
with patch("specjax.async_llm.LLM", lambda *_, **__: llm):
    sys.exit(main(["serve", "tiny", "--port", sys.argv[2]]))
"""


@pytest.mark.parametrize("is_twice", [False, True])
def test_a_signal_drains_and_a_second_one_ends(chat_folder, is_twice):
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    argv = [sys.executable, "-c", STUB, str(chat_folder), str(port)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = os.environ | {"PYTHONPATH": path}
    with subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stderr:
                if f"listening on http://127.0.0.1:{port}" in line:
                    break
            body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}
            headers = {"Content-Type": "application/json"}
            url = f"http://127.0.0.1:{port}/v1/completions"
            answer = urlopen(Request(url, json.dumps(body).encode(), headers), timeout=60)
            first = answer.readline()
            process.send_signal(signal.SIGTERM)
            started = time.monotonic()
            if is_twice:
                time.sleep(0.3)
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 130 and time.monotonic() - started < 2
            else:
                rest = answer.read()
                assert first.startswith(b"data: ") and rest.endswith(b"data: [DONE]\n\n")
                assert process.wait(30) == 0
        finally:
            process.kill()
