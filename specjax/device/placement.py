"""Placement of arrays on one device, or on a mesh of devices over which a model is divided."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

Device: TypeAlias = Any  # a `jax.Device`, which type checkers reject as a type
AXIS = "model"  # the mesh axis over which a model is divided
REPLICATED, DIVIDED = PartitionSpec(), PartitionSpec(AXIS)


def default_device() -> Device:
    """Return the device that engines run on: JAX's first device of this process."""
    return jax.local_devices()[0]


@dataclass(frozen=True)
class Placement:
    """The devices of an engine: a mesh with one axis, whose size can be one."""

    mesh: Mesh

    @classmethod
    def on(cls, *devices: Device) -> "Placement":
        """Return a placement on these devices."""
        return cls(Mesh(np.array(devices), (AXIS,)))

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return self.mesh.size

    @property
    def is_here(self) -> bool:
        """Whether all devices belong to this process."""
        return self.sharding().is_fully_addressable

    @property
    def device(self) -> Device:
        """One of this process's devices. All devices of the mesh are of its kind."""
        return self.mesh.local_devices[0]

    def sharding(self, spec: PartitionSpec = REPLICATED) -> Sharding:
        """Return the sharding for arrays that are `REPLICATED` or `DIVIDED`.

        Every device has the whole of a replicated array. A divided array is [devices, ...], and
        each device holds its row [1, ...].
        """
        memory = self.device.default_memory().kind  # a source array may be in host memory
        if self.mesh.size == 1:
            # Programs over a named mesh have more overhead to compile and to call.
            return SingleDeviceSharding(self.device, memory_kind=memory)
        return NamedSharding(self.mesh, spec, memory_kind=memory)

    def put(self, tree: Any) -> Any:
        """Return `tree` with its arrays on every device.

        NumPy arrays in `tree` must not be modified later.
        """
        return put(tree, self.sharding())

    def copy(self, tree: Any) -> Any:
        """Copy `tree` to the devices of this placement; return the copy.

        The arrays of `tree` are on another mesh with the same number of devices. An array that
        occurs twice in `tree` is copied once.
        """
        copies: dict[int, jax.Array] = {}

        def copy(x: jax.Array) -> jax.Array:
            if id(x) not in copies:
                spec = DIVIDED if is_divided(x) else REPLICATED
                copies[id(x)] = jax.device_put(x, self.sharding(spec))
            return copies[id(x)]

        return jax.tree.map(copy, tree)


def is_divided(x: Any) -> bool:
    """Return whether an array, or its shape, is divided over several devices."""
    sharding = getattr(x, "sharding", None)  # arrays of other devices than JAX's have none
    return isinstance(sharding, NamedSharding) and sharding.spec == DIVIDED


def divided_shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of a divided array [devices, ...], with a sharding that names no devices."""
    mesh = AbstractMesh((shape[0],), (AXIS,))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, DIVIDED))


def local_shape(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape of the array that each device holds."""
    return jax.ShapeDtypeStruct(x.shape[1:] if is_divided(x) else x.shape, x.dtype)


def on_one(x: jax.Array) -> jax.Array:
    """Return one device's row of an array [devices, ...] with equal rows.

    An array that is not divided over devices is returned unchanged.
    """
    return x.addressable_shards[0].data[0] if is_divided(x) else x


def own_sharding(sharding: Sharding) -> Sharding:
    """Return the sharding of this process's part of an array.

    `sharding` is the sharding of the whole array. The part is on the devices of this process.
    """
    if sharding.is_fully_addressable:
        return sharding
    assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    mesh = sharding.mesh.local_mesh
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def place_numbers(sharding: Sharding) -> list[int]:
    """Return the indices of this process's devices in the mesh of a `NamedSharding`."""
    assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    process = jax.process_index()
    devices = enumerate(sharding.mesh.devices.flat)
    return [i for i, device in devices if device.process_index == process]


def own_part(x: Any) -> Any:
    """Return this process's part of an array, without a copy.

    The part of a `DIVIDED` array is [devices of this process, ...]. A NumPy array is returned
    unchanged, and so is an array that is only on devices of this process.
    """
    if getattr(x, "is_fully_addressable", True):
        return x
    count = len(x.addressable_shards)
    shape = (count, *x.shape[1:]) if is_divided(x) else x.shape
    return _of_shards(shape, own_sharding(x.sharding), x)


def with_other_parts(own: jax.Array, sharding: Sharding) -> jax.Array:
    """Return a whole array, made of this process's part `own` and other processes' parts.

    `sharding` is the sharding of the whole array. Nothing is copied. The other processes make the
    same call with their parts.
    """
    if sharding.is_fully_addressable:
        return own
    assert isinstance(sharding, NamedSharding)
    is_whole = sharding.spec == REPLICATED
    shape = own.shape if is_whole else (sharding.num_devices, *own.shape[1:])
    return _of_shards(shape, sharding, own)


def _of_shards(shape: tuple[int, ...], sharding: Sharding, x: jax.Array) -> jax.Array:
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def put(own: Any, sharding: Sharding) -> Any:
    """Return a tree of arrays with this sharding.

    `own` is a tree of this process's parts of the arrays. NumPy arrays in `own` must not be
    modified later.
    """
    placed = jax.device_put(own, own_sharding(sharding))
    return jax.tree.map(lambda x: with_other_parts(x, sharding), placed)


def assemble(parts: Sequence[np.ndarray], sharding: Sharding) -> jax.Array:
    """Return the divided array [devices, ...] with these parts, one per device."""
    shape = len(parts), *parts[0].shape
    places = sharding.addressable_devices_indices_map(shape)
    placed = [
        jax.device_put(parts[at[0].start or 0][None], one) for one, at in places.items() if at
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)
