"""The decode step of an engine as `compile_functions` takes it: jitted, its shapes, its statics."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from specjax.batch import Layout, run_decode
from specjax.config import EngineConfig, SpeculativeConfig
from specjax.device.drafters.drafter import Drafter, NoDrafter, Params, Variant
from specjax.device.models.llama import Llama
from specjax.device.models.model import Model
from specjax.device.models.qwen3_5 import Qwen35
from specjax.device.models.registry import describe_model
from specjax.device.verification import SeedExact, make_verification
from specjax.engine import empty_state, step_model
from specjax.h200.minimum import Minimum, minimum_bytes
from specjax.host.scheduler import DecodePlan
from specjax.info import open_drafter, open_source


def decode_step(
    model: str,
    batch: int,
    k: int,
    context: int,
    speculation: dict[str, Any] | None = None,
    num_layers: int | None = None,
    page_size: int = 16,
    dtype: str = "bfloat16",
) -> tuple[Any, tuple, dict[str, Any]]:
    """A round of `batch` requests of `context` tokens, K = k, in an engine that is no larger."""
    target, drafter, drafter_params = describe(model, speculation, num_layers, dtype)
    config = configure(batch, k, context, page_size, dtype)
    verification = SeedExact()
    if speculation is not None:
        verification = make_verification(SpeculativeConfig.of(speculation))
    static = step_model(config, target, drafter, verification, "gpu")
    layout = Layout(batch, config.max_model_len, config.pages_per_seq, target.vocab_size)
    packed = jax.ShapeDtypeStruct(layout.packed_shape(DecodePlan((), batch, k, k)), jnp.int32)
    state = jax.eval_shape(lambda: empty_state(config, static, k))
    params = Params(shapes(target.specs(), dtype), drafter_params)
    return run_decode, (params, state, packed), {"model": static, "variant": Variant(), "k": k}
