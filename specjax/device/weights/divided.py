"""Divides quantised weights over devices without dequantising them.

Each device has a smaller quantised weight, made of its parts of the stored tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import numpy as np

from specjax.checkpoint.division import DividedSpec
from specjax.checkpoint.quantised.parts import computed_once, part_of
from specjax.checkpoint.spec import TensorSpec


@dataclass(frozen=True, kw_only=True)
class DividedParts(DividedSpec):
    """The `DividedSpec` of an array that belongs to a quantised weight, such as its scales.

    The spec in the field `local` builds one device's array from that device's parts of the
    quantised tensors. The spec names these parts "0", "1", ....
    """

    def read(self, find: Callable[[str], Any]) -> list[Any]:
        """Return the quantised tensors without reading them; `parts` reads a device's parts."""
        return [computed_once(find(name)) for name in self.names]

    read_partly = read

    def parts(self, tensors: Sequence[Any], device: int, xp: Any = np) -> list[Any]:
        """See `DividedSpec`.

        If a device has fewer experts than its array has room for, copies of the first expert fill
        the array. The router never chooses these copies.
        """
        taken = self.taken[device] if self.taken else range(len(tensors))
        found = {
            name: part_of(tensors[i or 0], self.tensor_cuts[i or 0], device)
            for name, i in zip(self.local.names, taken, strict=True)
        }
        return [np.asarray(x) for x in self.local.read(found.__getitem__)]


def divided_as_stored(
    x: Any, found: Sequence[Any], make: Callable[[Any, Sequence[Any]], Any]
) -> Any:
    """Return the weight `x`, which is divided over devices, in the form that the checkpoint stores.

    `found` holds the checkpoint's tensors that `x` merges. `make` is the function in
    `stored.STORED` that returns the stored form of an undivided weight of the same class as `x`.
    """
    spec: DividedSpec = x.values
    names = tuple(map(str, range(len(spec.local.names))))
    local = replace(x, values=replace(spec.local, names=names))
    taken = spec.taken[0] if spec.taken else range(len(names))
    parts = [part_of(found[i or 0], spec.tensor_cuts[i or 0], 0) for i in taken]
    whole = {one.name: getattr(spec, one.name) for one in fields(TensorSpec)}

    def divided(one: TensorSpec) -> DividedSpec:
        at = range(len(spec.names)) if spec.taken else list(map(int, one.names))
        given = {name: tuple(whole[name][i] for i in at) for name in ("names", "file_shapes")}
        if spec.interleaved:
            given["interleaved"] = tuple(spec.interleaved[i] for i in at)
        is_plain = parts[int(one.names[0])] is None
        return (DividedSpec if is_plain else DividedParts)(
            **(whole | given | {"dtype": one.dtype}),
            local=one,
            tensor_cuts=tuple(spec.tensor_cuts[i] for i in at),
            num_devices=spec.num_devices,
            taken=spec.taken,
        )

    return jax.tree.map(divided, make(local, parts))
