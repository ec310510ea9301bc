"""What a layer asks of the rows it runs on."""

from typing import Any, Protocol

import jax

from pallas_kernels.gated_delta_rule import Heads


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
        gates: jax.Array,
        conv: jax.Array,
        heads: Heads,
    ) -> tuple[jax.Array, Any]:
        """Run the gated delta rule on raw inputs x [N, C] with gates f32[N, 2, H_v] and the
        convolution [W, C]: outputs [N, H_v, D_v], and the cache that the rows left."""
        ...
