"""What a layer asks of the rows it runs on."""

from typing import Any, Protocol

import jax

from specjax.device.cache.kind import CacheKind


class Rows(Protocol):
    """The N token rows of one extension: the position of each (i32[N]) and the cache before it."""

    @property
    def positions(self) -> jax.Array: ...
    @property
    def kernels(self) -> str: ...

    def mix(
        self, kind: CacheKind, cache: Any, layer: jax.Array, inputs: Any
    ) -> tuple[jax.Array, Any]:
        """Let each row look at those before it, in the form of `kind` that suits these rows.

        Args:
            kind: of cache, and so how rows look at each other.
            cache: its arrays; without any, what the rows themselves keep.
            layer: i32[], which of the kind's layers this is.
            inputs: what the layer's projections made of the rows, as `kind` has it.

        Returns:
            The output [N, H, D_h], and the cache with the rows in it.
        """
        ...
