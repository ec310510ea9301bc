"""The commands that measure, each once and at small on the real device."""

import json

import pytest
from support.texts import letters_folder

from specjax.cli import main

pytestmark = pytest.mark.slow


def run(capsys, file, *argv):
    """What a command writes to `file`."""
    assert main([*argv, "--output", str(file)]) == 0
    capsys.readouterr()
    return json.loads(file.read_text())


@pytest.fixture
def model(checkpoints):
    return ["--model", str(letters_folder(checkpoints)), "--drafter", "ngram"]


def test_bench(capsys, tmp_path, model):
    sizes = "--k 2 --num-prompts 2 --max-tokens 24 --batch-size 2".split()
    report = run(capsys, tmp_path / "report.json", "bench", *model, *sizes)
    assert report["outputs_identical"] is True and report["num_compiles_while_measuring"] == 0
    plain, drafted = report["configurations"]
    assert plain["num_tokens"] == drafted["num_tokens"] > 0


def test_profile_and_sweep(capsys, tmp_path, model):
    sizes = "--k 0,2 --batch-size 2 --max-tokens 16 --rounds 1 --max-model-len 384".split()
    profile, plot = tmp_path / "profile.json", tmp_path / "plot.png"
    measured = run(capsys, profile, "profile", *model, *sizes)
    assert measured["measured"]["num_rounds_timed"]["2"]["0"] >= 5
    more = ["--profile", str(profile), "--plot", str(plot)]
    report = run(capsys, tmp_path / "report.json", "bench", "sweep", *model, *sizes, *more)
    assert report["num_compiles_while_measuring"] == 0
    policies = report["batches"]["2"]["policies"]
    assert list(policies) == ["off", "K=0", "K=2", "table", "profile", "adaptive"]
    assert not any(figures["num_differing"] for figures in policies.values())
    assert plot.read_bytes().startswith(b"\x89PNG")
