"""The compute capability of the GPU that programs are compiled for, even if no GPU is present."""

import jax

ABSTRACT_CAPABILITY = (9, 0)  # target of compilation without a GPU


def compute_capability() -> tuple[int, int] | None:
    """Return the compute capability of the target NVIDIA GPU; None for other devices."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:  # compilation without the device
        return ABSTRACT_CAPABILITY if "NVIDIA" in abstract.device_kind else None
    device = jax.local_devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return None
    major, minor = str(device.compute_capability).split(".")
    return int(major), int(minor)
