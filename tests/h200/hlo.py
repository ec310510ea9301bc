"""What the kernels of an optimized HLO module read and write. Text in, numbers out; no JAX.

A pass is one kernel reading, or writing, at least `num_elements` elements of an array that has a
dimension of `columns`. So a GEMM that writes the logits is one pass and an argmax that reads them
is another; a copy is two. What counts:

- A kernel is an instruction outside fusions that is not mere naming (tuple, bitcast, ...): a
  fusion, a custom call, a copy. It reads each buffer among its operands once, however often its
  body mentions it, and writes each of its outputs once.
- Of an operand that a fusion only slices or gathers from, it reads what it takes; an update in
  place writes the update alone. A custom call takes its operands whole.
- Buffers keep their identity through bitcasts, tuples, calls, loops and conditionals. One that is
  a parameter of the module (a weight, the state) is no pass; a copy or a conversion of it is.
- A kernel inside a conditional carries the branch it is in, numbered as `jax.lax.cond` numbers
  them: 0 is the false branch. One inside a loop counts once per trip where XLA knows their number,
  and once where it does not.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

NAMING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
NAMING |= {"opt-barrier", "add-dependency", "partition-id", "replica-id", "copy-done", "async-done"}
CONTROL = {"while", "conditional", "call", "async-start"}

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
        return found[1] if found else ""


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
    for kernel in _kernels(computations, entry, (), 1):
        for access, touched in _accesses(computations, kernel.computation, kernel.instruction):
            largest: dict[Leaf, tuple[int, str]] = {}
            for leaf, amount, shape in touched:
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
        aliasing = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", instruction.attributes)
        for output, operand in re.findall(
            r"\{(\d*)\}: \((\d+), \{\}", aliasing[1] if aliasing else ""
        ):
            yield results[int(output or 0)], inputs[int(operand)][0]


class _Kernel(NamedTuple):
    computation: str
    instruction: Instruction
    branches: tuple[tuple[str, int], ...]
    times: int


def _kernels(
    computations: dict[str, Computation],
    name: str,
    branches: tuple[tuple[str, int], ...],
    times: int,
) -> Iterator[_Kernel]:
    """What a computation launches, that of the computations it calls included."""
    for instruction in computations[name].values():
        if instruction.op == "conditional":
            for i, branch in enumerate(instruction.branches):
                inner = (*branches, (instruction.name, i))
                yield from _kernels(computations, branch, inner, times)
        elif instruction.op == "while":
            known = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
            trips = times * (int(known[1]) if known else 1)
            for part in "condition", "body":
                yield from _kernels(computations, str(instruction.called(part)), branches, trips)
        elif instruction.op in CONTROL:
            callee = instruction.called("to_apply") or instruction.called("calls")
            yield from _kernels(computations, str(callee), branches, times)
        elif instruction.op not in NAMING:
            yield _Kernel(name, instruction, branches, times)


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
        if instruction.op in ("dynamic-update-slice", "scatter"):
            in_place.add(instruction.name)
            update = body[instruction.operands[1 if instruction.op[0] == "d" else 2]]
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
