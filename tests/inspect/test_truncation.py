"""Truncated sampling, compiled for an H200: five kernels, one CUDA graph, few passes."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.truncation.triton import truncate_triton
from specjax.config import SpeculativeConfig
from specjax.device.edits import History
from specjax.device.requests import init_requests
from specjax.device.sampling import process
from specjax.device.verification import Draft, Target, make_verification

BATCH, K, VOCAB, DIM = 64, 3, 151_936, 1024
ROWS = BATCH * (K + 1)
METHODS = "seed_exact", "rejection"
REGISTERS = 2**16  # of a multiprocessor
# At least so many programs run on one at once. Those of tiles have 32 KiB in flight each; those of
# rows are all there at once, but for those that a row rarely needs.
PROGRAMS = {"summarise": 6, "bound": 2, "mask": 2, "select": 2, "rest": 1}

pytestmark = pytest.mark.h200


def truncated(rows):
    """For compile.py: return only the truncation."""
    shapes = [((rows, VOCAB), jnp.float32)]
    shapes += [((rows,), dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)]
    return jax.jit(truncate_triton), tuple(jax.ShapeDtypeStruct(*one) for one in shapes), {}


def settle(verification):
    """For compile.py: return the way from hidden states to a verdict, with edits and truncation."""
    fields = {"method": "eagle", "model": "", "num_speculative_tokens": K}
    method = make_verification(SpeculativeConfig(**fields, verification=verification))

    @jax.jit
    def run(hidden, head, requests, history, drafts, q):
        logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
        logits = logits.reshape(BATCH, K + 1, VOCAB)
        logits = process(logits, requests, history, kernels="auto")
        probs = q if verification == "rejection" else None
        full = jnp.full(BATCH, K)
        target = Target(logits, requests.sampling, history.lengths, full)
        return method.verify(Draft(drafts, probs), target)

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    args = (
        array(jnp.bfloat16, ROWS, DIM),
        array(jnp.bfloat16, DIM, VOCAB),
        jax.eval_shape(lambda: init_requests(BATCH, VOCAB)),
        History(array(jnp.int32, BATCH, 2048), array(jnp.int32, BATCH)),
        array(jnp.int32, BATCH, K),
        array(jnp.float32, BATCH, K, VOCAB),
    )
    return run, args, {}


@pytest.fixture(scope="module")
def reports(compile_for_h200):
    """Reports of `truncated` by the number of rows, and of `settle` by verification method."""
    cases = {rows: ("truncated", {"rows": rows}) for rows in (ROWS, 1)}
    cases |= {method: ("settle", {"verification": method}) for method in METHODS}
    over = {"num_elements": ROWS * VOCAB, "columns": VOCAB}
    return compile_for_h200(__file__, cases, resources=True, passes_over=over)


@pytest.mark.parametrize("rows", [ROWS, 1])
def test_programs_share_multiprocessors(reports, fitting_kernels, rows):
    found = fitting_kernels(reports[rows]).values()
    kernels = {one.kernel.removeprefix("truncation_"): one for one in found}
    assert kernels.keys() == PROGRAMS.keys()
    for name, kernel in kernels.items():
        registers = 8 * -(-kernel.registers // 8) * kernel.threads[0]  # as they are given out
        assert REGISTERS // registers >= PROGRAMS[name], kernel
        assert kernel.shared_bytes <= 16384, kernel


@pytest.mark.parametrize("method", METHODS)
def test_it_is_all_one_cuda_graph_and_truncation_adds_three_passes(reports, method):
    """Two kernels read the logits, and one writes them. Others change a few logits in place."""
    report = reports[method]
    assert report["is_one_command_buffer"]
    assert report["uncaptured_conditionals"] == []
    assert not any(thunk["kind"] == "kWhile" for thunk in report["thunks"])
    names = [thunk["name"] for thunk in report["thunks"]]
    assert all(names.count(f"truncation_{name}") == 1 for name in PROGRAMS)
    in_place = "truncation_select", "truncation_rest"
    outside = [
        one
        for one in report["passes"]
        if not one["branches"] and not any(name in one["source"] for name in in_place)
    ]
    # The head's, those of the edits and their copy, then the kernels'; tokens are drawn in another
    # kernel, or by one of two branches.
    draws = ["read"] if method == "seed_exact" else []
    accesses = [one["access"] for one in outside]
    assert accesses == ["write", "read", "write", "read", "read", "write", *draws], outside
