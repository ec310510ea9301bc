"""Streams add up to whole answers; clients that leave or do not read harm nobody; limits."""

import json
import logging
import socket
import threading
import time
from collections import defaultdict
from contextlib import contextmanager

import jax
import openai
import pytest
from support.engines import assert_idle, held, patched
from support.http import LIMIT, Served, served, until

from specjax import SamplingParams
from specjax.server.settings import Limits

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAMPLED = {"temperature": 0.8, "seed": 7, "max_tokens": 24, "ignore_eos": True}
LONG = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "temperature": 0, "stream": True}


@contextmanager
def opened(server: Served, body: dict, *, buffer: int | None = None):
    """Open a connection, send a request, and read nothing."""
    data = json.dumps(body).encode()
    with socket.socket() as one:
        if buffer:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        one.settimeout(LIMIT)
        one.connect(("127.0.0.1", server.port))
        path = CHAT if "messages" in body else COMPLETIONS
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        one.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        yield one


def texts_of(events):
    texts = defaultdict(str)
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    return dict(texts)


def test_streams_add_up_to_whole_answers_and_to_what_generate_gives(server):
    prompts = ["hello", "a b c"]
    body = {"prompt": prompts, "n": 2, "logprobs": 2, "echo": True, **SAMPLED}
    whole = server.post(COMPLETIONS, body).json
    streamed = server.post(
        COMPLETIONS, body | {"stream": True, "stream_options": {"include_usage": True}}
    ).events
    params = SamplingParams(n=2, logprobs=2, prompt_logprobs=2, **SAMPLED)
    outputs = server.generate(prompts, params)
    texts = [
        prompt + sample.text
        for prompt, output in zip(prompts, outputs, strict=True)
        for sample in output.outputs
    ]
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert texts_of(streamed) == dict(enumerate(texts))
    assert streamed[-1]["usage"] == whole["usage"] | {
        "prompt_tokens_details": streamed[-1]["usage"]["prompt_tokens_details"]
    }
    assert whole["usage"]["completion_tokens"] == 4 * 24 and whole["usage"]["prompt_tokens"] == 10
    assert len(streamed) < 4 * 24  # an event has the tokens of a step, or of several
    merged = defaultdict(lambda: defaultdict(list))
    for event in streamed:
        for choice in event["choices"]:
            for name, values in choice["logprobs"].items():
                merged[choice["index"]][name] += values
    for choice in whole["choices"]:
        assert merged[choice["index"]] == choice["logprobs"]
        found = outputs[choice["index"] // 2]
        sample, logprobs = found.outputs[choice["index"] % 2], choice["logprobs"]
        own = [e[t].logprob for t, e in zip(sample.token_ids, sample.logprobs, strict=True)]
        assert logprobs["token_logprobs"][-24:] == own and logprobs["token_logprobs"][0] is None
        for at, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            assert choice["text"][at:].startswith("" if token == "</s>" else token)


def test_a_chat_is_the_rendered_prompt(server):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "yes", "refusal": None, "annotations": []},
    ]
    text = "system: be brief user: hi assistant: yes answer:"
    tokens = server.post("/tokenize", {"messages": messages}).json
    assert tokens["tokens"] == server.llm.tokenizer.encode(text, add_special_tokens=False)
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json == {"prompt": text}
    (expected,) = server.generate(text, SamplingParams(**SAMPLED))[0].outputs
    body = {"messages": messages, **SAMPLED, "logprobs": True, "top_logprobs": 2}
    (choice,) = server.post(CHAT, body).json["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert choice["finish_reason"] == "length"
    first, *rest = server.post(CHAT, body | {"stream": True}).events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    choices = [event["choices"][0] for event in rest]
    assert "".join(one["delta"]["content"] for one in choices) == expected.text
    streamed = [entry for one in choices for entry in one["logprobs"]["content"]]
    assert streamed == choice["logprobs"]["content"] and len(streamed) == 24
    assert all(len(entry["top_logprobs"]) == 2 for entry in streamed)


def test_a_requests_effort_comes_before_the_servers(simulated):
    template = "{{ reasoning_effort }}{{ messages[0].content }}"
    given = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1, "temperature": 0}
    usual = {"default_chat_template_kwargs": {"reasoning_effort": "high"}}
    with served(simulated, chat_template=template, **usual) as server:
        for fields, text in ({}, "high?"), ({"reasoning_effort": "low"}, "low?"):
            answer = server.post(CHAT, given | fields | {"return_token_ids": True}).json
            assert server.post("/detokenize", {"tokens": answer["prompt_token_ids"]}).json == {
                "prompt": text
            }
        other = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
        for fields in {"reasoning_effort": ""}, other:
            assert server.post(CHAT, given | fields).error == (400, "reasoning_effort")


def test_the_first_event_comes_with_the_first_token(server):
    """Clients measure the time to the first token by the first event."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
    with held(server.llm) as let_go, opened(server, chat) as one:
        until(lambda: server.llm.engine.has_work)
        time.sleep(0.2)
        before = one.recv(2**16)
        assert before.startswith(b"HTTP/1.1 200") and b"data:" not in before
        let_go(10_000)
        while b"[DONE]" not in before:
            before += one.recv(2**16)
    assert before.count(b'"role":"assistant"') == 1


def test_a_client_that_leaves_frees_its_request_within_a_step(server):
    with held(server.llm) as let_go:
        with opened(server, LONG) as one:
            let_go(8)
            assert one.recv(100).startswith(b"HTTP/1.1 200")
            assert server.get("/load").json == {"server_load": 1}
        until(lambda: server.service.monitor.num_open == 0)
        let_go(2)
        until(lambda: not server.llm.engine.has_work)
    assert_idle(server.llm)
    assert server.llm.metrics().requests_finished["abort"] >= 1


def test_a_client_that_does_not_stream_may_leave_too(server):
    with held(server.llm) as let_go:
        with opened(server, LONG | {"stream": False, "n": 2}):
            let_go(8)
            until(lambda: server.llm.engine.has_work)
        until(lambda: server.service.monitor.num_open == 0)
        let_go(2)
        until(lambda: not server.llm.engine.has_work)
    assert_idle(server.llm)


def test_a_slow_reader_holds_nobody_up_and_gets_everything(server):
    body = LONG | {"n": 4, "return_token_ids": True}
    expected = server.post(COMPLETIONS, body | {"stream": False}).json["choices"]
    with opened(server, body, buffer=2048) as one:
        until(lambda: server.llm.engine.has_work)
        others = [server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 5}) for _ in range(3)]
        assert [answer.status for answer in others] == [200] * 3
        until(lambda: not server.llm.engine.has_work)  # it does not wait for the reader
        received = b""
        while b"[DONE]" not in received:
            received += one.recv(512)
    tokens = defaultdict(list)
    for line in received.decode().splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                tokens[choice["index"]] += choice["token_ids"]
    assert [tokens[i] for i in range(4)] == [choice["token_ids"] for choice in expected]


def test_a_client_that_reads_nothing_loses_its_request(simulated, caplog):
    prompt = "a" * 50
    with served(simulated, limits=Limits(max_stall_seconds=0.2)) as server:
        until(lambda: server.server.started)
        for listening in server.server.servers[0].sockets:  # its connections have small buffers
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        body = LONG | {"prompt": [prompt] * 4, "n": 4, "logprobs": 20}
        with opened(server, body, buffer=2048):
            until(lambda: "does not read" in caplog.text)
            until(lambda: not simulated.engine.has_work)
    assert_idle(simulated)


@pytest.mark.slow
def test_a_request_beyond_the_queue_is_refused_and_openai_retries_it(simulated):
    with served(simulated, limits=Limits(max_queue_len=2)) as server:
        with held(simulated) as let_go, opened(server, LONG | {"n": 5}):
            until(lambda: simulated.engine.has_work)
            answer = server.post(COMPLETIONS, {"prompt": "a", "n": 2})
            assert answer.error == (429, None) and answer.headers["retry-after"] == "1"
            assert server.post(COMPLETIONS, {"prompt": "a", "n": 10**9}).error == (400, "n")
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=3)
            threading.Timer(0.5, let_go, [10_000]).start()
            choices = client.completions.create(model="tiny", prompt="a", max_tokens=3, n=2).choices
            assert all(choice.finish_reason in ("length", "stop") for choice in choices)
        # One that is larger than the queue is admitted alone.
        until(lambda: server.service.monitor.num_open == 0)
        assert server.post(COMPLETIONS, {"prompt": "a", "n": 9, "max_tokens": 2}).status == 200


@pytest.mark.slow
def test_a_pause_is_503_and_openai_retries_it(simulated):
    with served(simulated, rl=True) as server:
        assert server.send("POST", "/pause", headers={}).status == 200
        answer = server.post(COMPLETIONS, {"prompt": "a"})
        assert answer.error == (503, None) and answer.headers["retry-after"] == "1"
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=3)
        threading.Timer(0.5, server.send, ["POST", "/resume", None, {}]).start()
        (choice,) = client.completions.create(model="tiny", prompt="a", max_tokens=3).choices
        assert choice.finish_reason in ("length", "stop")


def test_a_request_ends_with_its_tokens_when_its_time_is_over(simulated):
    with served(simulated, limits=Limits(max_request_seconds=0.1)) as server:
        with held(simulated) as let_go:
            let_go(8)
            answer = server.post(COMPLETIONS, LONG | {"stream": False, "return_token_ids": True})
            until(lambda: not simulated.engine.has_work or let_go(1))
    (choice,) = answer.json["choices"]
    assert choice["finish_reason"] == "abort" and 0 < len(choice["token_ids"]) < 200


def test_a_failure_in_mid_stream_is_one_event(server, caplog):
    step = server.llm.engine.step

    def fail_later():
        touched = step()
        time.sleep(0.01)  # so that the client gets some events before
        if server.llm.metrics().num_generation_tokens > before + 20:
            raise jax.errors.JaxRuntimeError("a secret of the device")
        return touched

    before = server.llm.metrics().num_generation_tokens
    with patched(server.llm.engine, "step", fail_later):
        *parts, last = server.post(COMPLETIONS, LONG).events
    assert parts and last["error"]["code"] == 500 and "secret" not in json.dumps(last)
    assert "a secret of the device" in caplog.text
    assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status == 200


def test_a_dead_engine_is_told(simulated):
    with served(simulated) as server:
        assert server.get("/health").status == server.get("/ping").status == 200
        with patched(simulated.engine, "step", lambda: [][1]):
            with patched(simulated.engine, "reset", lambda: [][1]):
                assert server.post(COMPLETIONS, {"prompt": "a"}).status == 500
        assert server.get("/health").status == 503
        answer = server.post(COMPLETIONS, {"prompt": "a"})
        assert answer.error == (503, None) and answer.headers["retry-after"]
    simulated.engine.reset()


def test_a_server_that_ends_answers_running_requests(simulated):
    with served(simulated) as server, held(simulated) as let_go:
        with opened(server, LONG) as one:
            until(lambda: simulated.engine.has_work)
            server.server.handle_exit(15, None)
            let_go(10_000)
            received = b""
            while part := one.recv(2**16):
                received += part
            assert b"[DONE]" in received and b'"finish_reason":"length"' in received
            with pytest.raises(OSError):
                until(lambda: server.get("/health") is None)
            assert not server.server.force_exit
            server.server.handle_exit(15, None)
            assert server.server.force_exit


def test_keys_are_needed_where_anything_is_generated(simulated, tmp_path):
    (tmp_path / "keys").write_text("first\nsecond\n")
    (tmp_path / "keys").chmod(0o600)
    keys = {"api_key": ("third",), "api_key_file": str(tmp_path / "keys")}
    with served(simulated, **keys, root_path="/proxy") as server:
        for path in COMPLETIONS, CHAT, "/tokenize", "/detokenize":
            for given in {}, {"authorization": "Bearer x"}, {"authorization": "Basic first"}:
                answer = server.post(path, {"prompt": "a"}, **given)
                assert answer.error == (401, None) and answer.headers["www-authenticate"]
        assert server.get("/v1/models").status == 401
        for path in "/health", "/ping", "/version", "/metrics", "/load":
            assert server.get(path).status == 200
        for key in "first", "second", "third":
            given = {"authorization": f"Bearer {key}"}
            assert server.post("/tokenize", {"prompt": "a"}, **given).status == 200


def test_answers_have_the_ids_of_their_requests(simulated):
    """Refusals have them, too. Requests without an id get a new one."""
    with served(simulated, enable_request_id_headers=True, api_key=("k",)) as server:
        for key, status in ("k", 200), ("x", 401):
            given = {"authorization": f"Bearer {key}"}
            body, name = {"prompt": "a"}, {"x-request-id": "mine"}
            answer = server.post("/tokenize", body, **given, **name)
            assert answer.status == status and answer.headers["x-request-id"] == "mine"
            others = [server.post("/tokenize", body, **given) for _ in range(2)]
            assert len({other.headers["x-request-id"] for other in others}) == 2


def test_prompts_are_logged_only_if_asked(simulated, caplog):
    caplog.set_level(logging.DEBUG)
    body = {"prompt": "my secret", "max_tokens": 2, "stop": "zz", "made_up": "secret value"}
    with served(simulated) as server:
        assert server.post(COMPLETIONS, body).status == 200
    assert "secret" not in caplog.text and "ignored: 'made_up'" in caplog.text
    with served(simulated, enable_log_requests=True, max_log_len=4) as server:
        assert server.post(COMPLETIONS, body).status == 200
    assert "'my s'" in caplog.text and "my secret" not in caplog.text


def test_comments_keep_a_silent_stream_alive(simulated):
    with served(simulated, sse_keep_alive_interval=0.02) as server:
        with held(simulated) as let_go, opened(server, LONG) as one:
            received = b""
            while b"\r\n:\n\n" not in received:
                received += one.recv(1000)
            let_go(10_000)
            while b"[DONE]" not in received:
                received += one.recv(2**16)
