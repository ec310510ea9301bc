"""`specjax serve`: errors are one line, before a model is loaded; signals end the server."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import warnings
from argparse import ArgumentParser
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from specjax.cli import build_parser, main
from specjax.commands.config_file import with_config
from specjax.commands.serve import read_engine_args
from specjax.commands.serve_arguments import _ALWAYS, add_arguments, engine_options, vllm_options
from specjax.commands.vllm_arguments import respelled
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
    (["--served-model-name", ""], "--served-model-name is empty"),
    (["--served-model-name", "a", ""], "--served-model-name is empty"),
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
    (["--ssl-ca-certs", "c"], "--ssl-certfile, which is missing"),
    (["--ssl-cert-reqs", "2"], "--ssl-ca-certs, which is missing"),
    (["--chat-template", "/no/such.jinja"], "is not a file"),
    (["--chat-template-content-format", "list"], "auto, string, openai"),
    (["--default-chat-template-kwargs", "[1]"], "must be a JSON object"),
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


def read(text):
    """Return the parsed arguments of a command line, and the engine's options."""
    args = build_parser().parse_args(respelled(shlex.split(text)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return vars(args) | vars(read_engine_args(args))


# What recipes of vLLM have, and what becomes of it here.
RECIPES = {
    "serve m -tp 8 -dp 2 -ep -O3": {
        "tensor_parallel_size": 8,
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
    },
    "serve m --max_model_len=32k --max-num-batched-tokens 8K": {
        "max_model_len": 32_000,
        "max_num_batched_tokens": 8192,
    },
    "serve --trust-remote-code m --enforce-eager --language-model-only": {"model": "m"},
    "serve m --speculative-config.method ngram --speculative_config.num_speculative_tokens=3": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    },
    "serve m --no-enable-prefix-caching --async-scheduling --kv-cache-dtype fp8": {
        "enable_prefix_caching": False,
        "async_scheduling": True,
        "kv_cache_dtype": "fp8",
    },
    """serve m --allowed-origins '["https://a", "https://b"]' --served-model-name x y""": {
        "allowed_origins": ["https://a", "https://b"],
        "served_model_name": ["x", "y"],
    },
    "serve m --tool-call-parser hermes --enable-auto-tool-choice --reasoning-parser qwen3": {},
    "serve m --h11-max-header-count 256 --attention-backend X --limit-mm-per-prompt.image 0": {},
    """serve m --default-chat-template-kwargs '{"enable_thinking": false}'""": {
        "default_chat_template_kwargs": {"enable_thinking": False},
    },
}


@pytest.mark.parametrize("line", RECIPES)
def test_recipes_of_vllm_are_read(line):
    found = read(line)
    assert {name: found[name] for name in RECIPES[line]} == RECIPES[line]


def test_the_beginning_of_a_flag_is_no_flag(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "m", "--max-queue", "9"])  # not --max-queue-len
    assert "unrecognized arguments: --max-queue" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "m", "--max-model-len", "1x"])
    assert "'1x' is not an integer, like 4096 or 4k" in capsys.readouterr().err


CONFIG = """
model: demo-llama
port: 81
max_model_len: 32k
prefill-shapes: [[4, 128]]
speculative-config: {method: ngram, num_speculative_tokens: 3}
served_model_name: [a, b]
enable_prefix_caching: false
rl: true
"""


def test_a_config_file_has_flags_and_the_command_line_comes_first(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    argv = ["serve", "--config", str(path), "--port", "82", "--served-model-name", "c"]
    args = build_parser().parse_args(with_config(argv))
    options = vars(read_engine_args(args))
    assert (args.model, args.port, args.served_model_name, args.rl) == (
        "demo-llama",
        82,
        ["c"],
        True,
    )
    assert options["max_model_len"] == 32_000 and options["prefill_shapes"] == [[4, 128]]
    assert options["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 3}
    assert options["enable_prefix_caching"] is False
    args = build_parser().parse_args(with_config(["serve", "m", f"--config={path}"]))
    assert (args.model, args.port, args.served_model_name) == ("m", 81, ["a", "b"])


@pytest.mark.parametrize("text, words", [
    (None, "cannot be read: No such file"),
    ("port: [", "is not YAML"),
    ("8000", "must have flags"),
    ("port:", "port has no value"),
    ("config: a", "has config"),
    ("max_log_len: 1\nmax-log-len: 2", "in two spellings"),
    ("api-key: k", "chmod 600"),
    ("port: 70000", "--port 70000 must be in 0..65535"),
    ("rl: true\nhost: 0.0.0.0", "--rl with --host 0.0.0.0"),
])  # fmt: skip
def test_bad_config_files(capsys, tmp_path, text, words):
    path = tmp_path / "c.yaml"
    if text is not None:
        path.write_text(text)
        path.chmod(0o644)
    assert words in fail(capsys, "--config", str(path))


def test_the_page_of_flags_has_every_flag():
    spec = spec_from_file_location("flag_tables", ROOT / "docs/flag_tables.py")
    tables = module_from_spec(spec)
    spec.loader.exec_module(tables)
    page = tables.fill((ROOT / "docs/flags.md").read_text())
    parser = ArgumentParser(add_help=False)
    add_arguments(parser)
    named = [action.option_strings for action in parser._actions if action.option_strings]
    flags = {next(one for one in names if one.startswith("--")) for names in named}
    flags -= {f"--{name.replace('_', '-')}" for name in _ALWAYS}
    assert flags and not [one for one in flags if f"`{one}" not in page]
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 90 and all(len(re.split(r"(?<!\\)\|", row)) == 5 for row in rows)
    assert not [row for row in rows if row.endswith("|  |")]  # each has a text


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
from specjax.engine.compiler import Compiler
from support.texts import simulated_llm
llm = simulated_llm(sys.argv[1], max_model_len=256, decode_batches=None, prefill_shapes=None)
step = llm.engine.step
llm.engine.step = lambda: time.sleep(0.02) or step()
compiler = Compiler(lambda program, is_urgent: time.sleep(100))  # nobody waits for its program
compiler.ask(["a program"], is_urgent=False)
llm.engine.programs.close = compiler.close
with patch("specjax.async_llm.LLM", lambda *_, **__: llm):
    sys.exit(main(["serve", "tiny", "--port", sys.argv[2]]))
"""


@pytest.mark.slow
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
