"""Stacks the arrays of equal matrices, such as those of a mixture's experts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoint.spec import TensorSpec


@dataclass(frozen=True, kw_only=True)
class StackedSpec(TensorSpec):
    """The `TensorSpec` of an array [E, ...] that stacks an array of each of E matrices.

    Attributes:
        one: the spec of the first matrix's array, without tensor names.
    """

    one: TensorSpec

    @property
    def is_stored(self) -> bool:
        """See `TensorSpec`."""
        return False

    @property
    def shape(self) -> tuple[int, ...]:
        """See `TensorSpec`."""
        return self.num_stacked or self.file_shapes[0][0], *self.one.shape

    def read(self, find: Callable[[str], Any]) -> list[Any]:
        """See `TensorSpec.read`."""
        return replace(self.one, names=self.names).read(find)

    def join(self, parts: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
        """See `TensorSpec`. If all matrices are in the same tensors, these are stacked already."""
        if self.num_stacked:
            each = len(self.one.names)
            parts = [jnp.stack(parts[i::each]) for i in range(each)]
        return jax.vmap(lambda *own: self.one.join(own, dtype))(*parts)


def stacked(spec: TensorSpec, one: Any) -> Any:
    """Return a tree of `StackedSpec`s, given the tree `one` of the specs of the first matrix.

    `spec` is the `TensorSpec` of the stacked matrices without quantisation.
    """
    given = {name: getattr(spec, name) for name in ("names", "file_shapes", "num_stacked")}
    return jax.tree.map(lambda x: StackedSpec(**given, dtype=x.dtype, one=x), one)
