"""Chunks and a round in one program, compiled for an H200: the weights are read once.

64 requests of Llama-3.1-8B with EAGLE, K = 3, beside a chunk of 128 tokens; two of its layers.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from specjax.device.drafters.drafter import Variant
from specjax.device.layout import Layout
from specjax.engine.programs import Begin, Decode, Joined, Prefill
from specjax.engine.step_model import empty_state, step_model
from specjax.engine.tracing import Static, jitted
from specjax.engine.variants import FEW_LOGPROBS
from specjax.engine.xla_options import GPU_OPTIONS
from specjax.inspect import step
from specjax.inspect.report import GEMMS, OWN_SHAPE

CONFIG = Path(__file__).parents[2] / "benchmarks" / "configs" / "Llama-3.1-8B"
BATCH, K, CONTEXT, WIDTH, LAYERS, PAGE_SIZE, DTYPE = 64, 3, 2048, 128, 2, 16, "bfloat16"
TRAFFIC = {"context": CONTEXT, "layers": step.LAYERS, "after": step.AFTER_LAYERS, "inside": ""}
NAMES = "prefill", "decode", "joined"

pytestmark = pytest.mark.h200


def open_parts():
    """The model, its drafter, and shapes of their weights."""
    speculation = {"method": "eagle", "model": OWN_SHAPE, "num_speculative_tokens": K}
    return step.open_parts(str(CONFIG), speculation, LAYERS, DTYPE)


def program(name):
    """For compile.py: a program of an engine, its shapes, and what is static in it."""
    parts, variant = open_parts(), Variant(num_logprobs=FEW_LOGPROBS)
    config = step.fit_engine(parts.target, BATCH + 1, K, CONTEXT, PAGE_SIZE, DTYPE)
    model = step_model(config, parts.target, parts.drafter, parts.verification, "gpu")
    sizes = config.max_num_seqs, config.max_model_len, config.pages_per_seq
    layout = Layout(*sizes, parts.target.vocab_size)
    state = jax.eval_shape(lambda: empty_state(config, model, K))
    decode = Decode(BATCH, K, variant)
    joined = Joined(Begin(1, WIDTH, variant), decode)
    made = {"prefill": Prefill(1, WIDTH), "decode": decode, "joined": joined}[name]
    packed = [
        jax.ShapeDtypeStruct(layout.packing(kind).shape(batch), jnp.int32)
        for kind, batch in made.packed
    ]
    return jitted(made, Static(model, layout)), (parts.params, state, *packed), {}


@pytest.fixture(scope="module")
def reports(compile_for_h200):
    requests = [
        {
            "function": "program",
            "arguments": {"name": name},
            "options": GPU_OPTIONS | GEMMS["cublas"],
            "traffic": {**TRAFFIC, "batch": BATCH, "rows": K + 1},
        }
        for name in NAMES
    ]
    return dict(zip(NAMES, compile_for_h200(__file__, requests), strict=True))


def num_bytes(report):
    """Of all kernels but attention's, which read what they read anyway."""
    return sum(
        one["times"] * (one["num_read"] + one["num_written"])
        for one in report["launches"]
        if not (one["pallas"] or "").startswith("paged_attention") and is_taken(one)
    )


def is_taken(one):
    """Whether a batch that asks for nothing runs a kernel."""
    return all(number == 0 for _, number in one["branches"])


def test_the_weights_are_read_once(reports):
    target = open_parts().params.target
    shared = sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves((target.layers, target.lm_head))
    )
    apart = num_bytes(reports["prefill"]) + num_bytes(reports["decode"])
    # The round's logits are copied once, as the head's rows are together with the chunk's.
    assert apart - num_bytes(reports["joined"]) > 0.75 * shared


def test_it_is_one_command_buffer_with_fewer_launches(reports):
    assert reports["joined"]["is_one_command_buffer"]
    counts = {
        name: sum(one["times"] for one in reports[name]["launches"] if is_taken(one))
        for name in NAMES
    }
    # The first token of a prompt, and what the drafter observes of it, are not among the others'.
    assert counts["joined"] < counts["prefill"] + counts["decode"] + 12
