"""Random weights of a parameter tree, drawn by NumPy without compiling a program; plain weights."""

from typing import Any

import jax
import numpy as np

from specjax.device.weights.stored import dequantise
from specjax.device.weights.weight import is_weight

_plain = jax.jit(dequantise, static_argnums=1)


def plain_of(params: Any, dtype: Any) -> Any:
    """Return `dequantise(params, dtype)`, by one program per kind of matrix; on one device."""
    return jax.tree.map(
        lambda x: _plain(x, dtype) if len(jax.tree.leaves(x)) > 1 else x,  # else it is plain
        params,
        is_leaf=is_weight,
    )


def random_params(specs: Any, seed: int) -> Any:
    """Return random f32 arrays for a tree of `TensorSpec`. Norms and gates change the outputs.

    Matrices keep the scale of their inputs. Recurrent states decay slowly.
    """
    rng = np.random.default_rng(seed)

    def draw(spec: Any) -> np.ndarray:
        noise = rng.normal(size=spec.shape)
        if spec.names[0].endswith("A_log"):
            drawn = np.log(np.linspace(1, 16, *spec.shape)) + 0.1 * noise
        elif spec.names[0].endswith("dt_bias"):
            drawn = 0.5 * noise - 4
        elif len(spec.shape) == 1:
            drawn = (1.0 if spec.fill is None else spec.fill) + 0.1 * noise
        else:
            drawn = noise / np.sqrt(spec.shape[-2])
        return drawn.astype(np.float32)

    return jax.tree.map(draw, specs)
