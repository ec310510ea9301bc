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
    """Return the device that engines run on: JAX's first device."""
    return jax.devices()[0]


@dataclass(frozen=True)
class Placement:
    """The devices of an engine: a mesh with one axis, whose size may be one."""

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
    def device(self) -> Device:
        """One of the mesh's devices, which are all of the same kind."""
        return self.mesh.devices.flat[0]

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
        return jax.device_put(tree, self.sharding())

    def copy(self, tree: Any) -> Any:
        """Return a copy of arrays that are placed on another mesh with as many devices.

        An array that occurs twice in `tree` is copied once.
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
    """Return the shape and sharding of a divided array [devices, ...], on no particular devices."""
    mesh = AbstractMesh((shape[0],), (AXIS,))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, DIVIDED))


def local_shape(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape of the array that each device holds."""
    return jax.ShapeDtypeStruct(x.shape[1:] if is_divided(x) else x.shape, x.dtype)


def on_one(x: jax.Array) -> jax.Array:
    """Return one row of a divided array whose rows are equal; return other arrays unchanged."""
    return x.addressable_shards[0].data[0] if is_divided(x) else x


def assemble(parts: Sequence[np.ndarray], sharding: Sharding) -> jax.Array:
    """Return the divided array [devices, ...] with these parts, one per device."""
    shape = len(parts), *parts[0].shape
    places = sharding.addressable_devices_indices_map(shape)
    placed = [jax.device_put(parts[at[0].start][None], one) for one, at in places.items() if at]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)
