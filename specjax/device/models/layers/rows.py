"""The interface of the rows that a layer runs on."""

from typing import Any, Protocol

import jax

from specjax.device.cache.kind import CacheKind


class Rows(Protocol):
    """The N token rows of a forward pass: their positions i32[N], and their places in the cache."""

    @property
    def positions(self) -> jax.Array: ...
    @property
    def kernels(self) -> str: ...
    @property
    def attends(self) -> bool:
        """Whether the output of attention is used. If not, only keys and values are needed."""
        ...

    def mix(
        self, kind: CacheKind, cache: Any, layer: jax.Array, inputs: Any
    ) -> tuple[jax.Array, Any]:
        """Mix each row with the rows before it. Call the method of `kind` for this class of rows.

        Args:
            kind: the cache kind, which determines the mixing (attention, delta rule).
            cache: the arrays of `kind`, or the state of rows that have no cache.
            layer: i32[], the layer's index within its kind.
            inputs: the layer's projections of the rows, as `kind` expects them.

        Returns:
            The output [N, H, D_h], and the cache with the rows added.
        """
        ...
