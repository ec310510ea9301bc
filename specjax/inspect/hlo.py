"""What the kernels of an optimized HLO module read and write. Text in, numbers out; no JAX.

A pass is one kernel reading, or writing, at least `num_elements` elements of an array that has a
dimension of `columns`. So a GEMM that writes the logits is one pass and an argmax that reads them
is another; a copy is two. What counts:

- A kernel is an instruction outside fusions that is not mere naming (tuple, bitcast, ...): a
  fusion, a custom call, a copy. It reads each buffer among its operands once, however often its
  body mentions it, and writes each of its outputs once.
- Of an operand that a fusion only slices or gathers from, it reads what it takes; an update in
  place writes the update alone. A custom call takes its operands whole.
- A cuBLAS call's scratch is not an output; a Pallas call of `pallas_bytes.TOUCHED` takes what that
  table says where traffic is counted, as whole pools pass through it.
- Buffers keep their identity through bitcasts, tuples, calls, loops and conditionals. One that is
  a parameter of the module (a weight, the state) is no pass; a copy or a conversion of it is.
- A kernel inside a conditional carries the branch it is in, numbered as `jax.lax.cond` numbers
  them: 0 is the false branch. One inside a loop counts once per trip where XLA knows their number,
  and once where it does not.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from specjax.inspect.pallas_bytes import Array, CachedContext, Call, touched

PALLAS_TARGETS = "__gpu$xla.gpu.triton", "mosaic_gpu"
NAMING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
NAMING |= {"opt-barrier", "add-dependency", "partition-id", "replica-id", "copy-done", "async-done"}
CONTROL = {"while", "conditional", "call", "async-start"}

# Of a first operand these read what they take; of theirs, these write the operand with the number.
SELECTING = {"slice", "dynamic-slice", "gather"}
UPDATING = {"dynamic-update-slice": 1, "scatter": 2}
LARGE_COPY = 30_000_000  # bytes written by a kernel that is no GEMM: a pool, a state, a weight

HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
SHAPE = re.compile(r"[a-z]\w*\[([\d,]*)\]")


@dataclass(frozen=True)
class Pass:
    """One kernel's reading or writing of an array."""

    kernel: str
    source: str  # the JAX operation that it comes from
    access: str  # "read" or "write"
    shape: str
    num_bytes: int
    branches: tuple[tuple[str, int], ...]  # conditionals around it, outermost first, and which one
    times: int


@dataclass(frozen=True)
class Launch:
    """A kernel as XLA launches it, and its traffic in bytes."""

    name: str
    kind: str  # "pallas", "gemm", or what the instruction is: "loop fusion", "copy", ...
    source: str  # the JAX operation that it comes from
    # And where that stands: of a loop or a conditional, its own, as what is in it may be shared
    # with another and be named after that.
    scope: str
    num_read: int
    num_written: int
    branches: tuple[tuple[str, int], ...]
    times: int
    layer: int | None  # see `launches`
    pallas: str | None = None  # the name that the Pallas kernel was given
    shape: str = ""  # of its outputs
    parameters: tuple[str, ...] = ()  # of the module that it takes, by JAX's names

    @property
    def num_bytes(self) -> int:
        """Read and written, over all of its runs."""
        return self.times * (self.num_read + self.num_written)

    @property
    def is_taken(self) -> bool:
        """Whether it runs when every conditional takes its branch 0."""
        return all(branch == 0 for _, branch in self.branches)


class Leaf(NamedTuple):
    """An array: an instruction's result, or a leaf of it, by number."""

    computation: str
    name: str
    number: int


@dataclass(frozen=True)
class Instruction:
    name: str
    op: str
    elements: tuple[tuple[str, ...], ...]  # shapes of the leaves of each tuple element
    operands: tuple[str, ...]
    argument: str  # between the parentheses, as written
    attributes: str
    is_root: bool

    @property
    def leaves(self) -> tuple[str, ...]:
        return tuple(shape for element in self.elements for shape in element)

    def called(self, attribute: str) -> str | None:
        """The computation that an attribute names."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None

    @property
    def branches(self) -> list[str]:
        """A conditional's computations, in the order of `jax.lax.cond`: false, true."""
        if on_true := self.called("true_computation"):
            return [str(self.called("false_computation")), on_true]
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        return re.findall(r"[\w.\-]+", listed[1]) if listed else []

    @property
    def branch_operands(self) -> list[str]:
        inputs = list(self.operands[1:])
        return inputs[::-1] if self.called("true_computation") else inputs

    @property
    def source(self) -> str:
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1].replace("\\'", "'") if found else ""

    @property
    def target(self) -> str:
        """What a custom call calls."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def pallas_name(self) -> str | None:
        """The name of a Pallas kernel, which stands before the primitive in its operation."""
        if not self.target.startswith(PALLAS_TARGETS):
            return None
        return (["", *self.source.split("/")])[-2]

    @property
    def aliases(self) -> list[tuple[int, int]]:
        """Outputs that take an operand's place, with that operand's number."""
        found = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", self.attributes)
        pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}", found[1] if found else "")
        return [(int(output or 0), int(operand)) for output, operand in pairs]


class Computation(dict[str, Instruction]):
    """Instructions by name, in order."""

    @property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.values() if instruction.is_root)

    @property
    def parameters(self) -> list[Instruction]:
        found = [instruction for instruction in self.values() if instruction.op == "parameter"]
        return sorted(found, key=lambda instruction: int(instruction.argument))


def num_elements_of(shape: str) -> int:
    """Elements of a shape such as f32[256,1024]."""
    return math.prod(dimensions_of(shape))


def element_bytes_of(shape: str) -> int:
    """Bytes of an element of a shape such as bf16[256,1024]; less than eight bits count as one."""
    bits = re.match(r"[a-z]+(\d+)", shape)
    return max(int(bits[1]) // 8, 1) if bits else 1


def dimensions_of(shape: str) -> list[int]:
    """Dimensions of a shape such as f32[256,1024]."""
    found = SHAPE.match(shape)
    return [int(size) for size in found[1].split(",") if size] if found else []


def parse(hlo: str) -> tuple[dict[str, Computation], str]:
    """Computations by name, and the name of the entry."""
    computations: dict[str, Computation] = {}
    current, entry = Computation(), ""
    for line in hlo.splitlines():
        if header := HEADER.match(line):
            current = computations[header[2]] = Computation()
            entry = header[2] if header[1] else entry
        elif found := INSTRUCTION.match(line):
            current[found[2]] = _instruction(found[2], found[3], bool(found[1]))
    return computations, entry


def passes_over(hlo: str, num_elements: int, columns: int) -> list[Pass]:
    """Every pass over an array with a dimension of `columns`, `num_elements` or more of it."""
    computations, entry = parse(hlo)
    buffers = _Buffers(computations)
    given = {
        buffers.of(Leaf(entry, parameter.name, i))
        for parameter in computations[entry].parameters
        for i in range(len(parameter.leaves))
    }
    wide = {buffers.of(leaf) for leaf, shape in buffers.shapes() if columns in dimensions_of(shape)}
    found = []
    for kernel in _kernels(computations, entry):
        for access, parts in _accesses(computations, kernel.computation, kernel.instruction):
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
    """Passes of a run in which every conditional takes its branch of that number."""
    return sum(p.times for p in passes if all(taken == branch for _, taken in p.branches))


def launches(
    hlo: str,
    load: CachedContext,
    layer_of: Callable[[str], int | None] = lambda _: None,
    is_inside: Callable[[str], bool] = lambda _: True,
) -> list[Launch]:
    """Every kernel with its traffic, in the order in which they are launched.

    Args:
        load: what Pallas kernels find in the pools that they are given.
        layer_of: of the name of one of the module's parameters, as JAX has it, the layer that reads
            it. A kernel is of the last layer that any of its inputs comes from.
        is_inside: whether an operation, by its scope, is part of what has these layers.
    """
    computations, entry = parse(hlo)
    buffers = _Buffers(computations)
    layers = _layers(computations[entry], layer_of, is_inside)
    given = {
        buffers.of(Leaf(entry, parameter.name, 0)): parameter.source
        for parameter in computations[entry].parameters
    }
    found = []
    for kernel in _kernels(computations, entry):
        instruction, traffic = kernel.instruction, {"read": 0, "write": 0}
        taken: dict[str, None] = {}
        for access, parts in _accesses(computations, kernel.computation, instruction):
            largest: dict[Leaf, int] = {}
            for leaf, amount, shape in parts:
                if (parameter := given.get(buffers.of(leaf))) and access == "read":
                    taken[parameter] = None
                buffer, size = buffers.of(leaf), amount * element_bytes_of(shape)
                largest[buffer] = max(largest.get(buffer, 0), size)
            traffic[access] = sum(largest.values())
        pallas = instruction.pallas_name
        if pallas is not None:
            call = _call(computations[kernel.computation], instruction)
            traffic["read"], traffic["write"] = touched(pallas, call, load)
        source = _source(computations, instruction)
        scope = computations[entry][kernel.outermost].source or source
        found.append(
            Launch(
                instruction.name,
                "pallas" if pallas is not None else _kind(computations, instruction),
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
    """Kernels that write so much without being GEMMs that it must be a whole pool, or a weight."""
    return [
        one
        for one in found
        if one.num_written > LARGE_COPY and one.kind not in ("gemm", "pallas") and one.is_taken
    ]


def unknown_loops(hlo: str) -> list[str]:
    """Loops whose number of trips XLA does not know, so that what is in them counts once."""
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
    """The layer of each instruction that has one."""
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


def _source(computations: dict[str, Computation], kernel: Instruction) -> str:
    """A fusion that XLA made of parts without giving it a source has that of its root."""
    body = kernel.called("calls")
    while not kernel.source and body in computations:
        kernel = computations[str(body)].root
        body = kernel.called("calls")
    return kernel.source


def _kind(computations: dict[str, Computation], kernel: Instruction) -> str:
    if "cublas" in kernel.target or _has_dot(computations, kernel):
        return "gemm"
    if kernel.op == "custom-call":
        return kernel.target
    if kernel.op == "fusion":
        kind = re.search(r"kind=k(\w+)", kernel.attributes)
        return f"{kind[1].lower() if kind else ''} fusion".strip()
    return kernel.op


def _has_dot(computations: dict[str, Computation], kernel: Instruction) -> bool:
    body = kernel.called("calls")
    if kernel.op == "dot" or kernel.op != "fusion" or body not in computations:
        return kernel.op == "dot"
    return any(_has_dot(computations, one) for one in computations[str(body)].values())


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
    end = _closing(text) if text.startswith("(") else text.index(" ")
    type_text, call = text[:end], text[end:].lstrip()
    op, _, rest = call.partition("(")
    close = _closing("(" + rest) - 2
    argument = rest[:close]
    parts = _top_level(type_text[1:-1]) if type_text.startswith("(") else [type_text]
    elements = tuple(tuple(m[0] for m in SHAPE.finditer(part)) for part in parts)
    operands = () if op in ("parameter", "constant") else re.findall(r"%([\w.\-]+)", argument)
    return Instruction(name, op, elements, tuple(operands), argument, rest[close + 1 :], is_root)


def _closing(text: str) -> int:
    """Where the parenthesis that opens `text` is closed, past it."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"unbalanced: {text[:80]}")


def _top_level(text: str) -> list[str]:
    """Split at the commas outside brackets of any kind."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return parts + [text[start:]] if text else []


class _Buffers:
    """Which arrays are one buffer under several names (union-find)."""

    def __init__(self, computations: dict[str, Computation]):
        self._computations = computations
        self._parents: dict[Leaf, Leaf] = {}
        for name, computation in computations.items():
            for instruction in computation.values():
                for one, other in self._aliases(name, instruction):
                    self._parents[self.of(one)] = self.of(other)

    def of(self, leaf: Leaf) -> Leaf:
        while leaf in self._parents and self._parents[leaf] != leaf:
            leaf = self._parents[leaf]
        return leaf

    def shapes(self) -> Iterator[tuple[Leaf, str]]:
        for name, computation in self._computations.items():
            for instruction in computation.values():
                for i, shape in enumerate(instruction.leaves):
                    yield Leaf(name, instruction.name, i), shape

    def _leaves(self, computation: str, name: str) -> list[Leaf]:
        count = len(self._computations[computation][name].leaves)
        return [Leaf(computation, name, i) for i in range(count)]

    def _aliases(self, name: str, instruction: Instruction) -> Iterator[tuple[Leaf, Leaf]]:
        """Pairs of leaves that are one buffer by reason of an instruction."""
        results = self._leaves(name, instruction.name)
        inputs = [self._leaves(name, operand) for operand in instruction.operands]
        flat = [leaf for leaves in inputs for leaf in leaves]

        def call(computation: str, arguments: list[Leaf], outputs: list[Leaf]):
            callee = self._computations[computation]
            names = [parameter.name for parameter in callee.parameters]
            parameters = [leaf for p in names for leaf in self._leaves(computation, p)]
            yield from zip(parameters, arguments, strict=True)
            yield from zip(self._leaves(computation, callee.root.name), outputs, strict=True)

        match instruction.op:
            case "tuple" | "bitcast" | "opt-barrier":
                yield from zip(results, flat, strict=True)
            case "get-tuple-element":
                source = self._computations[name][instruction.operands[0]]
                index = int(re.search(r"index=(\d+)", instruction.attributes)[1])  # pyright: ignore
                start = sum(map(len, source.elements[:index]))
                yield from zip(results, flat[start:], strict=False)
            case "copy-start":  # (destination, source, context)
                yield results[1], flat[0]
            case "copy-done":
                yield results[0], flat[0]
            case "async-start":  # (operands, results, context...)
                num_inputs, num_results = map(len, instruction.elements[:2])
                yield from zip(results[:num_inputs], flat, strict=True)
                outputs = results[num_inputs : num_inputs + num_results]
                yield from call(str(instruction.called("calls")), flat, outputs)
            case "async-done":
                start = len(self._computations[name][instruction.operands[0]].elements[0])
                yield from zip(results, flat[start:], strict=False)
            case "call":
                yield from call(str(instruction.called("to_apply")), flat, results)
            case "while":
                yield from zip(results, flat, strict=True)
                yield from call(str(instruction.called("body")), flat, results)
                condition = str(instruction.called("condition"))
                (parameter,) = self._computations[condition].parameters
                yield from zip(self._leaves(condition, parameter.name), flat, strict=True)
            case "conditional":
                for branch, operand in zip(
                    instruction.branches, instruction.branch_operands, strict=True
                ):
                    yield from call(branch, self._leaves(name, operand), results)
        for output, operand in instruction.aliases:
            yield results[output], inputs[operand][0]


class _Kernel(NamedTuple):
    computation: str
    instruction: Instruction
    branches: tuple[tuple[str, int], ...]
    times: int
    outermost: str  # the entry's instruction that it is in, or is


def _kernels(
    computations: dict[str, Computation],
    name: str,
    branches: tuple[tuple[str, int], ...] = (),
    times: int = 1,
    outermost: str | None = None,
) -> Iterator[_Kernel]:
    """What a computation launches, that of the computations it calls included."""
    for instruction in computations[name].values():
        top = outermost or instruction.name
        if instruction.op == "conditional":
            for i, branch in enumerate(instruction.branches):
                inner = (*branches, (instruction.name, i))
                yield from _kernels(computations, branch, inner, times, top)
        elif instruction.op == "while":
            known = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
            trips = times * (int(known[1]) if known else 1)
            for part in "condition", "body":
                body = str(instruction.called(part))
                yield from _kernels(computations, body, branches, trips, top)
        elif instruction.op in CONTROL:
            callee = instruction.called("to_apply") or instruction.called("calls")
            yield from _kernels(computations, str(callee), branches, times, top)
        elif instruction.op not in NAMING:
            yield _Kernel(name, instruction, branches, times, top)


def _accesses(
    computations: dict[str, Computation], name: str, kernel: Instruction
) -> Iterator[tuple[str, list[tuple[Leaf, int, str]]]]:
    """What a kernel reads and writes: leaf, number of elements of it, shape."""
    operands = [computations[name][operand] for operand in kernel.operands]
    whole = [[num_elements_of(shape) for shape in operand.leaves] for operand in operands]
    written = [num_elements_of(shape) for shape in kernel.leaves]
    if kernel.op == "fusion":
        reads, written = _touched_by_fusion(computations[str(kernel.called("calls"))])
        whole = [[amount] for amount in reads]  # an operand of a fusion is one array
    elif kernel.op == "copy-start":
        written = [written[0], 0, 0]
    elif kernel.op in SELECTING:
        whole[0] = [min(whole[0][0], written[0])]
    elif kernel.op in UPDATING:
        written = whole[UPDATING[kernel.op]]
        whole[0] = [0]
    elif "cublas" in kernel.target:
        written = [0 if shape.startswith("s8[") else n for shape, n in _with(kernel, written)]
    yield (
        "read",
        [
            (Leaf(name, operand.name, i), amount, operand.leaves[i])
            for operand, amounts in zip(operands, whole, strict=True)
            for i, amount in enumerate(amounts)
        ],
    )
    yield (
        "write",
        [
            (Leaf(name, kernel.name, i), amount, shape)
            for i, (amount, shape) in enumerate(zip(written, kernel.leaves, strict=True))
        ],
    )


def _with(kernel: Instruction, amounts: list[int]) -> list[tuple[str, int]]:
    return list(zip(kernel.leaves, amounts, strict=True))


def _touched_by_fusion(body: Computation) -> tuple[list[int], list[int]]:
    """How many elements a fusion reads of each parameter, and writes of each output."""
    needed = dict.fromkeys(body, 0)
    in_place, written = set(), []
    outputs = body.root.operands if body.root.op == "tuple" else (body.root.name,)
    for output in outputs:
        instruction = body[output]
        while instruction.op == "bitcast":
            instruction = body[instruction.operands[0]]
        amounts = [num_elements_of(shape) for shape in body[output].leaves]
        if instruction.op in UPDATING:
            in_place.add(instruction.name)
            update = body[instruction.operands[UPDATING[instruction.op]]]
            amounts = [num_elements_of(update.leaves[0])]
        written += amounts
        needed[output] = num_elements_of(body[output].leaves[0])
    for instruction in reversed(body.values()):
        for position, operand in enumerate(instruction.operands):
            size = sum(map(num_elements_of, body[operand].leaves))
            amount = _needed_of_operand(instruction, position, size, needed[instruction.name])
            if instruction.name in in_place and position == 0:
                amount = 0
            needed[operand] = min(size, needed[operand] + amount)
    return [needed[parameter.name] for parameter in body.parameters], written


def _needed_of_operand(user: Instruction, position: int, size: int, needed: int) -> int:
    """How many elements of an operand it takes to compute `needed` of an instruction's."""
    is_selected = user.op in ("slice", "dynamic-slice") or (user.op == "gather" and position == 0)
    is_elementwise = len(user.leaves) == 1 and num_elements_of(user.leaves[0]) == size
    return min(size, needed) if is_selected or is_elementwise or user.op == "broadcast" else size
