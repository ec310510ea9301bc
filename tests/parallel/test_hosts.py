"""Engines of two processes: the results of one, and errors that name a process."""

import json
import signal
import socket
import subprocess
from contextlib import ExitStack, contextmanager

import pytest
from support.host_processes import LIMIT, run_all, start
from support.shared_models import eagle3, hybrid, llama

pytestmark = pytest.mark.slow


@contextmanager
def processes(plan):
    """Processes 0 and 1 that follow a plan; they end with the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as stack:
        both = [stack.enter_context(start(rank, port, plan)) for rank in (0, 1)]
        for one in both:
            stack.callback(one.kill)
        yield both


def said(one):
    """The next report of a process."""
    for line in one.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise AssertionError(one.stderr.read())


def test_two_processes_give_what_one_gives(checkpoints):
    target, head = llama(checkpoints), eagle3(checkpoints)
    other = llama(checkpoints, seed=1).folder
    mtp = hybrid(checkpoints)
    speculation = {"num_speculative_tokens": 3}
    plan = [
        {
            "folder": str(target.folder),
            "updated": str(other),
            "speculative_config": {"method": "eagle3", "model": str(head.folder), **speculation},
        },
        {
            "folder": str(mtp),
            "updated": str(mtp),
            "speculative_config": {"method": "mtp", **speculation},
        },
    ]
    with processes([{**part, "then": "run all"} for part in plan]) as (leader, follower):
        expected = [run_all(**part) for part in plan]
        for one in expected:
            assert said(leader) == {"found": one}
            assert said(follower) == {"found": None}
            assert one["preempted"] and one["hits"] and one["counts"][1]
        leader.wait(10)
        follower.wait(10)
