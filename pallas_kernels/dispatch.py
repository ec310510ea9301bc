"""Chooses the implementation of an operation.

The argument `kernels` names the implementation. "reference" is plain JAX. "triton" and "mosaic" are
kernels for NVIDIA GPUs. "interpret" runs the Triton kernels on any device, slowly, for tests.
"auto" is the operation's first kernel that the GPU can run, or the reference if there is none.
"""

import logging
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax

from pallas_kernels import KERNELS
from pallas_kernels.capability import compute_capability
from pallas_kernels.triton_call import backend

MIN_COMPUTE_CAPABILITY = {"triton": (8, 0), "mosaic": (9, 0)}

logger = logging.getLogger("pallas_kernels")


class UnsupportedError(ValueError):
    """Raised for an argument that the reference supports, but the chosen kernel does not."""


def run(
    op: str, kernels: str, implementations: Mapping[str, Callable[..., Any]], *args: Any, **kwargs
) -> Any:
    """Run the implementation of the operation `op` that `kernels` names, and return its result.

    `implementations` maps names to functions, which are called with `args` and `kwargs`. One name
    is "reference". With "auto", the reference runs if the chosen kernel does not support the
    arguments; this is logged once. If `kernels` names a kernel that the device cannot run, the
    reference runs, and one warning is issued.

    Raises:
        ValueError: `kernels` is unknown or `op` has no such implementation.
        UnsupportedError: the named kernel does not support the arguments.
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
    """Return the name of the implementation of `op` to run.

    `names` are the names of all implementations of `op`, the best first.

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
    """Return why kernels of the kind `name` cannot run on this device with the installed jax.

    If they can run, return None.
    """
    if not has_backend(name):
        remedy = "; pip install jax-triton" if name == "triton" else ""
        return f"jax {jax.__version__} has no Pallas backend for {name}{remedy}"
    capability = compute_capability()
    if capability is None:
        return f"needs an NVIDIA GPU, but this is {jax.default_backend()}"
    needed = MIN_COMPUTE_CAPABILITY[name]
    if capability < needed:
        return f"needs compute capability {needed[0]}.{needed[1]}, but this GPU has {capability}"
    return None


def has_backend(name: str) -> bool:
    """Return whether the installed jax can compile kernels of the kind `name`."""
    if name == "triton":
        return backend() is not None
    try:
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
