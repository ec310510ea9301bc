"""The stress of accepted counts finds nothing, and would: counts that go wrong show in the tokens.

The benchmark runs it at length; this is 128 generations of it, and 64 in exact mode, with its
weights in a model of the tests' sizes.
"""

import argparse
import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support.engines import K, make_llm
from support.shared_models import NUM_SNAPSHOTS, hybrid
from support.simulated_device import SimulatedPrograms

from specjax import LLM
from specjax.device.models.registry import describe_model, read_config
from specjax.engine.engine import Engine
from specjax.engine.programs import Begin, Decode
from specjax.host.residency import slot_of
from specjax.host.scheduler import Scheduler

pytestmark = pytest.mark.every_jax

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
OPTIONS = ["--k", str(K), "--slots", "4", "--max-tokens", "12"]
EXACT = {"exact": True, "decode_batches": None, "prefill_shapes": None}

# What the counter holds after a step, from the slots that took part, what is true, and what was
# true after the step before.
Wrong = Callable[[list[int], np.ndarray, np.ndarray], np.ndarray]


def late(slots, now, before):
    return before


def of_the_request_beside(slots, now, before):
    return put(now, slots, np.roll(now[slots], 1))


def without_drafts(slots, now, before):
    return put(now, slots, 1)


def with_rejected_drafts(slots, now, before):
    return put(now, slots, K + 1)


def one_after_a_prompt(slots, now, before):
    return put(now, slots, 1)


def put(values, slots, new):
    values = values.copy()
    values[slots] = new
    return values


@contextmanager
def counts(engine: Engine, wrong: Wrong, program: type) -> Iterator[None]:
    """Overwrite the counts of accepted tokens after every run of one of a step's programs."""
    programs, launch = engine.programs, engine._launch
    run, before = programs.run, np.asarray(programs.state.pending)
    slots: list[int] = []

    def launch_known(parts: Any) -> Any:
        plan = parts[0 if program is Begin else -1]
        slots[:] = map(slot_of, plan.sequences)
        return launch(parts)

    def run_wrongly(key: Any, *arguments: Any) -> Any:
        nonlocal before
        result = run(key, *arguments)
        if isinstance(key, program):
            # A copy: the next step is given the state's own memory to write to.
            now = np.array(programs.state.pending)
            progress = np.array(programs.state.progress)
            progress[:, 1] = wrong(slots, now, before)
            state = replace(programs.state, progress=jnp.array(progress))
            programs.state, before = state, now
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_launch", launch_known)
        patch.setattr(programs, "run", run_wrongly)
        yield


@dataclass(frozen=True)
class Served:
    """The benchmark, and a small hybrid with speculation in many slots and without in one."""

    stress: Any
    llm: LLM
    alone: LLM
    settings: argparse.Namespace

    def run(self, **sizes: Any) -> tuple[int, dict[str, Any]]:
        """The exit code and the result of the benchmark at these sizes."""
        settings = argparse.Namespace(**vars(self.settings) | sizes)
        source = self.stress.provenance()
        code = self.stress.run_rounds(self.llm, self.alone, settings, source)
        return code, json.loads(settings.json.read_text())


@pytest.fixture(scope="module")
def stress() -> Iterator[Any]:
    """The benchmark as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("stress_accepted_counts")


@pytest.fixture(scope="module", params=["", pytest.param("exact", marks=pytest.mark.slow)])
def served(request, stress, checkpoints, tmp_path_factory) -> Iterator[Served]:
    """The benchmark's weights in a model of the tests' sizes."""
    folder = tmp_path_factory.mktemp("hybrid")
    stress.write_random(folder, describe_model(read_config(hybrid(checkpoints))))
    settings = [*OPTIONS, "--json", str(folder / "result.json")]
    options = {"num_snapshots": NUM_SNAPSHOTS}
    if request.param:
        options, settings = options | EXACT, [*settings, "--exact"]
    with make_llm(folder, "mtp", **options) as llm, make_llm(folder, **options) as alone:
        run_alone(alone.engine)
        yield Served(stress, llm, alone, stress.read_settings(settings))


def run_alone(engine: Engine) -> None:
    """One request at a time from now on."""
    config = replace(engine.config, max_num_seqs=1)
    policy = engine.scheduler.policy
    engine.scheduler = Scheduler(config, policy, num_snapshots=config.num_snapshots)


@pytest.fixture(scope="module")
def asked(served) -> tuple[Any, Any]:
    """Requests of a few prompts, and what they come to alone."""
    settings = argparse.Namespace(**vars(served.settings) | {"prompts": 8, "samples": 4})
    requests = served.stress.make_requests(served.llm, settings, 0)
    return requests, served.stress.serve(served.alone.engine, requests)[0]


def test_every_generation_is_that_of_the_request_alone(served, capsys):
    exact = served.settings.exact
    prompts, samples, rounds = 8 if exact else 16, 4, 2
    code, result = served.run(prompts=prompts, samples=samples, rounds=rounds)
    assert code == 0
    generations, accepted = result["tables"]
    rows = [dict(zip(generations["columns"], row, strict=True)) for row in generations["rows"]]
    assert [row["requests arrive"] for row in rows] == ["all at once", "one by one"]
    assert sum(row["generations"] for row in rows) == prompts * samples * rounds
    assert sum(row["mismatches"] for row in rows) == 0
    assert result["samples"]["mismatches"] == []
    if exact:
        assert result["samples"]["near_ties"] == []
    assert min(row["shortest output"] for row in rows) >= served.stress.FEWEST_TOKENS
    assert [count for count, _ in accepted["rows"]] == list(range(K + 1))
    # Every count occurs, or the comparison would not show much.
    assert all(share > 0.02 for _, share in accepted["rows"])
    printed = capsys.readouterr().out
    assert "mismatches: 0" in printed and "tokens/s" in printed


@pytest.mark.parametrize("served", [""], indirect=True)
@pytest.mark.parametrize(
    "wrong, program",
    [
        (late, Decode),
        (of_the_request_beside, Decode),
        (without_drafts, Decode),
        (with_rejected_drafts, Decode),
        (one_after_a_prompt, Begin),
    ],
)
def test_a_wrong_count_is_found_and_leaves_nothing_behind(served, asked, wrong, program):
    stress, engine = served.stress, served.llm.engine
    requests, expected = asked
    with counts(engine, wrong, program):
        outputs, _ = stress.serve(engine, requests)
    found = stress.compare_all(engine, requests, expected, outputs)
    assert len(found.mismatches) > found.num_outputs / 8
    # Those who take the slots and pages next do not notice.
    outputs, _ = stress.serve(engine, requests)
    assert not stress.compare_all(engine, requests, expected, outputs).mismatches


@pytest.mark.parametrize("served", [""], indirect=True)
def test_a_run_with_a_mismatch_fails(served, capsys):
    with counts(served.llm.engine, late, Decode):
        code, result = served.run(prompts=4, samples=2, rounds=1)
    assert code == 1 and result["samples"]["mismatches"]
    assert result["samples"]["mismatches"][0] in capsys.readouterr().out


def test_prompts_are_ragged(stress):
    settings = stress.read_settings(["--prompts", "64", "--k", str(K)])
    llm = argparse.Namespace(tokenizer=None, target=stress.RANDOM)
    lengths = [len(prompt) for prompt in stress.make_prompts(llm, settings)]
    assert lengths[: K + 2] == [1, 2, 3, 4, 5]
    assert stress.CHUNK < max(lengths) <= stress.LONGEST_PROMPT


def test_too_few_tokens_are_refused(stress, capsys):
    with pytest.raises(SystemExit):
        stress.read_settings(["--max-tokens", "3"])
    assert "--max-tokens 3 must be at least 4" in capsys.readouterr().err


class SimulatedTarget(SimulatedPrograms):
    """Its tokens hang on the target's weights alone, as those of a device do."""

    @property
    def params(self):
        return self._known_params

    @params.setter
    def params(self, params):
        SimulatedPrograms.params.fset(self, params.target)
        self._known_params = params


@pytest.mark.parametrize("mode", [[], ["--exact"]], ids=["", "exact"])
def test_the_command_runs_its_own_model(stress, tmp_path, monkeypatch, capsys, mode):
    """On a simulated device, whose drafts are accepted as if by chance."""
    options = ["--prompts", "8", "--samples", "2", "--rounds", "2"]
    tally: Counter = Counter()
    make = partial(SimulatedTarget, tally=tally)
    monkeypatch.setattr("specjax.llm.Engine", partial(Engine, make_programs=make))
    code = stress.main([*OPTIONS, *options, "--json", str(tmp_path / "result.json"), *mode])
    assert code == 0 and tally["rounds"] > 100
    result = json.loads((tmp_path / "result.json").read_text())
    assert sum(row[2] for row in result["tables"][0]["rows"]) == 8 * 2 * 2
    assert result["settings"]["exact"] == bool(mode)
    assert "mismatches: 0" in capsys.readouterr().out
