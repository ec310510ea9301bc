"""The gated delta rule's kernels, compiled for an H200: no spills, and no needless traffic."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gated_delta_rule import (
    DeltaRuleCache,
    DeltaRuleWeights,
    Heads,
    gated_delta_rule,
)
from pallas_kernels.gated_delta_rule.triton.tuning import DeltaRuleTuning, choose_tuning

MODELS = {"Qwen3.5-4B": Heads(16, 32, 128, 128), "Qwen3.5-27B": Heads(16, 48, 128, 128)}
SMALL, LARGE = MODELS
# Batch and tokens. The models differ in heads alone, so what one has the other need not have again.
STEPS = [(SMALL, 1, 8), (SMALL, 32, 1), (SMALL, 64, 4), (LARGE, 8, 4), (LARGE, 32, 4)]
PROMPTS = [(SMALL, 4, 512), (LARGE, 1, 512)]
CASES = [*((*shape, False) for shape in STEPS), *((*shape, True) for shape in PROMPTS)]
TAPS, MAX_ROWS = 4, 8
LAYERS, SLOTS = 24, 64  # states of more than 4 GiB, which take offsets of 64 bits, as served
REGISTERS = 64 * 1024  # of a multiprocessor

pytestmark = pytest.mark.h200


def call(model, batch, length, folds):
    """For compile.py: return the operation for these shapes, with a donated cache."""
    heads = MODELS[model]

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    f32, i32 = jnp.float32, jnp.int32
    weights = DeltaRuleWeights(
        shape(TAPS, heads.channels),
        shape(heads.num_values, dtype=f32),
        shape(heads.num_values, dtype=f32),
        shape(heads.value_dim),
    )
    cache = DeltaRuleCache.shapes(LAYERS, SLOTS, heads, TAPS, MAX_ROWS, jnp.dtype(jnp.bfloat16))
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
    """Return the bytes of the arrays between the kernels of a prompt."""
    chunk = DeltaRuleTuning().chunk
    num_chunks = -(-x.shape[1] // chunk)
    columns = 3 * heads.key_dim + heads.value_dim + chunk
    return 4 * x.shape[0] * heads.num_values * num_chunks * (chunk * columns + 1)


def inputs_bytes(x, heads):
    """Return the bytes of the arrays between the kernels of a step."""
    per_token = heads.num_keys * heads.key_dim + heads.num_values * (heads.value_dim + 1)
    return 4 * x.shape[0] * x.shape[1] * per_token


@pytest.fixture(scope="module")
def reports(compile_for_h200):
    names = "model", "batch", "length", "folds"
    cases = {case: ("call", dict(zip(names, case, strict=True))) for case in CASES}
    return compile_for_h200(__file__, cases, resources=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cache_stays_where_it_is_and_nothing_but_kernels_runs(reports, case):
    """The cache is updated in place, and there is no room for a second copy of a layer's states.

    Only one kernel reads and writes a state.
    """
    (model, *_, folds), report = case, reports[case]
    _, (x, _, cache, *_), _ = call(*case)
    heads, (batch, length, _) = MODELS[model], x.shape
    out = batch * length * heads.num_values * heads.value_dim * x.dtype.itemsize
    assert report["memory"]["alias"] == num_bytes(cache)
    scratch = 2 * out + chunks_bytes(x, heads) if folds else out + inputs_bytes(x, heads)
    assert report["memory"]["temp"] <= scratch + 4096
    assert " copy(" not in report["hlo"]
    kinds = ("_prepare", "_chunks", "_keep", "_norm") if folds else ("_inputs", "", "_norm")
    names = sorted(thunk["name"] for thunk in report["thunks"])
    assert names == sorted(f"gated_delta_rule{kind}" for kind in kinds)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_fit_and_fold_as_verifying_rounds(reports, fitting_kernels, case):
    """Prompts and steps round states in the same way: u k^T is added to e^g S by explicit FMAs.

    The kernel of a prompt has these FMAs in its loop over pending tokens. The kernel of a step also
    has them in its loop over new tokens, together with the FMAs of two sums over keys.
    """
    kernels, (model, batch, _, folds) = fitting_kernels(reports[case]), case
    kernel = kernels["gated_delta_rule_chunks" if folds else "gated_delta_rule"]
    heads, tuning = MODELS[model], choose_tuning(batch)
    per_thread = heads.value_dim // kernel.grid[0] * heads.key_dim // kernel.threads[0]
    if not folds:  # all threads have read the pending u's before any of them writes new ones
        assert per_thread * tuning.fold_tokens in kernel.barriers
    num_pieces = heads.key_dim // tuning.piece
    verified = 1 + 2 * (num_pieces - 1) / num_pieces
    assert kernel.multiply_adds == per_thread * (1 if folds else tuning.fold_tokens + verified)


@pytest.mark.parametrize("case", [case for case in CASES if not case[3]], ids=str)
def test_many_programs_of_a_step_share_a_multiprocessor(reports, fitting_kernels, case):
    """Some programs load while others compute, to hide the latency of memory.

    Their states are larger than the 20 KiB of loads in flight that a multiprocessor needs.
    """
    kernels, heads = fitting_kernels(reports[case]), MODELS[case[0]]
    kernel, inputs = kernels["gated_delta_rule"], kernels["gated_delta_rule_inputs"]
    num_programs = REGISTERS // (kernel.registers * kernel.threads[0])
    assert num_programs >= 5
    tile = heads.value_dim // kernel.grid[0]
    assert num_programs * tile * heads.key_dim * 4 >= 40 * 1024
    assert REGISTERS // (inputs.registers * inputs.threads[0]) >= 5
