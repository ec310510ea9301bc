"""On a CPU, programs update donated pages and states in place: their compiled code copies none."""

import re
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gated_delta_rule import DeltaRuleCache
from pallas_kernels.page_formats import PAGE_FORMATS
from specjax.config import EngineConfig
from specjax.device.drafters.drafter import Variant
from specjax.device.layout import Layout
from specjax.engine.programs import Begin, Decode, Joined, SplitRound
from specjax.engine.step_model import empty_state, step_model
from specjax.engine.tracing import Static, jitted
from specjax.host.speculation.rounds import SplitShape
from specjax.inspect import step
from specjax.inspect.report import OWN_SHAPE

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
K, PLAIN = 2, Variant()
ROUND = Decode(4, K, PLAIN)
PROGRAMS = {
    "joined": Joined(Begin(2, 32, PLAIN), ROUND),
    "split": SplitRound(SplitShape(2, K, 2), PLAIN),
}
EAGLE = {"method": "eagle", "model": OWN_SHAPE}
MODELS = {  # every kind of cache: the config, speculation, layers, and the format of pages
    "heads": ("Llama-3.2-1B", EAGLE, 2, None),
    "8-bit heads": ("Llama-3.2-1B", EAGLE, 2, "int8"),
    "latents": ("GLM-4.7-Flash", {"method": "ngram"}, 2, None),
    "states": ("Qwen3.5-0.8B", {"method": "mtp"}, 4, None),
}
HLO_NAMES = {"float32": "f32", "int8": "s8"}
# Both programs, and every kind; the other pairs run by night.
FAST = "latents", "split"
SLOW = (("states", "joined"),)
CASES = [
    pytest.param(*case, marks=pytest.mark.slow if case in SLOW else pytest.mark.nightly)
    for case in product(MODELS, PROGRAMS)
    if case != FAST
]


def hlo_shape(x):
    """The shape as XLA's text has it."""
    return f"{HLO_NAMES[x.dtype.name]}[{','.join(map(str, x.shape))}]"


@pytest.mark.parametrize("model, name", [FAST, *CASES])
def test_pages_and_states_are_not_copied(model, name):
    config, speculation, num_layers, format_ = MODELS[model]
    speculation = speculation | {"num_speculative_tokens": K}
    parts = step.open_parts(str(CONFIGS / config), speculation, num_layers, "float32")
    sizes = EngineConfig(
        max_model_len=128,
        max_num_seqs=6,
        num_pages=77,
        page_size=8,
        page_format=PAGE_FORMATS.get(format_),
    )
    made = step_model(sizes, parts.target, parts.drafter, parts.verification, "cpu")
    layout = Layout.of(sizes, parts.target.vocab_size, made.windows)
    state = jax.eval_shape(lambda: empty_state(sizes, made, K))
    packed = [
        jax.ShapeDtypeStruct(layout.packing(kind).shape(batch), jnp.int32)
        for kind, batch in PROGRAMS[name].packed
    ]
    run = jitted(PROGRAMS[name], Static(made, layout))
    compiled = run.lower(parts.params, state, *packed).compile()
    # The rings of recurrent layers, which hold a few tokens of each request, are copied.
    caches = [x.state if isinstance(x, DeltaRuleCache) else x for x in state.caches]
    large = [x for x in jax.tree.leaves((caches, state.drafter)) if x.ndim > 3]
    copied = re.findall(r"= (\w+\[[\d,]+\])\S* copy\(", compiled.as_text())
    assert large and not {hlo_shape(x) for x in large} & set(copied)
