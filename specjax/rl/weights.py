"""Weight updates of an engine: all arrays are validated before the first one is copied.

A trainer may pass them as the engine's own tree, as nested mappings (or a flax nnx.State) with
the same paths, or under Hugging Face names. Its arrays are read and never kept, so that it may
donate them afterwards.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from specjax.checkpoint.finite import all_finite
from specjax.checkpoint.spec import TensorSpec
from specjax.config import METHODS
from specjax.device.drafters.checkpoint import is_prefixed
from specjax.device.drafters.drafter import Drafter
from specjax.device.loading import lay_out
from specjax.device.models.model import Model
from specjax.device.models.registry import is_tied, is_unused, named_specs
from specjax.device.models.tensor_names import EMBEDDING, HEAD, TensorNames, is_within

Weights: TypeAlias = Any  # in any of the forms above
# Names of a draft vocabulary in checkpoints, and whether its ids count from their places.
VOCABULARIES = {"d2t": True, "token_map": False}


@dataclass(frozen=True)
class ArraySource:
    """The given arrays that make up one of the engine's arrays."""

    parts: tuple[Any, ...]
    spec: TensorSpec | None  # how to combine them; None if the only part is the array

    def copy(self, dtype: np.dtype, sharding: Sharding) -> jax.Array:
        """Return the array as a copy with this dtype and sharding."""
        if self.spec is not None:
            return lay_out(self.parts, self.spec, dtype, sharding)
        (whole,) = self.parts
        return jax.device_put(whole, sharding, may_alias=False).astype(dtype)


class WeightUpdate(NamedTuple):
    """Result of an update."""

    version: int
    num_arrays: int
    num_bytes: int
    seconds: float  # during which nothing was generated, including the pause

    @classmethod
    def of(cls, version: int, sources: Sequence[ArraySource], seconds: float) -> "WeightUpdate":
        """Return the result of an update from these sources."""
        parts = [part for source in sources for part in source.parts]
        num_bytes = sum(part.size * part.dtype.itemsize for part in parts)
        return cls(version, len(sources), num_bytes, seconds)


def stage_target(given: Mapping[str, Any], target: Model, current: Any) -> list[ArraySource]:
    """Run `stage` for the parameters `current` of a target.

    Raises:
        ValueError: they do not fit, or have two values for a tied embedding.
    """
    sources = stage(
        given, current, partial(named_specs, target), "weights", partial(is_unused, target)
    )
    if is_tied(target):
        _check_tied(given)
    return sources


def stage_drafter(weights: Weights, drafter: Drafter, current: Any) -> list[ArraySource]:
    """Run `stage` for the parameters `current` of a drafter, with its published names.

    Raises:
        ValueError: the drafter has no weights, or the given ones do not fit.
    """
    own = drafter.weights
    if own is None:
        raise ValueError(
            "the engine has no drafter with weights; build it with a speculative_config of one of "
            f"the methods {', '.join(name for name, one in METHODS.items() if one.has_weights)}"
        )
    name = "drafter's weights"
    given = read_named(weights, current, name)
    if own.prefix_in_target is not None:
        names = TensorNames.of(given)
        given = {names.canonical(tensor): array for tensor, array in given.items()}
    elif is_prefixed(given):
        given = {tensor.removeprefix("model."): array for tensor, array in given.items()}
    sources = stage(given, current, own.specs, name, own.is_unused)
    _check_vocabulary(given, own.target_ids(current))
    return sources


def brings_module(given: Mapping[str, Any], drafter: Drafter) -> bool:
    """Whether a target's weights include the MTP module, and the drafter is that module."""
    prefix = None if drafter.weights is None else drafter.weights.prefix_in_target
    return prefix is not None and any(is_within(tensor, (prefix,)) for tensor in given)


def stage(
    given: Mapping[str, Any],
    current: Any,
    specs_of: Callable[[Mapping[str, tuple[int, ...]]], Any],
    name: str,
    is_unused: Callable[[str], bool],
) -> list[ArraySource]:
    """Return the source of each array of the tree `current`, in the order of its leaves.

    Args:
        given: arrays by path in the tree or by Hugging Face name, see `read_named`.
        specs_of: returns the tree of `TensorSpec` of `current` for the given names and shapes.
        name: name of the weights in error messages.
        is_unused: whether an array of this name is allowed although it is not used.

    Raises:
        ValueError: they do not fit; the error lists all that is missing, wrong or unexpected.
    """
    places = paths(current)
    # Only floats are updated; integers, such as a draft vocabulary, are not.
    floats = {path: leaf for path, leaf in places.items() if _is_float(leaf.dtype)}
    specs: dict[str, Any] = {}
    if not any(tensor in places for tensor in given):
        specs = paths(specs_of({tensor: tuple(x.shape) for tensor, x in given.items()}))
    needed: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
    for path, leaf in floats.items():
        if path in specs:
            shapes = zip(specs[path].names, specs[path].file_shapes, strict=True)
            needed |= {tensor: (shape, leaf.dtype) for tensor, shape in shapes}
        else:
            needed[path] = leaf.shape, leaf.dtype
    fixed = {path: leaf for path, leaf in places.items() if path not in floats and path in given}
    _check(given, needed, fixed, name, is_unused)

    def source(path: str, leaf: jax.Array) -> ArraySource:
        spec = specs.get(path)
        if path not in floats:
            return ArraySource((leaf,), None)
        return ArraySource(
            tuple(given[tensor] for tensor in (spec.names if spec else (path,))), spec
        )

    return [source(path, leaf) for path, leaf in places.items()]


def _check(
    given: Mapping[str, Any],
    needed: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    fixed: Mapping[str, Any],
    name: str,
    is_unused: Callable[[str], bool],
) -> None:
    lost = [tensor for tensor in given if _is_deleted(given[tensor])]
    both = {tensor: (given[tensor], *needed[tensor]) for tensor in needed if tensor in given}
    faults = {
        "deleted, or donated to a computation": lost,
        "missing": [tensor for tensor in needed if tensor not in given],
        "wrong shape": [
            f"{tensor} (expected {list(shape)}, found {list(array.shape)})"
            for tensor, (array, shape, _) in both.items()
            if tuple(array.shape) != shape
        ],
        "wrong dtype": [
            f"{tensor} (expected {dtype}, found {array.dtype})"
            for tensor, (array, _, dtype) in both.items()
            if not _is_float(array.dtype)
        ],
        "unexpected": [
            tensor
            for tensor in given
            if tensor not in needed and tensor not in fixed and not is_unused(tensor)
        ],
        "not to be changed, as it is compiled in": [
            tensor
            for tensor, leaf in fixed.items()
            if tensor not in lost and not np.array_equal(given[tensor], leaf)
        ],
    }
    if any(faults.values()):
        lists = "\n".join(
            f"  {kind}: {', '.join(found)}" for kind, found in faults.items() if found
        )
        raise ValueError(
            f"the {name} do not fit the engine's, and nothing was changed:\n{lists}\n"
            "bring every array once, in its shape; floats of 16 bits or more are cast"
        )


def _check_tied(given: Mapping[str, Any]) -> None:
    names = TensorNames.of(given)
    embedding, head = names.stored(EMBEDDING), names.stored(HEAD)
    if not {embedding, head} <= given.keys():
        return
    one, other = given[embedding], given[head]
    on_device = isinstance(one, jax.Array) and isinstance(other, jax.Array)
    equal = jnp.array_equal if on_device and one.sharding == other.sharding else np.array_equal
    if one is not other and not equal(one, other):
        raise ValueError(
            f"the weights have {head} that differs from {embedding}, and the engine has one array "
            "for both, since its checkpoint ties them; train them tied, or build the engine from "
            "a checkpoint with tie_word_embeddings=false"
        )


def _is_deleted(array: Any) -> bool:
    return isinstance(array, jax.Array) and array.is_deleted()


def copies(params: Any) -> Any:
    """Return a copy of the tree in new memory."""

    def copy(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array):
            return jax.device_put(leaf, leaf.sharding, may_alias=False)
        return jax.device_put(np.array(leaf))

    return jax.tree.map(copy, params)


def paths(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path, like "layers.0.attention.qkv", in tree order."""
    return {_dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@jax.jit
def _digest(x: jax.Array) -> jax.Array:
    """Return two sums u32[2] of an array's words that depend on their values and order."""
    kind = jnp.uint32 if x.dtype.itemsize == 4 else jnp.uint16
    words = jax.lax.bitcast_convert_type(x.ravel(), kind).astype(jnp.uint32)
    place = jnp.arange(words.size, dtype=jnp.uint32)
    mixed = (words ^ (place * jnp.uint32(2654435761))) * jnp.uint32(2246822519)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(3266489917)
    return jnp.stack([jnp.sum(words * (2 * place + 1)), jnp.sum(mixed ^ (mixed >> 13))])


def checksum(params: Any) -> str:
    """Return a digest of bits, shapes and paths of a tree's arrays (16 or 32 bits per element).

    It is the same on any device, and each array is summed on its own device, so that no weights
    are transferred. Not cryptographic: it detects mistakes, not forgeries.
    """
    leaves = paths(params)
    digests = jax.device_get([_digest(jnp.asarray(leaf)) for leaf in leaves.values()])
    whole = blake2b(digest_size=16)
    for (path, leaf), digest in zip(leaves.items(), digests, strict=True):
        whole.update(f"{path} {leaf.dtype}{list(leaf.shape)}".encode() + digest.tobytes())
    return whole.hexdigest()


def read_named(weights: Weights, current: Any, name: str) -> dict[str, Any]:
    """Return weights given in any form as arrays by dotted name; iterables are exhausted.

    Raises:
        ValueError: not one of these forms, or a duplicate name.
    """
    if isinstance(weights, Mapping | type(current)):
        tree = dict(weights) if isinstance(weights, Mapping) else weights
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_variable)
        pairs = [(_dotted(p), x[...] if _is_variable(x) else x) for p, x in leaves]
    elif isinstance(weights, Iterable) and not isinstance(weights, str):
        pairs = list(weights)
    else:
        pairs = [weights]
    named: dict[str, Any] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError(
                f"the {name} must be a tree of arrays or pairs of name and array, not "
                f"{type(pair).__name__}"
            )
        tensor, array = pair
        if tensor in named:
            raise ValueError(f"the {name} have {tensor} twice")
        is_array = hasattr(array, "shape") and hasattr(array, "dtype")
        if not is_array or isinstance(array, jax.ShapeDtypeStruct):
            raise ValueError(f"the {name} have {tensor}={array!r}, which is not an array")
        named[tensor] = _as_array(array)
    return named


def read_finite(weights: Weights, current: Any, name: str) -> dict[str, Any]:
    """Run `read_named` and check for NaN and infinity; the engine may generate meanwhile.

    On an accelerator the check is a program for each shape and dtype. Those of the engine's own
    arrays are compiled when `LLM` reads a checkpoint, others at the first update.

    Raises:
        ValueError: as `read_named`, or an array is not finite.
    """
    named = read_named(weights, current, name)
    # `stage` reports deleted arrays.
    checks = {
        tensor: all_finite(array) for tensor, array in named.items() if not _is_deleted(array)
    }
    are_finite = jax.device_get(checks)
    if bad := [tensor for tensor in checks if not are_finite[tensor]]:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ValueError(
            f"the {name} have NaN or infinity in {', '.join(bad[:5])}{more}, and nothing was "
            "changed; look for the step of training that made it, and go back before it"
        )
    return named


def _is_variable(node: Any) -> bool:
    """Whether it is a flax nnx variable, as the leaves of an nnx.State are."""
    return hasattr(node, "get_value")


def _as_array(array: Any) -> Any:
    """Return a JAX or NumPy array without copying."""
    if isinstance(array, jax.Array | np.ndarray):
        return array
    return jnp.from_dlpack(array)  # an array of another library


def _is_float(dtype: Any) -> bool:
    """Whether weights may have this type. 8-bit floats are excluded: they would need scales."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2


def _dotted(path: tuple[Any, ...]) -> str:
    keys = (getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))) for key in path)
    return ".".join(str(key) for key in keys)


def _check_vocabulary(given: Mapping[str, Any], target_ids: jax.Array | None) -> None:
    """Raise an error if the draft vocabulary differs from the compiled one."""
    for name, are_offsets in VOCABULARIES.items():
        if name not in given:
            continue
        ids = np.asarray(given[name])
        places = np.arange(len(ids))
        own = places if target_ids is None else np.asarray(target_ids)
        if not np.array_equal(ids + places if are_offsets else ids, own):
            raise ValueError(
                f"the drafter's weights have another draft vocabulary ({name}) than the engine's; "
                "build a new engine for them"
            )
