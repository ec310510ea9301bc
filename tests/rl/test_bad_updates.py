"""Weights that do not fit are refused by name, and rollouts go on as before; simulated."""

import math
import warnings
from dataclasses import replace

import jax
import numpy as np
import pytest
import safetensors.numpy as safetensors
from support.engines import SIZES, simulated_engines
from support.refusals import label, refusal
from support.texts import letters_folder

from specjax import LLM, SamplingParams
from specjax.device.models.registry import load_model
from specjax.rl import RolloutEngine, save_model
from specjax.rl.nnx import PolicyModule, hf_named
from specjax.train.drafter import KINDS, HeadSizes, train_drafter
from specjax.train.loop import Schedule

torch = pytest.importorskip("torch")

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
    (lambda w: w | {NORM: "x"}, [f"{NORM} of the weights is 'x'", "not an array"]),
    (lambda w: {}, ["missing", NORM]),
    (lambda w: None, ["weights must be a tree of arrays", "NoneType"]),
    (lambda w: 5, ["weights must be a tree of arrays", "int"]),
    (lambda w: "folder", ["no such folder: 'folder'"]),
    (lambda w: [1, 2], ["weights must be a tree of arrays", "int"]),
]


class Elsewhere:
    """A tensor of a library whose memory JAX does not reach."""

    shape, dtype = (32,), "float32"

    def __dlpack_device__(self):
        return 8, 0

    def __dlpack__(self, **_):
        raise BufferError("of another device")


def on_meta():
    return torch.ones(32, device="meta")


def without_values():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(32)


def sharded():
    tensor = torch.ones(32)
    tensor.full_tensor = lambda: tensor  # as a DTensor's
    return tensor


def quantised():
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(torch.ones(32), 0.1, 0, torch.qint8)


# What cannot be an array, or whose values cannot be read, and the remedy that is named.
UNREADABLE = {
    "sparse": (lambda: torch.ones(32).to_sparse(), "sparse", "to_dense()"),
    "meta": (on_meta, "meta device", "load the weights"),
    "fake": (without_values, "no values", "load the weights"),
    "quantised": (quantised, "torch.qint8", "dequantize()"),
    "dtensor": (sharded, "DTensor", "full_tensor()"),
    "device": (Elsewhere, "cannot be read", "on the CPU"),
    "lazy": (torch.nn.UninitializedParameter, "cannot be read", "NumPy"),
    "masked": (lambda: np.ma.ones(32), "masked", "filled()"),
    "wide": (lambda: np.ones(32, np.longdouble), "cannot be read", "float128"),
    "objects": (lambda: np.full(32, None), "cannot be read", "object"),
    "key": (lambda: jax.random.key(0), "random key", "nnx.Param"),
    "shape": (lambda: jax.ShapeDtypeStruct((32,), np.float32), "not an array"),
}
# Arrays that are read and do not fit, names among them that tell where they are from.
UNFITTING = {
    "complex": ({NORM: torch.ones(32, dtype=torch.complex64).conj()}, "found complex64"),
    "packed": ({NORM: torch.ones(32, dtype=torch.int8)}, "found int8", "dequantise"),
    "float8": ({NORM: torch.ones(32).to(torch.float8_e4m3fn)}, "float8_e4m3fn", "dequantise"),
    "lora": ({"model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.ones(2, 2)}, "merge"),
    "peft": ({"base_model.model.lm_head.weight": torch.ones(2)}, "merge_and_unload()"),
    "ddp": ({"module.lm_head.weight": torch.ones(2)}, "wrapped model"),
    "compiled": ({"_orig_mod.lm_head.weight": torch.ones(2)}, "wrapped model"),
}
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


@pytest.mark.parametrize("case", UNREADABLE)
def test_arrays_that_cannot_be_read_are_named(engine, weights, case):
    make, *words = UNREADABLE[case]
    refusal(lambda: engine.update_weights(weights | {NORM: make()}), NORM, *words)


@pytest.mark.parametrize("case", UNFITTING)
def test_origins_of_arrays_that_do_not_fit(engine, weights, case):
    change, *words = UNFITTING[case]
    refusal(lambda: engine.update_weights(weights | change), *change, *words)


def test_weights_that_are_traced(engine, weights):
    refusal(lambda: jax.jit(engine.update_weights)(weights), "traced by JAX")


def test_every_door_for_arrays_names_them(folder, tmp_path):
    target, params = load_model(folder, np.dtype(np.float32))
    bad = replace(params, norm=torch.ones(32).to_sparse())
    schedule = Schedule(steps=1, batch_size=1, length=8, learning_rate=1e-3, seed=0)
    head = KINDS["eagle1"].make(target, HeadSizes(), [])
    doors = [
        lambda: LLM(target, params=bad, **SIZES),
        lambda: RolloutEngine(target, params=bad, **SIZES),
        lambda: save_model(tmp_path, target, bad, folder),
        lambda: PolicyModule(target, bad),
        lambda: hf_named({"norm": bad.norm}, {"norm": "model.norm.weight"}),
        lambda: train_drafter(target, bad, head, [], tmp_path, schedule),
    ]
    for door in doors:
        refusal(door, "norm of the", "is sparse", "to_dense()")
    policy = PolicyModule(target, replace(params, norm=torch.nn.Parameter(torch.ones(32))))
    np.testing.assert_array_equal(policy.params().norm, np.ones(32))


@pytest.mark.parametrize("options, words", BAD_ARGUMENTS, ids=label)
def test_bad_arguments_of_an_update(engine, weights, options, words):
    refusal(lambda: engine.update_weights(weights, **options), *words)
