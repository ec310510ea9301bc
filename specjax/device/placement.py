"""Placement of arrays: a mesh of devices, and rules that map array axes to mesh axes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

Device: TypeAlias = Any  # a `jax.Device`, which type checkers reject as a type


def default_device() -> Device:
    """Return the device that engines run on: JAX's first device."""
    return jax.devices()[0]


@dataclass(frozen=True)
class Placement:
    """A mesh of devices, and rules that shard arrays over them.

    Attributes:
        mesh: the devices; a single device is a mesh of size one.
        rules: pairs of a logical axis (see `TensorSpec.axes`) and the mesh axis that shards it.
            Arrays are replicated along logical axes without a rule.
    """

    mesh: Mesh
    rules: tuple[tuple[str, str], ...] = ()

    @classmethod
    def on(cls, device: Device) -> "Placement":
        """Return a placement of all arrays on one device."""
        return cls(Mesh(np.array([device]), ("model",)))

    @property
    def device(self) -> Device:
        """One of the mesh's devices, which are all of the same kind."""
        return self.mesh.devices.flat[0]

    def sharding(self, axes: Sequence[str | None] = ()) -> Sharding:
        """Return the sharding of an array with these logical axes.

        Without axes, the array is replicated on every device.
        """
        memory = self.device.default_memory().kind  # a source array may be in host memory
        if self.mesh.size == 1:
            # Programs over a named mesh have more overhead to compile and to call.
            return SingleDeviceSharding(self.device, memory_kind=memory)
        rules = dict(self.rules)
        spec = PartitionSpec(*(rules.get(axis) if axis else None for axis in axes))
        return NamedSharding(self.mesh, spec, memory_kind=memory)

    def put(self, tree: Any) -> Any:
        """Return a tree of arrays, replicated on every device.

        NumPy arrays in `tree` must not be modified later.
        """
        return jax.device_put(tree, self.sharding())
