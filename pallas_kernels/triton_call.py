"""Pallas' Triton backend as the kernels here use it, the same for every supported jax.

Kernels get their operands whole, in global memory, and load what they need: masked loads index
every dimension with arrays, which is what interpret mode can do.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

# Known since jax 0.11: one file per operation has to move, to Mosaic, when the backend goes.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")

load, store, dot, barrier = plt.load, plt.store, plt.dot, plt.debug_barrier


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
    """Run `kernel` on `grid`, with refs of whole operands, then of the outputs: the outputs.

    `aliases` names operands that outputs take the place of, operand to output: updated in place
    where the caller donated them or made them itself.
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
            # Without compiler parameters the backend would depend on jax's version.
            compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
            interpret=interpret,
            name=name,
        )(*operands)
    )
