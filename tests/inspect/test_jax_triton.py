"""Translated kernels compiled by jax_triton, compared with Pallas. Needs no GPU."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.draw_tokens import draw_tokens
from pallas_kernels.gated_delta_rule import (
    DeltaRuleCache,
    DeltaRuleWeights,
    Heads,
    gated_delta_rule,
)
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rms_norm import add_rms_norm
from pallas_kernels.route import Rule, route
from pallas_kernels.triton_call import BACKENDS, VARIABLE
from specjax.engine.xla_options import GPU_OPTIONS
from specjax.inspect.resources import assemble, parse_ptxas

BATCH, ROWS, VOCAB, LAYERS = 64, 4, 151_936, 24
HEADS = Heads(16, 32, 128, 128)
MAX_SPILLED = 8  # bytes: Triton's release differs from the one in XLA, which spills none

pytestmark = pytest.mark.h200


def program():
    """For compile.py: return important kernels of a step, at sizes of real models.

    One of the caches is updated in place, and has more than 2^31 elements.
    """
    f32, i32 = jnp.float32, jnp.int32

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    cache = DeltaRuleCache.shapes(LAYERS, BATCH, HEADS, 4, 8, jnp.dtype(jnp.bfloat16))
    heads = shape(HEADS.num_values, dtype=f32)
    weights = DeltaRuleWeights(shape(4, HEADS.channels), heads, heads, shape(HEADS.value_dim))
    slots, positions = shape(BATCH, dtype=i32), shape(BATCH, ROWS, dtype=i32)

    def run(x, weights, cache, slots, positions, attention, sampling, stream, choice):
        layer = jnp.int32(1)
        rule, cache = gated_delta_rule(
            *(x, weights, cache, layer, slots, positions, slots), folds=False, eps=1e-6
        )
        q, kv, table, at = attention
        attended = paged_attention(q, kv, layer, table, at)
        logits, temperature, seeds = sampling
        made = add_rms_norm(*stream, 1e-6)
        routes = route(choice[0], 8, Rule(), is_padding=choice[1])
        return rule, cache, attended, made, routes, draw_tokens(logits, temperature, seeds, 2, ())

    # Of few requests, so that attention is split.
    attention = (
        shape(8, ROWS, 32, 128),
        shape(2, 4096, 16, 2, 8, 128),
        *(shape(8, n, dtype=i32) for n in (512, ROWS)),
    )
    logits = shape(BATCH * ROWS, VOCAB, dtype=f32)
    sampling = logits, shape(BATCH, dtype=f32), shape(BATCH, dtype=jnp.uint32)
    stream = shape(8, 2048), shape(8, 2048), shape(2048)
    x, choice = shape(BATCH, ROWS, HEADS.inputs), (shape(8, 128), shape(8, dtype=jnp.bool_))
    args = x, weights, cache, slots, positions, attention, sampling, stream, choice
    return jax.jit(run, donate_argnums=2), args, {}


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """The folder to which jax_triton writes the PTX."""
    return tmp_path_factory.mktemp("ptx")


@pytest.fixture(scope="module")
def reports(compile_for_h200, dumped):
    """Reports by backend."""
    if importlib.util.find_spec("jax_triton") is None:
        pytest.skip("needs jax-triton")
    made, traffic = {}, {"batch": BATCH, "context": 2048}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_TRITON_DUMP_DIR", str(dumped))
        for backend in BACKENDS:
            patch.setenv(VARIABLE, backend)
            case = {backend: ("program", {})}
            options = {"options": GPU_OPTIONS, "traffic": traffic}
            made |= compile_for_h200(__file__, case, kept=None, **options)  # it must dump
    return made


def test_programs_are_the_same_but_for_who_compiles_the_kernels(reports):
    pallas, jax_triton = reports["pallas"], reports["jax_triton"]
    assert jax_triton["memory"] == pallas["memory"]  # so the cache is updated in place, too
    assert jax_triton["is_one_command_buffer"] and not jax_triton["large_copies"]
    kernels, others = (
        [one["pallas"] for one in report["launches"] if one["pallas"]]
        for report in (pallas, jax_triton)
    )
    assert sorted(kernels) == sorted(others) and len(set(kernels)) == 9


def test_kernels_hardly_spill(reports, dumped):
    said = "".join(assemble("sm_90a", file) for file in dumped.glob("*/*.ptx"))
    found = list(parse_ptxas(said))
    assert len(found) == 9
    for one in found:
        assert max(one.spill_store_bytes, one.spill_load_bytes) <= MAX_SPILLED, one
