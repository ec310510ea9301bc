"""Where arrays live: a mesh of devices, and which of its axes divides which axis of an array."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

Device: TypeAlias = Any  # a `jax.Device`, which is no type to checkers


def default_device() -> Device:
    """The device that engines run on: JAX's first."""
    return jax.devices()[0]


@dataclass(frozen=True)
class Placement:
    """A mesh of devices, and rules that divide arrays among them.

    Attributes:
        mesh: the devices; one device is a mesh of one.
        rules: pairs of a logical axis, see `TensorSpec.axes`, and the axis of the mesh that divides
            it. An axis without a rule is whole on every device.
    """

    mesh: Mesh
    rules: tuple[tuple[str, str], ...] = ()

    @classmethod
    def on(cls, device: Device) -> "Placement":
        """Everything on one device."""
        return cls(Mesh(np.array([device]), ("model",)))

    @property
    def device(self) -> Device:
        """One of the devices, which are all alike."""
        return self.mesh.devices.flat[0]

    def sharding(self, axes: Sequence[str | None] = ()) -> Sharding:
        """Sharding of an array with these logical axes; without axes, whole on every device."""
        memory = self.device.default_memory().kind  # not the host's, where an array may come from
        if self.mesh.size == 1:
            # Programs over a named mesh are compiled and called through more layers.
            return SingleDeviceSharding(self.device, memory_kind=memory)
        rules = dict(self.rules)
        spec = PartitionSpec(*(rules.get(axis) if axis else None for axis in axes))
        return NamedSharding(self.mesh, spec, memory_kind=memory)

    def put(self, tree: Any) -> Any:
        """A tree of arrays on every device, whole. Arrays of NumPy must be fresh."""
        return jax.device_put(tree, self.sharding())
