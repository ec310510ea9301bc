"""A round of a hybrid model, as compiled for an H200: states and rings are updated in place.

Qwen3.5-27B's layers, one period of four, batch 16, MTP at K = 3. The operations are references.
"""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gated_delta_rule import Heads
from specjax.device.cache.kind import CacheSizes
from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.drafter import Params, Variant
from specjax.device.drafters.mtp import MTPHead
from specjax.device.inputs import StepModel
from specjax.device.layout import Layout
from specjax.device.models.layers.rope import Rope
from specjax.device.models.model import init_caches
from specjax.device.models.qwen3_5 import ATTENTION, DELTA, Qwen35
from specjax.device.state import init_state
from specjax.device.verification import SeedExact
from specjax.engine.programs import Decode, Prefill
from specjax.engine.tracing import Static, jitted

BATCH, K, PAGES, MAX_LEN, CHUNK = 16, 3, 256, 2048, 512
HEADS = Heads(16, 48, 128, 128)
STATE_BYTES = 3 * BATCH * HEADS.num_values * 128 * 128 * 4

pytestmark = pytest.mark.h200


def step(program):
    """For compile.py: one of the engine's programs, its shapes, and what is static in it."""
    dtype = jnp.bfloat16
    target = Qwen35(
        vocab_size=8192,
        hidden_size=5120,
        intermediate_size=17408,
        layer_types=(DELTA, DELTA, DELTA, ATTENTION),
        num_heads=24,
        num_kv_heads=4,
        head_dim=256,
        delta_heads=HEADS,
        conv_width=4,
        rms_norm_eps=1e-6,
        rope=Rope(head_dim=64, theta=1e7),
        max_position=4096,
        num_mtp_layers=1,
    )
    drafter = ChainDrafter(MTPHead(target))
    layout = Layout(BATCH, MAX_LEN, MAX_LEN // 16, target.vocab_size)

    def state():
        sizes = CacheSizes(BATCH, PAGES, 16, K + 1)
        caches, own = init_caches(target, sizes, dtype), drafter.init_state(sizes, dtype)
        return init_state(BATCH, MAX_LEN, target.vocab_size, caches, (None, None), own)

    def shapes(specs):
        return jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype or dtype), specs
        )

    params = Params(shapes(target.specs()), shapes(drafter.head.specs()))
    model = StepModel(target, drafter, SeedExact(), "auto", 8, 1, "raw")
    made = Prefill(1, CHUNK) if program == "prefill" else Decode(BATCH, K, Variant())
    ((kind, batch),) = made.packed
    packed = jax.ShapeDtypeStruct(layout.packing(kind).shape(batch), jnp.int32)
    return jitted(made, Static(model, layout)), (params, jax.eval_shape(state), packed), {}


@pytest.fixture(scope="module")
def reports(compile_for_h200):
    programs = "decode", "prefill"
    requests = [{"function": "step", "arguments": {"program": name}} for name in programs]
    return dict(zip(programs, compile_for_h200(__file__, requests), strict=True))


def test_the_state_is_updated_in_place(reports):
    memory = reports["decode"]["memory"]
    assert memory["output"] - memory["alias"] < 2**20, memory  # all but the tokens


@pytest.mark.parametrize("program", ["decode", "prefill"])
def test_no_second_copy_of_all_states_is_kept(reports, program):
    """A layer's own states are gathered; those of all layers together never are."""
    whole = [
        line.strip()[:120]
        for line in reports[program]["hlo"].splitlines()
        if f"= f32[3,{BATCH},48,128,128]" in line and " copy(" in line
    ]
    assert not whole


def test_a_round_needs_less_scratch_than_snapshots_would(reports):
    assert reports["decode"]["memory"]["temp"] < (K + 1) * STATE_BYTES
