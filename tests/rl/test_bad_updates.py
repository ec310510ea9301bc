"""Weights that do not fit are refused by name, and rollouts continue; simulated."""

import math
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy as safetensors
from support.engines import SIZES, simulated_engines
from support.refusals import label, refusal
from support.rollouts import copied

from specjax import LLM, SamplingParams
from specjax.device.models.registry import load_model
from specjax.rl import RolloutEngine, save_model
from specjax.rl.named import read_finite
from specjax.rl.nnx import PolicyModule, hf_named
from specjax.rl.weights import paths
from specjax.train.drafter import KINDS, HeadSizes, train_drafter
from specjax.train.loop import Schedule

torch = pytest.importorskip("torch")

NORM = "model.norm.weight"
PARAMS = SamplingParams(temperature=1.0, seed=1, max_tokens=5)


@pytest.fixture(scope="module")
def weights(letters):
    return safetensors.load_file(letters / "model.safetensors")


@pytest.fixture(scope="module")
def engine(letters):
    with simulated_engines(), RolloutEngine(letters, **SIZES) as engine:
        yield engine


@pytest.fixture(autouse=True)
def unchanged(engine):
    def rollout():
        return engine.generate([[1, 2, 3]], PARAMS)[0].token_ids.tolist()

    expected, version = rollout(), engine.version
    yield
    assert rollout() == expected and engine.version == version


class Elsewhere:
    """A tensor of a library whose memory JAX cannot access."""

    shape, dtype = (32,), "float32"

    def __dlpack_device__(self):
        return 8, 0

    def __dlpack__(self, **_):
        raise BufferError("of another device")


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


def deleted():
    array = jnp.ones(32)
    array.delete()
    return array


# What a norm may be instead: of another shape, type or value, or none whose values can be read;
# and words of the error, the remedy among them.
NORMS = {
    "shape": (lambda: np.zeros(3, np.float32), "expected [32], found [3]"),
    "dtype": (lambda: np.zeros(32, np.int32), "found int32", "nothing was changed"),
    "nan": (lambda: np.full(32, math.nan, np.float32), "NaN", "nothing was changed"),
    "infinity": (lambda: np.full(32, math.inf, np.float32), "infinity"),
    "large": (lambda: np.full(32, -1e300), "too large for the engine's float32", "go back before"),
    "text": (lambda: "x", "of the weights is 'x'", "not an array"),
    "deleted": (deleted, "deleted, or donated"),
    "sparse": (lambda: torch.ones(32).to_sparse(), "sparse", "to_dense()"),
    "meta": (lambda: torch.ones(32, device="meta"), "meta device", "load the weights"),
    "fake": (without_values, "no values", "load the weights"),
    "quantised": (quantised, "torch.qint8", "dequantize()"),
    "dtensor": (sharded, "DTensor", "full_tensor()"),
    "device": (Elsewhere, "cannot be read", "on the CPU"),
    "lazy": (torch.nn.UninitializedParameter, "cannot be read", "NumPy"),
    "masked": (lambda: np.ma.ones(32), "masked", "filled()"),
    "wide": (lambda: np.ones(32, np.longdouble), "cannot be read", "float128"),
    "objects": (lambda: np.full(32, None), "cannot be read", "object"),
    "key": (lambda: jax.random.key(0), "random key", "nnx.Param"),
    "abstract": (lambda: jax.ShapeDtypeStruct((32,), np.float32), "not an array"),
    "complex": (lambda: torch.ones(32, dtype=torch.complex64).conj(), "found complex64"),
    "packed": (lambda: torch.ones(32, dtype=torch.int8), "found int8", "dequantise"),
    "float8": (lambda: torch.ones(32).to(torch.float8_e4m3fn), "float8_e4m3fn", "dequantise"),
}


@pytest.mark.parametrize("case", NORMS)
def test_an_array_that_does_not_fit(engine, weights, case):
    make, *words = NORMS[case]
    refusal(lambda: engine.update_weights(weights | {NORM: make()}), NORM, *words)


# Names that no array of the engine has, and what the error says of where they are from.
NAMES = {
    "extra": "unexpected",
    "model.layers.0.self_attn.q_proj.lora_A.default.weight": "merge",
    "base_model.model.lm_head.weight": "merge_and_unload()",
    "module.lm_head.weight": "wrapped model",
    "_orig_mod.lm_head.weight": "wrapped model",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_not_known(engine, weights, name):
    given = weights | {name: np.zeros(2, np.float32)}
    refusal(lambda: engine.update_weights(given), name, NAMES[name])


WEIGHTS = {
    "missing": (lambda w: {n: x for n, x in w.items() if "norm" not in n}, "missing", NORM),
    "none": (lambda w: None, "weights must be a tree of arrays", "NoneType"),
    "list": (lambda w: [1, 2], "weights must be a tree of arrays", "int"),
    "path": (lambda w: "folder", "no such folder: 'folder'"),
    "twice": (lambda w: [*w.items(), (NORM, w[NORM])], NORM, "twice"),
    "keys": (lambda w: w | {3: w[NORM]}, "the weights", "the key 3", "all text"),
    "keys inside": (lambda w: {"a": w | {None: w[NORM]}}, "the weights", "the key None"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_do_not_fit(engine, weights, case):
    change, *words = WEIGHTS[case]
    refusal(lambda: engine.update_weights(change(weights)), *words)


def test_all_that_is_wrong_is_named_at_once(engine):
    bad = dict(paths(copied(engine.params.target)))
    names = list(bad)
    lost = [names[0], names[7]]
    for name in lost:
        del bad[name]
    bad[names[3]] = np.zeros((3, 5), np.float32)
    bad[names[4]] = bad[names[4]].astype(np.int32)
    bad["layers.99.attention.qkv"] = np.zeros(3, np.float32)
    words = *lost, "layers.99.attention.qkv", f"{names[3]} (expected", "found [3, 5]"
    refusal(lambda: engine.update_weights(bad), *words, f"{names[4]} (expected float32, found int")


def test_weights_that_are_traced(engine, weights):
    refusal(lambda: jax.jit(engine.update_weights)(weights), "traced by JAX")


def test_every_door_for_arrays_names_them(letters, tmp_path):
    target, params = load_model(letters, np.dtype(np.float32))
    bad = replace(params, norm=torch.ones(32).to_sparse())
    schedule = Schedule(steps=1, batch_size=1, length=8, learning_rate=1e-3, seed=0)
    head = KINDS["eagle1"].make(target, HeadSizes(), [])
    for door in (
        lambda: LLM(target, params=bad, **SIZES),
        lambda: RolloutEngine(target, params=bad, **SIZES),
        lambda: save_model(tmp_path, target, bad, letters),
        lambda: PolicyModule(target, bad),
        lambda: hf_named({"norm": bad.norm}, {"norm": "model.norm.weight"}),
        lambda: train_drafter(target, bad, head, [], tmp_path, schedule),
    ):
        refusal(door, "norm of the", "is sparse", "to_dense()")
    policy = PolicyModule(target, replace(params, norm=torch.nn.Parameter(torch.ones(32))))
    np.testing.assert_array_equal(policy.params().norm, np.ones(32))


ARGUMENTS = [
    ({"version": 0}, ["version=0", "above"]),
    *(({"version": value}, [f"version={value!r}", "integer"]) for value in ("1", 1.5, True)),
    ({"version": 2**63}, [f"version={2**63}", "2**63 - 1"]),
    ({"pause": "x"}, ["pause='x'", "abort, wait, keep"]),
    ({"drafter": {}}, ["no drafter with weights", "eagle3"]),
]


def test_values_too_large_for_bfloat16():
    current, large = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2)}, np.float32([1, 3.4e38])
    given = {"a": large, "b": jnp.array(large)}
    refusal(lambda: read_finite(given, current, "weights"), "bfloat16 in a, b,")
    read_finite({"a": large}, {"a": jnp.ones(2)}, "weights")


SAMPLES = [
    *((samples, [f"samples={samples!r}", "list"]) for samples in (None, 5, True)),
    *(([([1], output)], ["sample 0", repr(output)]) for output in (None, 5)),
    ([(None, [1])], ["sample 0", "None"]),
]


@pytest.mark.parametrize("samples, words", SAMPLES, ids=label)
def test_samples_that_cannot_be_scored(engine, samples, words):
    refusal(lambda: engine.score(samples), *words)
    refusal(lambda: engine.check_score(samples), *words)


@pytest.mark.parametrize("options, words", ARGUMENTS, ids=label)
def test_bad_arguments_of_an_update(engine, weights, options, words):
    refusal(lambda: engine.update_weights(weights, **options), *words)
