"""Triton kernels of the gated delta rule: three for a decode step, four for a prompt."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.gated_delta_rule.triton.norm import run_norm
from pallas_kernels.gated_delta_rule.triton.prompt import run_prompt
from pallas_kernels.gated_delta_rule.triton.step import run_step
from pallas_kernels.gated_delta_rule.triton.tuning import DeltaRuleTuning, choose_tuning
from pallas_kernels.gated_delta_rule.types import DeltaRuleCache, DeltaRuleWeights

DIMS = 16, 32, 64, 128
DTYPES = "bfloat16", "float32"


def gated_delta_rule_triton(
    x: jax.Array,
    weights: DeltaRuleWeights,
    cache: DeltaRuleCache,
    layer: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    pending: jax.Array,
    *,
    folds: bool,
    eps: float,
    config: DeltaRuleTuning | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, DeltaRuleCache]:
    """See `gated_delta_rule`. The outputs of padding rows are zeros.

    Raises:
        UnsupportedError: the kernels do not support a size or dtype.
    """
    heads = cache.heads
    for name, dim in ("D_k", heads.key_dim), ("D_v", heads.value_dim):
        if dim not in DIMS:
            raise UnsupportedError(
                f"cache.state has {name}={dim}; the kernel takes {', '.join(map(str, DIMS))}"
            )
    for name, dtype in ("x", x.dtype), ("cache.ring", cache.ring.dtype):
        if dtype.name not in DTYPES:
            raise UnsupportedError(f"{name} is {dtype}; the kernel takes {', '.join(DTYPES)}")
    config = config or choose_tuning(x.shape[0])
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    run = run_prompt if folds else run_step
    out, cache = run(x, weights, cache, (layer, slots, positions, pending), config, interpret)
    if weights.norm is not None:
        out = run_norm(out, x, weights.norm, heads, eps=eps, config=config, interpret=interpret)
    return out, cache
