"""A mixture of experts with a shared expert beside it."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import grouped_matmul
from specjax.device.models.layers.mlp import MLP, swiglu


class Experts(NamedTuple):
    """The static geometry of a mixture."""

    num_experts: int  # E
    num_chosen: int  # per token
    intermediate_size: int  # F
    shared_intermediate_size: int
    normalises: bool  # weights of the chosen sum to one


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoE:
    """Weights of a mixture; every expert is a SwiGLU layer, gate and up side by side."""

    router: jax.Array  # [D, E]
    gate_up: jax.Array  # [E, D, 2 F]
    down: jax.Array  # [E, F, D]
    shared: MLP
    shared_gate: jax.Array  # [D, 1]


def moe(params: MoE, x: jax.Array, experts: Experts, kernels: str) -> jax.Array:
    """sum_e w_e expert_e(x) + sigmoid(shared_gate x) shared(x) for x [N, D].

    w is the softmax over all experts (in f32), of which the largest are chosen.
    """
    num_rows, num_chosen = x.shape[0], experts.num_chosen
    probs = jax.nn.softmax((x @ params.router).astype(jnp.float32))
    weights, chosen = jax.lax.top_k(probs, num_chosen)  # [N, num_chosen]
    if experts.normalises:
        weights = weights / weights.sum(-1, keepdims=True)

    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=experts.num_experts)
    hidden = grouped_matmul(x[order // num_chosen], params.gate_up, sizes, kernels=kernels)
    outputs = grouped_matmul(swiglu(hidden), params.down, sizes, kernels=kernels)
    outputs = outputs[jnp.argsort(order)].reshape(num_rows, num_chosen, -1)
    mixed = jnp.einsum("nc,ncd->nd", weights.astype(x.dtype), outputs)
    shared = swiglu(x @ params.shared.gate_up) @ params.shared.down
    return mixed + jax.nn.sigmoid(x @ params.shared_gate) * shared
