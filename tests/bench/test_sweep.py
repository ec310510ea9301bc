"""`specjax bench sweep` and `specjax profile` end to end on a simulated device."""

import contextlib
import io
import json
import sys

import pytest
from support.engines import simulated_engines
from support.scripts import TextScript

from specjax import LLM
from specjax.bench.profile import unconditional
from specjax.bench.workload import read_questions
from specjax.cli import main
from specjax.host.speculation.acceptance import DraftOutcome
from specjax.host.speculation.profile import Profile
from specjax.train.data import CHAT_TEMPLATE, train_tokenizer

VOCAB = 300


@pytest.fixture(scope="module", autouse=True)
def simulated():
    """Engines whose outputs are the same with any drafter."""
    with simulated_engines(TextScript(VOCAB)):
        yield


@pytest.fixture(scope="module")
def folders(checkpoints):
    """A tiny target with a tokenizer, and a head for it."""
    files = checkpoints.target(vocab_size=VOCAB)
    folder = checkpoints.copy(files.folder)
    train_tokenizer(read_questions(), VOCAB).save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder, checkpoints.eagle(files).folder


@pytest.fixture(scope="module")
def options(folders):
    """What both commands share."""
    target, head = folders
    sizes = ["--k", "0,2", "--batch-size", "1,2", "--max-tokens", "10", "--rounds", "1"]
    return ["--model", str(target), "--drafter", f"eagle={head}", *sizes]


def run(*argv):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(list(argv)) == 0
    return printed.getvalue()


@pytest.fixture(scope="module")
def profile(options, tmp_path_factory):
    """The file that `specjax profile` writes, and what it printed."""
    file = tmp_path_factory.mktemp("profile") / "profile.json"
    return file, run("profile", *options, "--output", str(file))


def test_a_profile_is_what_its_readers_expect(profile, folders):
    file, printed = profile
    content = json.loads(file.read_text())
    assert {batch: set(times) for batch, times in content["batch_stats"].items()} == {
        "1": {"0", "2"},
        "2": {"0", "2"},
    }
    assert content["max_num_speculative_tokens"] == 2 and content["is_online"] is False
    measured = content["measured"]
    assert measured["target"] == str(folders[0]) and measured["method"] == "eagle"
    assert measured["versions"]["jax"] and measured["device"]
    assert measured["num_rounds_timed"]["2"]["0"] >= 5
    assert Profile.read(file).as_json() == content
    assert "K=2" in printed and f"written to {file}" in printed
    shown = json.loads(run("profile", "show", str(file), "--json"))
    assert set(shown["tpot_ms"]) == set(shown["best_k"]) == {"1", "2"}


def test_a_profile_serves_the_model_it_is_of_and_no_other(profile, folders, checkpoints):
    target, head = folders
    speculation = {"method": "eagle", "model": str(head), "dynamic_config_path": str(profile[0])}
    settings = {"max_model_len": 64, "max_num_seqs": 2, "verbose": False}
    with LLM(target, speculative_config=speculation, **settings) as llm:
        assert llm.engine.scheduler.policy.choices == (0, 1, 2)
    other = checkpoints.target(vocab_size=VOCAB, seed=3).folder
    with pytest.raises(ValueError, match="measured on another model"):
        LLM(other, speculative_config=speculation, **settings)


def test_rates_are_those_of_what_was_looked_at():
    """4 of 6 first drafts stood; of those, 1 of 3 seconds, one having been cut off."""
    verdicts = {
        DraftOutcome(2, 0): 2,
        DraftOutcome(2, 1): 2,
        DraftOutcome(2, 2): 1,
        DraftOutcome(1, 1): 1,
    }
    assert unconditional(verdicts, 3) == pytest.approx((4 / 6, 4 / 6 / 3, 0))


@pytest.fixture(scope="module")
def sweep(options, profile, tmp_path_factory):
    """The report of `specjax bench sweep`, what it printed, and the plot."""
    folder = tmp_path_factory.mktemp("sweep")
    plot, file = folder / "plot.png", folder / "report.json"
    more = ["--profile", str(profile[0]), "--plot", str(plot), "--output", str(file)]
    printed = run("bench", "sweep", *options, *more)
    return json.loads(file.read_text()), printed, plot


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
            assert ks <= ({0} if name in ("off", "K=0") else {0, 1, 2})
        assert policies["off"]["mean_acceptance_length"] == 1
    assert "outputs that differ from decoding without speculation: 0" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_both_speak_and_measure_without_matplotlib(options, monkeypatch, tmp_path, caplog, capsys):
    """Lines name what is measured, and a plot is refused at once only where one is asked for."""
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


BAD = {
    "--k 1,x must list integers": ["--k", "1,x"],
    "--k 0 alone drafts nothing": ["--k", "0"],
    "--k -1,2 must list integers of at least 0": ["--k=-1,2"],
    "--batch-size 0,4 must list integers of at least 1": ["--batch-size", "0,4"],
    "--rounds=0": ["--rounds", "0"],
    "--max-tokens 1 leaves nothing to time": ["--max-tokens", "1"],
    f"--seed={2**64} must be": [f"--seed={2**64}"],
    "--drafter eagle lacks a checkpoint": ["--drafter", "eagle"],
    "--synthetic-rates a must list rates": ["--synthetic-rates", "a"],
    "--output /no/such/x.json cannot be a file": ["--output", "/no/such/x.json"],
    "temperature=-1": ["--temperature=-1"],
}


@pytest.mark.parametrize("message", BAD)
@pytest.mark.parametrize("command", [("bench", "sweep"), ("profile",)])
def test_bad_options_are_refused_before_anything_is_loaded(capsys, command, message):
    argv = [*command, "--model", "no/such/model", "--drafter", "eagle=no/such/head"]
    assert main([*argv, *BAD[message]]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_profile_needs_plain_decoding(capsys, options):
    assert main(["profile", *options, "--k", "1,2"]) == 2
    assert "--k 1,2 lacks 0" in capsys.readouterr().err


def test_a_model_without_a_drafter_is_refused(capsys):
    assert main(["bench", "sweep", "--model", "no/such/model"]) == 2
    assert "has no default drafter" in capsys.readouterr().err
