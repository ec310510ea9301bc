"""Answers to attacks, as in the table of docs/security.md, which must list each of them."""

import gc
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
from support.engines import make_llm
from support.http import served, until

from specjax.server.connection import Connection
from specjax.server.service import MAX_LONG
from specjax.server.settings import Limits

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"role": "user", "content": "hi"}
LONG = 15.0  # seconds that no attack may take, on a slow machine whose cores are all used
DEEP = b"[" * 50_000 + b"]" * 50_000
SCHEMA = b'{"prompt": "a", "structured_outputs": {"json": %s}}'


def nested(depth: int) -> bytes:
    """Return a JSON schema of nested objects."""
    return b'{"type": "object", "properties": {"a": ' * depth + b"{}" + b"}}" * depth


def body(**fields):
    return json.dumps({"prompt": "a", "max_tokens": 2} | fields).encode()


def constrained(**fields):
    return body(structured_outputs=fields)


BODIES = {  # name: body of /v1/completions, status
    "a body of 16 MiB": (b'{"prompt": "' + b"a" * 2**24 + b'"}', 413),
    "JSON nested 50,000 times": (DEEP, 400),
    "JSON nested in a field": (SCHEMA % DEEP, 400),
    "a schema nested 400 times": (SCHEMA % nested(400), 422),
    "`n` of 10^9": (body(n=10**9), 400),
    "numbers that no type holds": (b'{"prompt": "a", "temperature": 1e999}', 400),
    "NaN and Infinity": (b'{"prompt": "a", "temperature": Infinity}', 400),
    "a key twice": (b'{"prompt": "a", "n": 0, "n": 1, "max_tokens": 2}', 200),
    "bytes that are not UTF-8": (b'{"prompt": "\xff"}', 400),
    "a lone surrogate": (b'{"prompt": "\\ud800"}', 400),
    "a null character": (b'{"prompt": "\\u0000a", "max_tokens": 2}', 200),
    "a pattern as a stop": (body(stop="(a+)+$"), 200),
    "100,000 stops": (body(stop=["a"] * 10**5), 400),
    "100,000 prompts": (body(prompt=["a"] * 10**5), 400),
    "a prompt of 15 million characters": (body(prompt="ab " * 5 * 10**6), 400),
    "200,000 biases": (body(logit_bias={str(i): 1 for i in range(2 * 10**5)}), 400),
    "a bad word of 4 MB": (body(bad_words=["ab " * 2**20]), 400),
    "100,000 bad words": (body(bad_words=["ab"] * 10**5), 400),
    "millions of log-probabilities": (body(n=1024, logprobs=20, max_tokens=200), 400),
    "a million allowed tokens": (body(allowed_token_ids=[1] * 10**6), 400),
    "a regular expression with nested repeats": (constrained(regex="((a{1,99}){1,99}){1,99}"), 200),
    "a regular expression that backtracks": (constrained(regex="((a+)+)+ *"), 200),
    "a line break in `request_id`": (body(request_id="a\nERROR: b"), 400),
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(chat_folder):
    """An LLM on a simulated device that follows grammars."""
    with make_llm(chat_folder, "ngram", device="simulated", max_model_len=256) as made:
        yield made


@pytest.fixture(scope="module")
def attacked(llm):
    limits = Limits(max_schema_seconds=6, max_stall_seconds=1, max_request_logprobs=10**6)
    with served(llm, limits=limits) as running:
        yield running


def told(name: str) -> str:
    """Return the answer to an attack in the page's table."""
    rows = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", PAGE.read_text(), re.MULTILINE))
    return rows[name]


@pytest.mark.parametrize("name", BODIES)
def test_bodies(attacked, name):
    given, status = BODIES[name]
    begin = time.perf_counter()
    answer = attacked.send("POST", COMPLETIONS, given)
    assert answer.status == status, answer.body[:300]
    assert time.perf_counter() - begin < LONG and len(answer.body) < 1000
    assert told(name).startswith(str(status))
    assert attacked.get("/health").status == 200


def exchange(port: int, *parts: bytes) -> bytes:
    """Send `parts`; return what the server sends before it closes, or in `LONG` seconds."""
    with socket.create_connection(("127.0.0.1", port), timeout=LONG) as connection:
        received = b""
        try:
            for part in parts:
                connection.sendall(part)
            while part := connection.recv(2**16):
                received += part
        except (TimeoutError, ConnectionError):
            pass
        return received


POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
POST += b"Connection: close\r\n"
SENT = {  # name: parts to send, status
    "two lengths of one body": ([POST, b"Content-Length: 2\r\nContent-Length: 9\r\n\r\n{}"], 400),
    "a length and chunks": (
        [POST, b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
        400,
    ),
    "a body that never comes": ([POST, b"Content-Length: 9\r\n\r\n"], 408),
    "a path with dots": ([b"GET /v1/../../etc/passwd HTTP/1.0\r\n\r\n"], 404),
    "a header of 1 MiB": ([POST, b"X: " + b"a" * 2**20 + b"\r\n\r\n"], 400),
    "100,000 headers": ([POST, b"X: a\r\n" * 10**5, b"\r\n"], 400),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SENT)
def test_bytes(attacked, name):
    parts, status = SENT[name]
    answer = exchange(attacked.port, *parts)
    is_flood = sum(map(len, parts)) > 2**18  # the connection may end before the answer is read
    assert answer.startswith(b"HTTP/1.1 %d" % status) or (is_flood and not answer), answer[:200]
    assert told(name).startswith(str(status)) and attacked.get("/health").status == 200


@pytest.mark.slow
def test_a_request_that_never_comes(attacked):
    for parts in [], [POST]:
        begin = time.perf_counter()
        assert exchange(attacked.port, *parts) == b"" and time.perf_counter() - begin < LONG
    assert told("a connection without a request")


@pytest.mark.slow
def test_texts_that_take_long_hold_nobody(llm):
    """Long texts are tokenized one at a time. Some may wait, and further ones are refused."""
    encode, slow = type(llm.tokenizer).encode, threading.Event()

    def wait(self, text, **options):
        assert len(text) < 2**18 or slow.wait(30)
        return encode(self, text, **options)

    with (
        served(llm) as server,
        patch.object(type(llm.tokenizer), "encode", wait),
        ThreadPoolExecutor(40) as threads,
    ):
        long = {"prompt": "a" * 2**18}
        sent = [threads.submit(server.post, "/tokenize", long) for _ in range(MAX_LONG + 4)]
        try:
            until(lambda: sum(one.done() for one in sent) == 4)
            assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status == 200
        finally:
            slow.set()
        statuses = [one.result().status for one in sent]
        assert sorted(statuses) == [200] * MAX_LONG + [429] * 4
    assert told("20 texts of 1 MB at the same time").startswith("429")


def test_bodies_that_fill_the_memory(llm):
    with served(llm, limits=Limits(max_pending_bytes=2**16)) as server, ExitStack() as stack:
        for _ in range(4):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            one.sendall(POST + b"Content-Length: 99999\r\n\r\n" + b" " * 2**14)
        until(lambda: server.service.num_pending_bytes == 2**16)
        assert server.post(COMPLETIONS, {"prompt": "a"}).error == (429, None)
        stack.close()
        until(lambda: server.service.num_pending_bytes == 0)
        large = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "user": "a" * 2**17})
        assert large.status == 200  # one that is larger than the limit is read alone
    assert told("bodies of 16 MiB on many connections").startswith("429")


def test_many_small_values_are_not_visited_while_they_are_made(attacked):
    """Otherwise, Python 3.11 would collect garbage 200 times, over all new objects each time."""
    given, begun = b'{"prompt": "a", "max_tokens": 1, "x": [' + b"[]," * 199_999 + b"[]]}", []

    def note(phase, info):
        begun.append(phase == "start")

    usual = gc.get_threshold()
    gc.set_threshold(1000, *usual[1:])
    gc.callbacks.append(note)
    try:
        assert attacked.send("POST", COMPLETIONS, given).status == 200
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*usual)
    assert sum(begun) < 100


def test_a_template_that_takes_too_long(llm):
    template = "{% for a in messages %}" * 9 + "{% endfor %}" * 9
    limits = Limits(max_template_seconds=0.2)
    with served(llm, limits=limits, chat_template=template) as server:
        answer = server.post(CHAT, {"messages": [HI] * 100})
        assert answer.error == (400, "messages") and b"too long" in answer.body
        assert server.post("/tokenize", {"messages": [HI] * 100}).status == 400
    assert told("messages for which a template loops too long").startswith("400")


class Watched(Connection):
    """A connection with system buffers that are too small for its answers."""

    ended: list[object] = []

    def connection_made(self, transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        super().connection_made(transport)

    def connection_lost(self, exc):
        self.ended.append(self)
        super().connection_lost(exc)


@pytest.mark.slow
def test_answers_that_nobody_reads(llm, monkeypatch):
    """The connection ends, which also frees the memory of the completed answer."""
    monkeypatch.setattr("specjax.server.run.Connection", Watched)
    data = body(n=64, max_tokens=200, ignore_eos=True)
    with served(llm, limits=Limits(max_stall_seconds=0.5)) as server, socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", server.port))
        one.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        until(lambda: server.service.monitor.num_open == 0 and llm.metrics().num_steps)
        until(lambda: Watched.ended)
        assert one.recv(12) == b"HTTP/1.1 200"
    assert told("a large answer that nobody reads")


def test_a_request_behind_a_large_body_is_not_its_header(attacked, monkeypatch):
    """A client may send its next request before it has the answer to the first."""
    whole = POST.replace(b"Connection: close\r\n", b"") + b"Content-Length: 99\r\n\r\n"
    receive, parts = Connection.data_received, []

    def together(self, data):
        parts.append(data)
        size = sum(map(len, parts))
        if size == len(whole) + 20:  # a whole body, and a part of a head
            receive(self, b"".join(parts))
        elif size > len(whole) + 20:
            receive(self, data)

    monkeypatch.setattr(Connection, "data_received", together)
    large = body(user="a" * 2**16)
    whole = whole.replace(b"99", b"%d" % len(large)) + large
    second = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", attacked.port), timeout=LONG) as one:
        one.sendall(whole + second[:20])
        received = one.recv(2**16)
        one.sendall(second[20:])
        while part := one.recv(2**16):
            received += part
    assert received.count(b"HTTP/1.1 200") == 2, received


def test_templates(llm):
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with served(llm) as server:
        answer = server.post(CHAT, {"messages": [HI], "chat_template": attack})
        assert answer.error == (400, "chat_template")
        asked = {"messages": [{"role": "user", "content": "{{ 7 * 7 }}"}]}
        tokens = server.post("/tokenize", asked).json["tokens"]
        text = server.post("/detokenize", {"tokens": tokens}).json["prompt"]
        assert "{{ 7 * 7 }}" in text
    with served(llm, trust_request_chat_template=True) as server:
        answer = server.post(CHAT, {"messages": [HI], "chat_template": attack})
        assert answer.error[0] == 400 and b"subclass" not in answer.body.lower()
    for name in "a chat template in a request", "a template in a message":
        assert told(name)


def test_keys_and_weights(llm, tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    root = str(tmp_path / "root")
    with served(llm, api_key=("secret",), rl=True, rl_weights_root=root) as server:
        for key in "", "Bearer", "Bearer secre", "Bearer secret1", "Basic secret", "Bearer \xe9":
            assert server.post(COMPLETIONS, {"prompt": "a"}, authorization=key).status == 401
        own = {"authorization": "Bearer secret"}
        for path in "..", "../root", "/etc", "link", "a\0b", "a" * 5000:
            given = {"update_info": {"path": path}}
            answer = server.post("/update_weights", given, **own)
            assert answer.error[0] == 400 and root.encode() not in answer.body
    for name in "keys of any length or encoding", "a folder of weights outside the root":
        assert told(name)
