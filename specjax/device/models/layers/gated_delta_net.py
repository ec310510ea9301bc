"""Gated DeltaNet (Yang et al. 2024): a recurrent layer whose memory is one matrix per head."""

from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.gated_delta_rule import DeltaRuleWeights
from specjax.device.cache.recurrent import DeltaInputs, DeltaRule
from specjax.device.models.layers.rope import Angles
from specjax.device.models.layers.rows import Rows
from specjax.device.weights.matrix import Matrix


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GatedDeltaNet:
    """Weights of a Gated DeltaNet layer; decay parameters are always f32."""

    in_proj: Matrix  # [D, C + H_v D_v + 2 H_v], q | k | v, output gate z, write gate b, decay a
    conv: jax.Array  # [W, C]
    log_decay: jax.Array  # f32[H_v]
    decay_bias: jax.Array  # f32[H_v]
    norm: jax.Array  # [D_v], shared by the heads
    out: Matrix  # [H_v D_v, D]

    def mix(
        self,
        x: jax.Array,
        rows: Rows,
        angles: Angles,
        cache: Any,
        layer: jax.Array,
        kind: DeltaRule,
    ) -> tuple[jax.Array, Any]:
        """Run the layer on rows x [N, D]; return its output [N, D] and the new cache.

        The gated delta rule and the output norm run between two projections. `angles` is not used.
        """
        weights = DeltaRuleWeights(self.conv, self.log_decay, self.decay_bias, self.norm)
        inputs = DeltaInputs(self.in_proj.multiply(x), weights)
        y, cache = rows.mix(kind, cache, layer, inputs)
        return self.out.multiply(y.reshape(len(y), -1)), cache
