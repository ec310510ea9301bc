"""Engines of several processes give the results of one process; errors name a process."""

import json
import signal
import socket
import time
from contextlib import ExitStack, contextmanager

import pytest
from support.host_processes import LIMIT, run_all, same, serve_all, start
from support.marks import marked
from support.refusals import refusal
from support.shared_models import eagle3, hybrid, llama
from support.weights import rewrite

from specjax import LLM, follow
from specjax.cli import main


@contextmanager
def processes(*plan, count=2, is_trainer=False):
    """Yield processes that follow a plan, and end them with the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as stack:
        options = {"count": count, "is_trainer": is_trainer}
        every = [stack.enter_context(start(i, port, [*plan], **options)) for i in range(count)]
        for one in every:
            stack.callback(one.kill)
        yield every


def said(one):
    """Return the next report of a process."""
    for line in one.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise AssertionError(one.stderr.read())


def error_after(leader, do):
    """Call `do`, then let a process continue; return its error, and the seconds until then."""
    assert said(leader) == {"ready": True}
    do()
    start = time.monotonic()
    leader.stdin.write("\n")
    leader.stdin.flush()
    return said(leader)["error"], time.monotonic() - start


# The axis along which two devices divide a matrix of a checkpoint.
AXES = dict.fromkeys(["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], 0)
AXES |= dict.fromkeys(["o_proj", "down_proj"], 1)


def with_own_half(checkpoints, folder, rank):
    """Return a copy of a target. The halves of projections that `rank` must not read are NaN."""

    def spoil(tensors):
        for name, tensor in tensors.items():
            if (axis := AXES.get(name.split(".")[-2])) is not None:
                half = tensor.shape[axis] // 2
                tensor.narrow(axis, (1 - rank) * half, half).fill_(float("nan"))
        return tensors

    made = checkpoints.copy(folder)
    rewrite(made / "model.safetensors", spoil)
    return str(made)


@pytest.mark.parametrize("kind", marked(["llama", "hybrid"], slow=["llama"]))
def test_two_processes_give_what_one_gives(checkpoints, kind):
    """Each process reads only its parts of the weights. If one stops answering, both end."""
    drafting = {"method": "suffix", "num_speculative_tokens": 3}
    folders = [llama(checkpoints, seed=seed).folder for seed in (0, 1)]
    if kind == "hybrid":
        drafting |= {"method": "mtp", "with": ["suffix"]}
        folders = [hybrid(checkpoints, seed=seed) for seed in (0, 1)]
    folder, updated = folders
    part = {"folder": str(folder), "speculative_config": drafting}
    run = {**part, "updated": str(updated)}
    halves = {str(i): {"folder": with_own_half(checkpoints, folder, i)} for i in range(2)}
    # The second engine has the programs of the first.
    with processes({**run, "own": halves, "then": "run all"}, part) as (leader, follower):
        expected = run_all(**run)
        assert expected["num_preemptions"] and expected["hits"] and expected["counts"][1]
        reply = said(leader)
        assert same(reply, {"found": expected}), reply
        assert said(follower) == {"found": None}
        error, seconds = error_after(leader, lambda: follower.send_signal(signal.SIGSTOP))
        assert error.startswith("HostsError: process 1 (") and "does not answer" in error
        assert LIMIT <= seconds < LIMIT + 10
        assert leader.wait(10) == 1


@pytest.mark.nightly
def test_three_processes_of_a_trainer(checkpoints, tmp_path):
    """With 8-bit weights, results equal one process's. All exit without an error, in any order."""
    plain = checkpoints.with_letters(llama(checkpoints).folder)
    folder = str(tmp_path / "fp8")
    assert main(["quantize", str(plain), folder, "--quantization", "fp8"]) == 0
    head = str(eagle3(checkpoints).folder)
    config = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
    part = {"folder": folder, "speculative_config": config, "kv_cache_dtype": "int8"}
    with processes({**part, "then": "serve"}, count=3, is_trainer=True) as (leader, *others):
        expected = serve_all(**part)
        assert expected["found"][-3:] == [True, True, True]
        reply = said(leader)
        assert same(reply, {"found": expected}), reply
        assert [said(one) for one in others] == [{"found": None}] * 2
        assert [one.wait(20) for one in (leader, *others)] == [0, 0, 0]


@pytest.mark.slow
def test_what_differs_and_who_is_lost(checkpoints):
    folder = llama(checkpoints).folder
    other = str(checkpoints.copy(folder, rms_norm_eps=0.1))
    common = {"folder": str(folder)}
    plan = [
        {**common, "own": {"1": {"nnodes": 3}}},
        {**common, "own": {"1": {"max_num_seqs": 3}}},
        {**common, "own": {"1": {"folder": other}}},
        common,
        common,
    ]
    with processes(*plan) as (leader, follower):
        assert "process 1 has nnodes=3, process 0 has 2" in said(leader)["error"]
        assert "process 0 waits no longer" in said(follower)["error"]
        for expected in "has max_num_seqs=3, process 0 has 4", "has checkpoint (digest":
            errors = [said(one)["error"] for one in (leader, follower)]
            assert errors[0] == errors[1] and expected in errors[0]
            assert errors[0].startswith("ValueError: the processes of this LLM differ: process 1 (")
        error, _ = error_after(leader, lambda: leader.send_signal(signal.SIGINT))
        assert "KeyboardInterrupt" in error and said(follower) == {"found": None}
        error, seconds = error_after(leader, follower.kill)
        assert error.startswith("HostsError: process 1 (") and seconds < LIMIT
        assert leader.wait(10) == 1


@pytest.mark.slow
def test_refusals_before_processes_meet(checkpoints):
    folder = llama(checkpoints).folder
    two = {"nnodes": 2, "tensor_parallel_size": 2}
    for do, *expected in (
        (lambda: LLM(folder, **two, node_rank=1), "node_rank=1", "specjax.follow"),
        (lambda: LLM(folder, **two, node_rank=2), "node_rank=2", "from 0 to 1"),
        (lambda: LLM(folder, nnodes=2, node_rank=0), "a multiple of nnodes=2"),
        (lambda: LLM(folder, **two, data_parallel_size=2), "data_parallel_size=2", "RayRollouts"),
        (lambda: LLM(object(), **two, node_rank=0), "needs a checkpoint", "save_model"),
        (lambda: LLM(folder, **two), "node_rank=None", "jax.distributed"),
        (lambda: LLM(folder, distributed_timeout_seconds=0), "distributed_timeout_seconds=0"),
        (lambda: follow(folder, **two, node_rank=0), "process 0 builds an LLM"),
        (lambda: follow(folder), "nnodes=1"),
    ):
        refusal(do, *expected)
