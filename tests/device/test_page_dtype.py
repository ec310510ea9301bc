"""Pages in a dtype of their own: all pools have it, nothing else has, and steps keep it so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import EngineConfig
from specjax.device.cache.kind import CacheSizes
from specjax.device.drafters.drafter import Params, Variant
from specjax.device.drafters.registry import shape_drafter
from specjax.device.layout import Layout
from specjax.device.models.model import init_caches
from specjax.device.models.registry import load_model
from specjax.device.state import init_state
from specjax.device.verification import SeedExact
from specjax.engine.programs import Decode, Prefill
from specjax.engine.step_model import step_model
from specjax.engine.tracing import Static, jitted

NUM_PAGES, PAGE_SIZE, NUM_SLOTS, LENGTH, K = 13, 8, 2, 32, 2


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_5_text"])
def test_steps_keep_the_dtype_of_pages(checkpoints, name):
    model, params = load_model(checkpoints.target(name).folder, np.dtype("float32"))
    drafter, own = shape_drafter("eagle", model, name, "float32")
    config = EngineConfig(
        max_model_len=LENGTH, max_num_seqs=NUM_SLOTS, page_size=PAGE_SIZE, num_pages=NUM_PAGES
    )
    static = step_model(config, model, drafter, SeedExact(), "cpu")._replace(max_deferred_rows=0)
    sizes = CacheSizes(NUM_SLOTS, NUM_PAGES, PAGE_SIZE, K + 1, 2, page_dtype=jnp.bfloat16)

    def empty():
        caches = init_caches(model, sizes, "float32")
        snapshots = tuple(kind.init_snapshots(2, "float32") for kind in model.cache_kinds)
        of_drafter = drafter.init_state(sizes, "float32")
        return init_state(NUM_SLOTS, LENGTH, model.vocab_size, caches, snapshots, of_drafter)

    state = jax.eval_shape(empty)
    for leaf in jax.tree.leaves((state.caches, state.drafter)):
        is_pool = leaf.shape[1:3] == (NUM_PAGES, PAGE_SIZE)
        assert (leaf.dtype == jnp.bfloat16) == is_pool, leaf
    layout = Layout.of(config, model.vocab_size, static.windows)
    for program in Prefill(1, 16), Decode(2, K, Variant()), Decode(2, 0, Variant()):
        ((kind, batch),) = program.packed
        packed = jax.ShapeDtypeStruct(layout.packing(kind).shape(batch), jnp.int32)
        step = jitted(program, Static(static, layout))
        after, _ = jax.eval_shape(step, Params(params, own), state, packed)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
            lambda x: (x.shape, x.dtype), state
        )
