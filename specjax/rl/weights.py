"""Updates an engine's weights; all arrays are validated before the first array is copied.

A trainer's arrays are read and never kept, so that the trainer may donate them afterwards. See
`Weights` in `specjax.rl.named` for the forms that weights may have.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from specjax.checkpoint.division import DividedSpec
from specjax.checkpoint.given import as_arrays, paths
from specjax.checkpoint.spec import TensorSpec
from specjax.checks import is_integer
from specjax.device.drafters.checkpoint import is_prefixed
from specjax.device.drafters.drafter import Drafter, Params
from specjax.device.loading import copy_to, lay_out, lay_out_whole
from specjax.device.models.model import Model
from specjax.device.models.registry import is_tied, is_unused, named_specs
from specjax.device.models.tensor_names import EMBEDDING, HEAD, TensorNames, is_within
from specjax.device.parallel import specs_of
from specjax.device.resharding import devices_of
from specjax.engine.engine import Engine
from specjax.engine.log import get_log
from specjax.engine.sleep import SleepOfAll
from specjax.methods import METHODS
from specjax.rl.named import Weights, is_deleted, read_finite, read_named
from specjax.rl.quantising import (
    Origin,
    all_sources,
    plain_shapes,
    quantising,
    report_errors,
)

# Names of draft vocabularies in checkpoints, and whether they store each id minus its index.
VOCABULARIES = {"d2t": True, "token_map": False}
MAX_VERSION = 2**63 - 1  # of arrays i64; times in milliseconds are above 2**31
MAX_LISTED = 20  # maximum number of names that an error lists for one kind of fault
# Patterns of array names in torch and flax that reveal adapters and wrapped models.
_ADAPTER = re.compile(r"lora_[abAB]|base_layer|^base_model\.")
_WRAPPER = re.compile(r"^module\.|_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")


@dataclass(frozen=True)
class ArraySource:
    """Builds one of the engine's arrays from `parts`, arrays of a weight update; see `Origin`."""

    parts: tuple[Any, ...]
    spec: TensorSpec | None  # combines the parts; None if the only part is the array itself
    # If set, it divides the only part over devices. The part may be divided already.
    division: DividedSpec | None = None
    rounding: None = None

    def copy(self, dtype: np.dtype, sharding: Sharding) -> jax.Array:
        """Build the engine's array in new memory, with this dtype and sharding."""
        if self.spec is not None:
            return lay_out(self.parts, self.spec, dtype, sharding)
        (whole,) = self.parts
        if self.division is not None:
            return lay_out_whole(whole, self.division, dtype, sharding)
        return copy_to(whole, dtype, sharding)


def replace_weights(
    engine: Engine,
    sleep: SleepOfAll,
    target: Sequence[Origin | None] | None,
    own: Sequence[Origin | None] | None,
    *,
    tear: Callable[[], None],
) -> None:
    """Replace weights between two steps, one array at a time.

    `target` has an `Origin` for each of the target's arrays, and `own` for each of the drafter's.
    None keeps the old arrays. `tear` is called before each array of the target is replaced. The
    target's arrays mix two versions until the last array is replaced.
    """
    num_target = len(jax.tree.leaves(engine.params.target))
    sources = all_sources(engine.params, engine.drafter, target, own)

    def change(i: int, leaf: Any, home: Sharding) -> Any:
        if (source := sources[i]) is None:
            return leaf
        new = source.copy(leaf.dtype, home)
        if i < num_target:
            tear()
        return new

    sleep.change(change)
    for one in engine.engines:
        one.use(one.params, has_new_target=target is not None, has_new_drafter=own is not None)


class WeightUpdate(NamedTuple):
    """The result of a weight update."""

    version: int  # the target's new version, or the drafter's if only the drafter was updated
    num_arrays: int  # number of the engine's arrays that were built from the update's arrays
    num_bytes: int  # bytes of the update's arrays
    seconds: float  # from the start of the pause until the new weights are in use
    # The largest relative error of a quantised weight: the Frobenius norm of the error, divided by
    # the norm of the plain weight. None if no weight was quantised.
    largest_error: float | None = None

    @classmethod
    def of(cls, version: int, sources: Sequence[Origin | None], seconds: float) -> "WeightUpdate":
        """Return the result of an update whose arrays were built by `sources`."""
        parts = [part for source in sources if source for part in source.parts]
        num_bytes = sum(part.size * part.dtype.itemsize for part in parts)
        num_arrays = sum(bool(source and source.parts) for source in sources)
        error = report_errors(sources, version, seconds)
        return cls(version, num_arrays, num_bytes, seconds, error)


def stage_target(given: Mapping[str, Any], target: Model, current: Any) -> list[Origin | None]:
    """Return an `Origin`, which builds the new array, for each target array; see `stage`.

    Raises:
        ValueError: the weights do not fit, or an output head differs from its tied embedding.
    """
    sources = stage(
        given, current, partial(named_specs, target), "weights", partial(is_unused, target)
    )
    if is_tied(target):
        _check_tied(given)
    return sources


def stage_drafter(weights: Weights, drafter: Drafter, current: Any) -> list[Origin | None]:
    """Return an `Origin`, which builds the new array, for each drafter array; see `stage`.

    `weights` can have the tensor names of published drafter checkpoints.

    Raises:
        ValueError: the drafter has no weights, or the given weights do not fit.
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
    sources = stage(given, current, partial(specs_of, own), name, own.is_unused)
    _check_vocabulary(given, own.target_ids(current))
    return sources


def read_update(
    weights: Weights, drafter_weights: Weights, params: Params, drafter: Drafter
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the new arrays by name, for the target and for the drafter.

    If `drafter_weights` is None, and `weights` have weights of the engine's MTP drafter, both
    results are the arrays of `weights`. If they have none, the second result is None: the drafter
    keeps its arrays. `params` are the engine's weights.

    Raises:
        ValueError: weights cannot be read, or are not finite in the engine's dtype.
        CheckpointError: a folder has no weights, or they are damaged.
    """
    named = read_finite(weights, params.target, "weights")
    if drafter_weights is not None:
        return named, read_finite(drafter_weights, params.drafter, "drafter's weights")
    return named, named if brings_module(named, drafter) else None


def next_version(current: int, version: Any) -> int:
    """Return the version of new weights: `version`, or the next integer if it is None.

    Raises:
        ValueError: `version` is not an integer above the version `current`, or is too large.
    """
    number = current + 1 if version is None else version
    if not is_integer(number):
        raise ValueError(f"version={version!r} must be an integer, or None for the next")
    if number <= current:
        raise ValueError(f"version={number} must be above the current one, {current}")
    if number > MAX_VERSION:
        raise ValueError(f"version={number} must be at most 2**63 - 1; number the updates from 1")
    return int(number)


def brings_module(given: Mapping[str, Any], drafter: Drafter) -> bool:
    """Return whether `drafter` is an MTP module whose weights are among the given new weights."""
    prefix = None if drafter.weights is None else drafter.weights.prefix_in_target
    return prefix is not None and any(is_within(tensor, (prefix,)) for tensor in given)


class _Needed(NamedTuple):
    """The shape and dtype that an array of a weight update must have."""

    shape: tuple[int, ...]
    dtype: np.dtype
    is_packed: bool = False  # whether the array has 4-bit numbers, packed into bytes

    def takes(self, dtype: Any) -> bool:
        """Return whether arrays of this dtype can be converted to the required dtype."""
        return dtype == np.uint8 if self.is_packed else _is_float(dtype)


def stage(
    given: Mapping[str, Any],
    current: Any,
    specs_of: Callable[[Mapping[str, tuple[int, ...]]], Any],
    name: str,
    is_unused: Callable[[str], bool],
) -> list[Origin | None]:
    """Return an `Origin`, which builds the new array, for each leaf of `current`, in order.

    Quantised weights are made from plain weights. Their i32 arrays do not change, so the result has
    None for them. Buffers that `given` lacks keep their values, and are logged once, by name.

    Args:
        given: arrays by path in the tree or by Hugging Face name; see `read_named`.
        current: the engine's parameters.
        specs_of: a function. `specs_of(shapes)` takes the shapes of the given arrays by name, and
            returns a tree like `current`, with a `TensorSpec` for each array.
        name: what to call the weights in error messages.
        is_unused: a function. `is_unused(name)` returns whether an array of this name is accepted
            although the engine does not use it.

    Raises:
        ValueError: the arrays do not fit; the error lists missing, wrong and unexpected arrays.
    """
    plain = plain_shapes(current)
    places = paths(plain)
    has_paths = any(tensor in places for tensor in given)
    specs: dict[str, Any] = paths(
        specs_of({} if has_paths else {tensor: tuple(x.shape) for tensor, x in given.items()})
    )

    def tensors(path: str) -> tuple[str, ...]:
        return (path,) if has_paths or path not in specs else specs[path].names

    def division(path: str) -> DividedSpec | None:
        spec = specs.get(path)
        return spec if isinstance(spec, DividedSpec) else None

    kept = [
        path
        for path in places
        if path in specs and specs[path].is_buffer and given.keys().isdisjoint(tensors(path))
    ]
    # Only floats are updated, not integers such as a draft vocabulary.
    floats = {
        path: leaf for path, leaf in places.items() if _is_float(leaf.dtype) and path not in kept
    }
    needed: dict[str, _Needed] = {}
    for path, leaf in floats.items():
        if has_paths or path not in specs:
            divided = division(path)
            # The engine's own tree has the parts of all devices, in one more axis.
            is_own = path in given and given[path].ndim == leaf.ndim
            shape = leaf.shape if divided is None or is_own else divided.whole.shape
            needed[path] = _Needed(shape, leaf.dtype)
        else:
            spec = specs[path]
            shapes = zip(spec.names, spec.file_shapes, strict=True)
            needed |= {one: _Needed(shape, leaf.dtype, spec.is_packed) for one, shape in shapes}
    fixed = {path: leaf for path, leaf in places.items() if path not in floats and path in given}
    _check(given, needed, fixed, name, is_unused)
    if kept:
        _say_kept(tuple(one for path in kept for one in tensors(path)), name)

    def source(path: str, leaf: jax.Array) -> ArraySource:
        if path not in floats:
            return ArraySource((leaf,), None)
        spec = None if has_paths else specs.get(path)
        parts = tuple(given[tensor] for tensor in tensors(path))
        return ArraySource(parts, spec, division(path) if has_paths else None)

    sources = [source(path, leaf) for path, leaf in places.items()]
    return quantising(jax.tree.unflatten(jax.tree.structure(plain), sources), current)


@cache
def _say_kept(names: tuple[str, ...], name: str) -> None:
    """Log, once, that the buffers `names` were not given and keep their values."""
    get_log(verbose=True).info(
        "the %s come without %s; they are buffers and keep their values (torch: named_parameters() "
        "leaves buffers out, state_dict() has them)",
        name,
        _listed(names),
    )


def _check(
    given: Mapping[str, Any],
    needed: Mapping[str, _Needed],
    fixed: Mapping[str, Any],
    name: str,
    is_unused: Callable[[str], bool],
) -> None:
    lost = [tensor for tensor in given if is_deleted(given[tensor])]
    both = {tensor: (given[tensor], needed[tensor]) for tensor in needed if tensor in given}
    faults = {
        "deleted, or donated to a computation": lost,
        "missing": [tensor for tensor in needed if tensor not in given],
        "wrong shape": [
            f"{tensor} (expected {list(need.shape)}, found {list(array.shape)})"
            for tensor, (array, need) in both.items()
            if tuple(array.shape) != need.shape
        ],
        "wrong dtype": [
            f"{tensor} (expected {need.dtype}, found {array.dtype})"
            for tensor, (array, need) in both.items()
            if not need.takes(array.dtype)
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
        lists = "\n".join(f"  {kind}: {_listed(found)}" for kind, found in faults.items() if found)
        remedies = "\n".join(
            [
                "bring every array once, in its shape; floats of 16 bits or more are cast",
                *_hints(faults),
            ]
        )
        raise ValueError(
            f"the {name} do not fit the engine's, and nothing was changed:\n{lists}\n{remedies}"
        )


def _hints(faults: Mapping[str, Sequence[str]]) -> list[str]:
    """Return remedies for common mistakes that are visible in the names and dtypes of `faults`."""
    found = {
        "these are LoRA adapters; merge them into the weights first (peft: merge_and_unload() of a "
        "copy of the model; flax: hf_named with lora_scale)": any(
            _ADAPTER.search(tensor) for tensor in faults["unexpected"]
        ),
        "these are names of a wrapped model; pass the names of the model inside": any(
            _WRAPPER.search(tensor) for tensor in faults["unexpected"]
        ),
        f"the engine's {HEAD} is not tied; if the trainer's is, send the embedding under both "
        "names": list(faults["missing"]) == [HEAD],
        "integers and floats of 8 bits may be quantised weights; dequantise them first": bool(
            faults["wrong dtype"]
        ),
    }
    return [hint for hint, applies in found.items() if applies]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _check_tied(given: Mapping[str, Any]) -> None:
    names = TensorNames.of(given)
    embedding, head = names.stored(EMBEDDING), names.stored(HEAD)
    if not {embedding, head} <= given.keys():
        return
    one, other = given[embedding], given[head]
    if not _have_same_bits(one, other):
        raise ValueError(
            f"the weights have {head} that differs from {embedding}, but the engine has one array "
            "for both, since its checkpoint ties them; train them tied, or build the engine from "
            "a checkpoint with tie_word_embeddings=false"
        )


def _have_same_bits(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if devices_of([one, other]):
        return bool(jax.device_get(_are_equal(one, other)))
    # Compare bytes, because NumPy compares bfloat16 slowly.
    first, second = (np.ascontiguousarray(x).view(np.uint8) for x in jax.device_get((one, other)))
    return np.array_equal(first, second)


@jax.jit
def _are_equal(one: jax.Array, other: jax.Array) -> jax.Array:
    """Return whether two arrays, which have no NaN, are equal. Zeros of any sign are equal."""
    return (one == other).all()


def copies(params: Any) -> Any:
    """Return a copy of the tree in new memory.

    Raises:
        ValueError: a leaf is not an array, or cannot be read.
    """

    def copy(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array):
            return jax.device_put(leaf, leaf.sharding, may_alias=False)
        return jax.device_put(np.array(leaf))

    return jax.tree.map(copy, as_arrays(params, "params"))


def _is_float(dtype: Any) -> bool:
    """Return whether weights may have this dtype: a float of 16 bits or more.

    Floats of 8 bits would need scales.
    """
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2


def _check_vocabulary(given: Mapping[str, Any], target_ids: jax.Array | None) -> None:
    """Raise a ValueError if a draft vocabulary in `given` differs from the engine's."""
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
