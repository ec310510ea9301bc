"""Converts a trainer's weights, which may have various forms, to arrays by name."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from specjax.checkpoint.finite import all_finite
from specjax.checkpoint.given import as_array, dotted
from specjax.rl.folders import read_weights

# One of these: a folder; a tree like the engine's; nested mappings or an nnx.State with the paths
# of that tree; pairs (Hugging Face name, array); or a mapping from such names to arrays.
Weights: TypeAlias = Any
VALUE = ".value"  # end of paths in a saved nnx.State
VALUES = ".values"


def read_named(weights: Weights, current: Any, name: str) -> dict[str, Any]:
    """Return weights of any supported form as a mapping from dotted names to arrays.

    Args:
        weights: see `Weights`. An iterator is read to its end.
        current: the engine's tree of weights.
        name: what to call the weights in error messages.

    Raises:
        ValueError: the weights have an unsupported form or a duplicate name, or an array cannot be
            read.
        CheckpointError: the folder has no weights.
    """
    if isinstance(weights, str | Path):
        weights = read_weights(weights)
    pairs: list[Any]
    if isinstance(weights, Mapping | type(current)):
        tree = dict(weights) if isinstance(weights, Mapping) else weights
        pairs = list(variable_paths(tree, name).items())
    elif isinstance(weights, Iterable):
        pairs = list(weights)
    else:
        pairs = [weights]
    named: dict[str, Any] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError(
                f"the {name} must be a tree of arrays, pairs of name and array, or a folder, not "
                f"{type(pair).__name__}"
            )
        tensor, array = pair
        if tensor in named:
            raise ValueError(f"the {name} have {tensor} twice")
        if isinstance(array, Tracer):
            raise ValueError(
                f"{tensor} of the {name} is traced by JAX; update the engine outside of functions "
                "that JAX transforms, such as jitted ones"
            )
        named[tensor] = as_array(array, tensor, name)
    return named


def read_finite(weights: Weights, current: Any, name: str) -> dict[str, Any]:
    """Run `read_named`, and check that all values are finite in the engine's dtype.

    The engine can generate during the check. On an accelerator, a program is compiled for each
    shape and dtype. Programs for the engine's own arrays were already compiled when `LLM` read a
    checkpoint. If a trainer's arrays have other shapes or dtypes, the first update compiles more
    programs.

    Raises:
        ValueError: as for `read_named`, or an array is not finite in the engine's dtype.
    """
    named = read_named(weights, current, name)
    dtype = _dtype_of(current)
    # Skip deleted arrays: `stage` reports them.
    checks = {
        tensor: all_finite(array, dtype) for tensor, array in named.items() if not is_deleted(array)
    }
    are_finite = jax.device_get(checks)
    if bad := [tensor for tensor in checks if not are_finite[tensor]]:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ValueError(
            f"the {name} have NaN, infinity or values too large for the engine's {dtype} in "
            f"{', '.join(bad[:5])}{more}, and nothing was changed; look for the step of training "
            "that made them, and go back before it"
        )
    return named


def _dtype_of(current: Any) -> np.dtype:
    """Return the dtype of the engine's weights: bfloat16 if an array has it, else float32.

    An engine with bfloat16 may also have float32, whose largest number is only 0.4% larger.
    """
    bfloat16 = np.dtype(jnp.bfloat16)
    has_it = any(leaf.dtype == bfloat16 for leaf in jax.tree.leaves(current))
    return bfloat16 if has_it else np.dtype(np.float32)


def variable_paths(tree: Any, name: str) -> dict[str, Any]:
    """Return the leaves of a tree by path. A flax nnx variable counts as a leaf.

    If all paths end in ".value", this suffix is removed. An nnx.State that was saved and restored
    as mappings has such paths. A suffix ".values" is always removed: it is the name of the field
    that holds the array in some of the engine's weights.

    Raises:
        ValueError: keys of a mapping cannot be sorted; the message calls the tree `name`.
    """
    _check_keys(tree, name)

    def is_variable(node: Any) -> bool:
        return hasattr(node, "get_value")

    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable)
    found = {
        dotted(path).removesuffix(VALUES): x[...] if is_variable(x) else x for path, x in leaves
    }
    if all(path.endswith(VALUE) for path in found):
        return {path.removesuffix(VALUE): leaf for path, leaf in found.items()}
    return found


def _check_keys(tree: Any, name: str) -> None:
    """Raise a ValueError if a mapping in `tree` has keys that JAX cannot sort, as 3 and "a"."""
    if not isinstance(tree, Mapping):
        return
    try:
        sorted(tree)
    except TypeError as error:
        odd = next(key for key in tree if not isinstance(key, str))
        raise ValueError(
            f"a mapping of the {name} has the key {odd!r} and keys of other types; make the keys "
            "of each mapping all text"
        ) from error
    for inner in tree.values():
        _check_keys(inner, name)


def is_deleted(array: Any) -> bool:
    """Return whether `array` is a deleted JAX array."""
    return isinstance(array, jax.Array) and array.is_deleted()
