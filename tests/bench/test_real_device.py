"""A short run of `specjax profile` and of `specjax bench sweep` on the real device."""

import json

import pytest
from support.texts import letters_folder

from specjax.cli import main


@pytest.mark.slow
def test_profile_and_sweep(checkpoints, tmp_path):
    profile, report, plot = (tmp_path / name for name in ("profile.json", "report.json", "a.png"))
    options = ["--model", str(letters_folder(checkpoints)), "--drafter", "ngram", "--k", "0,2"]
    options += "--batch-size 2 --max-tokens 16 --rounds 1 --max-model-len 384".split()
    assert main(["profile", *options, "--output", str(profile)]) == 0
    measured = json.loads(profile.read_text())["measured"]
    assert measured["num_rounds_timed"]["2"]["0"] >= 5
    options += ["--profile", str(profile), "--plot", str(plot), "--output", str(report)]
    assert main(["bench", "sweep", *options]) == 0
    found = json.loads(report.read_text())
    assert found["num_compiles_while_measuring"] == 0
    policies = found["batches"]["2"]["policies"]
    assert list(policies) == ["off", "K=0", "K=2", "table", "profile", "adaptive"]
    assert not any(figures["num_differing"] for figures in policies.values())
    assert plot.read_bytes().startswith(b"\x89PNG")
