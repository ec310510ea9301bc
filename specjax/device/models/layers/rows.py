"""The interface of the rows that a layer runs on."""

from typing import Any, Protocol

import jax

from specjax.device.cache.kind import CacheKind


class Rows(Protocol):
    """The N token rows of one extension: the position of each (i32[N]) and the cache before it."""

    @property
    def positions(self) -> jax.Array: ...
    @property
    def kernels(self) -> str: ...
    @property
    def attends(self) -> bool:
        """Whether the output of attention is used, and not only the keys and values it leaves."""
        ...

    def mix(
        self, kind: CacheKind, cache: Any, layer: jax.Array, inputs: Any
    ) -> tuple[jax.Array, Any]:
        """Mix each row with the rows before it, in the form of `kind` for these rows.

        Args:
            kind: the kind of cache, which determines the mixing (attention, delta rule).
            cache: the arrays of `kind`; for rows without a cache, their own state.
            layer: i32[], the layer's index within its kind.
            inputs: the layer's projections of the rows, as `kind` expects them.

        Returns:
            The output [N, H, D_h], and the cache with the rows added.
        """
        ...
