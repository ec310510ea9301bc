"""The parts of Pallas' Triton backend that the kernels use, the same for every supported jax.

Kernels get whole operands in global memory, and load what they need: masked loads index every
dimension with arrays, because interpret mode supports only that.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

# Since jax 0.11. If the backend is removed, one file per operation has to be ported to Mosaic.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")

load, store, dot, barrier = plt.load, plt.store, plt.dot, plt.debug_barrier


def multiply_add(a: jax.Array, b: jax.Array, c: jax.Array, *, interpret: bool) -> jax.Array:
    """Return a b + c of f32 arrays of one shape, rounded once, after c itself has been rounded.

    Compilers may fuse a product into the sum that follows, or not; of two products, either one.
    This is always the same instruction. In interpret mode there is none to ask for, but c is still
    rounded first: the barrier keeps its product apart.
    """
    if interpret:
        return a * b + jax.lax.optimization_barrier(c)
    (sum_,) = plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[a, b, c],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(c.shape, c.dtype)],
    )
    return sum_


def log2(x: jax.Array, *, interpret: bool) -> jax.Array:
    """Return log2 of normal numbers f32 by the GPU's instruction for it.

    Its error is at most 2^-22, absolute for x in (0.5, 2) and relative elsewhere (PTX ISA). In
    interpret mode it is JAX's.
    """
    if interpret:
        return jnp.log2(x)
    (found,) = plt.elementwise_inline_asm(
        "lg2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return found


def triton_call(
    kernel: Callable[..., None],
    operands: Sequence[jax.Array],
    out_shapes: Sequence[jax.ShapeDtypeStruct],
    *,
    name: str,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int = 1,
    aliases: Mapping[int, int] | None = None,
    interpret: bool = False,
) -> tuple[Any, ...]:
    """Run `kernel` on `grid`, with refs to the whole operands, then to the outputs; return these.

    `aliases` maps operands to the outputs that reuse their buffers: updated in place if the caller
    donated or created them.
    """
    whole = pl.no_block_spec
    return tuple(
        pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[whole] * len(operands),
            out_specs=[whole] * len(out_shapes),
            out_shape=list(out_shapes),
            input_output_aliases=dict(aliases or {}),
            # Without compiler parameters, jax's version would decide which backend runs.
            compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
            interpret=interpret,
            name=name,
        )(*operands)
    )
