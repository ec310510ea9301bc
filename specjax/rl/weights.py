"""New weights for an engine: checked as a whole before anything changes, then copied in.

A trainer may bring them as the engine's own tree, as nested mappings (or a flax nnx.State) with
the same paths, or under Hugging Face names. Its arrays are read and never kept: what it does with
them afterwards, donating them included, is its own affair.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.drafter import Drafter
from specjax.device.drafters.mtp import MTPHead
from specjax.device.loading import lay_out
from specjax.device.models.model import Model
from specjax.device.models.registry import is_unused

Weights: TypeAlias = Any  # what trainers bring; see above


@dataclass(frozen=True)
class ArraySource:
    """What one of the engine's arrays will be made from."""

    parts: tuple[Any, ...]
    spec: TensorSpec | None  # how, or None where the one part is the array itself

    def copy(self, dtype: np.dtype, sharding: Sharding) -> jax.Array:
        """The array where `sharding` says, in memory of its own."""
        if self.spec is not None:
            return lay_out(self.parts, self.spec, dtype, sharding)
        (whole,) = self.parts
        return jax.device_put(whole, sharding, may_alias=False).astype(dtype)


class WeightUpdate(NamedTuple):
    """What an update did."""

    version: int
    num_arrays: int
    num_bytes: int
    seconds: float  # that nothing was generated, pausing included

    @classmethod
    def of(cls, version: int, sources: Sequence[ArraySource], seconds: float) -> "WeightUpdate":
        """An update from these sources."""
        parts = [part for source in sources for part in source.parts]
        num_bytes = sum(part.size * part.dtype.itemsize for part in parts)
        return cls(version, len(sources), num_bytes, seconds)


def stage_target(given: Mapping[str, Any], target: Model, current: Any) -> list[ArraySource]:
    """`stage` for the parameters `current` of a target."""
    return stage(given, current, target.specs, "weights", partial(is_unused, target))


def stage_drafter(weights: Weights, drafter: Drafter, current: Any) -> list[ArraySource]:
    """`stage` for the parameters `current` of a drafter, by its published names.

    Raises:
        ValueError: it has no weights, or these do not fit.
    """
    if not isinstance(drafter, ChainDrafter):
        raise ValueError(
            "the engine has no drafter with weights; build it with a speculative_config of "
            "method eagle, eagle3 or mtp"
        )
    head, name = drafter.head, "drafter's weights"
    given = read_named(weights, current, name)
    if "fc.weight" not in given and "model.fc.weight" in given:  # a re-export's prefix
        given = {tensor.removeprefix("model."): array for tensor, array in given.items()}
    sources = stage(given, current, head.specs, name, partial(_is_beside, head))
    _check_vocabulary(given, head.target_ids(current))
    return sources


def brings_module(given: Mapping[str, Any], drafter: Drafter) -> bool:
    """Whether a target's weights bring those of its own drafting module, which is in use, along."""
    is_own = isinstance(drafter, ChainDrafter) and isinstance(drafter.head, MTPHead)
    return is_own and any(tensor.startswith("mtp.") for tensor in given)


def stage(
    given: Mapping[str, Any],
    current: Any,
    specs_of: Callable[[Collection[str]], Any],
    name: str,
    is_unused: Callable[[str], bool],
) -> list[ArraySource]:
    """Where each array of the tree `current` is to come from, in the order of its leaves.

    Args:
        given: arrays by path in the tree or by Hugging Face name, see `read_named`.
        specs_of: the tree of `TensorSpec` of `current`, given the names at hand.
        name: what errors call the weights.
        is_unused: whether an array of this name may be there unused.

    Raises:
        ValueError: they do not fit; names everything that is missing, wrong or unexpected.
    """
    places = paths(current)
    # What the weights are made of, none but floats: a draft vocabulary stays as it is.
    floats = {path: leaf for path, leaf in places.items() if _is_float(leaf.dtype)}
    specs: dict[str, Any] = {}
    if not any(tensor in places for tensor in given):
        specs = paths(specs_of(given.keys()))
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


def _is_deleted(array: Any) -> bool:
    return isinstance(array, jax.Array) and array.is_deleted()


def copies(params: Any) -> Any:
    """The same tree in memory of its own."""

    def copy(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array):
            return jax.device_put(leaf, leaf.sharding, may_alias=False)
        return jax.device_put(np.array(leaf))

    return jax.tree.map(copy, params)


def paths(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path, like "layers.0.attention.qkv", in their order."""
    return {_dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@jax.jit
def _digest(x: jax.Array) -> jax.Array:
    """Two sums u32[2] of the words of an array that change when words do, or change places."""
    kind = jnp.uint32 if x.dtype.itemsize == 4 else jnp.uint16
    words = jax.lax.bitcast_convert_type(x.ravel(), kind).astype(jnp.uint32)
    place = jnp.arange(words.size, dtype=jnp.uint32)
    mixed = (words ^ (place * jnp.uint32(2654435761))) * jnp.uint32(2246822519)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(3266489917)
    return jnp.stack([jnp.sum(words * (2 * place + 1)), jnp.sum(mixed ^ (mixed >> 13))])


def checksum(params: Any) -> str:
    """A digest of the bits, shapes and places of a tree's arrays, of 16 or 32 bits per element.

    Equal trees have equal ones on any device. It finds mistakes, not forgeries: every array is
    summed where it lies, so that no weights move.
    """
    leaves = paths(params)
    digests = jax.device_get([_digest(jnp.asarray(leaf)) for leaf in leaves.values()])
    whole = blake2b(digest_size=16)
    for (path, leaf), digest in zip(leaves.items(), digests, strict=True):
        whole.update(f"{path} {leaf.dtype}{list(leaf.shape)}".encode() + digest.tobytes())
    return whole.hexdigest()


def read_named(weights: Weights, current: Any, name: str) -> dict[str, Any]:
    """Arrays by dotted name, of weights in any form; iterables are read to their end.

    Raises:
        ValueError: it is no such form, or a name comes twice.
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
    """`read_named` of weights without NaN and infinity; the engine need not stop for the look.

    On an accelerator that runs a program for each shape and dtype: `LLM` compiles those of the
    engine's own arrays as it reads a checkpoint, others are compiled at the first update.

    Raises:
        ValueError: as `read_named`, or an array is not finite.
    """
    named = read_named(weights, current, name)
    # Deleted ones are refused when they are compared with the engine's.
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
    """Whether it is a variable of flax nnx, which an nnx.State has for leaves."""
    return hasattr(node, "get_value")


def _as_array(array: Any) -> Any:
    """A JAX or NumPy array, without a copy."""
    if isinstance(array, jax.Array | np.ndarray):
        return array
    return jnp.from_dlpack(array)  # of another library


def _is_float(dtype: Any) -> bool:
    """Whether weights can be of this type. Of 8 bits they need a scale, which nobody brings."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2


def _dotted(path: tuple[Any, ...]) -> str:
    keys = (getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))) for key in path)
    return ".".join(str(key) for key in keys)


def _is_beside(head: Any, tensor: str) -> bool:
    """Whether a tensor that is not among a head's weights may lie beside them."""
    if isinstance(head, MTPHead):
        return not tensor.startswith("mtp.")
    return tensor in ("d2t", "t2d", "embed_tokens.weight")


def _check_vocabulary(given: Mapping[str, Any], target_ids: jax.Array | None) -> None:
    """Refuse another draft vocabulary than the one that is compiled in."""
    if "d2t" in given and target_ids is not None:
        own = np.asarray(target_ids) - np.arange(len(target_ids))
        if not np.array_equal(given["d2t"], own):
            raise ValueError(
                "the drafter's weights have another draft vocabulary (d2t) than the engine's; "
                "build a new engine for them"
            )
