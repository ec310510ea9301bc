"""What a layer asks of the rows it runs on."""

from typing import Any, Protocol

import jax

from pallas_kernels.gated_delta_rule import DeltaRuleWeights, Heads


class Rows(Protocol):
    """The N token rows of one extension: where each stands (i32[N]) and what it goes on from."""

    @property
    def positions(self) -> jax.Array: ...
    @property
    def kernels(self) -> str: ...

    def attend(
        self, kv: Any, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Make k and v [N, H_kv, D] part of the context `kv`, then attend q [N, H, D] over it:
        the output [N, H, D], and the context that holds them."""
        ...

    def recur(
        self,
        cache: Any,
        layer: jax.Array,
        x: jax.Array,
        weights: DeltaRuleWeights,
        heads: Heads,
        eps: float,
    ) -> tuple[jax.Array, Any]:
        """Run the gated delta rule on projected inputs x [N, C + H_v D_v + 2 H_v]: outputs
        [N, H_v, D_v], and the cache that the rows left. See `pallas_kernels.gated_delta_rule`."""
        ...
