"""The gated delta rule's kernels as compiled for an H200: no spills, and nothing moved but once.

python -m pytest -m h200 tests/inspect/test_gated_delta_rule.py
"""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gated_delta_rule import (
    DeltaRuleCache,
    DeltaRuleWeights,
    Heads,
    gated_delta_rule,
    num_ring_columns,
)
from pallas_kernels.gated_delta_rule.triton.tuning import DeltaRuleTuning
from specjax.inspect.resources import Resources

MODELS = {"Qwen3.5-4B": Heads(16, 32, 128, 128), "Qwen3.5-27B": Heads(16, 48, 128, 128)}
STEPS = [(1, 8), (8, 4), (32, 4), (32, 1), (64, 4)]
PROMPTS = [(1, 512), (4, 512)]
CASES = [(name, *shape, False) for name in MODELS for shape in STEPS]
CASES += [(name, *shape, True) for name in MODELS for shape in PROMPTS]
TAPS, MAX_ROWS = 4, 8
LAYERS, SLOTS = 24, 64  # states of more than 4 GiB, which take offsets of 64 bits, as served
MAX_SHARED, REGISTERS = 227 * 1024, 64 * 1024  # of a multiprocessor

pytestmark = pytest.mark.h200


def call(model, batch, length, folds):
    """For the compiler: the operation at a shape, with a donated cache."""
    heads = MODELS[model]
    columns = num_ring_columns(TAPS, MAX_ROWS)

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    f32, i32 = jnp.float32, jnp.int32
    weights = DeltaRuleWeights(
        shape(TAPS, heads.channels),
        shape(heads.num_values, dtype=f32),
        shape(heads.num_values, dtype=f32),
        shape(heads.value_dim),
    )
    state = LAYERS, SLOTS, heads.num_values, heads.value_dim, heads.key_dim
    cache = DeltaRuleCache(
        shape(*state, dtype=f32),
        shape(LAYERS, SLOTS, columns, heads.channels),
        shape(LAYERS, SLOTS, columns, 2, heads.num_values, dtype=f32),
    )
    x = shape(batch, length, heads.inputs)
    slots, positions = shape(batch, dtype=i32), shape(batch, length, dtype=i32)

    def run(x, weights, cache, layer, slots, positions, pending):
        return gated_delta_rule(
            *(x, weights, cache, layer, slots, positions, pending),
            folds=folds, eps=1e-6, kernels="triton",
        )  # fmt: skip

    args = x, weights, cache, shape(dtype=i32), slots, positions, slots
    return jax.jit(run, donate_argnums=2), args, {}


def num_bytes(arrays):
    return sum(x.size * x.dtype.itemsize for x in arrays)


def chunks_bytes(x, heads):
    """Of what the kernels of a prompt leave for each other."""
    chunk = DeltaRuleTuning().chunk
    num_chunks = -(-(x.shape[1] + MAX_ROWS) // chunk)
    columns = 3 * heads.key_dim + heads.value_dim + chunk
    return 4 * x.shape[0] * heads.num_values * num_chunks * (chunk * columns + 1)


@pytest.fixture(scope="module")
def reports(compile_for_h200):
    names = "model", "batch", "length", "folds"
    requests = [
        {"function": "call", "arguments": dict(zip(names, case, strict=True))} for case in CASES
    ]
    made = compile_for_h200(__file__, requests, resources=True)
    return dict(zip(CASES, made, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_fit(reports, case):
    kernels = [Resources(**fields) for fields in reports[case]["resources"]]
    assert kernels
    for kernel in kernels:
        assert not kernel.spills and kernel.shared_bytes <= MAX_SHARED, kernel


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cache_stays_where_it_is(reports, case):
    """All of it is aliased, and there is no room for a second copy of any layer's states: a state
    is read by the one kernel that owns it, and written by it."""
    _, (x, _, cache, *_), _ = call(*case)
    report = reports[case]
    heads, (batch, length, _) = MODELS[case[0]], x.shape
    out = batch * length * heads.num_values * heads.value_dim * x.dtype.itemsize
    assert report["memory"]["alias"] == num_bytes(cache)
    assert report["memory"]["temp"] <= (2 * out + chunks_bytes(x, heads) if case[3] else 0) + 4096
    assert " copy(" not in report["hlo"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_but_kernels_runs(reports, case):
    names = {thunk["name"] for thunk in reports[case]["thunks"]}
    kinds = ("_prepare", "_chunks", "_keep", "_norm") if case[3] else ("", "_norm")
    assert names == {f"gated_delta_rule{kind}" for kind in kinds}
    assert len(reports[case]["thunks"]) == len(kinds)


@pytest.mark.parametrize("case", [case for case in CASES if not case[3]], ids=str)
def test_two_programs_of_a_step_share_a_multiprocessor(reports, case):
    """One computes while the other loads."""
    (kernel,) = (
        kernel for kernel in reports[case]["resources"] if kernel["name"] == "gated_delta_rule"
    )
    assert 2 * kernel["registers"] * kernel["threads"][0] <= REGISTERS
