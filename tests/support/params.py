"""Random weights for a parameter tree. NumPy draws them, so that no program is compiled."""

from typing import Any

import jax
import numpy as np


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
