"""The attention layer: grouped-query softmax attention."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.rope_write import HeadWeights
from specjax.device.cache.paged import PagedAttention, ProjectedHeads
from specjax.device.models.layers.rope import Angles
from specjax.device.models.layers.rows import Rows
from specjax.device.weights.matrix import Matrix


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Attention:
    """Weights of an attention layer; a weight that the architecture does not have is None."""

    qkv: Matrix  # [D_in, ...]: q, optional output gate, k and v of all heads
    out: Matrix  # [H head_dim, D]
    qkv_bias: jax.Array | None = None
    out_bias: jax.Array | None = None
    q_norm: jax.Array | None = None  # [head_dim]
    k_norm: jax.Array | None = None
    sinks: jax.Array | None = None  # [H], see `paged_attention`

    def mix(
        self,
        x: jax.Array,
        rows: Rows,
        angles: Angles,
        kv: Any,
        layer: jax.Array,
        kind: PagedAttention,
    ) -> tuple[jax.Array, Any]:
        """Run the layer on rows x [N, D_in]; return its output [N, D] and the new kv.

        If `rows.attends` is false, only keys and values are computed, and the output is zeros.
        """
        if not rows.attends:
            return self._keep(x, rows, angles, kv, layer, kind)
        qkv = self.qkv.multiply(x)
        weights = HeadWeights(self.qkv_bias, self.q_norm, self.k_norm)
        inputs = ProjectedHeads(qkv, weights, angles.rotation, self.sinks, angles.query_scales)
        mixed, kv = rows.mix(kind, kv, layer, inputs)
        mixed = mixed.reshape(len(mixed), -1)
        if (gate := self.qkv.split(qkv).get("gate")) is not None:
            mixed = mixed * jax.nn.sigmoid(gate)
        y = self.out.multiply(mixed)
        return y if self.out_bias is None else y + self.out_bias[None], kv

    def _keep(
        self,
        x: jax.Array,
        rows: Rows,
        angles: Angles,
        kv: Any,
        layer: jax.Array,
        kind: PagedAttention,
    ) -> tuple[jax.Array, Any]:
        """Write only the keys and values of rows x [N, D_in]; return zeros [N, D] and new kv."""
        first = self.qkv.start("k")
        bias = None if self.qkv_bias is None else self.qkv_bias[first:]
        made = self.qkv.multiply_from(x, first)
        inputs = ProjectedHeads(made, HeadWeights(bias, None, self.k_norm), angles.rotation)
        _, kv = rows.mix(kind, kv, layer, inputs)
        return jnp.zeros((len(x), self.out.num_out), x.dtype), kv
