"""Divides quantised matrices over devices.

Each device takes a part, which is itself a quantised matrix with numbers and scales. If a cut goes
through a group of weights that share a scale, parts have smaller groups, and the scale is repeated.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from specjax.checkpoint.division import Cut
from specjax.checkpoint.quantised.packed import PackedTensor, unchanged
from specjax.checkpoint.quantised.rounding import Part
from specjax.checkpoint.quantised.scaled import ScaledTensor
from specjax.checkpoint.stored_tensor import Readable, read_partly

MIN_INPUTS = 16  # smallest group of inputs: kernels multiply at least 16 inputs at a time


def part_of(tensor: Any, cut: Cut | None, device: int) -> Any:
    """Return the part of a quantised tensor that device number `device` takes.

    The result is None if the tensor is not quantised, or if no kernel can read its parts. For one
    tensor and cut, either all devices get a part, or all get None. If `cut` is None, every device
    takes the whole quantised tensor.
    """
    make = PARTS.get(type(tensor))
    if make is None or cut is None:
        return None if make is None else tensor
    return make(tensor, cut, device)


def computed_once(tensor: Any) -> Any:
    """Return a quantised tensor whose numbers are computed only once for all devices' parts.

    The tensor is returned unchanged if a file has the numbers, or if it is not quantised.
    """
    if type(tensor) not in PARTS or not isinstance(tensor.weight, Part):
        return tensor
    compute = cache(lambda: np.asarray(tensor.weight.read()))
    return replace(tensor, weight=replace(tensor.weight, compute=compute))


def _cut(tensor: Readable, cut: Cut, device: int) -> Part:
    """Return a device's part of the stored numbers. If possible, only this part is read."""
    shape = cut.part_shape(tensor.shape)
    return Part(tensor.path, tensor.dtype, shape, lambda: cut.take(read_partly(tensor), device))


def _runs(side: int, size: int, cut: Cut) -> int | None:
    """Return how many adjacent rows share a scale in a device's part of a matrix.

    The whole matrix has `size` rows, and every `side` adjacent rows share a scale. Return None if
    all rows of the whole matrix share one scale.
    """
    return None if side >= size else math.gcd(side, cut.unit)


def _refined(scales: np.ndarray, axis: int, side: int, run: int, size: int) -> np.ndarray:
    """Return scales for smaller groups of rows, by repeating `scales` along an axis.

    The axis has `size` rows. In `scales`, `side` adjacent rows share a scale. In the result, `run`
    adjacent rows share a scale.
    """
    fine = np.repeat(scales, side // run, axis=axis)
    return fine.take(np.arange(size // run), axis=axis)


def _scaled_part(tensor: ScaledTensor, cut: Cut, device: int) -> ScaledTensor | None:
    shape, block = cut.part_shape(tensor.shape), list(tensor.block)
    within = cut.axis - (len(shape) - 2)  # 0: rows, 1: columns, negative: whole matrices are taken
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
        """See `PackedTensor.order`. An index past the matrix's last input marks padding."""
        return self.own_order

    @cached_property
    def used_zeros(self) -> np.ndarray | None:
        """The zero points u8[groups, O] of the part; None if `whole.used_zeros` is None."""
        zeros = self.whole.used_zeros
        return None if zeros is None else self.cut_groups(zeros)

    def read_scales(self) -> np.ndarray:
        """Return the scales [groups, O]. Padding has scales of 0."""
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
    """Return the size of groups in the parts of all devices, and the order of one part's inputs.

    The inputs of a group are not adjacent in the matrix, so each device gets some inputs of each
    group. The number of these inputs differs by group and by device. So all groups are padded to
    the same size, with indices past the last input.
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
