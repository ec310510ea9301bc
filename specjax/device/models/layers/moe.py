"""A mixture of experts with a shared expert."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import grouped_matmul
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.spec import experts, fused_experts, projection
from specjax.device.models.layers.linear import linear
from specjax.device.models.layers.mlp import MLP, mlp, mlp_specs, swiglu


class Experts(NamedTuple):
    """The static sizes of a mixture."""

    num_experts: int  # E
    num_chosen: int  # per token
    intermediate_size: int  # F
    shared_intermediate_size: int
    normalises: bool  # router weights of the chosen experts sum to one


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoE:
    """Weights of a mixture; every expert is a SwiGLU layer with gate and up concatenated."""

    router: jax.Array  # [D, E]
    gate_up: jax.Array  # [E, D, 2 F]
    down: jax.Array  # [E, F, D]
    shared: MLP
    shared_gate: jax.Array  # [D, 1]


def moe(params: MoE, x: jax.Array, experts: Experts, kernels: str) -> jax.Array:
    """Compute sum_e w_e expert_e(x) + sigmoid(shared_gate x) shared(x) for x [N, D].

    w is the softmax over all experts (in f32); the sum runs over the experts with the largest w.
    """
    num_rows, num_chosen = x.shape[0], experts.num_chosen
    logits = linear(x, params.router)
    best, chosen = jax.lax.top_k(logits, num_chosen)  # [N, num_chosen]
    best = best.astype(jnp.float32)
    if experts.normalises:
        weights = jax.nn.softmax(best)
    else:
        total = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1, keepdims=True)
        weights = jnp.exp(best - total)

    chosen = chosen.reshape(-1)
    # Sorting one array, because sorting keys and indices as two would copy them first.
    order = jnp.sort(chosen * chosen.size + jnp.arange(chosen.size)) % chosen.size
    # Counting by comparison takes one kernel; a scatter needs another to clear its result.
    sizes = jnp.sum(chosen[:, None] == jnp.arange(experts.num_experts), axis=0, dtype=jnp.int32)
    hidden = grouped_matmul(x, params.gate_up, sizes, order // num_chosen, kernels=kernels)
    outputs = grouped_matmul(swiglu(hidden), params.down, sizes, targets=order, kernels=kernels)
    outputs = outputs.reshape(num_rows, num_chosen, -1)
    mixed = jnp.einsum("nc,ncd->nd", weights.astype(x.dtype), outputs)
    return mixed + jax.nn.sigmoid(linear(x, params.shared_gate)) * mlp(params.shared, x)


def moe_specs(mixture: Experts, dim: int, prefix: str, names: Collection[str]) -> MoE:
    """Return the weights as `TensorSpec`s. `names`, those in the checkpoint, tell whether all
    experts share a tensor or each has its own.

    Raises:
        CheckpointError: both layouts are present.
    """
    num_experts, _, inner, shared, _ = mixture
    fused = f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj"
    single = [f"{prefix}.experts.{i}" for i in range(num_experts)]
    found_fused = [name for name in fused if name in names]
    found_single = [n for n in names if n.startswith(f"{prefix}.experts.") and n not in fused]
    if found_fused and found_single:
        raise CheckpointError(
            f"the weights hold both {found_fused[0]} (all experts in one) and {min(found_single)} "
            "(one expert); keep one of the two layouts"
        )
    if found_fused:
        gate_up = fused_experts(fused[0], num_experts, dim, 2 * inner)
        down = fused_experts(fused[1], num_experts, inner, dim)
    else:
        pairs = [(f"{one}.gate_proj.weight", f"{one}.up_proj.weight") for one in single]
        gate_up = experts(pairs, dim, [inner, inner])
        down = experts([(f"{one}.down_proj.weight",) for one in single], inner, [dim])
    return MoE(
        router=projection([f"{prefix}.gate.weight"], dim, [num_experts]),
        gate_up=gate_up,
        down=down,
        shared=mlp_specs(f"{prefix}.shared_expert", dim, shared),
        shared_gate=projection([f"{prefix}.shared_expert_gate.weight"], dim, [1]),
    )
