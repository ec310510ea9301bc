"""Which implementation of an operation runs: one place, one rule.

`kernels` names it: "reference" is plain JAX; "triton" and "mosaic" are kernels for NVIDIA GPUs;
"interpret" runs the Triton kernels on any device, slowly, as tests want it; "auto" is the first
kernel of the operation where there is a GPU that can run it, and the reference elsewhere.
"""

import logging
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax

from pallas_kernels import KERNELS

MIN_COMPUTE_CAPABILITY = {"triton": (8, 0), "mosaic": (9, 0)}
ABSTRACT_CAPABILITY = (9, 0)  # what a compilation without a GPU is for

logger = logging.getLogger("pallas_kernels")


class UnsupportedError(ValueError):
    """An argument that the reference takes and a kernel does not."""


def run(
    op: str, kernels: str, implementations: Mapping[str, Callable[..., Any]], *args: Any, **kwargs
) -> Any:
    """The result of the implementation of `op` that `kernels` names; "reference" must be one.

    Where `kernels` is "auto", what a kernel does not take goes to the reference, which is logged
    once. On a device that cannot run the kernel asked for, the reference runs, with one warning.

    Raises:
        ValueError: `kernels` is unknown, or `op` has no such implementation.
        UnsupportedError: the kernel that `kernels` names does not take the arguments.
    """
    reference = implementations["reference"]
    name = choose(op, kernels, tuple(implementations))
    if name == "interpret":
        return implementations["triton"](*args, **kwargs, interpret=True)
    try:
        return implementations[name](*args, **kwargs)
    except UnsupportedError as error:
        if kernels != "auto":
            raise
        _log_once(f"{op} runs as plain JAX: {error}")
        return reference(*args, **kwargs)


def choose(op: str, kernels: str, names: tuple[str, ...]) -> str:
    """The name of the implementation of `op` to run, of those it has, the best first.

    Raises:
        ValueError: see `run`.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r} is unknown; choose one of {', '.join(KERNELS)}")
    accelerated = [name for name in names if name != "reference"]
    if kernels == "auto":
        able = [name for name in accelerated if why_not(name) is None]
        return able[0] if able else "reference"
    if kernels == "reference":
        return kernels
    needed = "triton" if kernels == "interpret" else kernels
    if needed not in names:
        raise ValueError(
            f"kernels={kernels!r}: {op} has no such implementation; "
            f"it has {', '.join(names)}, or use kernels='auto'"
        )
    if kernels != "interpret" and (reason := why_not(kernels)):
        _warn_once(f"kernels={kernels!r}: {reason}; plain JAX runs instead")
        return "reference"
    return kernels


def why_not(name: str) -> str | None:
    """Why the kernels of a kind cannot run on this device with this jax; None if they can."""
    if not has_backend(name):
        return f"jax {jax.__version__} has no Pallas backend for {name}"
    capability = compute_capability()
    if capability is None:
        return f"needs an NVIDIA GPU, and this is {jax.default_backend()}"
    needed = MIN_COMPUTE_CAPABILITY[name]
    if capability < needed:
        return f"needs compute capability {needed[0]}.{needed[1]}, this GPU has {capability}"
    return None


def compute_capability() -> tuple[int, int] | None:
    """Of the NVIDIA GPU that programs are compiled for; None where it is no such GPU."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:  # compilation for a device that is not here
        return ABSTRACT_CAPABILITY if "NVIDIA" in abstract.device_kind else None
    device = jax.devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return None
    major, minor = str(device.compute_capability).split(".")
    return int(major), int(minor)


@cache
def has_backend(name: str) -> bool:
    """Whether this jax can import Pallas' backend of a kind."""
    try:
        if name == "triton":
            from jax.experimental.pallas import triton  # noqa: F401
        else:
            from jax.experimental.pallas import mosaic_gpu  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def _log_once(message: str) -> None:
    logger.warning(message)


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=4)
