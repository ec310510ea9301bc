"""Divides a model's arrays over devices, by dividing the tensors of its checkpoint.

Each device runs a smaller model, which has only some of the whole model's heads, experts, MLP
columns and vocabulary tokens. The `TensorSpec`s of the smaller model describe the arrays that one
device holds.

A divided axis of a file tensor consists of sections, such as the rows of q, k and v. Sections have
names in `TensorSpec.cuts`. Each name has a `Share`, which defines the part of the section that each
device takes. If each expert has its own tensors, a device takes the whole tensors of its experts
(see `TensorSpec.stacked_as`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.checkpoint.spec import TensorSpec, module_of
from specjax.checkpoint.stored_tensor import read_partly


class Share(NamedTuple):
    """The division of `total` units (such as heads, columns or tokens) over devices.

    Device d takes `counts[d]` units, beginning with unit `starts[d]`. These units are then padded
    with zeros to `size` units, the same number on all devices.
    """

    total: int
    size: int
    starts: tuple[int, ...]
    counts: tuple[int, ...]


def even(total: int, num_devices: int, multiple: int = 1) -> Share:
    """Return a share in which each device takes consecutive units, in the order of devices.

    The parts of all devices have the same size, a multiple of `multiple`. If there are too few
    units, the parts of the last devices are padded with zeros.
    """
    size = multiple * -(-total // (multiple * num_devices))
    starts = [min(i * size, total) for i in range(num_devices)]
    return Share(total, size, tuple(starts), tuple(min(size, total - start) for start in starts))


def first_only(num_devices: int) -> Share:
    """Return a share in which the first device takes everything, and all other devices have zeros.

    A bias is divided like this if a sum over devices follows. The sum then has the bias only once.
    """
    return Share(1, 1, (0,) * num_devices, (1, *(0,) * (num_devices - 1)))


def grouped(
    num_heads: int, num_groups: int, num_devices: int, *, may_copy: bool = True
) -> tuple[Share, Share]:
    """Return the share of `num_heads` query heads, and the share of `num_groups` key heads.

    A group of query heads shares a key head, and a device must have the key heads of its query
    heads. Usually each device takes some key heads, each with all query heads of its group. The
    last devices can get fewer heads, which are then padded with heads of zeros.

    If there are 2, 3, ... times as many devices as key heads and `may_copy` is true, several
    devices have a copy of the same key head, and divide its query heads.
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
    """Return the same division as `share`, with each unit split into `factor` units."""
    return Share(
        share.total * factor,
        share.size * factor,
        *(tuple(factor * x for x in values) for values in share[2:]),
    )


@dataclass(frozen=True)
class Cut:
    """The division of one axis of a file tensor over devices.

    `sections` has a pair (share, number of rows) for each section of the axis. Every device takes
    all rows of a section whose share is None.
    """

    axis: int
    sections: tuple[tuple[Share | None, int], ...]

    @property
    def num_devices(self) -> int | None:
        """The number of devices; None if every device takes the whole axis."""
        return next((len(share.starts) for share, _ in self.sections if share), None)

    @property
    def size(self) -> int:
        """The size of the axis in each device's part, including padding."""
        return sum(size for _, _, size in self._ranges(0))

    @property
    def unit(self) -> int:
        """The largest number that divides the start and size of every section and every part."""
        devices = range(self.num_devices or 1)
        places = (x for device in devices for one in self._ranges(device) for x in one)
        return math.gcd(*(size for _, size in self.sections), *places)

    def of_runs(self, unit: int, axis: int) -> "Cut":
        """Return this division for a second tensor, with one row per `unit` rows of the first.

        `axis` is the divided axis of the second tensor. For example, the first tensor holds
        weights. The second holds their scales, one for each block of `unit` rows. A block of `unit`
        rows must not belong to two devices or sections.
        """
        return Cut(axis, tuple((share, size // unit) for share, size in self.sections))

    def part_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a device's part of a tensor with this shape."""
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])

    def take(self, tensor: Any, device: int, xp: Any = np, *, fill: int = 0) -> Any:
        """Return the part of a file tensor that device number `device` takes.

        `xp` is the module of the tensor's array type: NumPy or `jax.numpy`. If the device has too
        few rows, rows with the value `fill` are appended.
        """
        x, pieces = xp.moveaxis(tensor, self.axis, 0), []
        for start, count, size in self._ranges(device):
            pieces.append(x[start : start + count])
            if size > count:
                pieces.append(xp.full((size - count, *x.shape[1:]), fill, x.dtype))
        return xp.moveaxis(xp.concatenate(pieces), 0, self.axis)

    def put(self, part: np.ndarray, device: int, tensor: np.ndarray) -> None:
        """Write the part of device number `device` to its place in a file tensor.

        This is the inverse of `take`.
        """
        x, y, place = np.moveaxis(tensor, self.axis, 0), np.moveaxis(part, self.axis, 0), 0
        for start, count, size in self._ranges(device):
            x[start : start + count] = y[place : place + count]
            place += size

    def _ranges(self, device: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start, count, size) for each section.

        The device takes `count` rows of the file tensor from row `start` on, which are then padded
        to `size` rows.
        """
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
    """The `TensorSpec` of an array [devices, ...] that stacks the arrays of all devices.

    The inherited fields describe the whole model's array.

    Attributes:
        local: the `TensorSpec` of one device's array, with empty tensor names.
        tensor_cuts: the `Cut` of each file tensor; None for a tensor that every device takes whole.
        num_devices: the number of devices.
        taken: () if devices take parts of tensors. Otherwise each device takes whole tensors, for
            example the tensors of some experts. Then `taken` has a tuple per device with the
            indices of its tensors. None instead of an index means a tensor of zeros.
    """

    local: TensorSpec
    tensor_cuts: tuple[Cut | None, ...]
    num_devices: int
    taken: tuple[tuple[int | None, ...], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """See `TensorSpec`."""
        return self.num_devices, *self.local.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        """See `TensorSpec`."""
        return self.local.shape

    @property
    def whole(self) -> TensorSpec:
        """The `TensorSpec` of the whole model's array."""
        return type(self.local)(**{one.name: getattr(self, one.name) for one in fields(TensorSpec)})

    @property
    def is_padded(self) -> bool:
        """Whether any device's array is padded."""
        cuts = (cut for cut in self.tensor_cuts if cut is not None)
        shares = {share for cut in cuts for share, _ in cut.sections if share is not None}
        is_filled = any(None in one for one in self.taken)
        return is_filled or any(min(share.counts) < share.size for share in shares)

    @property
    def is_stored(self) -> bool:
        """False: the array is not a single unchanged tensor of the file."""
        return False

    @property
    def is_packed(self) -> bool:
        """See `TensorSpec`."""
        return self.local.is_packed

    def read(self, find: Callable[[str], Any]) -> list[Any]:
        """See `TensorSpec.read`."""
        return replace(self.local, names=self.names).read(find)

    def read_partly(self, find: Callable[[str], Any]) -> list[Any]:
        """Return the file tensors, for a caller that uses only parts of them.

        If possible, tensors are mapped into memory instead of read.
        """
        return [read_partly(find(name)) for name in self.names]

    def parts(self, tensors: Sequence[Any], device: int, xp: Any = np) -> list[Any]:
        """Return the tensors that `local` joins to the array of device number `device`.

        `tensors` are all file tensors of the whole array. With `taken`, the result has only the
        tensors that this device takes, undivided, and zeros in the place of missing tensors.
        Otherwise, the result has the device's part of each file tensor. `Cut.take` explains `xp`.
        """
        if self.taken:
            pairs = zip(self.taken[device], self.local.file_shapes, strict=True)
            dtype = tensors[0].dtype
            return [xp.zeros(shape, dtype) if i is None else tensors[i] for i, shape in pairs]
        pairs = zip(tensors, self.tensor_cuts, strict=True)
        return [x if cut is None else cut.take(x, device, xp) for x, cut in pairs]

    def join(self, parts: Sequence[Any], dtype: np.dtype) -> Any:
        """See `TensorSpec`."""
        xp, devices = module_of(parts[0]), range(self.num_devices)
        return xp.stack([self.local.join(self.parts(parts, i, xp), dtype) for i in devices])

    def split(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """See `TensorSpec.split`. `array` must be a NumPy array."""
        shapes = zip(self.names, self.file_shapes, strict=True)
        whole = {name: np.empty(shape, array.dtype) for name, shape in shapes}
        places = [str(i) for i in range(len(self.local.names))]
        for device in range(self.num_devices):
            parts = replace(self.local, names=tuple(places)).split(array[device]).values()
            taken = self.taken[device] if self.taken else range(len(self.names))
            for index, part in zip(taken, parts, strict=True):
                if index is None:
                    continue
                name, cut = self.names[index], self.tensor_cuts[index]
                if cut is None:
                    whole[name][...] = part
                else:
                    cut.put(part, device, whole[name])
        return whole


def divide(whole: Any, local: Any, shares: Mapping[str, Share], num_devices: int) -> Any:
    """Return the `TensorSpec`s of a model that is divided over devices.

    Args:
        whole: the tree of the whole model's `TensorSpec`s.
        local: the tree of `TensorSpec`s of the model that each device runs.
        shares: the `Share` of each kind of axis, such as attention heads, by the names that
            `TensorSpec.cuts` uses.
        num_devices: the number of devices.

    Returns:
        A tree like `local`. An array that is divided has a `DividedSpec`. Every other array is
        whole on each device, and keeps its spec from `whole`.

    Raises:
        ValueError: the parts of a tensor have other shapes than in `local`. The message names the
            tensor.
    """
    leaves, tree = jax.tree.flatten(local)
    specs = map(partial(_divide, shares=shares, count=num_devices), jax.tree.leaves(whole), leaves)
    return jax.tree.unflatten(tree, list(specs))


def _divide(
    whole: TensorSpec, local: TensorSpec, shares: Mapping[str, Share], count: int
) -> TensorSpec:
    cuts = tuple(_cut(whole, i, shares) for i in range(len(whole.names)))
    groups = shares.get(whole.stacked_as or "")
    if groups is None:
        _check_shapes(whole, local, cuts, count)
    if not any(cuts) and groups is None:
        return whole
    own = {one.name: getattr(whole, one.name) for one in fields(TensorSpec)}
    nameless = replace(local, names=("",) * len(local.names))
    divided = DividedSpec(**own, local=nameless, tensor_cuts=cuts, num_devices=count)
    if groups is None:
        return divided
    size = len(whole.names) // groups.total  # tensors of a group
    each = zip(groups.starts, groups.counts, strict=True)
    held = [range(size * start, size * (start + number)) for start, number in each]
    padding = [(None,) * (size * groups.size - len(one)) for one in held]
    taken = tuple((*one, *rest) for one, rest in zip(held, padding, strict=True))
    return replace(divided, taken=taken)


def _check_shapes(
    whole: TensorSpec, local: TensorSpec, cuts: tuple[Cut | None, ...], count: int
) -> None:
    each = zip(whole.names, whole.file_shapes, local.file_shapes, cuts, strict=True)
    for name, shape, expected, cut in each:
        found = shape if cut is None else cut.part_shape(shape)
        if found != expected:
            raise ValueError(
                f"tensor_parallel_size={count}: the model that each device runs has {name} of the "
                f"shape {list(expected)}, but `shares` and `cuts` divide the whole {list(shape)} "
                f"into {list(found)}; correct these in the Model's class, or use one device"
            )


def _cut(spec: TensorSpec, index: int, shares: Mapping[str, Share]) -> Cut | None:
    """Return how devices divide file tensor number `index`; None if they do not divide it."""
    for axis, sections in spec.cuts[index] if spec.cuts else ():
        if any(name in shares for name, _ in sections):
            each = ((None if name is None else shares[name], size) for name, size in sections)
            return Cut(axis, tuple(each))
    return None
