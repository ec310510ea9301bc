"""The engine survives any sequence of calls of the trainer's endpoints."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save
from support.engines import assert_idle
from support.http import JSON, Served, served

from specjax.server.rl_doors import RL_ROUTES

pytestmark = pytest.mark.slow

COMPLETIONS, UPDATE = "/v1/completions", "/update_weights"
FILE = {"content-type": "application/octet-stream"}
ASKED = {"prompt": [3, 1, 4], "max_tokens": 30, "ignore_eos": True, "temperature": 0}
NOBODY_WRONG = {200, 400, 408, 413, 415, 422, 429}


@pytest.fixture(scope="module")
def server(real, real_folder) -> Iterator[Served]:
    with served(real, rl=True, rl_weights_root=str(real_folder.parent)) as running:
        yield running


NUMBERS = st.integers(-2, 9) | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
ANY = st.none() | st.booleans() | NUMBERS | st.text("a/.\0é", max_size=4) | st.lists(NUMBERS)
ANY |= st.dictionaries(st.sampled_from(["path", "x"]), ANY, max_size=2)
FIELDS = ["update_info", "weight_version", "new_version", "request_ids", "x"]
BODIES = st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=2)
OWN = "the folder of the target"
FOLDERS = ["", "..", OWN, "none"]
QUERIES = {  # likely ones
    "mode": st.sampled_from(["abort", "keep", "wait", "x", ""]),
    "level": st.sampled_from(["1", "2", "3", "x", "9" * 30]),
    "tags": st.just("weights"),
    "weight_version": st.sampled_from(["5", "-1", "x", "9" * 30]),
    "x": st.just("1"),
}


@st.composite
def calls(draw, data: dict[str, bytes]):
    """Draw the method, path, body and headers of a call."""
    kind = draw(st.integers(0, 9))
    if kind < 2:
        return "POST", COMPLETIONS, ASKED | {"stream": bool(kind)}, JSON
    route = draw(st.sampled_from(RL_ROUTES))
    method = "GET" if "GET" in route.methods else "POST"
    names = draw(st.lists(st.sampled_from(sorted(QUERIES)), max_size=1))
    query = "&".join(f"{name}={draw(QUERIES[name])}" for name in names)
    path = f"{route.path}?{query}" if query else route.path
    if kind < 6 or method == "GET":
        return method, path, None, {}
    if route.path != UPDATE or kind == 6:
        return method, path, draw(BODIES), JSON
    if kind == 7:
        return method, path, {"update_info": {"path": draw(st.sampled_from(FOLDERS))}}, JSON
    return method, path, data[draw(st.sampled_from(sorted(data)))], FILE


def test_no_order_of_calls_kills_the_engine(server, real_folder):
    tensors = load_file(real_folder / "model.safetensors")
    half = len(tensors) // 2
    data = {
        "whole": save(tensors),
        "first": save(dict(list(tensors.items())[:half])),
        "second": save(dict(list(tensors.items())[half:])),
        "damaged": save(tensors)[:-9],
        "empty": b"",
    }
    before = server.post(COMPLETIONS, ASKED | {"return_token_ids": True}).json["choices"]

    def send(call) -> int:
        method, path, body, headers = call
        if isinstance(body, dict) and body.get("update_info") == {"path": OWN}:
            body = {"update_info": {"path": real_folder.name}}
        return server.send(method, path, body, headers).status

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.lists(calls(data), min_size=1, max_size=3), max_size=8))
    def run(groups):
        with ThreadPoolExecutor(32) as threads:
            waiting = []
            for group in groups:  # of calls at the same time
                sent = [(call, threads.submit(send, call)) for call in group]
                for call, status in sent:
                    if call[1] == COMPLETIONS:  # it may wait until the engine goes on
                        waiting.append(status)
                    else:
                        assert status.result() in NOBODY_WRONG, call
            for path in "/finish_weight_update", "/wake_up", "/resume":
                server.send("POST", path, headers={})
            assert {status.result() for status in waiting} <= {200, 503}
        assert server.get("/health").status == 200
        assert not server.service.admission.closed and not server.service.llm.stops
        answer = server.post(COMPLETIONS, ASKED | {"return_token_ids": True})
        assert answer.json["choices"] == before
        assert_idle(server.llm)

    run()
