"""Measures the limits of the card, to which other figures are compared."""

import importlib
import pkgutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from problems import normal
from timing import Setting, launch_times, spread

import pallas_kernels
from pallas_kernels.dispatch import choose

GIB = 2**30


def measure_card(setting: Setting) -> Iterator[dict[str, Any]]:
    """Yield the implementations that "auto" selects, and the limits of the card.

    The limits are the bandwidths of a copy and of a read, and the speed of products of bf16
    matrices.
    """
    yield check_choice(setting)
    num_bytes = setting.pick(4 * GIB, 2**20)
    device = {"device_kind": jax.devices()[0].device_kind, "jax": jax.__version__}

    @jax.jit
    def copy(x):  # an operation that XLA cannot remove
        return x ^ jnp.uint32(1)

    @jax.jit
    def read(x):
        return jnp.sum(x, dtype=jnp.uint32)

    x = jax.random.bits(jax.random.key(0, impl="rbg"), (num_bytes // 4,), jnp.uint32)
    for what, program, moved in ("copy", copy, 2 * num_bytes), ("read", read, num_bytes):
        ms = spread(launch_times(partial(program, x), setting), 1e3)
        yield device | {
            "what": what,
            "ms": ms,
            "bytes": moved,
            "gbps": moved / ms["median"] / 1e6,
        }
    for size in setting.pick((4096, 8192), (64,)):
        yield device | {"what": "bf16 product", "size": size} | measure_product(size, setting)


def check_choice(setting: Setting) -> dict[str, Any]:
    """Return the implementation that "auto" selects for each operation.

    Raises:
        RuntimeError: an implementation on the card is plain JAX and not a kernel.
    """
    packages = (one.name for one in pkgutil.iter_modules(pallas_kernels.__path__) if one.ispkg)
    modules = {name: importlib.import_module(f"pallas_kernels.{name}") for name in packages}
    chosen = {name: choose(name, "auto", tuple(m.IMPLEMENTATIONS)) for name, m in modules.items()}
    if set(chosen.values()) != {setting.pick("triton", "reference")}:
        raise RuntimeError(f'kernels="auto" on {jax.devices()[0].device_kind} means {chosen}')
    return {"what": "kernels", "chosen": chosen}


def measure_product(size: int, setting: Setting) -> dict[str, Any]:
    """Measure the product of two square matrices in bfloat16."""
    a, b = (normal(i, (size, size), jnp.bfloat16) for i in range(2))
    ms = spread(launch_times(partial(jax.jit(jnp.matmul), a, b), setting), 1e3)
    return {"ms": ms, "tflops": 2 * size**3 / ms["median"] / 1e9}
