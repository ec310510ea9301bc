"""Divides the arrays of a model over devices, tensor by tensor of its checkpoint.

The model of one device has fewer heads, inner columns and tokens than the whole model, so that its
specs describe smaller arrays. An axis of a file tensor consists of sections, such as the rows of q,
k and v. The name of a section (see `TensorSpec.cuts`) selects a `Share`, which defines the part of
the section that each device takes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoint.spec import TensorSpec


class Share(NamedTuple):
    """The division of an axis of `total` units (heads, columns, tokens) over devices.

    Device d takes `counts[d]` units from `starts[d]` on, followed by zeros up to `size` units.
    """

    total: int
    size: int
    starts: tuple[int, ...]
    counts: tuple[int, ...]


def even(total: int, num_devices: int, multiple: int = 1) -> Share:
    """Return shares of consecutive units.

    All shares have the same size, a multiple of `multiple`. The last shares may have zeros.
    """
    size = multiple * -(-total // (multiple * num_devices))
    starts = [min(i * size, total) for i in range(num_devices)]
    return Share(total, size, tuple(starts), tuple(min(size, total - start) for start in starts))


def first_only(num_devices: int) -> Share:
    """Return the share of an array that only the first device has; other devices have zeros.

    Biases that are added before a sum over devices are divided in this way.
    """
    return Share(1, 1, (0,) * num_devices, (1, *(0,) * (num_devices - 1)))


def grouped(
    num_heads: int, num_groups: int, num_devices: int, *, may_copy: bool = True
) -> tuple[Share, Share]:
    """Return the shares of query heads, and of the key heads that groups of query heads attend to.

    If there are fewer key heads than devices, several devices hold the same key head and divide its
    query heads, provided that `may_copy` is true. If the key heads do not divide evenly, the last
    devices have heads of zeros.
    """
    per_group, copies = num_heads // num_groups, num_devices // num_groups
    if copies < 2 or num_devices % num_groups or not may_copy:
        keys = even(num_groups, num_devices)
        return _scaled(keys, per_group), keys
    keys = Share(num_groups, 1, tuple(i // copies for i in range(num_devices)), (1,) * num_devices)
    part = even(per_group, copies)
    starts = (i // copies * per_group + part.starts[i % copies] for i in range(num_devices))
    counts = (part.counts[i % copies] for i in range(num_devices))
    return Share(num_heads, part.size, tuple(starts), tuple(counts)), keys


def _scaled(share: Share, factor: int) -> Share:
    """Return a share of `factor` times as many units."""
    return Share(
        share.total * factor,
        share.size * factor,
        *(tuple(factor * x for x in values) for values in share[2:]),
    )


@dataclass(frozen=True)
class Cut:
    """The sections of one axis of a file tensor: pairs of a share and a number of rows.

    Every device takes all rows of a section whose share is None.
    """

    axis: int
    sections: tuple[tuple[Share | None, int], ...]

    def take(self, tensor: Any, device: int, xp: Any = np) -> Any:
        """Return a device's part of a file tensor, an array of the module `xp`."""
        x, pieces = xp.moveaxis(tensor, self.axis, 0), []
        for start, count, size in self._ranges(device):
            pieces.append(x[start : start + count])
            if size > count:
                pieces.append(xp.zeros((size - count, *x.shape[1:]), x.dtype))
        return xp.moveaxis(xp.concatenate(pieces), 0, self.axis)

    def put(self, part: np.ndarray, device: int, tensor: np.ndarray) -> None:
        """Write a device's part to a file tensor: the inverse of `take`."""
        x, y, place = np.moveaxis(tensor, self.axis, 0), np.moveaxis(part, self.axis, 0), 0
        for start, count, size in self._ranges(device):
            x[start : start + count] = y[place : place + count]
            place += size

    def _ranges(self, device: int) -> Iterator[tuple[int, int, int]]:
        """Yield each section's rows on a device: the first row, their number, and with zeros."""
        first = 0
        for share, size in self.sections:
            if share is None:
                yield first, size, size
            else:
                values = share.starts[device], share.counts[device], share.size
                start, count, padded = (value * size // share.total for value in values)
                yield first + start, count, padded
            first += size


@dataclass(frozen=True, kw_only=True)
class DividedSpec(TensorSpec):
    """The spec of an array [devices, ...] that holds the array of each device.

    `local` is the spec of one device's array. `tensor_cuts` has a `Cut` for each file tensor, or
    None for a tensor that every device takes whole.
    """

    local: TensorSpec
    tensor_cuts: tuple[Cut | None, ...]
    num_devices: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See `TensorSpec`."""
        return self.num_devices, *self.local.shape

    @property
    def is_stored(self) -> bool:
        """False: the tensors of the file are divided."""
        return False

    @property
    def is_packed(self) -> bool:
        """See `TensorSpec`."""
        return self.local.is_packed

    def parts(self, tensors: Sequence[Any], device: int, xp: Any = np) -> list[Any]:
        """Return a device's parts of the file tensors."""
        pairs = zip(tensors, self.tensor_cuts, strict=True)
        return [x if cut is None else cut.take(x, device, xp) for x, cut in pairs]

    def join(self, parts: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
        """See `TensorSpec`."""
        devices = range(self.num_devices)
        return jnp.stack([self.local.join(self.parts(parts, i, jnp), dtype) for i in devices])

    def split(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """See `TensorSpec`."""
        shapes = zip(self.names, self.file_shapes, strict=True)
        whole = {name: np.empty(shape, array.dtype) for name, shape in shapes}
        for device in range(self.num_devices):
            local = replace(self.local, names=self.names).split(array[device])
            for (name, part), cut in zip(local.items(), self.tensor_cuts, strict=True):
                if cut is None:
                    whole[name][...] = part
                else:
                    cut.put(part, device, whole[name])
        return whole


def divide(whole: Any, local: Any, shares: Mapping[str, Share], num_devices: int) -> Any:
    """Return the tree of specs of arrays that are divided over devices.

    `whole` and `local` are the trees of the whole model and of the model of one device. The result
    has the structure of `local`. Arrays that every device has as a whole stay `TensorSpec`s.
    """
    leaves, tree = jax.tree.flatten(local)
    specs = map(partial(_divide, shares=shares, count=num_devices), jax.tree.leaves(whole), leaves)
    return jax.tree.unflatten(tree, list(specs))


def _divide(
    whole: TensorSpec, local: TensorSpec, shares: Mapping[str, Share], count: int
) -> TensorSpec:
    cuts = tuple(_cut(whole, i, shares) for i in range(len(whole.names)))
    if not any(cuts):
        return whole
    for shape, part, cut in zip(whole.file_shapes, local.file_shapes, cuts, strict=True):
        made = shape if cut is None else np.broadcast_to(np.int8(0), shape)
        made = part if cut is None else cut.take(made, 0).shape
        assert made == part, f"{whole.names}: {made} {part}"
    own = {one.name: getattr(whole, one.name) for one in fields(TensorSpec)}
    nameless = replace(local, names=("",) * len(local.names))
    return DividedSpec(**own, local=nameless, tensor_cuts=cuts, num_devices=count)


def _cut(spec: TensorSpec, index: int, shares: Mapping[str, Share]) -> Cut | None:
    """Return the cut of a spec's file tensor, or None if it stays whole."""
    if not spec.cuts:
        return None
    axis, sections = spec.cuts[index]
    if all(name is None for name, _ in sections):
        return None
    return Cut(axis, tuple((None if name is None else shares[name], n) for name, n in sections))
