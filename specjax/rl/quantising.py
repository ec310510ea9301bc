"""Quantises a trainer's plain (unquantised) weights for an engine with quantised weights.

Each quantised weight of the engine is made from one plain weight. The new arrays have the shapes
and dtypes of the old arrays.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Sharding

from specjax.checkpoint.given import dotted
from specjax.checkpoint.quantised.nearest import relative_error
from specjax.device.drafters.drafter import Drafter, Params
from specjax.device.placement import AXIS, is_divided
from specjax.device.weights.weight import Weight, is_weight
from specjax.engine.log import get_log


class Origin(Protocol):
    """Builds one array of the engine from arrays of a weight update."""

    @property
    def parts(self) -> tuple[Any, ...]:
        """The arrays of the update that `copy` reads."""
        ...

    @property
    def rounding(self) -> tuple[str, jax.Array] | None:
        """The name and relative error of the weight that `copy` quantised; None if it did not."""
        ...

    def copy(self, dtype: np.dtype, sharding: Sharding) -> jax.Array:
        """Build the array in new memory, with this dtype and sharding."""
        ...


@dataclass(eq=False)
class Quantising:
    """Makes a quantised weight of the engine from a plain weight.

    Attributes:
        plain: the plain weight, with an `Origin` instead of its array.
        form: the quantised weight, with shapes instead of arrays. Only i32 arrays, such as the
            order of input channels, are kept, because an update does not change them.
    """

    name: str  # the weight's path in the engine's tree
    plain: Weight
    form: Weight
    is_divided: bool  # whether arrays have one more axis, over devices
    error: jax.Array | None = None  # relative to the plain weight; None before it is made
    _made: dict[int, jax.Array] = field(default_factory=dict)

    @property
    def sources(self) -> list[Origin | None]:
        """For each array, the `Origin` that builds the new array; None if it does not change."""
        leaves = jax.tree.leaves(self.form)
        return [None if _stays(x) else QuantisedArray(self, i) for i, x in enumerate(leaves)]

    def make(self, number: int, sharding: Sharding) -> jax.Array:
        """Return array number `number` of the quantised weight. Call this once per array.

        The call for array 0 quantises the weight, so this call must be the first.
        """
        leaves, tree = jax.tree.flatten(self.form)
        if number == 0:
            source: Any = self.plain.values
            dtypes = {np.dtype(x.dtype) for x in source.parts}
            is_short = len(dtypes) == 1 and all(one.itemsize == 2 for one in dtypes)
            dtype = dtypes.pop() if is_short else np.dtype(np.float32)
            plain = replace(self.plain, values=source.copy(dtype, sharding))  # pyright: ignore
            shapes = tuple(None if _stays(x) else x for x in leaves)
            kept = [x for x in leaves if _stays(x)]
            made, self.error = _quantiser(tree, shapes, self.is_divided)(plain, kept)
            self._made = {i: x for i, x in enumerate(made) if shapes[i] is not None}
        return jax.device_put(self._made.pop(number), sharding)


@dataclass(eq=False, frozen=True)
class QuantisedArray:
    """Builds one array of a quantised weight; see `Origin`."""

    weight: Quantising
    number: int

    @property
    def parts(self) -> tuple[Any, ...]:
        """See `Origin`.

        Array 0 of a weight is copied first, and this copy quantises the whole weight. So array 0
        lists all arrays of the update that the weight is made of. The other arrays list none.
        """
        source: Any = self.weight.plain.values
        return () if self.number else source.parts

    @property
    def rounding(self) -> tuple[str, jax.Array] | None:
        """See `Origin`."""
        error = self.weight.error
        return None if self.number or error is None else (self.weight.name, error)

    def copy(self, dtype: np.dtype, sharding: Sharding) -> jax.Array:
        """See `Origin`."""
        return self.weight.make(self.number, sharding)


def plain_shapes(current: Any) -> Any:
    """Return the tree `current`, but with the shape of a plain weight for each quantised weight.

    The shapes have the dtype float32. Other weights and arrays are unchanged.
    """

    def of(x: Any) -> Any:
        if not _is_quantised(x):
            return x
        make = _plain if not _is_divided(x) else jax.vmap(_plain)
        return jax.eval_shape(make, x)

    return jax.tree.map(of, current, is_leaf=is_weight)


def quantising(sources: Any, current: Any) -> list[Origin | None]:
    """Return an `Origin`, which builds the new array, for each array of the tree `current`.

    Arrays that do not change have None. `current` has the engine's weights. `sources` is a tree
    like the result of `plain_shapes`, with an `Origin` for each array.
    """
    given = jax.tree.leaves(sources, is_leaf=is_weight)
    found = jax.tree_util.tree_leaves_with_path(current, is_leaf=is_weight)
    made: list[Origin | None] = []
    for new, (path, old) in zip(given, found, strict=True):
        made += sources_of(dotted(path), new, old) if _is_quantised(old) else jax.tree.leaves(new)
    return made


def sources_of(name: str, plain: Weight, old: Weight) -> list[Origin | None]:
    """Return an `Origin`, which builds the new array, for each array of a quantised weight.

    The entry is None for an array that does not change. `old` is the engine's weight, `name` is the
    path of the weight, and `plain` is the new plain weight, with an `Origin` instead of its array.
    """
    form = jax.tree.map(lambda x: x if _stays(x) else jax.ShapeDtypeStruct(x.shape, x.dtype), old)
    return Quantising(name, plain, form, _is_divided(old)).sources


def report_errors(sources: Iterable[Origin | None], version: int, seconds: float) -> float | None:
    """Log the number of weights that an update has quantised, and the largest relative error.

    Return this relative error. If no weight was quantised, log nothing, and return None.
    """
    found = [source.rounding for source in sources if source is not None]
    errors = {name: float(error) for name, error in filter(None, found)}
    if not errors:
        return None
    worst = max(errors, key=errors.__getitem__)
    get_log(verbose=True).info(
        "weights of version %d: %d were quantised to the engine's formats, in an update of %.2f s; "
        "the largest relative error is %.2f%%, of %s",
        *(version, len(errors), seconds, 100 * errors[worst], worst),
    )
    return errors[worst]


def all_sources(
    params: Params,
    drafter: Drafter,
    target: Sequence[Origin | None] | None,
    own: Sequence[Origin | None] | None,
) -> list[Origin | None]:
    """Return an `Origin`, which builds the new array, for each array of an engine's `params`.

    The entry is None for an array that does not change. For `target` and `own`, see
    `replace_weights`. If the drafter has a quantised copy of the output head (`Params.head`), the
    copy is made again from a new head.
    """

    def new(sources: Any, current: Any) -> tuple[list[Origin | None], Any]:
        leaves, tree = jax.tree.flatten(current)
        return sources or [None] * len(leaves), sources and jax.tree.unflatten(tree, sources)

    (first, of_target), (second, of_drafter) = new(target, params.target), new(own, params.drafter)
    if params.head is None:
        return [*first, *second]
    head = drafter.head_of(Params(of_target, of_drafter))
    num_arrays = len(jax.tree.leaves(params.head))
    copied = sources_of("head", head, params.head) if head else [None] * num_arrays
    return [*first, *second, *copied]


def kinds_of(params: Any) -> str | None:
    """Return the kinds of quantised numbers in a tree, such as "fp8, int4"; None if it has none."""
    weights = filter(is_weight, jax.tree.leaves(params, is_leaf=is_weight))
    return ", ".join(sorted({kind for one in weights for kind in one.numbers})) or None


def _is_quantised(x: Any) -> bool:
    return is_weight(x) and bool(x.numbers)


def _plain(x: Weight) -> Weight:
    return x.plain(np.float32)


def _is_divided(x: Weight) -> bool:
    return any(map(is_divided, jax.tree.leaves(x)))


def _stays(leaf: Any) -> bool:
    return leaf.dtype == np.int32


@lru_cache(maxsize=32)  # each entry holds a compiled program; layers share it
def _quantiser(tree: Any, shapes: tuple[Any, ...], is_divided: bool) -> Any:
    """Return a jitted function that quantises a plain weight.

    The function takes the plain weight and the arrays to keep. It returns the arrays of the
    quantised weight, and the relative error of the quantised weight.
    """

    def local(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if is_divided else x

    def quantise(plain: Any, kept: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        staying = iter(kept)
        leaves = [next(staying) if x is None else local(x) for x in shapes]
        new = jax.tree.unflatten(tree, leaves).quantise(plain)
        error = relative_error(_plain(new).values, plain.values)
        return jax.tree.leaves(new), error

    if not is_divided:
        return jax.jit(quantise)

    def each(plain: Any, kept: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        made, errors = jax.vmap(quantise, axis_name=AXIS)(plain, kept)
        return made, errors.max()

    return jax.jit(each)
