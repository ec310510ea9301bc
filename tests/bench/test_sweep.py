"""Whole runs of `specjax bench sweep` and `specjax profile`, on a simulated device."""

import contextlib
import io
import json
import sys

import pytest
from support.engines import simulated_engines
from support.scripts import TextScript

from specjax import LLM
from specjax.bench.profile import unconditional
from specjax.cli import main
from specjax.host.speculation.acceptance import DraftOutcome
from specjax.host.speculation.profile import Profile

VOCAB = 300


@pytest.fixture(scope="module", autouse=True)
def simulated():
    """Simulate engines whose outputs do not depend on the drafter."""
    with simulated_engines(TextScript(VOCAB)):
        yield


@pytest.fixture(scope="module")
def head(checkpoints, files):
    return checkpoints.eagle(files).folder


@pytest.fixture(scope="module")
def options(folder, head):
    """The options for both commands."""
    sizes = ["--k", "0,2", "--batch-size", "1,2", "--max-tokens", "10", "--rounds", "1"]
    return ["--model", str(folder), "--drafter", f"eagle={head}", *sizes]


def run(*argv):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(list(argv)) == 0
    return printed.getvalue()


@pytest.fixture(scope="module")
def profile(options, tmp_path_factory):
    """The profile that `specjax profile` writes, and the printed text."""
    file = tmp_path_factory.mktemp("profile") / "profile.json"
    return file, run("profile", *options, "--output", str(file))


def test_a_profile_is_what_its_readers_expect(profile, folder):
    file, printed = profile
    content = json.loads(file.read_text())
    ks = {batch: set(times) for batch, times in content["batch_stats"].items()}
    assert ks == {"1": {"0", "2"}, "2": {"0", "2"}}
    assert content["max_num_speculative_tokens"] == 2 and content["is_online"] is False
    measured = content["measured"]
    assert measured["target"] == str(folder) and measured["method"] == "eagle"
    assert measured["versions"]["jax"] and measured["device"]
    assert measured["num_rounds_timed"]["2"]["0"] >= 5
    assert Profile.read(file).as_json() == content
    assert "K=2" in printed and f"written to {file}" in printed
    shown = json.loads(run("profile", "show", str(file), "--json"))
    assert set(shown["tpot_ms"]) == set(shown["best_k"]) == {"1", "2"}


def test_a_profile_serves_the_model_it_is_of_and_no_other(profile, folder, head, checkpoints):
    speculation = {"method": "eagle", "model": str(head), "dynamic_config_path": str(profile[0])}
    settings = {"max_model_len": 64, "max_num_seqs": 2, "verbose": False}
    with LLM(folder, speculative_config=speculation, **settings) as llm:
        assert llm.engine.scheduler.policy.choices == (0, 1, 2)
    other = checkpoints.target(vocab_size=VOCAB, seed=3).folder
    with pytest.raises(ValueError, match="measured on another model"):
        LLM(other, speculative_config=speculation, **settings)


def test_rates_are_those_of_what_was_looked_at():
    """4 of 6 first drafts are accepted. 3 of these 4 rounds have a second draft; 1 is accepted."""
    counts = {(2, 0): 2, (2, 1): 2, (2, 2): 1, (1, 1): 1}
    verdicts = {DraftOutcome(*verdict): count for verdict, count in counts.items()}
    assert unconditional(verdicts, 3) == pytest.approx((4 / 6, 4 / 6 / 3, 0))


@pytest.fixture(scope="module")
def sweep(options, profile, tmp_path_factory):
    """The report of `specjax bench sweep`, the printed text, and the path of the plot."""
    folder = tmp_path_factory.mktemp("sweep")
    plot, file = folder / "plot.png", folder / "report.json"
    more = ["--profile", str(profile[0]), "--plot", str(plot), "--output", str(file)]
    printed = run("bench", "sweep", *options, *more)
    return json.loads(file.read_text()), printed, plot


@pytest.mark.slow
def test_a_sweep_compares_every_policy_at_every_size(sweep):
    report, printed, plot = sweep
    assert set(report["batches"]) == {"1", "2"} and report["num_compiles_while_measuring"] == 0
    for at_size in report["batches"].values():
        policies = at_size["policies"]
        assert list(policies) == ["off", "K=0", "K=2", "table", "profile", "adaptive"]
        assert at_size["best_static"] in ("K=0", "K=2")
        best = policies[at_size["best_static"]]
        assert best["regret"] == 0 and best["to_best_static"]["median"] == 1
        for name, figures in policies.items():
            assert figures["num_differing"] == 0
            assert figures["regret"] == pytest.approx(1 - figures["to_best_static"]["median"])
            ks = {int(k) for k in figures["k_histogram"]}
            assert max(map(int, figures["request_k_histogram"])) <= max(ks)
            assert ks <= ({0} if name in ("off", "K=0") else {0, 1, 2})
        assert policies["off"]["mean_acceptance_length"] == 1
    assert "outputs that differ from decoding without speculation: 0" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_both_speak_and_measure_without_matplotlib(options, monkeypatch, tmp_path, caplog, capsys):
    """Log lines name the current work. A plot is refused at once, but only if it is requested."""
    caplog.set_level("INFO", "specjax")
    for name in ["matplotlib", *(m for m in sys.modules if m.startswith("matplotlib."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "specjax.bench.plot", raising=False)
    monkeypatch.setattr("specjax.bench.sweep.find_spec", lambda _: None)
    monkeypatch.setattr("specjax.engine.log.LINE_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    assert "not plotted; pip install 'specjax[plot]'" in run("bench", "sweep", *options)
    assert "measuring K=2 at batch size 1, run " in caplog.text and not list(tmp_path.iterdir())
    assert "run 1 of 48" in caplog.text and "run 48 of 48" in caplog.text
    caplog.clear()
    run("profile", *options)
    assert "measuring K=2 at batch size 2, run 4 of 4" in caplog.text
    caplog.clear()
    assert main(["bench", "sweep", *options, "--plot", "a.png"]) == 2
    assert "specjax[plot]" in capsys.readouterr().err and "measuring" not in caplog.text
