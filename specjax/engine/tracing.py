"""Traces programs with JAX, for the shapes of one engine's arrays, so that XLA can compile them."""

from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.device.drafters.drafter import Params
from specjax.device.inputs import StepModel
from specjax.device.layout import Layout
from specjax.device.placement import DIVIDED, REPLICATED, Placement, is_divided
from specjax.device.state import EngineState
from specjax.device.step import StepOutputs
from specjax.engine.batch import pack_outputs
from specjax.engine.xla_options import matmul_precision


class Static(NamedTuple):
    """The hashable values that are compiled into all programs of an engine."""

    model: StepModel
    layout: Layout


Packed = tuple[type, int]  # a class of inputs, and the number of rows of the packed array


class Program:
    """The base class of the programs of a step.

    A program is a hashable value, whose fields are constants in the compiled code. It takes
    parameters, state, arrays that the host packs, and results of other programs. Results for the
    host are packed, too.
    """

    __slots__ = ()
    inputs: ClassVar[type]
    is_last: ClassVar[bool] = False  # whether the result goes to the host
    batch: int

    @property
    def packed(self) -> tuple[Packed, ...]:
        """For each input that the host packs into one array: its class, and the number of rows."""
        return ((self.inputs, self.batch),)

    def handed(self, traces: "Traces") -> tuple[Any, ...]:
        """Return the shapes of all arguments but the weights, the state and the packed inputs."""
        return ()

    def run(self, params: Params, state: EngineState, *arguments: Any, **model: Any) -> Any:
        """Return the next state and the program's result.

        `arguments` are the unpacked inputs, followed by all other arrays that the program takes,
        such as results of other programs. The only keyword argument is `model`, a `StepModel`.
        """
        raise NotImplementedError


Trees = tuple[Any, Any]  # structures of parameters and state


class Division(NamedTuple):
    """The devices that run a program together, and which arguments are divided over them.

    `are_divided` has one bool for each leaf of the weights, the state and the other arguments.
    """

    mesh: Mesh
    are_divided: tuple[bool, ...]


def jitted(
    program: Program,
    static: Static,
    trees: Trees | None = None,
    division: Division | None = None,
) -> Any:
    """Return a jitted function that runs a program on packed arrays.

    The function takes parameters, state and the program's arguments. The first
    `len(program.packed)` arguments are packed arrays; the others are not packed. The function
    returns the next state and the result, in which `StepOutputs` are packed. It donates the buffers
    of the state that it takes.

    With `trees`, parameters and both states are lists of leaves. Without `trees`, they are nested
    dataclasses, through which JAX walks in every call. With `division`, the function runs on every
    device of the mesh (see `_on_devices`).
    """

    def run(params: Any, state: Any, *arguments: Any) -> Any:
        if trees is not None:
            params, state = map(jax.tree.unflatten, trees, (params, state))
        kinds = [kind for kind, _ in program.packed]
        inputs = [
            static.layout.packing(kind).unpack(array)
            for kind, array in zip(kinds, arguments, strict=False)
        ]
        state, result = program.run(
            params, state, *inputs, *arguments[len(kinds) :], model=static.model
        )
        result = jax.tree.map(_pack, result, is_leaf=lambda x: isinstance(x, StepOutputs))
        return state if trees is None else jax.tree.leaves(state), result

    run.__name__ = type(program).__name__.lower()  # profiles show it
    if division is not None:
        return _on_devices(run, division, program.is_last)
    return jax.jit(run, donate_argnames="state")


def _on_devices(run: Callable[..., Any], division: Division, is_last: bool) -> Any:
    """Return a jitted function that runs `run` on every device of a mesh.

    Divided arguments and results have a leading axis of one entry per device; `run` gets and
    returns the device's entry. If `is_last`, the program's result is not divided, because all
    devices compute the same result. The next state is always divided.
    """

    def each(*leaves: jax.Array, tree: Any) -> Any:
        pairs = zip(leaves, division.are_divided, strict=True)
        own = [x[0] if is_divided else x for x, is_divided in pairs]
        state, result = run(*jax.tree.unflatten(tree, own))
        return _leading(state), result if is_last else _leading(result)

    def on_mesh(params: Any, state: Any, *arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten((params, state, *arguments))
        mapped = jax.shard_map(
            partial(each, tree=tree),
            mesh=division.mesh,
            in_specs=tuple(DIVIDED if one else REPLICATED for one in division.are_divided),
            out_specs=outputs,
            check_vma=False,
        )
        return mapped(*leaves)

    outputs = DIVIDED, REPLICATED if is_last else DIVIDED
    on_mesh.__name__ = run.__name__
    # XLA would replicate arrays without elements.
    shardings = tuple(NamedSharding(division.mesh, spec) for spec in outputs)
    return jax.jit(on_mesh, donate_argnames="state", out_shardings=shardings)


def _leading(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


class Jits(dict[tuple[Program, Trees, Division | None], Any]):
    """A dict of jitted programs that all have the same `Static`.

    A key is (program, trees, division), with the meanings of `jitted`'s arguments. Looking up a
    missing key calls `jitted`.
    """

    def __init__(self, static: Static):
        super().__init__()
        self._static = static

    def __missing__(self, key: tuple[Program, Trees, Division | None]) -> Any:
        program, trees, division = key
        self[key] = made = jitted(program, self._static, trees, division)
        return made


# Engines with equal `Static`s trace once. JAX frees a function's compiled code together with the
# function, which is freed together with the last engine of its `Static`.
JITS: WeakValueDictionary[Static, Jits] = WeakValueDictionary()


class Traces:
    """Traces the programs of one engine for the shapes of its parameters and state.

    `dtype` is the dtype of the weights (see `matmul_precision`).

    Attributes:
        shapes: the shapes of parameters and state.
    """

    def __init__(
        self,
        static: Static,
        dtype: str,
        params: Params,
        state: EngineState,
        placement: Placement,
        jits: MutableMapping[Static, Jits] = JITS,
    ):
        self._layout, self._vocabulary = static.layout, static.model.vocabulary
        self.shapes = jax.tree.map(_shape, (params, state))
        self._leaves = [jax.tree.leaves(shapes) for shapes in self.shapes]
        self._dtype = dtype
        self._trees = jax.tree.structure(params), jax.tree.structure(state)
        self._placement = placement
        self._jits = jits.setdefault(static, Jits(static))

    def trace(self, program: Program) -> Any:
        """Return the `jax.stages.Traced` of a program that takes lists of leaves (see `jitted`)."""
        packed = [
            self._ints(*self._layout.packing(kind).shape(batch)) for kind, batch in program.packed
        ]
        arguments = *packed, *program.handed(self)
        jit = self._jits[program, self._trees, self._division(arguments)]
        with matmul_precision(self._dtype, self._placement.device.platform):
            return jit.trace(*self._leaves, *arguments)

    def result(self, program: Program) -> Any:
        """Return the shapes of a program's result."""
        shapes = self.trace(program).out_info[1]
        if self._placement.num_devices == 1:
            return shapes
        sharding = self._placement.sharding(DIVIDED)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
        )

    def logits(self, batch: int, num_rows: int) -> jax.ShapeDtypeStruct:
        """Return the shape of logits, f32[batch, num_rows, V].

        With several devices, it is f32[devices, batch, num_rows, columns per device].
        """
        shape = batch, num_rows, self._vocabulary.num_columns(self._layout.vocab_size)
        if self._placement.num_devices == 1:
            return self._array(shape, jnp.float32)
        return self._array((self._placement.num_devices, *shape), jnp.float32, DIVIDED)

    def masks(self, batch: int, num_rows: int) -> jax.ShapeDtypeStruct:
        """Return the shape of grammars' masks i32[batch, num_rows, mask_words]."""
        return self._ints(batch, num_rows, self._layout.mask_words)

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._array(shape, jnp.int32)

    def _array(
        self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = REPLICATED
    ) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._placement.sharding(spec))

    def _division(self, arguments: tuple[Any, ...]) -> Division | None:
        """Return which arguments of a program are divided over devices; None on one device.

        `arguments` are the program's arguments after the weights and the state.
        """
        if self._placement.num_devices == 1:
            return None
        leaves = jax.tree.leaves((*self._leaves, *arguments))
        return Division(self._placement.mesh, tuple(map(is_divided, leaves)))


def _pack(result: Any) -> Any:
    return pack_outputs(result) if isinstance(result, StepOutputs) else result


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
