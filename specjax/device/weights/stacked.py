"""Stacks the arrays of matrices of the same form, such as the matrices of a mixture's experts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from specjax.checkpoint.spec import TensorSpec, module_of


@dataclass(frozen=True, kw_only=True)
class StackedSpec(TensorSpec):
    """The `TensorSpec` of an array [E, ...] that stacks one array from each of E matrices.

    For example, it stacks the scales of E experts.

    Attributes:
        one: the spec of this array for a single matrix, without tensor names.
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

    def join(self, parts: Sequence[Any], dtype: np.dtype) -> Any:
        """Return the stacked array in `dtype`.

        If a file tensor holds all E matrices, it is stacked already.
        """
        if self.num_stacked:
            each = len(self.one.names)
            xp = module_of(parts[0])
            parts = [xp.stack(parts[i::each]) for i in range(each)]
        if isinstance(parts[0], np.ndarray):
            return np.stack([self.one.join(own, dtype) for own in zip(*parts, strict=True)])
        return jax.vmap(lambda *own: self.one.join(own, dtype))(*parts)


def stacked(spec: TensorSpec, one: Any) -> Any:
    """Return a tree like `one`, with a `StackedSpec` in the place of each spec.

    `one` is the tree of specs of one matrix. `spec` is the `TensorSpec` of the stacked matrices
    without quantisation.
    """
    given = {name: getattr(spec, name) for name in ("names", "file_shapes", "num_stacked")}
    return jax.tree.map(lambda x: StackedSpec(**given, dtype=x.dtype, one=x), one)
