"""Moves a trainer's arrays, which are spread over several devices, to the devices of an engine.

Nothing passes through the host. First, the trainer's devices compute the engine's arrays. Then the
part of an array that an engine's device needs is copied to it from a trainer's device.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from specjax.device.placement import Device

_PARTS, _COPIES = "parts", "copies"  # the axes of the trainer's devices


def devices_of(arrays: Sequence[Any]) -> tuple[Device, ...]:
    """Return the devices over which all of the arrays are spread, in the order of their mesh.

    Return () if the arrays are not all spread over the same devices. Also return () if an array is
    on one device, in host memory, or spread over processes.
    """
    found = {all_devices_of(array) for array in arrays}
    devices = found.pop() if len(found) == 1 else ()
    return devices if len(devices) > 1 else ()


def all_devices_of(array: Any) -> tuple[Device, ...]:
    """Return the one or several devices of an array, in the order of their mesh.

    Return () if the array is in host memory, or if it is spread over processes.
    """
    if not isinstance(array, jax.Array) or not array.is_fully_addressable:
        return ()
    devices = tuple(array.sharding.devices_indices_map(array.shape))
    is_near = array.sharding.memory_kind in (None, devices[0].default_memory().kind)
    return devices if is_near else ()


def spread(
    function: Callable[[list[jax.Array]], jax.Array],
    devices: Sequence[Device],
    cut_axes: Sequence[int | None],
    num_parts: int,
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Return `function`, jitted for arrays that are spread over `devices`.

    `function` takes a list of arrays, and can cut each array along one axis. `cut_axes` holds this
    axis for each array; None for no axis. So that no device needs a whole array, each array is
    first spread over the devices along another axis, whose size is divisible by the number of
    devices. An array without such an axis is not moved.

    `num_parts` is the size of the result's first axis, along which the result is spread over the
    devices. If `num_parts` is 0, each device has the whole result.
    """
    grid = np.array(devices).reshape(math.gcd(num_parts or 1, len(devices)), -1)
    mesh = Mesh(grid, (_PARTS, _COPIES))

    def placed(x: jax.Array, *spec: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))

    def run(arrays: Sequence[jax.Array]) -> jax.Array:
        beside, width = [], 0
        for x, cut in zip(arrays, cut_axes, strict=True):
            others = (i for i, size in enumerate(x.shape) if i != cut and size % mesh.size == 0)
            axis = next(others, None)
            width = 0 if axis is None else x.shape[axis]
            beside.append(x if axis is None else placed(x, *[None] * axis, mesh.axis_names))
        result = function(beside)
        if num_parts and width in result.shape[1:]:  # first each part, then its copies
            axis = result.shape.index(width, 1)
            result = placed(result, _PARTS, *[None] * (axis - 1), _COPIES)
        return result

    place = PartitionSpec(_PARTS) if num_parts else PartitionSpec()
    return jax.jit(run, out_shardings=NamedSharding(mesh, place))


def automatic(array: jax.Array) -> jax.Array:
    """Return the array on a mesh of the same devices, with axes of JAX's type `Auto`.

    In programs on such a mesh, JAX chooses how results are divided. A trainer's mesh can have axes
    of the type `Explicit`, for which functions must say how results are divided. An array without a
    mesh is returned unchanged.
    """
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        return array
    devices: Any = sharding.mesh.devices
    mesh = Mesh(devices, sharding.mesh.axis_names)
    shards = [shard.data for shard in array.addressable_shards]
    place = NamedSharding(mesh, sharding.spec)
    return jax.make_array_from_single_device_arrays(array.shape, place, shards)


def move(array: jax.Array, sharding: Sharding) -> jax.Array:
    """Return a copy of `array` with the given sharding, copied from device to device.

    Each device's part of the result must lie within a part of `array` that one device has.
    """
    held = {}
    for shard in array.addressable_shards:
        held.setdefault(_rows(shard.index, array.shape), []).append(shard.data)
    placed = []
    for i, (device, index) in enumerate(
        sharding.addressable_devices_indices_map(array.shape).items()
    ):
        start, stop = _rows(index, array.shape)
        (first, last), copies = next(
            one for one in held.items() if one[0][0] <= start and stop <= one[0][1]
        )
        data = copies[i % len(copies)]  # so that several devices send
        if (first, last) != (start, stop):
            data = data[start - first : stop - first]
        home = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        placed.append(jax.device_put(data, home, may_alias=False))
    return jax.make_array_from_single_device_arrays(array.shape, sharding, placed)


def _rows(index: Any, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the range that `index` selects on the first axis."""
    start, stop, _ = index[0].indices(shape[0]) if shape else (0, 1, 1)
    return start, stop
