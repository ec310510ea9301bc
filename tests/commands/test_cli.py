"""The command line: help without JAX, errors as one line, and what the commands print."""

import json
import re
import subprocess
import sys
import tomllib
import types
from functools import partial
from pathlib import Path

import pytest
from support.engines import SIZES, K, simulated_engines
from support.refusals import refusal
from support.scripts import TextScript
from support.texts import letters_folder

import specjax
from specjax import LLM, cli
from specjax.checkpoint import demo
from specjax.checkpoint.hub import resolve
from specjax.cli import main
from specjax.commands.speculation import read_speculation
from specjax.rl import RolloutEngine
from specjax.serving.source import open_model
from specjax.train.data import CHAT_TEMPLATE, train_tokenizer

VOCAB = 300
SMALL = [
    *("--max-model-len", "64", "--max-num-batched-tokens", "32", "--max-num-seqs", "1"),
    *("--max-tokens", "4"),
]


@pytest.fixture
def simulated():
    """Engines on a simulated device, which give the same with any drafter."""
    with simulated_engines(TextScript(VOCAB)):
        yield


@pytest.fixture
def same_sizes(monkeypatch):
    """Engines on the real device, of the sizes that other tests have compiled."""
    make = partial(LLM, **{name: SIZES[name] for name in ("decode_batches", "prefill_shapes")})
    monkeypatch.setattr("specjax.commands.generate.LLM", make)


@pytest.fixture(scope="module")
def target(checkpoints):
    """A tiny target without a tokenizer."""
    return checkpoints.target(vocab_size=VOCAB)


@pytest.fixture(scope="module")
def speaking(checkpoints, target):
    """The folder of the same target with a tokenizer and a chat template."""
    folder = checkpoints.copy(target.folder)
    tokenizer = train_tokenizer(["What is two and two? It is four. " * 3], VOCAB)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def drafter(checkpoints, target):
    """The folder of an EAGLE-3 head for the target."""
    return str(checkpoints.eagle3(target).folder)


def fail(capsys, *argv):
    """Run a command that must fail, and give its message."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("specjax: error: ") and captured.err.count("\n") == 1
    assert not captured.out
    return captured.err


HELPED = [
    *([], ["generate"], ["bench"], ["bench", "simulate"], ["profile"], ["profile", "show"]),
    *(["train"], ["info"]),
]


@pytest.mark.parametrize("command", HELPED)
def test_help_is_instant_and_without_jax(command):
    code = (
        "import sys, time, specjax.cli\n"
        "try: specjax.cli.main(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = sorted({'jax', 'numpy', 'rich', 'matplotlib'} & set(sys.modules))\n"
        "print(heavy, time.process_time(), sep='|', file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: specjax")
    # Time on the processor, as the machine may be busy with other tests.
    heavy, seconds = done.stderr.split("|")
    assert heavy == "[]" and float(seconds) < 0.5


def test_the_package_imports_lazily_but_completely():
    second = {"StructuredOutputsParams": "StructuredOutputs"}  # names of things that have another
    for name in specjax.__all__:
        assert getattr(specjax, name).__name__ == second.get(name, name) and name in dir(specjax)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = specjax.Nothing


def test_unknown_commands_and_options_exit_with_2(capsys):
    for argv in ["dance"], ["bench", "--fast"], []:
        with pytest.raises(SystemExit) as end:
            main(argv)
        assert end.value.code == 2 and "specjax" in capsys.readouterr().err


@pytest.fixture
def two_demos(tmp_path, monkeypatch):
    """Folders of demos beside the package and inside it, as in a wheel."""
    for root, name in ("inside", "demo-a"), ("beside", "demo-b"):
        (tmp_path / root / name).mkdir(parents=True)
        (tmp_path / root / name / "config.json").write_text("{}")
    monkeypatch.setattr(demo, "_ROOTS", (tmp_path / "inside", tmp_path / "beside", tmp_path / "no"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_demo_names_stand_for_their_folders(two_demos):
    assert resolve("demo-a") == resolve(Path("demo-a")) == two_demos / "inside" / "demo-a"
    assert resolve("demo-b") == two_demos / "beside" / "demo-b"
    with pytest.raises(specjax.CheckpointError, match="'demo-c'; pass.* a demo: demo-a, demo-b"):
        resolve("demo-c")
    (two_demos / "demo-a").mkdir()  # a folder of the user's comes first
    assert resolve("demo-a") == Path("demo-a")


def test_a_demo_that_the_wheel_does_not_hold_is_named_with_its_package(two_demos, monkeypatch):
    with pytest.raises(specjax.CheckpointError, match=r"demo-qwen3.5 is not .* ./checkpoints"):
        resolve("demo-qwen3.5")
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


def test_demo_names_work_wherever_a_model_is_named(two_demos, target, capsys):
    """Each gets as far as the demo's config, which is empty."""
    loads = [
        lambda: specjax.LLM("demo-a"),
        lambda: specjax.AsyncLLM(Path("demo-b")),
        lambda: RolloutEngine("demo-a"),
        lambda: specjax.LLM(
            target.folder,
            speculative_config={"method": "eagle", "model": "demo-b", "num_speculative_tokens": 1},
            verbose=False,
        ),
        lambda: open_model("demo-b").target,
    ]
    for load in loads:
        refusal(load, two_demos, "demo-", "no weights" if load is loads[3] else "model_type=None")
    (two_demos / "t.jsonl").write_text('{"text": "a"}\n')
    train = ["train", "eagle1", "--target", "demo-a", "--data", "t.jsonl", "--out", "out"]
    for argv in (
        ["generate", "--model", "demo-a", "hi"],
        ["info", "demo-b"],
        ["bench", "--model", "demo-a", "--drafter", "mtp", "--k", "1"],
        train,
    ):
        assert "error" in (message := fail(capsys, *argv)) and "side/demo-" in message


def test_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"specjax {specjax.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", specjax.__version__)


def test_bad_checkpoints_are_one_clear_line(capsys, tmp_path, target, checkpoints):
    assert "no such folder" in fail(capsys, "generate", "--model", str(tmp_path / "x"), "hi")
    assert "config.json cannot be read" in fail(capsys, "info", str(tmp_path))
    assert "or a demo: demo-llama, " in fail(capsys, "info", "demo-nothing")
    other = checkpoints.eagle3(checkpoints.target(hidden_size=64))
    message = fail(capsys, "info", str(target.folder), "--drafter", str(other.folder))
    assert "vocab" in message


def test_bad_arguments_are_one_clear_line(capsys, speaking, drafter, tmp_path):
    generate = ["generate", "--model", speaking, *SMALL]
    assert "no prompts; give some" in fail(capsys, *generate)
    assert "--prompts-file" in fail(capsys, *generate, "--prompts-file", str(tmp_path / "none"))
    assert "max_tokens=0" in fail(capsys, *generate, "hi", "--max-tokens", "0")
    assert "--k goes with --drafter" in fail(capsys, *generate, "hi", "--k", "2")
    assert "--adaptive goes with --drafter" in fail(capsys, *generate, "hi", "--adaptive")
    one = ["--speculative-config", "{}"]
    assert "leave out --drafter" in fail(capsys, *generate, "hi", *one, "--drafter", drafter)
    assert "leave out --adaptive" in fail(capsys, *generate, "hi", *one, "--adaptive")
    assert "speculative_config lacks" in fail(
        capsys, *generate, "hi", *one[:1], '{"method": "eagle"}'
    )
    assert "is not JSON" in fail(capsys, *generate, "hi", *one[:1], "{")
    assert "must be a JSON object" in fail(capsys, *generate, "hi", *one[:1], "[]")
    bad_k = ["--drafter", drafter, "--k", "0"]
    assert "num_speculative_tokens=0" in fail(capsys, *generate, "hi", *bad_k)
    assert "exceeds the 512 positions" in fail(capsys, "info", speaking, "--max-model-len", "9999")
    assert "max_model_len=0" in fail(capsys, "info", speaking, "--max-model-len", "0")


@pytest.mark.parametrize(
    "flags, config",
    [
        ([], {"num_speculative_tokens": 3}),
        (["--k", "2"], {"num_speculative_tokens": 2}),
        (["--adaptive"], {"adaptive": True}),
        (["--adaptive", "--k", "2"], {"adaptive": True, "num_speculative_tokens": 2}),
    ],
    ids=str,
)
def test_how_many_drafts_the_flags_ask_for(flags, config):
    args = cli.build_parser().parse_args(["generate", "--drafter", "eagle3=org/head", *flags])
    made = read_speculation(args, None)
    assert made == {"method": "eagle3", "model": "org/head"} | config
    most = config.get("num_speculative_tokens", 5)
    assert specjax.SpeculativeConfig.of(made).num_speculative_tokens == most


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
        "tpot_ms": {
            "1": {"0": 6.0, "1": 6.5 / 1.5, "2": 4.0},
            "3": {"0": 20 / 3, "1": (20 + 35) / 6 / 1.5, "2": 35 / 3 / 1.75},
            "4": {"0": 7.0, "1": 7.0, "2": 8.0},
        },
        "best_k": {"1": 2, "3": 1, "4": 0},
    }
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == list(expected) and shown["best_k"] == expected["best_k"]
    for batch, row in expected["tpot_ms"].items():
        assert shown["tpot_ms"].pop(batch) == pytest.approx(row)
    assert not shown["tpot_ms"]
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
    assert "profiled from 1 to 4; other sizes show the nearest" in text
    profile.write_text(json.dumps(PROFILE | {"measured": {"model": "ab12", "sizes": [1, 2]}}))
    assert main(argv) == 0
    assert "measured on: model ab12, sizes [1, 2]" in capsys.readouterr().out


def test_bad_arguments_of_profile_show(capsys, profile):
    argv = ["profile", "show", str(profile)]
    for sizes in ",", "1,", "x", "1.5":
        error = fail(capsys, *argv, "--batch-size", sizes)
        assert f"--batch-size {sizes} must list integers" in error
    for sizes in "0", "-1,4":
        error = fail(capsys, *argv, f"--batch-size={sizes}")
        assert f"--batch-size {sizes} must list integers of at least 1" in error
    assert "cannot be read as a profile" in fail(capsys, "profile", "show", f"{profile}.none")
    profile.write_text(json.dumps(PROFILE | {"batch_stats": {"1": {"0": -1}}}))
    assert 'batch_stats["1"]["0"]=-1' in fail(capsys, *argv)
    with pytest.raises(SystemExit) as end:
        main(["profile", "show"])
    assert end.value.code == 2 and "FILE" in capsys.readouterr().err


def test_options_before_a_subcommand_are_refused(capsys):
    argv = ["simulate", "--profile", "x", "--policy", "table"]
    assert "--seed precedes simulate" in fail(capsys, "bench", "--seed", "3", *argv)
    assert "--json precedes simulate" in fail(capsys, "bench", "--json", *argv)


def test_profiles_are_shown_and_simulated_without_jax(profile):
    code = (
        "import sys\nfrom specjax.cli import main\n"
        "assert main(['profile', 'show', sys.argv[1]]) == 0\n"
        "argv = ['bench', 'simulate', '--profile', sys.argv[1], '--policy', 'table']\n"
        "assert main([*argv, '--seeds', '1', '--requests', '2']) == 0\n"
        "assert not {'jax', 'numpy', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(profile)], check=True, capture_output=True)


@pytest.mark.parametrize(
    "row, message",
    [
        ("{", "is not JSON"),
        ("3", "a row needs one of prompt, question, prompt_token_ids"),
        ('{"text": "hi"}', "a row needs one of"),
        ('{"prompt": 3}', "prompt must be a str, got 3"),
        ('{"prompt_token_ids": "3"}', "prompt_token_ids must be a list"),
    ],
)
def test_bad_rows_of_prompts_are_named(capsys, tmp_path, speaking, row, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hi"}\n\n' + row + "\n")
    error = fail(capsys, "generate", "--model", speaking, "--prompts-file", str(file))
    assert f"{file}:3" in error and message in error


def test_a_missing_training_package_names_the_extra(capsys, monkeypatch):
    def import_module(name):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(cli, "import_module", import_module)
    argv = ["train", "target", "--data", "x", "--out", "y"]
    missing = "optax.contrib"
    assert "pip install 'specjax[train]'" in fail(capsys, *argv)
    missing = "specjax.nothing"
    with pytest.raises(ModuleNotFoundError):
        main(argv)


def test_an_interrupt_is_not_a_traceback(capsys, monkeypatch):
    def run(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", lambda name: types.SimpleNamespace(run=run))
    assert main(["info", "x"]) == 130
    assert capsys.readouterr().err == "specjax: interrupted\n"


@pytest.mark.usefixtures("simulated")
def test_generate_with_a_drafter(capsys, tmp_path, speaking, drafter):
    file = tmp_path / "prompts.txt"
    file.write_text("What is two?\n\nIt is four.\n")
    argv = ["generate", "--model", speaking, "--prompts-file", str(file), *SMALL, "--json"]
    plain = generate(capsys, *argv)
    drafted = generate(capsys, *argv, "--drafter", drafter, "--k", "2")
    assert drafted["outputs"] == plain["outputs"]
    assert [output["prompt"] for output in plain["outputs"]] == ["What is two?", "It is four."]
    assert all(len(output["token_ids"]) == 4 for output in plain["outputs"])
    assert plain["metrics"]["num_drafts"] == 0 < drafted["metrics"]["num_drafts"]
    text = {"method": "eagle3", "model": drafter, "num_speculative_tokens": 2}
    config = generate(capsys, *argv, "--speculative-config", json.dumps(text))
    assert config["outputs"] == plain["outputs"]


def generate(capsys, *argv):
    """The outputs that a command prints, in the order of prompts, and its metrics."""
    assert main(argv) == 0
    *outputs, last = map(json.loads, capsys.readouterr().out.splitlines())
    return {"outputs": sorted(outputs, key=lambda one: one["request_id"]), **last}


@pytest.mark.usefixtures("same_sizes")
def test_generate_is_the_same_with_a_drafter(capsys, tmp_path, checkpoints):
    """On the real device."""
    file = tmp_path / "prompts.txt"
    file.write_text("What is two?\n\nIt is four.\n")
    sizes = ["--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
    argv = ["generate", "--model", str(letters_folder(checkpoints)), "--prompts-file", str(file)]
    argv += [*sizes, "--page-size", str(SIZES["page_size"]), "--max-tokens", "24", "--json"]
    plain = generate(capsys, *argv)
    text = json.dumps({"method": "ngram", "num_speculative_tokens": K})
    drafted = generate(capsys, *argv, "--speculative-config", text)
    assert drafted["outputs"] == plain["outputs"]
    assert plain["metrics"]["num_drafts"] == 0 < drafted["metrics"]["num_drafts"]


@pytest.mark.usefixtures("simulated")
def test_generate_takes_any_sampling_params(capsys, speaking, monkeypatch):
    argv = ["generate", "--model", speaking, *SMALL, "--temperature", "1", "What is two?"]
    text = {"n": 2, "seed": 3, "top_p": 0.9, "logit_bias": {"5": 100.0}, "logprobs": 0}
    given, make = [], LLM.generate_stream
    monkeypatch.setattr(LLM, "generate_stream", lambda *a, **b: given.append(a[2]) or make(*a, **b))
    first, second = generate(capsys, *argv, "--sampling-params", json.dumps(text), "--json")[
        "outputs"
    ]
    expected = {"temperature": 1.0, "max_tokens": 4} | text | {"logit_bias": {5: 100.0}}
    assert {name: getattr(given[0], name) for name in expected} == expected
    assert (first["index"], second["index"]) == (0, 1) and first["prompt"] == second["prompt"]
    for one in first, second:
        assert [list(entry) for entry in one["logprobs"]] == [[str(t)] for t in one["token_ids"]]
    assert main([*argv, "--sampling-params", json.dumps(text)]) == 0
    assert len(capsys.readouterr().out.split("\n--\n")) == 2
    for bad, message in ("{", "is not JSON"), ('{"top": 1}', "unknown keys ['top']"):
        assert message in fail(capsys, *argv, "--sampling-params", bad)
    assert "top_p=2" in fail(capsys, *argv, "--sampling-params", '{"top_p": 2}')


@pytest.mark.slow
def test_generate_obeys_sampling_params(capsys, speaking):
    """On the real device."""
    argv = ["generate", "--model", speaking, *SMALL, "--temperature", "1", "What is two?"]
    text = {"n": 2, "seed": 3, "top_p": 0.9, "logit_bias": {"5": 100.0}, "logprobs": 0}
    first, second = generate(capsys, *argv, "--sampling-params", json.dumps(text), "--json")[
        "outputs"
    ]
    assert set(first["token_ids"]) == {5} and first["prompt"] == second["prompt"]
    assert [list(one) for one in first["logprobs"]] == [["5"]] * len(first["token_ids"])


@pytest.mark.usefixtures("simulated")
def test_generate_prints_text(capsys, speaking):
    argv = ["generate", "--model", speaking, *SMALL, "--chat", "What is two?"]
    [output] = generate(capsys, *argv, "--json")["outputs"]
    assert main(argv) == 0
    assert capsys.readouterr().out == output["text"].strip() + "\n"
    assert main([*argv, "And four?"]) == 0
    assert "> What is two?\n" in (printed := capsys.readouterr().out) and "> And four?" in printed


@pytest.mark.usefixtures("simulated")
def test_generate_takes_token_ids_without_a_tokenizer(capsys, tmp_path, target):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    argv = ["generate", "--model", str(target.folder), "--prompts-file", str(file), *SMALL]
    assert main(argv) == 0
    assert len(capsys.readouterr().out.split()) == 4
    assert "--chat needs prompts of text" in fail(capsys, *argv, "--chat")
    assert "the checkpoint has no tokenizer" in fail(
        capsys, "generate", "--model", str(target.folder), *SMALL, "hi"
    )


def own_module_options(checkpoints, tmp_path):
    made = checkpoints.mtp(checkpoints.target("qwen3_5_text"))
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    return ["generate", "--model", str(made.folder), "--prompts-file", str(file), *SMALL, "--json"]


def assert_drafts(capsys, argv):
    plain = generate(capsys, *argv)
    drafted = generate(capsys, *argv, "--method", "mtp", "--k", "2")
    assert drafted["outputs"] == plain["outputs"]
    assert plain["metrics"]["num_drafts"] == 0 < drafted["metrics"]["num_drafts"]


@pytest.mark.usefixtures("simulated")
def test_generate_drafts_with_the_models_own_module(capsys, tmp_path, checkpoints):
    argv = own_module_options(checkpoints, tmp_path)
    assert_drafts(capsys, argv)
    assert "eagle lacks a checkpoint" in fail(capsys, *argv, "--method", "eagle")


@pytest.mark.slow
def test_the_models_own_module_changes_nothing(capsys, tmp_path, checkpoints):
    """On the real device."""
    assert_drafts(capsys, own_module_options(checkpoints, tmp_path))
