"""Chooses the implementation of an operation.

The argument `kernels` names the implementation. "reference" is plain JAX. "triton" is a kernel for
NVIDIA GPUs. "interpret" runs the Triton kernels on any device, slowly, for tests. "auto" is the
operation's first kernel that the GPU can run and that supports the arguments, or the reference.
An operation may have kernels of the kind "mosaic"; only "auto" chooses them.
"""

import logging
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
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
    """Run one implementation of the operation `op`, chosen by `kernels`; return its result.

    `implementations` maps names to functions, which are called with `args` and `kwargs`; the best
    comes first, and "reference" last. With "auto", a kernel that does not support the arguments is
    skipped; this is logged once. If `kernels` names a kernel that the device cannot run, the
    reference runs, and one warning is issued.

    Raises:
        ValueError: `kernels` is unknown, `op` has no such implementation, or the environment names
            an unusable backend (see `triton_call.backend`).
        UnsupportedError: the named kernel does not support the arguments.
    """
    names = choose(op, kernels, tuple(implementations))
    for name, other in pairwise(names):
        try:
            return implementations[name](*args, **kwargs)
        except UnsupportedError as error:
            shown = "plain JAX" if other == "reference" else f"{other} kernel"
            _log_once(f"{op} runs as {shown}: {error}")
    if (last := names[-1]) == "interpret":
        return implementations["triton"](*args, **kwargs, interpret=True)
    return implementations[last](*args, **kwargs)


def choose(op: str, kernels: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the implementations of `op` to try, in this order.

    `names` are the names of all implementations of `op`, the best first and "reference" last. For
    "auto", the result ends with "reference". Otherwise, the result has only one name.

    Raises:
        ValueError: see `run`.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r} is unknown; choose one of {', '.join(KERNELS)}")
    if kernels == "auto":
        return tuple(name for name in names if name == "reference" or why_not(name) is None)
    if kernels == "reference":
        return (kernels,)
    needed = "triton" if kernels == "interpret" else kernels
    if needed not in names:
        raise ValueError(
            f"kernels={kernels!r}: {op} has no such implementation; "
            f"it has {', '.join(names)}, or use kernels='auto'"
        )
    if kernels != "interpret" and (reason := why_not(kernels)):
        _warn_once(f"kernels={kernels!r}: {reason}; plain JAX runs instead")
        return ("reference",)
    return (kernels,)


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
    """Return whether the installed packages can compile kernels of the kind `name`.

    Raises:
        ValueError: for "triton", if the environment names an unusable backend (see
            `triton_call.backend`).
    """
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
