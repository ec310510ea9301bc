"""The real device and the simulated device give the same reports for the same schedules.

The simulated device uses transformers' tokens and drafts from a search through lists, and checks
everything that it reads. So a fault of either device, or of the host, is found.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.contract import KS, PromptLookup, Report, differences, run_schedule, tally
from support.engines import VOCAB, make_llm, simulated_engines
from support.marks import marked

from specjax import LLM
from specjax.engine.port import Programs
from specjax.engine.programs import Begin
from specjax.host.speculation.policy import StaticPolicy

pytestmark = pytest.mark.slow

SEEDS = range(8)
OFTEN = {  # in all schedules of a kind, at least
    "num_preemptions": 3,
    "prefix_cache_hits": 20,
    "num_accepted_tokens": 50,
    "rejected": 50,
    "aborted": 10,
    "stopped": 5,
    "errors": 2,
}


@pytest.fixture(scope="module", params=marked(["llama", "qwen3_5_text"], fast=["llama"]))
def devices(request, checkpoints) -> tuple[LLM, LLM]:
    """LLMs of the same model on the real device and on the simulated device."""
    target = checkpoints.target(request.param, vocab_size=VOCAB, seed=4)  # whose outputs repeat
    with simulated_engines(PromptLookup(target.hf)):
        simulated = make_llm(target.folder, "ngram")
    real = make_llm(target.folder, "ngram")
    for llm in real, simulated:
        llm.engine.set_policy(StaticPolicy(min(KS)))  # compiles it
    return real, simulated


@pytest.fixture(scope="module")
def expected(devices) -> list[Report]:
    """The reports of the real device."""
    return [run_schedule(devices[0], seed) for seed in SEEDS]


def test_both_devices_report_the_same(devices, expected):
    for seed, report in zip(SEEDS, expected, strict=True):
        assert not differences(report, run_schedule(devices[1], seed)), f"schedule {seed}"
    counts = tally(expected)
    assert not {name: counts[name] for name, least in OFTEN.items() if counts[name] < least}


# --- what the contract would find -----------------------------------------------------------------

# Runs a program: (its own run, its key, its arguments) -> its result.
Fault = Callable[[Programs, Callable, Any, tuple], Any]


def another_token(programs: Any, run: Callable, key: Any, arguments: tuple) -> Any:
    """A fault: the first token is not the most likely one."""
    result = run(key, *arguments)
    return result.at[:, 2].set((result[:, 2] + 1) % VOCAB) if isinstance(key, Begin) else result


def stops_unseen(programs: Any, run: Callable, key: Any, arguments: tuple) -> Any:
    """A fault: the device does not end requests at their stop ids."""
    for slot in programs.slots:
        slot.stop_ids = frozenset()
    return run(key, *arguments)


@contextmanager
def planted(llm: LLM, fault: Fault) -> Iterator[None]:
    """Run the engine's programs with a fault inside the `with` block."""
    programs = llm.engine.programs
    kind = type(programs)
    run = kind.run

    def run_wrongly(self: Any, key: Any, *arguments: Any) -> Any:
        return fault(self, lambda *all_: run(self, *all_), key, arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "run", run_wrongly)
        yield
    llm.engine.reset()


@pytest.mark.parametrize("devices", ["llama"], indirect=True)
@pytest.mark.parametrize("fault", [another_token, stops_unseen])
def test_a_fault_of_either_device_is_found(devices, expected, fault):
    real, simulated = devices
    llm = real if fault is another_token else simulated
    with planted(llm, fault):
        assert any(is_found(llm, seed, expected) for seed in SEEDS)


def is_found(llm: LLM, seed: int, expected: list[Report]) -> bool:
    try:
        return bool(differences(run_schedule(llm, seed), expected[seed]))
    except AssertionError:  # of the simulated device, about what it is given to read
        return True
