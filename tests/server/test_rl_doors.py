"""The trainer's endpoints: new weights give a new engine's tokens; refused calls change nothing."""

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import load_file, save
from support.engines import (
    VOCAB,
    assert_idle,
    generate_tokens,
    make_llm,
    patched,
    simulated_engines,
)
from support.http import Served, served
from support.weights import rewrite

from specjax import SamplingParams
from specjax.device.drafters.drafter import Params
from specjax.rl.weights import ArraySource
from specjax.server.control import max_bytes
from specjax.server.rl_doors import RL_ROUTES
from specjax.server.settings import ServerSettings

pytestmark = pytest.mark.slow

PROMPT = [3, 1, 4, 1, 5]
GREEDY = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
BODY = {"prompt": PROMPT, "return_token_ids": True, **GREEDY}
COMPLETIONS, UPDATE = "/v1/completions", "/update_weights"
FILE = {"content-type": "application/octet-stream"}
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def folders(checkpoints) -> list[Path]:
    """Targets of equal sizes with different weights. The server starts with the first one."""
    return [checkpoints.target("llama", vocab_size=VOCAB, seed=seed).folder for seed in SEEDS]


@pytest.fixture(scope="module")
def heads(checkpoints) -> list[Path]:
    target = checkpoints.target("llama", vocab_size=VOCAB)
    return [checkpoints.eagle3(target, seed=seed).folder for seed in SEEDS[:2]]


@pytest.fixture(scope="module")
def known(folders, heads) -> Iterator[Any]:
    """A function that returns the tokens of an engine built from folder number `i`."""
    llms = [make_llm(folder, "eagle3", heads[0]) for folder in folders]

    def tokens(i: int, prompt: list[int] = PROMPT, count: int = GREEDY["max_tokens"]) -> list[int]:
        params = SamplingParams(**GREEDY | {"max_tokens": count})
        (found,) = generate_tokens(llms[i], [prompt], params)
        return found

    yield tokens
    for llm in llms:
        llm.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory, folders) -> Path:
    made = tmp_path_factory.mktemp("weights")
    for i, folder in enumerate(folders):
        shutil.copytree(folder, made / f"step-{i}")
    return made


@pytest.fixture(scope="module")
def server(folders, heads, root) -> Iterator[Served]:
    with make_llm(folders[0], "eagle3", heads[0]) as llm:
        with served(llm, rl=True, rl_weights_root=str(root)) as running:
            yield running


def post(server: Served, path: str, body: Any = None, headers: Any = None) -> Any:
    """Return an endpoint's answer, which must not be an error."""
    given = {"content-type": "application/json"} if isinstance(body, dict) else {}
    answer = server.send("POST", path, body, headers or given)
    assert answer.status == 200, answer.body
    return answer.json


def update(server: Served, i: int, **more: Any) -> int:
    body = {"update_info": {"path": f"step-{i}"}, **more}
    return post(server, UPDATE, body)["weight_version"]


def complete(server: Served) -> tuple[list[int], list[int]]:
    """Return the tokens of a completion, and the versions of their weights."""
    answer = server.post(COMPLETIONS, BODY)
    (choice,) = answer.json["choices"]
    return choice["token_ids"], answer.json["weight_versions"]


def version_of(server: Served) -> int:
    return server.get("/weight_info").json["weight_version"]


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def test_an_update_by_folder_file_or_parts_gives_the_tokens_of_a_new_engine(server, known, folders):
    assert complete(server) == (known(0), [0])
    assert update(server, 1) == 1
    assert complete(server) == (known(1), [1])
    data = (folders[2] / "model.safetensors").read_bytes()
    assert post(server, f"{UPDATE}?weight_version=7", data, FILE)["weight_version"] == 7
    assert complete(server) == (known(2), [7])
    post(server, "/start_weight_update")
    assert server.send("POST", "/start_weight_update", headers={}).error == (400, None)
    tensors = list(tensors_of(folders[0]).items())
    for part in tensors[:5], tensors[5:]:
        assert post(server, UPDATE, save(dict(part)), FILE) == {"status": "gathered"}
    again = server.send("POST", UPDATE, save(dict(tensors[:1])), FILE)
    assert again.error == (400, None) and tensors[0][0] in again.json["error"]["message"]
    assert complete(server) == (known(2), [7])  # not yet in use
    done = post(server, "/finish_weight_update", {"weight_version": 8})
    assert done == {"status": "updated", "weight_version": 8, "draft_weight_version": 0}
    assert complete(server) == (known(0), [8])
    assert post(server, "/update_weight_version", {"new_version": 11})["success"]
    assert complete(server) == (known(0), [11])


def test_a_quantised_engine_takes_plain_weights(checkpoints):
    """The engine rounds them, and reports the format. A file may have the plain float32 size."""
    wide = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 192}
    first, second = (checkpoints.target("llama", **wide, seed=seed).folder for seed in (0, 1))
    with simulated_engines():
        llms = [make_llm(folder, quantization="int4") for folder in (first, second)]
    with llms[0], llms[1], served(llms[0], rl=True) as running:
        assert running.get("/weight_info").json["quantization"] == "int4"
        data = (second / "model.safetensors").read_bytes()
        assert post(running, UPDATE, data, FILE)["weight_version"] == 1
        params, expected = (llm.engine.params for llm in llms)
        jax.tree.map(np.testing.assert_array_equal, params, expected)
        size = sum(4 * x.size for x in tensors_of(second).values())
        assert max_bytes(params) - max_bytes(Params(None, None)) == size
        tensors = tensors_of(first) | {"model.norm.weight": np.full(128, np.nan, np.float32)}
        answer = running.send("POST", UPDATE, save(tensors), FILE)
        assert answer.error[0] == 400 and b"NaN" in answer.body
        jax.tree.map(np.testing.assert_array_equal, params, llms[0].engine.params)


def test_draft_weights_have_a_door_of_their_own(server, heads):
    before = complete(server)
    rounds = server.llm.metrics().num_drafts
    post(server, "/start_draft_weight_update")
    post(server, UPDATE, (heads[1] / "model.safetensors").read_bytes(), FILE)
    done = post(server, "/finish_weight_update")
    assert (done["weight_version"], done["draft_weight_version"]) == (before[1][-1], 1)
    changed = jax.tree.leaves(server.llm.engine.params.drafter)
    expected = tensors_of(heads[1])["fc.weight"].T
    assert any(np.array_equal(leaf, expected) for leaf in changed if leaf.shape == expected.shape)
    assert complete(server) == before and server.llm.metrics().num_drafts > rounds


@contextmanager
def half_way(server: Served, **fields: Any) -> Iterator[Any]:
    """Yield a function that reads the rest of a stream. The first part has arrived already."""
    step = server.llm.engine.step
    with (
        patched(server.llm.engine, "step", lambda: time.sleep(0.004) or step()),
        ThreadPoolExecutor() as threads,
    ):
        connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = json.dumps(BODY | {"stream": True} | fields)
        connection.request("POST", COMPLETIONS, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        first = answer.readline()
        rest = threads.submit(answer.read)

        def read() -> tuple[list[int], list[int], str]:
            lines = [line for line in (first + rest.result(60)).decode().split("\n\n") if line]
            assert lines.pop() == "data: [DONE]"
            events = [json.loads(line.removeprefix("data: ")) for line in lines]
            choices = [event["choices"][0] for event in events]
            tokens = [token for choice in choices for token in choice.get("token_ids", [])]
            return tokens, events[-1]["weight_versions"], choices[-1]["finish_reason"]

        try:
            yield read
        finally:  # whatever has failed, the stream ends
            post(server, "/wake_up")
            post(server, "/resume")
            connection.close()


def assert_goes_on(known: Any, tokens: list[int], old: int, new: int) -> None:
    """Check that the first tokens come from the old weights, and the rest from the new ones."""
    pairs = zip(tokens, known(old), strict=True)
    count = next(i for i, (one, other) in enumerate(pairs) if one != other)
    rest = len(tokens) - count
    assert count > 0 and tokens[count:] == known(new, PROMPT + tokens[:count], rest)


def test_paused_requests_go_on_with_the_new_weights(server, known):
    version = update(server, 0)
    with half_way(server) as read, ThreadPoolExecutor() as threads:
        assert post(server, "/pause?mode=keep") == {"status": "paused"}
        num_steps = server.llm.metrics().num_steps
        later = threads.submit(complete, server)
        assert server.get("/is_paused").json == {"is_paused": True}
        assert server.send("POST", "/pause?mode=wait", headers={}).error == (400, None)
        assert post(server, "/reset_prefix_cache") == {"success": False}
        update(server, 1)
        assert server.llm.metrics().num_steps == num_steps and not later.done()
        assert post(server, "/resume") == {"status": "resumed"}
        tokens, versions, reason = read()
    assert versions == [version, version + 1] and reason == "length"
    assert_goes_on(known, tokens, 0, 1)
    assert later.result()[0] == known(1)
    assert post(server, "/reset_prefix_cache") == {"success": True}


@pytest.mark.parametrize("mode, reason", [("wait", "length"), ("abort", "abort")])
def test_paused_requests_finish_first_or_end(server, known, mode, reason):
    update(server, 0)
    with half_way(server) as read:
        post(server, f"/pause?mode={mode}")
        assert_idle(server.llm)
        refused = server.post(COMPLETIONS, BODY)
        assert refused.error == (503, None) and refused.headers["retry-after"] == "1"
        tokens, _, ended = read()
        assert ended == reason and tokens == known(0)[: len(tokens)]
        assert (len(tokens) < GREEDY["max_tokens"]) == (mode == "abort")
    assert complete(server)[0] == known(0)


def test_requests_are_aborted_by_the_id_of_their_answer(server):
    with half_way(server, request_id="r1") as read:
        abort = {"request_ids": ["cmpl-r2", "r1"]}
        assert post(server, "/abort_requests", abort) == {"status": "aborted", "aborted": 0}
        assert post(server, "/abort_requests", {"request_ids": ["cmpl-r1"]})["aborted"] == 1
        assert read()[2] == "abort"
    with half_way(server) as read:
        assert post(server, "/abort_requests")["aborted"] == 1
        assert read()[2] == "abort"


def test_asleep_it_holds_no_memory_takes_weights_and_goes_on(server, known):
    update(server, 0)
    with half_way(server) as read:
        asleep = post(server, "/sleep?level=2&mode=keep")
        assert asleep == {"status": "sleeping", "level": 2}
        assert server.get("/is_sleeping").json == {"is_sleeping": True}
        leaves = jax.tree.leaves(server.llm.engine.params)
        assert all(isinstance(leaf, np.ndarray) for leaf in leaves)
        state = jax.tree.leaves(server.llm.engine.programs.state)
        assert state and all(leaf.is_deleted() for leaf in state)
        assert server.post(COMPLETIONS, BODY).error == (503, None)
        update(server, 2)
        assert post(server, "/wake_up?tags=weights&tags=kv_cache") == {"status": "awake"}
        tokens, _, reason = read()
    assert reason == "length" and complete(server)[0] == known(2)
    assert_goes_on(known, tokens, 0, 2)
    assert server.get("/is_sleeping").json == {"is_sleeping": False}


def test_after_an_update_that_failed_half_way_nothing_runs_until_the_next(server, known):
    update(server, 0)
    copy, copied = ArraySource.copy, []

    def fail(source, *arguments):
        copied.append(source)
        if len(copied) == 3:
            raise MemoryError("no memory")
        return copy(source, *arguments)

    with half_way(server) as read:
        with patched(ArraySource, "copy", fail):
            failed = server.post(UPDATE, {"update_info": {"path": "step-1"}})
        assert failed.error == (500, None) and b"no memory" not in failed.body
        tokens, _, reason = read()
        assert reason == "abort" and tokens == known(0)[: len(tokens)]
        assert server.post(COMPLETIONS, BODY).error == (503, None)
    update(server, 1)
    assert complete(server)[0] == known(1)


def metrics_of(server: Served) -> Any:
    """Return a function that returns the value of a metric, by its name and last label."""
    found = {}
    for family in text_string_to_metric_families(server.get("/metrics").body.decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "tiny" and sample.labels.pop("engine") == "0"
            found[sample.name, *sample.labels.values()] = sample.value
    return found.__getitem__


def test_metrics_count_what_a_trainer_did(server):
    update(server, 1)
    before = metrics_of(server)
    assert before(("vllm:engine_sleep_state", "awake")) == 1
    post(server, "/pause")
    post(server, "/pause")
    began = time.monotonic()
    version = update(server, 2)
    assert server.post(UPDATE, {"update_info": {"path": "none"}}).status == 400
    post(server, "/sleep?level=1")
    during = metrics_of(server)
    assert during(("specjax:is_paused",)) == 1
    assert during(("vllm:engine_sleep_state", "awake")) == 0
    assert during(("vllm:engine_sleep_state", "caches_freed")) == 1
    post(server, "/wake_up")
    paused = time.monotonic() - began
    post(server, "/resume")
    after = metrics_of(server)

    def gained(*key: str) -> float:
        return after(key) - before(key)

    assert gained("specjax:weight_updates_total", "target") == 1
    assert gained("specjax:weight_updates_total", "drafter") == 0
    assert gained("specjax:pauses_total") == 1
    assert paused <= gained("specjax:paused_seconds_total") < paused + 5
    seconds = "vllm:rl_weight_update_operation_duration_seconds"
    assert gained(f"{seconds}_count", "update_weights") == 1  # the refused one is not in it
    assert 0 < gained(f"{seconds}_sum", "update_weights") < paused
    assert after(("specjax:weight_version",)) == version
    assert after(("vllm:rl_weight_update_operations_in_flight",)) == 0
    assert after(("specjax:is_paused",)) == 0
    assert after(("vllm:engine_sleep_state", "awake")) == 1


@pytest.fixture(scope="module")
def bad(root, folders, checkpoints) -> Path:
    """Folders that cannot be used: damaged ones below the root, and links to outside."""
    (root / "out").symlink_to(folders[1])
    (root / "circle").symlink_to(root / "circle")
    (root / "linked").mkdir()
    (root / "linked/model.safetensors").symlink_to(folders[1] / "model.safetensors")
    (root / "empty").mkdir()
    for name in "short", "nan", "cut", "index":
        shutil.copytree(folders[1], root / name)
    rewrite(root / "short/model.safetensors", lambda given: dict(list(given.items())[1:]))
    rewrite(root / "nan/model.safetensors", lambda given: {k: v * np.nan for k, v in given.items()})
    data = (root / "cut/model.safetensors").read_bytes()
    (root / "cut/model.safetensors").write_bytes(data[:-8])
    index = {"weight_map": {"a": "../step-1/model.safetensors"}}
    (root / "index/model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copytree(checkpoints.target("llama").folder, root / "other")  # more tokens
    return root


OUTSIDE = ["../out", "..", ".", "", "out", "linked", "circle", "/etc", "a\0b", "none", "a" * 5000]
OUTSIDE += ["step-1/../..", "step-1/model.safetensors"]
UNFIT = {"empty": "no weights", "short": "missing", "nan": "NaN", "cut": "damaged"}
UNFIT |= {"other": "wrong shape", "index": "weight_map"}


def test_bad_folders_change_nothing(server, bad, known):
    update(server, 1)
    version = version_of(server)
    for path in OUTSIDE:
        answer = server.post(UPDATE, {"update_info": {"path": path}})
        assert answer.error == (400, None) and b"is not a folder below" in answer.body
    for path, words in UNFIT.items():
        answer = server.post(UPDATE, {"update_info": {"path": path}})
        assert answer.error == (400, None) and words in answer.json["error"]["message"]
        assert str(bad) not in answer.body.decode()
    assert version_of(server) == version and complete(server) == (known(1), [version])


@pytest.mark.parametrize("path, body, headers, error", [
    (UPDATE, b"{}", {}, (415, None)),
    (UPDATE, b"{}", FILE, (400, None)),
    (UPDATE, b"\xff" * 64, FILE, (400, None)),
    (UPDATE, b"0" * 2**25, FILE, (413, None)),
    (UPDATE, {"update_info": {"names": ["a"]}}, None, (400, "update_info")),
    (UPDATE, {"update_info": {"path": "step-0"}, "weight_version": 0}, None, (400, None)),
    (UPDATE, {"update_info": {"path": "step-0"}, "weight_version": "9"}, None,
     (400, "weight_version")),
    (f"{UPDATE}?path=a", b"", FILE, (400, None)),
    ("/finish_weight_update", None, {}, (400, None)),
    ("/update_weight_version", {"new_version": 0}, None, (400, None)),
    ("/update_weight_version", {"new_version": 2**63}, None, (400, None)),
    ("/pause?mode=soon", None, {}, (400, None)),
    ("/pause?clear_cache=1", None, {}, (400, None)),
    ("/sleep?level=3", None, {}, (400, None)),
    ("/sleep?level=deep", None, {}, (400, "level")),
    ("/wake_up?tags=weights", None, {}, (400, "tags")),
    ("/abort_requests", {"ids": []}, None, (400, None)),
    ("/resume", None, {"origin": "https://a.example"}, (400, None)),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_bad_calls_change_nothing(server, path, body, headers, error):
    version = version_of(server)
    given = {"content-type": "application/json"} if headers is None else headers
    answer = server.send("POST", path, body, given)
    assert answer.error == error and b"/tmp" not in answer.body
    assert version_of(server) == version
    assert server.get("/is_paused").json == {"is_paused": False}
    assert server.get("/is_sleeping").json == {"is_sleeping": False}


def test_doors_need_the_flag_and_the_key(simulated):
    doors = [(next(iter((one.methods or set()) - {"HEAD"})), one.path) for one in RL_ROUTES]
    assert len(doors) == 14
    with served(simulated) as plain:
        assert {plain.send(*door, headers={}).status for door in doors} == {404}
        assert "weight_versions" not in plain.post(COMPLETIONS, {"prompt": "a"}).json
    with served(simulated, rl=True, api_key=("k",)) as keyed:
        assert {keyed.send(*door, headers={}).status for door in doors} == {401}
        answer = keyed.send("GET", "/weight_info", headers={"authorization": "Bearer k"})
        versions = {"weight_version": 0, "draft_weight_version": 0}
        assert answer.json == versions | {"quantization": None}
        given = {"authorization": "Bearer k", "content-type": "application/json"}
        answer = keyed.send("POST", UPDATE, {"update_info": {"path": "a"}}, given)
        assert answer.error[0] == 400 and b"--rl-weights-root" in answer.body


def test_the_flag_needs_a_key_or_this_machine(tmp_path):
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rl": True, "host": "0.0.0.0"}, "--rl with --host 0.0.0.0"),
        ({"rl_weights_root": str(tmp_path)}, "goes with --rl"),
        ({"rl": True, "rl_weights_root": str(tmp_path / "none")}, "is not a folder"),
    ]
    for settings, words in cases:
        with pytest.raises(ValueError, match=words):
            ServerSettings(**settings)
    ServerSettings(rl=True, host="0.0.0.0", api_key=("k",), rl_weights_root=str(tmp_path))
