"""Tokens with CUDA graphs and without them: an update that goes wrong gives no error."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cases import NO_GRAPHS
from engines import Chosen
from timing import Setting, attempt
from tokens import MAX_TOKENS, K, choose_requests, open_llm

from specjax.bench.measure import decode
from specjax.checkpoint.demo import DRAFTERS, TARGET, demo_folders
from specjax.host.speculation.policy import DecodeLoad

METHOD, NUM_STEPS = "eagle3", 200


@dataclass
class Alternating(Chosen):
    """One K after the other, so that other programs run between two steps of the same."""

    def __post_init__(self):
        self._ks = itertools.cycle(self.choices)

    def choose(self, load: DecodeLoad) -> int:
        """The next one."""
        return next(self._ks)


def check_graphs(setting: Setting) -> Iterator[dict[str, Any]]:
    """The same 200 steps in two processes, whose requests and K alternate."""
    row = {"what": "graphs", "model": TARGET, "way": METHOD}
    if TARGET not in demo_folders():
        yield row | {"absent": f"{TARGET} is not in checkpoints"}
        return

    def one() -> dict[str, Any]:
        usual, without = (_run(environment, setting) for environment in ({}, NO_GRAPHS))
        is_same = usual["outputs"] == without["outputs"]
        return {"num_steps": usual["num_steps"], "is_same": is_same, "passes": is_same}

    yield attempt(row, one)


def _run(environment: dict[str, str], setting: Setting) -> dict[str, Any]:
    if setting.is_cpu:
        environment = {}  # flags that a CPU would refuse
    command = [sys.executable, __file__, json.dumps(setting.is_cpu)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-400:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run the steps, and print all outputs.

    In float32, where the tokens of a request do not depend on the K of its rounds.
    """
    setting = Setting(is_cpu=json.loads(sys.argv[1]))
    found = []
    with open_llm(TARGET, (METHOD, DRAFTERS[TARGET][METHOD]), "float32") as llm:
        engine = llm.engine
        engine.set_policy(Alternating((0, K)))
        requests = choose_requests(llm, setting.pick(MAX_TOKENS, 4))
        for turn in range(NUM_STEPS):
            several = [
                replace(one, params=replace(one.params, top_k=20 * (turn % 2), top_p=0.9))
                for one in requests[turn % 2 :: 1 + turn % 2]
            ]
            outputs = decode(engine, several).outputs
            found.append([list(outputs[one.request_id]) for one in several])
            num_steps = engine.metrics().num_steps
            if num_steps >= setting.pick(NUM_STEPS, 8):
                break
    print(json.dumps({"num_steps": num_steps, "outputs": found}))


if __name__ == "__main__":
    main()
