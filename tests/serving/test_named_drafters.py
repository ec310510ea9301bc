"""The notation for drafters, and the drafting method of a checkpoint."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.refusals import refusal

from specjax import LLM
from specjax.methods import OWN_SHAPE
from specjax.serving.drafters import find_method, parse_drafter

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target()


PUBLISHED = dict.fromkeys(("DFlash", "DFlash2", "DSpark"), "dflash")
PUBLISHED |= {"EAGLE3": "eagle3", "P-EAGLE": "p_eagle", "Medusa": "medusa"}
SHIPPED = {f"demo-llama-{name}": name for name in ("eagle3", "dflash")}
SHIPPED |= {"demo-llama-eagle1": "eagle", "demo-llama": "draft_model", "demo-qwen3.5": "mtp"}


def test_the_method_is_that_of_the_checkpoint(checkpoints, target, tmp_path):
    """For published configs, for demos, and for heads whose method only the weights show."""
    for name, method in PUBLISHED.items():
        assert find_method(CONFIGS / "drafters" / f"Llama-3.1-8B-{name}") == method, name
    for name, method in SHIPPED.items():
        assert find_method(name, "demo-qwen3.5") == method, name
    assert find_method("demo-qwen3.5", "demo-llama") == "draft_model"
    plain = json.loads((target.folder / "config.json").read_text())
    for method in "eagle", "eagle3", "p_eagle":
        folder = tmp_path / method
        shutil.copytree(getattr(checkpoints, method)(target).folder, folder)
        (folder / "config.json").write_text(json.dumps(plain))  # names no kind of head
        assert find_method(folder) == method
    (folder / "config.json").write_text('{"model_type": "olmo3"}')
    (folder / "model.safetensors").unlink()
    refusal(lambda: find_method(folder), str(folder), "name it, as in eagle3=")


HEAD = "demo-llama-dflash"
NAMED = [
    (HEAD, {}, ("dflash", HEAD)),
    (f"dflash={HEAD}", {}, ("dflash", HEAD)),
    (HEAD, {"method": "dflash"}, ("dflash", HEAD)),
    (f"dflash={HEAD}", {"method": "dflash"}, ("dflash", HEAD)),
    ("mtp", {}, ("mtp", None)),
    ("ngram", {}, ("ngram", None)),
    ("eagle", {"takes_shapes": True}, ("eagle", OWN_SHAPE)),
    ("eagle", {}, ["--drafter eagle", "lacks a checkpoint", "eagle=CHECKPOINT"]),
    ("eagle3=", {}, ["lacks a checkpoint", "eagle3=CHECKPOINT"]),
    ("egle3=x", {}, ["'egle3' is not a method", "ngram", "did you mean 'eagle3'"]),
    (f"eagle3={HEAD}", {"method": "dflash"}, ["eagle3=", "'dflash'", "leave one out"]),
    ("none", {}, ["--drafter none", "no such folder", "demo-llama"]),
    ("egle3", {}, ["no such folder", "did you mean 'eagle3'"]),
]


@pytest.mark.parametrize("text, options, expected", NAMED, ids=str)
def test_one_notation(text, options, expected):
    if isinstance(expected, tuple):
        assert parse_drafter(text, **options) == expected
    else:
        refusal(lambda: parse_drafter(text, **options), *expected)


def test_a_path_may_have_the_sign_of_the_notation(tmp_path, checkpoints, target):
    folder = tmp_path / "rate=0.1"
    shutil.copytree(checkpoints.eagle3(target).folder, folder)
    assert parse_drafter(str(folder)) == ("eagle3", str(folder))
    assert parse_drafter(f"eagle={folder}") == ("eagle", str(folder))


def test_engines_find_the_method_as_well(monkeypatch):
    """As in vLLM, a config may omit the method. The weights are not read."""
    make_plan = Mock(side_effect=InterruptedError)
    monkeypatch.setattr("specjax.serving.assembly.make_plan", make_plan)
    with pytest.raises(InterruptedError):
        LLM("demo-llama", speculative_config={"model": HEAD, "num_speculative_tokens": 3})
    assert make_plan.call_args.kwargs["speculative_config"].method == "dflash"
