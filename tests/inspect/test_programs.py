"""Programs of engines, compiled for an H200: their reads, copies and passes.

One program is a round of Llama-3.1-8B with EAGLE: K = 3, 64 requests and two layers, together with
a chunk of 128 tokens. Another is a chunk of Qwen3.5-27B with its MTP module and four layers.
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

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
BATCH, K, CONTEXT, WIDTH, VOCAB = 64, 3, 2048, 128, 128_256
VARIANT = Variant(num_logprobs=FEW_LOGPROBS)
ROUND = Decode(BATCH, K, VARIANT)
PROGRAMS = {
    "prefill": Prefill(1, WIDTH),
    "decode": ROUND,
    "joined": Joined(Begin(1, WIDTH, VARIANT), ROUND),
}
HYBRID, HYBRID_BATCH = "hybrid's prefill", 16
DTYPES = "bfloat16", "float32"

pytestmark = pytest.mark.h200


def parts_of(name="Llama-3.1-8B", method="eagle", num_layers=2, dtype="bfloat16"):
    """Return the model, its drafter, and the shapes of their weights."""
    speculation = {"method": method, "num_speculative_tokens": K}
    if method == "eagle":
        speculation["model"] = OWN_SHAPE
    return step.open_parts(str(CONFIGS / name), speculation, num_layers, dtype)


def program(name, dtype="bfloat16"):
    """For compile.py: return a program of an engine, its shapes, and its static arguments."""
    is_hybrid = name == HYBRID
    parts = parts_of("Qwen3.5-27B", "mtp", 4) if is_hybrid else parts_of(dtype=dtype)
    batch = HYBRID_BATCH if is_hybrid else BATCH + 1
    config = step.fit_engine(parts.target, batch, K, CONTEXT, dtype)
    model = step_model(config, parts.target, parts.drafter, parts.verification, "gpu")
    layout = Layout.of(config, parts.target.vocab_size, model.windows)
    state = jax.eval_shape(lambda: empty_state(config, model, K))
    made = Prefill(1, 512) if is_hybrid else PROGRAMS[name]
    packed = [
        jax.ShapeDtypeStruct(layout.packing(kind).shape(batch), jnp.int32)
        for kind, batch in made.packed
    ]
    return jitted(made, Static(model, layout)), (parts.params, state, *packed), {}


@pytest.fixture(scope="module")
def reports(compile_for_h200):
    """Reports by program name; "float32" is the round in this dtype."""
    cases = {name: ("program", {"name": name}) for name in (*PROGRAMS, HYBRID)}
    cases["float32"] = "program", {"name": "decode", "dtype": "float32"}
    made = compile_for_h200(
        __file__,
        cases,
        options=GPU_OPTIONS | GEMMS["cublas"],
        passes_over={"num_elements": BATCH * VOCAB, "columns": VOCAB},
        traffic={
            "context": CONTEXT,
            "layers": step.LAYERS,
            "after": step.AFTER_LAYERS,
            "inside": "",
            "batch": BATCH,
            "rows": K + 1,
        },
    )
    return made | {"bfloat16": made["decode"]}


def is_taken(one):
    """Return whether a kernel runs for a batch without optional work."""
    return all(number == 0 for _, number in one["branches"])


# --- chunks and a round in one program ------------------------------------------------------------


def num_bytes(report):
    """Return the bytes of all kernels except attention's, which always move the same bytes."""
    return sum(
        one["times"] * (one["num_read"] + one["num_written"])
        for one in report["launches"]
        if not (one["pallas"] or "").startswith("paged_attention") and is_taken(one)
    )


def test_the_weights_are_read_once(reports):
    target = parts_of().params.target
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
        for name in PROGRAMS
    }
    # The first token of a prompt, and what the drafter observes of it, are not among the others'.
    assert counts["joined"] < counts["prefill"] + counts["decode"] + 12


# --- passes over the logits -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_greedy_round_writes_logits_once_and_reads_them_once(reports, dtype):
    """This holds for the target's logits and for each draft's logits."""
    passes = [one for one in reports[dtype]["passes"] if is_taken(one)]
    of_target = [one for one in passes if one["num_bytes"] >= 2 * BATCH * (K + 1) * VOCAB]
    assert [one["access"] for one in of_target] == ["write", "read"], of_target
    assert len(passes) == reports[dtype]["num_passes"][0] == 2 * (K + 1), passes
    memory = reports[dtype]["memory"]
    assert memory["output"] - memory["alias"] < 2**20, memory  # all but the tokens


# --- copies ---------------------------------------------------------------------------------------


def test_no_second_copy_of_all_states_of_a_hybrid_is_kept(reports):
    """A layer's own states are gathered, but never the states of all layers together."""
    states = f"= f32[3,{HYBRID_BATCH},48,128,128]"
    assert states in reports[HYBRID]["hlo"]
    lines = reports[HYBRID]["hlo"].splitlines()
    assert not [line for line in lines if states in line and " copy(" in line]
