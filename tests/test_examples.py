"""The examples, and the code in the documentation. Parts of GRPO are compared with loops."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import optax
import pytest
from support.params import random_params
from support.rollouts import made_rollout
from support.weights import rewrite

from specjax.checkpoint.demo import demo_folder
from specjax.rl import RolloutBatch
from specjax.train.target import demo_llama

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES, PROGRAMS = ROOT / "examples", ROOT / ".cache" / "examples"
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
VOCAB = 96
NAMES = "arithmetic", "grpo", "imitation", "grpo_plot", "grpo_engines", "grpo_arithmetic"


# Scripts that take no options, and what they are bound to print.
PRINTED = {
    "offline_batch": "the same text: True",
    "chat": "prompt tokens cached",
    "streaming": "acceptance length",
    "structured_output": "parsed  {'name': ",
    "train_drafter": "after  40 training steps",
}


def python_of(page: str, kinds: str = "python") -> str:
    """Return the Python code of a page as one script.

    Blocks that need more than a CPU are marked `py`.
    """
    blocks = rf"^```(?:{kinds})\n(.*?)^```"
    return "".join(re.findall(blocks, (ROOT / page).read_text(), re.S | re.M))


@pytest.mark.parametrize("page", PAGES)
def test_python_on_pages_is_python(page):
    compile(python_of(page, "python|py"), page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.fixture(scope="module")
def examples() -> Iterator[dict[str, ModuleType]]:
    """The modules of the examples, which can import each other."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    """A model of two layers, and random parameters."""
    model = demo_llama(VOCAB, 2, 64)
    return model, random_params(model.specs(), 0)


@pytest.fixture(scope="module")
def logprobs_of(examples, tiny) -> Callable[..., np.ndarray]:
    """Return a function that calls `token_logprobs` with rows padded to one shape."""
    compiled = jax.jit(examples["grpo"].token_logprobs, static_argnums=0)

    def run(params, tokens):
        count, width = tokens.shape
        padded = np.zeros((VOCAB, 5), np.int32)
        padded[:count, :width] = tokens
        return np.asarray(compiled(tiny[0], params, padded))[:count, : width - 1]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, expected",
    [
        (" 7+5=12\n4+1=5\n#### 52", 1),
        ("#### 52", 1),  # how it gets there is not judged
        (" 7+5=12\n4+1=5\n#### 53", 0),
        (" 7+5=12\n4+1=5\n#### 5", 0),
        (" 7+5=12\n4+1=5\n#### 520", 0),
        (" 7+5=12\n4+1=52", 0),
        ("#### 52\n#### 53", 0),  # the last counts
        ("#### -52", 0),
        ("#### ", 0),
        ("", 0),
    ],
)
def test_only_the_last_result_is_judged(examples, text, expected):
    arithmetic = examples["arithmetic"]
    assert arithmetic.reward(arithmetic.Question(47, 5), text) == expected


def test_worked_answers_are_right_and_no_question_is_on_both_sides(examples):
    arithmetic = examples["arithmetic"]
    train, held_out = arithmetic.split_questions(3, 64)
    assert len(held_out) == 64 and len({*train, *held_out}) == arithmetic.NUM_QUESTIONS == 360
    assert arithmetic.split_questions(3, 64) == (train, held_out)
    for question in train:
        first, second, _ = question.worked().split("\n")
        for sum_ in first, second:
            left, right = sum_.split("=")
            assert sum(map(int, left.split("+"))) == int(right)
        rewards = [arithmetic.reward(question, question.worked(slip)) for slip in (-1, 0, 1)]
        assert rewards == [0, 1, 0]


def test_advantages_compare_answers_to_the_same_question(examples):
    rewards = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], np.float32)
    found = examples["grpo"].advantages(rewards)
    for row, group in zip(found, rewards.tolist(), strict=True):
        mean = sum(group) / 4
        deviation = (sum((r - mean) ** 2 for r in group) / 4) ** 0.5
        expected = [(r - mean) / deviation if deviation else 0 for r in group]
        np.testing.assert_allclose(row, expected, rtol=1e-5)


def rollouts_of(*samples, prompts=None):
    """Return a batch of rollouts, given pairs (tokens, log-probabilities)."""
    return RolloutBatch(
        made_rollout(prompts[i] if prompts else [1], *sample, sample_index=i)
        for i, sample in enumerate(samples)
    )


def test_rows_hold_each_prompt_and_its_output(examples):
    prompts, outputs = [[5, 6, 7], [8], [9, 10]], [[1], [2, 3, 4], [5, 5]]
    logprobs = [[-0.1], [-0.2, -0.3, -0.4], [-0.5, -0.6]]
    batch = rollouts_of(*zip(outputs, logprobs, strict=True), prompts=prompts)
    advantages = np.arange(3, dtype=np.float32)
    rows = examples["grpo"].training_rows(batch.padded(99, length=4), advantages)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        start, stop = len(prompt), len(prompt) + len(output)
        assert rows.tokens[i].tolist() == [*prompt, *output, *[99] * (7 - stop)]
        # Column t of mask and behaviour belongs to token t + 1.
        assert np.flatnonzero(rows.mask[i]).tolist() == list(range(start - 1, stop - 1))
        np.testing.assert_allclose(rows.behaviour[i, start - 1 : stop - 1], logprobs[i])
        assert rows.behaviour[i].sum() == pytest.approx(sum(logprobs[i]))
    assert rows.advantages is advantages


def brute_force_loss(logprobs, rows, clip):
    """Return the negative mean, over tokens, of the smaller of plain and clipped objective."""
    total = count = 0.0
    for i, t in np.ndindex(*logprobs.shape):
        if not rows.mask[i, t]:
            continue
        ratio = np.exp(float(logprobs[i, t]) - float(rows.behaviour[i, t]))
        advantage = float(rows.advantages[i])
        if advantage > 0:
            total += min(ratio, 1 + clip) * advantage
        else:
            total += max(ratio, 1 - clip) * advantage
        count += 1
    return -total / count


def random_rows(examples, seed):
    rng = np.random.default_rng(seed)
    mask = (rng.random((5, 9)) < 0.6).astype(np.float32)
    behaviour = rng.normal(-1, 0.5, (5, 9)).astype(np.float32)
    tokens = rng.integers(0, 50, (5, 10)).astype(np.int32)
    rows = examples["grpo"].Rows(tokens, mask, behaviour * mask, rng.normal(size=5))
    return rows, (behaviour + rng.normal(0, 0.3, (5, 9))).astype(np.float32)


def test_losses_are_the_clipped_surrogate_and_the_cross_entropy(examples):
    """Values outside of the mask do not count."""
    losses = [jax.jit(examples["grpo"].grpo_loss), jax.jit(examples["grpo"].imitation_loss)]
    for seed in range(5):
        rows, logprobs = random_rows(examples, seed)
        logprobs = np.where(rows.mask > 0, logprobs, np.float32(-100))
        expected = brute_force_loss(logprobs, rows, 0.2), -logprobs[rows.mask > 0].mean()
        assert [float(loss(logprobs, rows)) for loss in losses] == pytest.approx(expected, rel=1e-5)


def test_log_probabilities_are_the_model_s(logprobs_of, tiny):
    params = tiny[1]
    tokens = np.array([[0, 23, 27, 80, 11], [0, 21, 24, 46, 22]], np.int32)
    found = logprobs_of(params, tokens)
    np.testing.assert_allclose(found[1:], logprobs_of(params, tokens[1:]), 1e-4)
    np.testing.assert_allclose(found[:, :2], logprobs_of(params, tokens[:, :3]), 1e-4)
    every = np.array([[*tokens[0, :4], token] for token in range(VOCAB)], np.int32)
    last = logprobs_of(params, every)[:, -1]
    assert np.exp(last).sum() == pytest.approx(1, rel=1e-4)  # of all that may come next


@pytest.mark.slow
def test_updates_raise_what_was_good_and_leave_the_given_arrays_alone(examples, tiny, logprobs_of):
    grpo, (model, params) = examples["grpo"], tiny
    tokens = np.array([[0, 23, 27, 80, 11], [0, 23, 27, 24, 21]], np.int32)
    mask = np.array([[0, 0, 1, 1]] * 2, np.float32)
    before = logprobs_of(params, tokens)
    rows = grpo.Rows(tokens, mask, before * mask, np.array([1, -1], np.float32))
    optimizer = optax.sgd(1e-2)
    update = grpo.make_update(model, optimizer, grpo.grpo_loss)
    learner, loss = update(grpo.begin(params, optimizer), rows)
    assert float(loss) == pytest.approx(0, abs=1e-4)  # ratios of 1, advantages that cancel
    better, worse = ((logprobs_of(learner.params, tokens) - before) * mask).sum(axis=1)
    assert better > 0 > worse
    np.testing.assert_array_equal(logprobs_of(params, tokens), before)  # not donated


def test_only_the_same_rollouts_pass(examples):
    compare, last = examples["grpo_engines"].compare, ([3], [-2])
    plain = rollouts_of(([1, 2], [-0.5, -1]), last)
    assert compare(plain, plain) == 0
    close = rollouts_of(([1, 2], [-0.5, -1.00005]), last)
    assert compare(close, plain) == pytest.approx(5e-5, rel=1e-2)
    with pytest.raises(RuntimeError, match="log-probabilities differ"):
        compare(rollouts_of(([1, 2], [-0.5, -1.001]), last), plain)
    for tokens in [1, 3], [1], [1, 2, 2]:
        with pytest.raises(RuntimeError, match="changed a rollout"):
            compare(rollouts_of((tokens, [-0.5] * len(tokens)), last), plain)


@pytest.mark.parametrize(
    "options, reason",
    [
        ("--steps 0", "must be positive"),
        ("--samples 1", "samples=1 must be 2"),
        ("--minibatches 3", "must divide"),
        ("--held-out 355", "lower it"),
    ],
)
def test_settings_that_cannot_be_are_refused(examples, tmp_path, capsys, options, reason):
    with pytest.raises(SystemExit):
        examples["grpo_arithmetic"].main([*options.split(), "--output", str(tmp_path)])
    assert reason in capsys.readouterr().err


@pytest.fixture(scope="module")
def shallow(checkpoints) -> dict[str, str]:
    """Return folders by demo name, with copies whose target has three of the twelve layers.

    A program is faster to compile for fewer layers. The examples do not depend on their number.
    """
    target = checkpoints.copy(demo_folder("demo-llama"), num_hidden_layers=3)
    deep = re.compile(r"model\.layers\.(?![012]\.)")
    rewrite(
        target / "model.safetensors",
        lambda tensors: {name: x for name, x in tensors.items() if not deep.match(name)},
    )
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    head = checkpoints.copy(demo_folder("demo-llama-eagle3"), **layers)
    return {"demo-llama": str(target), "demo-llama-eagle3": str(head)}


@pytest.fixture(scope="module")
def scripts(shallow, tmp_path_factory) -> Path:
    """Return a folder with copies of the examples that name the folders of `shallow`."""
    folder = tmp_path_factory.mktemp("examples")
    for script in EXAMPLES.glob("*.py"):
        text = re.sub(r"demo-llama(-eagle3)?\b", lambda name: shallow[name[0]], script.read_text())
        (folder / script.name).write_text(text)
    return folder


def run_script(script: Path, folder: Path | None = None, options: Sequence[str] = ()) -> str:
    """Run a script in `folder`, and return its printed text.

    The script's programs are compiled without optimisation, which takes less time.
    """
    own = {"JAX_COMPILATION_CACHE_DIR": str(PROGRAMS), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    result = subprocess.run(
        [sys.executable, str(script), *options],
        cwd=folder,
        env=os.environ | own,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("name", PRINTED)
def test_scripts_run_and_print(scripts, name):
    assert PRINTED[name] in run_script(scripts / f"{name}.py")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page == "README.md" else pytest.mark.nightly)
        for page in PAGES
        if python_of(page)
    ],
    ids=str,
)
def test_python_on_pages_runs(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text(python_of(page))
    assert run_script(script, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_of_pages_lead_to_files(page):
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text())
    missing = [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()]
    assert not missing


@pytest.mark.nightly
def test_a_small_run_of_grpo(examples, shallow, tmp_path, capsys, monkeypatch):
    for name in "TARGET", "DRAFTER":
        demo = getattr(examples["grpo_engines"], name)
        monkeypatch.setattr(examples["grpo_engines"], name, shallow[demo])
    options = "--steps 2 --questions 2 --samples 2 --imitation-steps 2 --refit-every 1"
    options += " --refit-steps 2 --held-out 4 --output"
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        examples["grpo_arithmetic"].main([*options.split(), str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [step["number"] for step in results["steps"]] == [1, 2]
    assert all(0 <= step["reward"] <= 1 for step in results["steps"])
    # The run raises where rollouts are not the same; this says that it has compared them.
    assert all(0 <= step["logprob_difference"] <= 1e-4 for step in results["steps"])
    assert len(results["moments"]) == 5
    told = capsys.readouterr().out
    for line in "engines built in", "imitating ", "refitting the drafter", "after a refit":
        assert line in told, "minutes without a line"


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["folder", "wire"])
def test_a_trainer_in_another_process_updates_a_server(scripts, transport):
    """The example raises an error if an answer does not come from the weights it has just sent."""
    options = ["--steps", "2", "--questions", "2", "--samples", "2", "--imitation-steps", "2"]
    options += ["--held-out", "2", "--transport", transport]
    told = run_script(scripts / "grpo_http.py", options=options)
    lines = [line.split() for line in told.splitlines()]
    steps = [line for line in lines if len(line) == 6 and line[0] in "12"]
    assert [step[0] for step in steps] == ["1", "2"]
    assert all(0 <= float(step[1]) <= 1 <= float(step[2]) for step in steps)
    assert lines[-1][-1] == "after"
