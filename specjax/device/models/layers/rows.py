"""The interface of the rows that a layer runs on."""

from typing import Any, Protocol

import jax

from specjax.device.cache.kind import CacheKind


class Rows(Protocol):
    """The N token rows of a forward pass.

    Each row has a position, i32[N]. In serving, rows read a cache and write to it.
    """

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
        """Mix each row with the rows that it sees (by attention or the delta rule).

        Most classes of rows call methods of `kind`: `write` and `read` in serving, `causal` or
        `unrolled` in training.

        Args:
            kind: the cache kind, which determines the mixing.
            cache: in serving, the arrays of `kind`. In training, some classes of rows keep values
                in it between calls; other classes do not use it.
            layer: i32[], the layer's index within its kind.
            inputs: the projected rows and shared weights that `kind` needs; see `RowInputs`.

        Returns:
            The output [N, H, D_h], and the cache. Classes that store rows in the cache add these
            rows to it.
        """
        ...
