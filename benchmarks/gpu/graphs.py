"""Compares tokens with and without CUDA graphs, because a wrong graph update raises no error."""

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
    """A policy that alternates K, so that other programs run between two steps with the same K."""

    def __post_init__(self):
        self._ks = itertools.cycle(self.choices)

    def choose(self, load: DecodeLoad) -> int:
        """Return the next K."""
        return next(self._ks)


def check_graphs(setting: Setting) -> Iterator[dict[str, Any]]:
    """Run the same steps in two processes, with and without graphs; compare their outputs.

    Requests and K alternate between steps.
    """
    row = {"what": "same outputs", "model": TARGET, "dtype": "float32", "way": "without graphs"}
    if TARGET not in demo_folders():
        yield row | {"absent": f"{TARGET} is not in checkpoints"}
        return

    def one() -> dict[str, Any]:
        usual, without = (_run(environment, setting) for environment in ({}, NO_GRAPHS))
        pairs = list(zip(usual["outputs"], without["outputs"], strict=True))
        differ = sum(a != b for a, b in pairs)
        found = {"num_steps": usual["num_steps"], "outputs": len(pairs), "differ": differ}
        return found | {"passes": differ == 0}

    yield attempt(row, one)


def _run(environment: dict[str, str], setting: Setting) -> dict[str, Any]:
    if setting.is_cpu:
        environment = {}  # a CPU refuses the flags
    command = [sys.executable, __file__, json.dumps(setting.is_cpu)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-400:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run the steps, and print all outputs.

    The model runs in float32, so that a request's tokens do not depend on the K of its rounds.
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
            found += [list(outputs[one.request_id]) for one in several]
            num_steps = engine.metrics().num_steps
            if num_steps >= setting.pick(NUM_STEPS, 8):
                break
    print(json.dumps({"num_steps": num_steps, "outputs": found}))


if __name__ == "__main__":
    main()
