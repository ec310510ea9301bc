"""The parts of quantised matrices that devices take.

A part is a quantised matrix as well, with its own numbers and scales. If the matrix is cut within
groups that share a scale, the part has smaller groups, and several of them have the same scale.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

import numpy as np

from specjax.checkpoint.division import Cut
from specjax.checkpoint.quantised.packed import PackedTensor, unchanged
from specjax.checkpoint.quantised.rounding import Part
from specjax.checkpoint.quantised.scaled import ScaledTensor
from specjax.checkpoint.stored_tensor import Readable, read_partly

MIN_INPUTS = 16  # of a group: kernels multiply at least this many at a time


def part_of(tensor: Any, cut: Cut | None, device: int) -> Any:
    """Return the part of a quantised tensor that device number `device` takes.

    It is the tensor itself if `cut` is None. It is None if parts would have no form for kernels, or
    if the tensor is not quantised. These conditions do not depend on the device.
    """
    make = PARTS.get(type(tensor))
    if make is None or cut is None:
        return None if make is None else tensor
    return make(tensor, cut, device)


def _cut(tensor: Readable, cut: Cut, device: int) -> Part:
    """Return a part of the stored numbers. Only this part of a file is read."""
    shape = cut.part_shape(tensor.shape)
    return Part(tensor.path, tensor.dtype, shape, lambda: cut.take(read_partly(tensor), device))


def _runs(side: int, size: int, cut: Cut) -> int | None:
    """Return how many adjacent rows of a part share a scale.

    `side` rows of the whole matrix share a scale. The result is None if all of its `size` rows do.
    """
    return None if side >= size else math.gcd(side, cut.unit)


def _refined(scales: np.ndarray, axis: int, side: int, run: int, size: int) -> np.ndarray:
    """Return one scale for `run` of `size` rows along an axis, given one for `side` rows."""
    fine = np.repeat(scales, side // run, axis=axis)
    return fine.take(np.arange(size // run), axis=axis)


def _scaled_part(tensor: ScaledTensor, cut: Cut, device: int) -> ScaledTensor | None:
    shape, block = cut.part_shape(tensor.shape), list(tensor.block)
    within = cut.axis - (len(shape) - 2)  # 0: rows, 1: columns; less if whole matrices are taken
    side, size = tensor.block[within] if within >= 0 else 1, tensor.shape[cut.axis]
    run = _runs(side, size, cut)
    if within == 1 and run is not None and run < min(side, MIN_INPUTS):
        return None
    if within >= 0:
        block[within] = run or cut.size

    def read_scales() -> np.ndarray:
        scales = tensor.read_scales()
        if run is None:
            return scales
        fine = _refined(scales, cut.axis, side, run, size)
        return cut.of_runs(run, cut.axis).take(fine, device, fill=1)

    outer = shape[: len(shape) - 2]
    blocks = (-(-n // m) for n, m in zip(shape[-2:], block, strict=True))
    scales = Part(tensor.path, np.dtype(np.float32), (*outer, *blocks), read_scales)
    numbers, sides = _cut(tensor.weight, cut, device), (block[0], block[1])
    return ScaledTensor(numbers, scales, tensor.scales_name, sides, tensor.dtype)


@dataclass(frozen=True, kw_only=True)
class PackedPart(PackedTensor):
    """A device's part of a `PackedTensor`."""

    whole: PackedTensor
    own_order: np.ndarray | None
    cut_groups: Callable[[np.ndarray], np.ndarray]  # returns the part of an array [groups, O]

    @cached_property
    def order(self) -> np.ndarray | None:
        """See `PackedTensor`. An input past the last one is 0; it fills up a group."""
        return self.own_order

    @cached_property
    def used_zeros(self) -> np.ndarray | None:
        """See `PackedTensor`. They are None for all parts of a matrix or for none."""
        zeros = self.whole.used_zeros
        return None if zeros is None else self.cut_groups(zeros)

    def read_scales(self) -> np.ndarray:
        """Return the scales [groups, O]. The scales of rows and groups of padding are 0."""
        whole = self.whole
        scales = np.asarray(whole.unpack.scales(whole.read_scales()))
        shape = whole.num_groups, whole.shape[0]
        return self.cut_groups(np.broadcast_to(scales, shape))


def _packed_part(tensor: PackedTensor, cut: Cut, device: int) -> PackedPart | None:
    word_axis, per_word = tensor.unpack.axes[cut.axis]
    if cut.unit % per_word:
        return None
    group, order, cut_groups = tensor.group, tensor.order, unchanged
    if cut.axis == 0:
        cut_groups = partial(cut.of_runs(1, 1).take, device=device)
    elif order is not None:
        group, order = _order_of_part(tensor, cut, device)
    elif run := _runs(group, depth := tensor.shape[1], cut):
        if run % MIN_INPUTS:
            return None
        by_run = partial(_refined, axis=0, side=group, run=run, size=depth)
        take = partial(cut.of_runs(run, 0).take, device=device)
        group, cut_groups = run, lambda x: take(by_run(x))
    else:
        group = cut.size
    own = {one.name: getattr(tensor, one.name) for one in fields(PackedTensor)}
    own |= {
        "weight": _cut(tensor.weight, cut.of_runs(per_word, word_axis), device),
        "unpack": tensor.unpack._replace(scales=unchanged),
        "shape": cut.part_shape(tensor.shape),
        "group": group,
    }
    return PackedPart(**own, whole=tensor, own_order=order, cut_groups=cut_groups)


def _order_of_part(tensor: PackedTensor, cut: Cut, device: int) -> tuple[int, np.ndarray]:
    """Return the size of the groups of all parts, and the order of a part's inputs.

    A group of the matrix is a group of each part. Because its inputs are not adjacent, parts have
    different numbers of them. So groups are filled up with inputs past the last one, which are 0.
    """
    assert tensor.order is not None
    depth, count = tensor.shape[1], tensor.num_groups
    groups = np.empty(depth, np.int32)
    groups[tensor.order] = np.arange(depth) // tensor.group
    by_input = cut.of_runs(1, 0)
    parts = [by_input.take(groups, i, fill=count) for i in range(cut.num_devices or 1)]
    counts = [np.bincount(one, minlength=count + 1)[:count] for one in parts]
    size = MIN_INPUTS * -(-int(np.max(counts)) // MIN_INPUTS)
    order = np.full((count, size), cut.size, np.int32)
    for group in range(count):
        members = np.flatnonzero(parts[device] == group)
        order[group, : len(members)] = members
    return size, order.reshape(-1)


PARTS: dict[type, Callable[[Any, Cut, int], Any]] = {
    ScaledTensor: _scaled_part,
    PackedTensor: _packed_part,
}
