"""Weights that do not fit are refused by name, and rollouts go on as before; simulated."""

import math

import numpy as np
import pytest
import safetensors.numpy as safetensors
from support.engines import SIZES, simulated_engines
from support.refusals import label, refusal
from support.texts import letters_folder

from specjax import SamplingParams
from specjax.rl import RolloutEngine

NORM = "model.norm.weight"
PARAMS = SamplingParams(temperature=1.0, seed=1, max_tokens=5)


@pytest.fixture(scope="module")
def folder(checkpoints):
    return letters_folder(checkpoints)


@pytest.fixture(scope="module")
def weights(folder):
    return safetensors.load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def engine(folder):
    with simulated_engines(), RolloutEngine(folder, **SIZES) as engine:
        yield engine


def without_norms(weights):
    return {name: array for name, array in weights.items() if "norm" not in name}


BAD_WEIGHTS = [
    (without_norms, ["missing", NORM, "nothing was changed"]),
    (lambda w: w | {"extra": np.zeros(2, np.float32)}, ["unexpected", "extra", "nothing was"]),
    (lambda w: w | {NORM: np.zeros(3, np.float32)}, [NORM, "expected [32], found [3]"]),
    (lambda w: w | {NORM: np.zeros(32, np.int32)}, [NORM, "found int32"]),
    (lambda w: w | {NORM: np.full(32, math.nan, np.float32)}, ["NaN", NORM, "nothing was"]),
    (lambda w: w | {NORM: np.full(32, math.inf, np.float32)}, ["infinity", NORM]),
    (lambda w: w | {NORM: "x"}, [f"{NORM}='x'", "not an array"]),
    (lambda w: {}, ["missing", NORM]),
    (lambda w: None, ["weights must be a tree of arrays", "NoneType"]),
    (lambda w: 5, ["weights must be a tree of arrays", "int"]),
    (lambda w: "folder", ["weights must be a tree of arrays", "str"]),
    (lambda w: [1, 2], ["weights must be a tree of arrays", "int"]),
]
NAMES = "missing extra shape dtype nan infinity text none None number path list".split()
BAD_ARGUMENTS = [
    ({"version": 0}, ["version=0", "above"]),
    *(({"version": value}, [f"version={value!r}", "integer"]) for value in ("1", 1.5, True)),
    *(({"pause": value}, [f"pause={value!r}", "abort, wait, keep"]) for value in ("x", None)),
    ({"drafter": {}}, ["no drafter with weights", "eagle3"]),
]


@pytest.fixture(autouse=True)
def unchanged(engine):
    def rollout():
        return engine.generate([[1, 2, 3]], PARAMS)[0].token_ids.tolist()

    expected, version = rollout(), engine.version
    yield
    assert rollout() == expected and engine.version == version


@pytest.mark.parametrize("change, words", BAD_WEIGHTS, ids=NAMES)
def test_weights_that_do_not_fit(engine, weights, change, words):
    refusal(lambda: engine.update_weights(change(weights)), *words)


@pytest.mark.parametrize("options, words", BAD_ARGUMENTS, ids=label)
def test_bad_arguments_of_an_update(engine, weights, options, words):
    refusal(lambda: engine.update_weights(weights, **options), *words)
