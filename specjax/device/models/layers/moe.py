"""A mixture of experts, with or without a shared expert."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.route import Routes, route
from specjax.checkpoint.errors import CheckpointError
from specjax.device.models.layers.mlp import (
    MLP,
    SWIGLU,
    ClampedSwiGLU,
    FeedSettings,
    SwiGLU,
    mlp_specs,
)
from specjax.device.models.layers.router import Router, SoftmaxRouter
from specjax.device.models.layers.rows import Rows
from specjax.device.weights.experts import ExpertWeights, expert_matrices, fused_expert_matrices
from specjax.device.weights.matrix import Matrix, dense


class Experts(NamedTuple):
    """The sizes and functions of a mixture of experts."""

    num_experts: int  # E
    num_chosen: int  # number of experts per token
    intermediate_size: int  # F
    shared_intermediate_size: int = 0  # 0 without a shared expert
    has_shared_gate: bool = False
    router: Router = SoftmaxRouter()
    activation: SwiGLU | ClampedSwiGLU = SWIGLU
    shared_name: str = "shared_expert"  # in the names of tensors
    num_local: int = 0  # number of experts that each device has, if they are divided over devices

    @property
    def num_held(self) -> int:
        """The number of experts whose weights a device has."""
        return self.num_local or self.num_experts

    @property
    def active_size(self) -> int:
        """The total inner width of the experts that process a token."""
        return self.num_chosen * self.intermediate_size + self.shared_intermediate_size


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoE:
    """Weights of a mixture of experts.

    The gate and up projections of an expert are merged into one matrix.
    """

    router: Any  # weights of `Experts.router`
    gate_up: ExpertWeights  # [E, D, 2 F]
    down: ExpertWeights  # [E, F, D]
    shared: MLP | None = None
    shared_gate: Matrix | None = None  # [D, 1]
    gate_up_bias: jax.Array | None = None  # [E, 2 F]
    down_bias: jax.Array | None = None  # [E, D]

    def feed(self, x: jax.Array, model: FeedSettings, rows: Rows) -> jax.Array:
        """Return the output [N, D] of the model's mixture for x [N, D]."""
        assert model.experts is not None, "the model has no experts"
        return moe(self, x, model.experts, rows.kernels, rows.positions < 0)


def moe(
    params: MoE,
    x: jax.Array,
    experts: Experts,
    kernels: str,
    is_padding: jax.Array | None = None,
) -> jax.Array:
    """Compute sum_e w_e expert_e(x) + g shared(x) for x [N, D].

    The sum is over the chosen experts e, and w_e are the router's weights. The gate g is
    sigmoid(shared_gate x), or 1 if the mixture has no shared gate.

    `is_padding` bool[N] marks padding rows, whose results are meaningless. Padding rows go to the
    experts of row 0, so that no expert's weights are read only for padding.
    """
    router = experts.router
    logits, correction = router.logits(params.router, x)
    routes = route(logits, experts.num_chosen, router.rule, correction, is_padding, kernels=kernels)
    is_here = None
    if experts.num_local:
        first = jax.lax.axis_index(params.down.axis) * experts.num_local
        routes, is_here = _local_routes(routes, first, experts.num_local)
    sizes = routes.sizes
    hidden = params.gate_up.multiply(x, sizes, sources=routes.rows, kernels=kernels)
    if params.gate_up_bias is not None:
        hidden += params.gate_up_bias[routes.experts.reshape(-1)[routes.order]]
    hidden = experts.activation(hidden)
    outputs = params.down.multiply(hidden, sizes, targets=routes.order, kernels=kernels)
    if params.down_bias is not None:
        outputs += params.down_bias[routes.experts.reshape(-1)]
    outputs = outputs.reshape(*routes.experts.shape, -1)
    if is_here is not None:
        outputs = jnp.where(is_here[..., None], outputs, 0)
    mixed = jnp.einsum("nc,ncd->nd", routes.weights.astype(x.dtype), outputs)
    if params.shared is not None:
        shared = params.shared.feed_part(x)
        if params.shared_gate is not None:
            shared = jax.nn.sigmoid(params.shared_gate.multiply(x)) * shared
        mixed = mixed + shared
    return params.down.total(mixed)


def _local_routes(routes: Routes, first: jax.Array, count: int) -> tuple[Routes, jax.Array]:
    """Return `routes`, limited to this device's experts, and which chosen experts are here.

    This device has `count` experts, beginning with expert `first`. The second result is bool[N, C]:
    whether each of the C experts chosen for a row is on this device.

    In the new routes, the rows of this device's experts come first. Later rows are not computed,
    because `sizes` counts only the rows of this device's experts. Expert ids count from `first`.

    Every device has all rows, so devices exchange only the sum of the experts' outputs. If rows
    were sent to the devices of their experts, a second exchange would be needed, and no computation
    would be saved.
    """
    sizes = jnp.pad(routes.sizes, (0, count))  # the last device may have fewer experts
    before = jnp.sum(jnp.where(jnp.arange(len(routes.sizes)) < first, routes.sizes, 0))
    places = (before + jnp.arange(len(routes.order))) % len(routes.order)
    is_here = (routes.experts >= first) & (routes.experts < first + count)
    local = routes._replace(
        sizes=jax.lax.dynamic_slice_in_dim(sizes, first, count),
        rows=routes.rows[places],
        order=routes.order[places],
        experts=jnp.clip(routes.experts - first, 0, count - 1),
    )
    return local, is_here


def moe_specs(
    mixture: Experts,
    dim: int,
    prefix: str,
    names: Collection[str],
) -> MoE:
    """Return the weights of a mixture as `TensorSpec`s.

    `prefix` is the mixture's name in checkpoints. `names` are the checkpoint's tensor names, or a
    map from names to shapes. There are two layouts:

        fused      `experts.gate_up_proj` and `experts.down_proj` hold the weights of all experts.
                   One of these names is enough to choose this layout; both tensors are then loaded
        separate   each expert has separate tensors

    Fused tensors are [E, out, in], where E is `mixture.num_held`. They are read as [E, in, out]
    only if `names` has their shapes, and both shapes are [E, in, out].

    Raises:
        CheckpointError: `names` has tensors of both layouts.
    """
    num_experts, inner = mixture.num_held, mixture.intermediate_size
    shared = mixture.shared_intermediate_size
    fused = f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj"
    single = [f"{prefix}.experts.{i}" for i in range(num_experts)]
    found_fused = [name for name in fused if name in names]
    found_single = [n for n in names if n.startswith(f"{prefix}.experts.") and n not in fused]
    if found_fused and found_single:
        raise CheckpointError(
            f"the weights contain both {found_fused[0]} (all experts in one) and "
            f"{min(found_single)} (one expert); keep one of the two layouts"
        )
    if found_fused:
        is_swapped = isinstance(names, Mapping) and (
            names.get(fused[0]) == (num_experts, dim, 2 * inner)
            and names.get(fused[1]) == (num_experts, inner, dim)
        )
        gate_up = fused_expert_matrices(
            fused[0], num_experts, dim, 2 * inner, is_swapped, columns=(("inner", inner),) * 2
        )
        down = fused_expert_matrices(fused[1], num_experts, inner, dim, is_swapped, rows="inner")
    else:
        pairs = [(f"{one}.gate_proj.weight", f"{one}.up_proj.weight") for one in single]
        gate_up = expert_matrices(pairs, dim, [inner, inner], columns="inner")
        down = expert_matrices(
            [(f"{one}.down_proj.weight",) for one in single], inner, [dim], rows="inner"
        )
    return MoE(
        router=mixture.router.specs(prefix, dim, mixture.num_experts),
        gate_up=gate_up,
        down=down,
        shared=mlp_specs(f"{prefix}.{mixture.shared_name}", dim, shared, name="shared")
        if shared
        else None,
        shared_gate=dense([f"{prefix}.{mixture.shared_name}_gate.weight"], dim, [1])
        if mixture.has_shared_gate
        else None,
    )
