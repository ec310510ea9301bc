"""The command line: help without JAX, names of demo models, and `profile show`."""

import json
import re
import runpy
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from support.refusals import refusal

import specjax
from specjax import cli
from specjax.checkpoint import demo
from specjax.checkpoint.hub import resolve
from specjax.cli import main
from specjax.commands.speculation import read_speculation
from specjax.rl import RolloutEngine
from specjax.serving.source import open_model

HELPED = "", "generate", "bench", "bench serve", "profile", "profile show", "train", "info"
HELPED += "serve", "quantize"


def fail(capsys, *argv):
    """Run a command that must fail, and return its message."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("specjax: error: ") and captured.err.count("\n") == 1
    assert not captured.out
    return captured.err


@pytest.mark.slow
def test_help_is_instant_and_without_jax():
    """One process prints the help of all commands."""
    code = """
import sys, time, specjax.cli
for command in sys.argv[1:]:
    try:
        specjax.cli.main([*command.split(), "--help"])
    except SystemExit as end:
        assert end.code == 0, end.code
    heavy = {"jax", "numpy", "rich", "matplotlib"} & set(sys.modules)
    assert not heavy, f"{command} needs {heavy}"
    print(time.process_time(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code, *HELPED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    usages = [line for line in done.stdout.splitlines() if line.startswith("usage: ")]
    assert [usage.split(" [")[0] for usage in usages] == [
        f"usage: specjax {command}".rstrip() for command in HELPED
    ]
    # Time on the processor, as the machine may be busy with other tests.
    ends = [0.0, *map(float, done.stderr.splitlines())]
    assert max(b - a for a, b in pairwise(ends)) < 1.5


def test_the_package_imports_lazily_but_completely():
    second = {"StructuredOutputsParams": "StructuredOutputs"}  # names of things that have another
    for name in specjax.__all__:
        assert getattr(specjax, name).__name__ == second.get(name, name) and name in dir(specjax)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = specjax.Nothing


@pytest.mark.parametrize("as_module", [False, True])
def test_the_version(capsys, monkeypatch, as_module):
    monkeypatch.setattr(sys, "argv", ["specjax", "--version"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("specjax", run_name="__main__") if as_module else main()
    assert end.value.code == 0
    assert capsys.readouterr().out == f"specjax {specjax.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", specjax.__version__)


def test_a_missing_package_names_its_extra_and_an_interrupt_is_no_traceback(capsys, monkeypatch):
    argv, error = ["train", "target", "--data", "x", "--out", "y"], None

    def import_module(name):
        raise error

    monkeypatch.setattr(cli, "import_module", import_module)
    error = ModuleNotFoundError("No module named 'optax.contrib'", name="optax.contrib")
    assert "pip install 'specjax[train]'" in fail(capsys, *argv)
    error = ModuleNotFoundError("No module named 'specjax.nothing'", name="specjax.nothing")
    with pytest.raises(ModuleNotFoundError):
        main(argv)
    error = KeyboardInterrupt()
    assert main(argv) == 130
    assert capsys.readouterr().err == "specjax: interrupted\n"


# --- demos ----------------------------------------------------------------------------------------


@pytest.fixture
def two_demos(tmp_path, monkeypatch):
    """Folders of two demo models: one inside the package, as in a wheel, and one next to it."""
    for root, name in ("inside", "demo-a"), ("beside", "demo-b"):
        (tmp_path / root / name).mkdir(parents=True)
        (tmp_path / root / name / "config.json").write_text("{}")
    monkeypatch.setattr(demo, "_ROOTS", (tmp_path / "inside", tmp_path / "beside", tmp_path / "no"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_demo_names_stand_for_their_folders(two_demos):
    assert resolve("demo-a") == resolve(Path("demo-a")) == two_demos / "inside" / "demo-a"
    assert resolve("demo-b") == two_demos / "beside" / "demo-b"
    refusal(lambda: resolve("demo-c"), "'demo-c'", "demo-a, demo-b")
    (two_demos / "demo-a").mkdir()  # a folder of the user's comes first
    assert resolve("demo-a") == Path("demo-a")


def test_a_demo_that_the_wheel_does_not_hold_is_named_with_its_package(two_demos, monkeypatch):
    refusal(lambda: resolve("demo-qwen3.5"), "demo-qwen3.5 is not", "./checkpoints")
    (folder := two_demos / "site/specjax_demos/demo-qwen3.5").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(two_demos / "site")
    assert resolve("demo-qwen3.5") == folder


def test_each_demo_is_in_the_wheel_or_in_the_package_of_the_others():
    root, held = Path(__file__).parents[2], {}
    for folder, place in (root, "specjax"), (root / "checkpoints", "specjax_demos"):
        built = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
        included = built["targets"]["wheel"]["force-include"].values()
        held[place] = {Path(one).name for one in included}
    assert held["specjax"] == {demo.TARGET, demo.DRAFTERS[demo.TARGET]["eagle3"]}
    assert held["specjax"] | held["specjax_demos"] == set(demo.NAMES)


def test_demo_names_work_wherever_a_model_is_named(two_demos, checkpoints, capsys):
    """Each call finds the demo's folder, and then fails because the demo's config is empty."""
    target = checkpoints.target(vocab_size=300).folder
    config = {"method": "eagle", "model": "demo-b", "num_speculative_tokens": 1}
    for load in (
        lambda: specjax.LLM("demo-a"),
        lambda: specjax.AsyncLLM(Path("demo-b")),
        lambda: RolloutEngine("demo-a"),
        lambda: open_model("demo-b").target,
    ):
        refusal(load, two_demos, "demo-", "model_type=None")
    refusal(lambda: specjax.LLM(target, speculative_config=config), two_demos, "demo-b")
    (two_demos / "t.jsonl").write_text('{"text": "a"}\n')
    for argv in (
        "generate --model demo-a hi",
        "info demo-b",
        "bench --model demo-a --drafter mtp --k 1",
        "train eagle1 --target demo-a --data t.jsonl --out out",
    ):
        assert "side/demo-" in fail(capsys, *argv.split())


# --- speculation and profiles ---------------------------------------------------------------------


def test_how_many_drafts_the_flags_ask_for():
    for flags, config in {
        "": {"num_speculative_tokens": 3},
        "--k 2": {"num_speculative_tokens": 2},
        "--adaptive": {"adaptive": True},
        "--adaptive --k 2": {"adaptive": True, "num_speculative_tokens": 2},
    }.items():
        argv = ["generate", "--drafter", "eagle3=org/head", *flags.split()]
        made = read_speculation(cli.build_parser().parse_args(argv), None)
        assert made == {"method": "eagle3", "model": "org/head"} | config


@pytest.mark.parametrize("model", [{}, {"model": None}])
def test_a_demo_has_a_drafter_by_default(model):
    config = json.dumps({"method": "eagle3", "num_speculative_tokens": 3, **model})
    argv = ["generate", "--speculative-config", config]
    made = read_speculation(cli.build_parser().parse_args(argv), "demo-llama")
    assert made is not None and made["model"] == "demo-llama-eagle3"


PROFILE = {
    "is_online": False,
    "batch_stats": {"1": {"0": 6.0, "2": 7.0}, "4": {"0": 7.0, "2": 14.0}},
    "max_num_speculative_tokens": 2,
    "acceptance_rate_per_pos": [0.5, 0.25],
}


@pytest.fixture
def profile(tmp_path):
    """The path of a profile."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    return path


def test_profile_show(capsys, profile):
    argv = ["profile", "show", str(profile)]
    assert main([*argv, "--batch-size", "4,3,1,4", "--json"]) == 0
    # A step of 3 requests: 6 + 2/3 without drafts, 7 + 2/3 * 7 with two, and K = 1 half-way.
    expected = {
        "1": {"0": 6.0, "1": 6.5 / 1.5, "2": 4.0},
        "3": {"0": 20 / 3, "1": (20 + 35) / 6 / 1.5, "2": 35 / 3 / 1.75},
        "4": {"0": 7.0, "1": 7.0, "2": 8.0},
    }
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == ["tpot_ms", "best_k"] and shown["best_k"] == {"1": 2, "3": 1, "4": 0}
    assert shown["tpot_ms"] == {batch: pytest.approx(row) for batch, row in expected.items()}
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert [line.split() for line in text.splitlines()[2:5]] == [
        ["batch", "K=0", "K=1", "K=2", "best"],
        ["1", "6.00", "~4.33", "4.00*", "K=2"],
        ["4", "7.00*", "~7.00", "8.00", "K=0"],
    ]
    assert "~ is an estimate" in text
    assert "measured on: unknown" in text and text.isascii()
    assert main([*argv, "--batch-size", "1,256"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[4].split() == ["256", "~7.00", "~7.00", "~8.00", "~K=0"]
    assert "profiled from 1 to 4" in text
    profile.write_text(json.dumps(PROFILE | {"measured": {"model": "ab12", "sizes": [1, 2]}}))
    assert main(argv) == 0
    assert "measured on: model ab12, sizes [1, 2]" in capsys.readouterr().out


@pytest.mark.slow
def test_profiles_are_shown_and_simulated_without_jax(profile):
    code = (
        "import sys\nfrom specjax.cli import main\n"
        "assert main(['profile', 'show', sys.argv[1]]) == 0\n"
        "argv = ['bench', 'simulate', '--profile', sys.argv[1], '--policy', 'table']\n"
        "assert main([*argv, '--seeds', '1', '--requests', '2']) == 0\n"
        "assert not {'jax', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(profile)], check=True, capture_output=True)
