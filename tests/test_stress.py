"""The stress test of accepted counts passes, and it would detect wrong counts.

The benchmark runs it for long. Here it runs 128 generations, and 64 in exact mode, in a model of
the tests' sizes.
"""

import argparse
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support.engines import EXACT, K, make_llm, patched, simulated_engines
from support.scripts import TextScript
from support.shared_models import NUM_SNAPSHOTS, hybrid

from specjax import LLM
from specjax.device.models.registry import describe_model, read_config
from specjax.engine.engine import Engine
from specjax.engine.programs import Begin, Decode
from specjax.host.scheduler import Scheduler
from specjax.host.speculation.policy import StaticPolicy

pytestmark = pytest.mark.every_jax

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
OPTIONS = ["--k", str(K), "--slots", "4", "--max-tokens", "12"]


@contextmanager
def late_counts(engine: Engine, program: type) -> Iterator[None]:
    """After each run of a program of this type, restore the counts of accepted drafts before it."""
    programs = engine.programs
    run, before = programs.run, np.asarray(programs.state.pending)

    def run_wrongly(key: Any, *arguments: Any) -> Any:
        nonlocal before
        result = run(key, *arguments)
        if isinstance(key, program):
            # Copies: the next step is given the state's own memory to write to.
            now, progress = (
                np.array(values) for values in (programs.state.pending, programs.state.progress)
            )
            progress[:, 1], before = before, now
            programs.state = replace(programs.state, progress=jnp.array(progress))
        return result

    with patched(programs, "run", run_wrongly):
        yield


@dataclass(frozen=True)
class Served:
    """The benchmark, and a small hybrid: with speculation in many slots, and plain in one slot."""

    stress: Any
    llm: LLM
    alone: LLM
    settings: argparse.Namespace

    def run(self, **sizes: Any) -> tuple[int, dict[str, Any]]:
        """Run the benchmark at these sizes; return its exit code and result."""
        settings = argparse.Namespace(**vars(self.settings) | sizes)
        source = self.stress.provenance()
        code = self.stress.run_rounds(self.llm, self.alone, settings, source)
        return code, json.loads(settings.json.read_text())


@pytest.fixture(scope="module")
def stress() -> Iterator[Any]:
    """The module of the benchmark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("stress_accepted_counts")


@pytest.fixture(scope="module", params=["", pytest.param("exact", marks=pytest.mark.nightly)])
def served(request, stress, checkpoints, tmp_path_factory) -> Iterator[Served]:
    """The benchmark's weights, in a model of the tests' sizes."""
    folder = tmp_path_factory.mktemp("hybrid")
    stress.write_random(folder, describe_model(read_config(hybrid(checkpoints))))
    settings = [*OPTIONS, "--json", str(folder / "result.json")]
    options = {"num_snapshots": NUM_SNAPSHOTS}
    if request.param:
        options, settings = options | EXACT, [*settings, "--exact"]
    with make_llm(folder, "mtp", **options) as llm, make_llm(folder, **options) as alone:
        engine = alone.engine
        one = replace(engine.config, max_num_seqs=1)
        engine.scheduler = Scheduler(one, StaticPolicy(0), num_snapshots=NUM_SNAPSHOTS)
        yield Served(stress, llm, alone, stress.read_settings(settings))


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("served", [""], indirect=True)
@pytest.mark.parametrize("program", [Begin, Decode])
def test_a_wrong_count_is_found_and_leaves_nothing_behind(served, program, capsys):
    """Later requests in the same slots and pages are not affected."""
    sizes = {"prompts": 8, "samples": 4, "rounds": 1}
    with late_counts(served.llm.engine, program):
        code, result = served.run(**sizes)
    found = result["samples"]["mismatches"]
    assert code == 1 and len(found) > 8 * 4 / 8
    assert found[0] in capsys.readouterr().out
    code, result = served.run(**sizes)
    assert code == 0 and not result["samples"]["mismatches"]


def test_prompts_are_ragged(stress):
    settings = stress.read_settings(["--prompts", "64", "--k", str(K)])
    llm = argparse.Namespace(tokenizer=None, target=stress.RANDOM)
    lengths = [len(prompt) for prompt in stress.make_prompts(llm, settings)]
    assert lengths[: K + 2] == [*range(1, K + 3)]
    assert stress.CHUNK < max(lengths) <= stress.LONGEST_PROMPT


def test_too_few_tokens_are_refused(stress, capsys):
    with pytest.raises(SystemExit):
        stress.read_settings(["--max-tokens", "3"])
    assert "--max-tokens 3 must be at least 4" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("mode", [[], ["--exact"]], ids=["", "exact"])
def test_the_command_runs_its_own_model(stress, tmp_path, capsys, mode):
    """The command runs on a simulated device, whose drafts are accepted pseudo-randomly."""
    options = ["--prompts", "8", "--samples", "2", "--rounds", "2"]
    with simulated_engines(TextScript(stress.RANDOM.vocab_size)) as tally:
        code = stress.main([*OPTIONS, *options, "--json", str(tmp_path / "result.json"), *mode])
    assert code == 0 and tally["rounds"] > 100
    result = json.loads((tmp_path / "result.json").read_text())
    assert sum(row[2] for row in result["tables"][0]["rows"]) == 8 * 2 * 2
    assert result["settings"]["exact"] == bool(mode)
    assert "mismatches: 0" in capsys.readouterr().out
