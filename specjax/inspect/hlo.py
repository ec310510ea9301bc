"""Finds what the kernels of an optimized HLO module read and write, from its text without JAX.

A pass is one kernel's read or write of at least `num_elements` elements of an array that has a
dimension of size `columns`. For example, a GEMM that writes the logits is one pass, an argmax that
reads the logits is another pass, and a copy of the logits is two passes. An access to a parameter
of the module (a weight, the state) is not a pass. An access to a copy or a conversion of the
parameter is a pass.

kernels.py explains how accesses are counted. But `launches` counts the bytes of Pallas kernels with
`pallas_bytes.touched`, because these kernels read only some pages of a cache that they are given.
"""

from collections.abc import Callable
from dataclasses import dataclass

from specjax.inspect.buffers import Buffers, Leaf
from specjax.inspect.hlo_text import (
    Computation,
    Instruction,
    dimensions_of,
    element_bytes_of,
    parse,
)
from specjax.inspect.kernels import accesses, kernels_of, kind_of, source_of
from specjax.inspect.pallas_bytes import Array, CachedContext, Call, touched

LARGE_COPY = 30_000_000  # bytes; a larger write, except by a GEMM, copies a pool, state or weight


@dataclass(frozen=True)
class Pass:
    """One kernel's read or write of an array."""

    kernel: str
    source: str  # the JAX operation that the kernel was compiled from
    access: str  # "read" or "write"
    shape: str
    num_bytes: int
    branches: tuple[tuple[str, int], ...]  # enclosing conditionals and branches, outermost first
    times: int  # number of runs, see `Kernel`


@dataclass(frozen=True)
class Launch:
    """A kernel launched by XLA, and its traffic in bytes."""

    name: str
    kind: str  # "pallas", "gemm", or the instruction: "loop fusion", "copy", "all-reduce", ...
    source: str  # the JAX operation that the kernel was compiled from
    # The named scopes in which that operation was traced. A kernel inside a loop or conditional has
    # the scopes of the loop or conditional instead, because XLA may share one body between two
    # loops, and the names in the body are then right for only one of the loops.
    scope: str
    num_read: int  # bytes per run
    num_written: int  # bytes per run
    branches: tuple[tuple[str, int], ...]  # as in `Pass`
    times: int  # as in `Pass`
    layer: int | None  # the layer it belongs to; see the argument `layer_of` of `launches`
    pallas: str | None = None  # the Pallas kernel's name
    shape: str = ""  # shapes of its outputs
    parameters: tuple[str, ...] = ()  # JAX's names of the module parameters it reads

    @property
    def num_bytes(self) -> int:
        """Bytes read and written by all runs (`times`) of the kernel together."""
        return self.times * (self.num_read + self.num_written)

    @property
    def is_taken(self) -> bool:
        """Whether the kernel runs if every conditional takes branch 0."""
        return self.is_taken_by(0)

    def is_taken_by(self, branch: int) -> bool:
        """Return whether the kernel runs if every conditional takes this branch."""
        return all(taken == branch for _, taken in self.branches)


def passes_over(hlo: str, num_elements: int, columns: int) -> list[Pass]:
    """Return the passes of an HLO module.

    A pass is a read or a write of at least `num_elements` elements of an array that has a dimension
    of size `columns`. Parameters of the module do not count as arrays.
    """
    computations, entry = parse(hlo)
    buffers = Buffers(computations)
    given = {
        buffers.of(Leaf(entry, parameter.name, i))
        for parameter in computations[entry].parameters
        for i in range(len(parameter.leaves))
    }
    wide = {buffers.of(leaf) for leaf, shape in buffers.shapes() if columns in dimensions_of(shape)}
    found = []
    for kernel in kernels_of(computations, entry):
        for access, parts in accesses(computations, kernel.computation, kernel.instruction):
            largest: dict[Leaf, tuple[int, str]] = {}
            for leaf, amount, shape in parts:
                buffer = buffers.of(leaf)
                if buffer in wide - given and amount >= num_elements:
                    largest[buffer] = max(largest.get(buffer, (0, "")), (amount, shape))
            found += [
                Pass(
                    kernel.instruction.name,
                    kernel.instruction.source,
                    access,
                    shape,
                    amount * element_bytes_of(shape),
                    kernel.branches,
                    kernel.times,
                )
                for amount, shape in largest.values()
            ]
    return found


def num_passes(passes: list[Pass], branch: int = 0) -> int:
    """Return the number of `passes` in a run in which every conditional takes this branch."""
    return sum(p.times for p in passes if all(taken == branch for _, taken in p.branches))


def launches(
    hlo: str,
    load_of: Callable[[str], CachedContext],
    layer_of: Callable[[str], int | None] = lambda _: None,
    is_inside: Callable[[str], bool] = lambda _: True,
) -> list[Launch]:
    """Return every kernel of a module with its traffic, in launch order.

    A kernel that reads a parameter of a layer, or the result of a layer's kernel, belongs to this
    layer. If there are several such layers, the kernel belongs to the last of them.

    Args:
        load_of: a function that takes a JAX name scope, and returns the sizes that determine how
            many bytes the scope's Pallas kernels read and write.
        layer_of: a function that takes JAX's name of a module parameter, and returns the layer that
            the parameter belongs to, or None.
        is_inside: a function that takes a scope, and returns whether the scope's operations belong
            to layers.
    """
    computations, entry = parse(hlo)
    buffers = Buffers(computations)
    layers = _layers(computations[entry], layer_of, is_inside)
    given = {
        buffers.of(Leaf(entry, parameter.name, 0)): parameter.source
        for parameter in computations[entry].parameters
    }
    found = []
    for kernel in kernels_of(computations, entry):
        instruction, traffic = kernel.instruction, {"read": 0, "write": 0}
        taken: dict[str, None] = {}
        for access, parts in accesses(computations, kernel.computation, instruction):
            largest: dict[Leaf, int] = {}
            for leaf, amount, shape in parts:
                if (parameter := given.get(buffers.of(leaf))) and access == "read":
                    taken[parameter] = None
                buffer, size = buffers.of(leaf), amount * element_bytes_of(shape)
                largest[buffer] = max(largest.get(buffer, 0), size)
            traffic[access] = sum(largest.values())
        pallas = instruction.pallas_name
        source = source_of(computations, instruction)
        scope = computations[entry][kernel.outermost].source or source
        if pallas is not None:
            call = _call(computations[kernel.computation], instruction)
            traffic["read"], traffic["write"] = touched(pallas, call, load_of(scope))
        found.append(
            Launch(
                instruction.name,
                "pallas" if pallas is not None else kind_of(computations, instruction),
                source,
                scope,
                traffic["read"],
                traffic["write"],
                kernel.branches,
                kernel.times,
                None if scope and not is_inside(scope) else layers.get(kernel.outermost),
                pallas,
                ", ".join(instruction.leaves),
                tuple(taken),
            )
        )
    return found


def large_copies(found: list[Launch]) -> list[Launch]:
    """Return the kernels that write more than `LARGE_COPY` bytes.

    The result excludes GEMMs, Pallas kernels, and kernels that do not run if every conditional
    takes branch 0.
    """
    return [
        one
        for one in found
        if one.num_written > LARGE_COPY and one.kind not in ("gemm", "pallas") and one.is_taken
    ]


def unknown_loops(hlo: str) -> list[str]:
    """Return the names of loops with an unknown trip count. A report counts their kernels once."""
    computations, _ = parse(hlo)
    return [
        instruction.name
        for computation in computations.values()
        for instruction in computation.values()
        if instruction.op == "while" and "known_trip_count" not in instruction.attributes
    ]


def _layers(
    computation: Computation,
    layer_of: Callable[[str], int | None],
    is_inside: Callable[[str], bool],
) -> dict[str, int]:
    """Return the layer of each instruction that belongs to a layer, by the instruction's name."""
    layers: dict[str, int] = {}
    for instruction in computation.values():
        if instruction.op == "parameter":
            layer = layer_of(instruction.source)
        elif instruction.source and not is_inside(instruction.source):
            continue
        else:
            layer = max((layers[x] for x in instruction.operands if x in layers), default=None)
        if layer is not None:
            layers[instruction.name] = layer
    return layers


def _call(computation: Computation, kernel: Instruction) -> Call:
    operands = [_array(computation[name].leaves[0]) for name in kernel.operands]
    aliases = kernel.aliases
    outputs = [
        _array(shape)
        for i, shape in enumerate(kernel.leaves)
        if i not in {output for output, _ in aliases}
    ]
    return Call(tuple(operands), tuple(outputs), frozenset(operand for _, operand in aliases))


def _array(shape: str) -> Array:
    is_float = shape.startswith(("f", "bf"))
    return Array(tuple(dimensions_of(shape)), element_bytes_of(shape), is_float)
