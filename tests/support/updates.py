"""Updates of parameters without an engine."""

from typing import Any

import jax

from specjax.rl.folders import read_weights
from specjax.rl.weights import stage_target


def updated(model: Any, params: Any, weights: Any) -> Any:
    """Return the parameters after a weight update from a folder, or from a dict of arrays."""
    given = weights if isinstance(weights, dict) else read_weights(weights)
    leaves, tree = jax.tree.flatten(params)
    pairs = zip(leaves, stage_target(given, model, params), strict=True)
    return jax.tree.unflatten(tree, [s.copy(x.dtype, x.sharding) if s else x for x, s in pairs])
