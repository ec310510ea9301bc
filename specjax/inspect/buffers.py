"""Finds which arrays of an HLO module share a buffer.

Bitcasts, tuples, calls, loops and conditionals give an array another name, but keep its buffer.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from specjax.inspect.hlo_text import STARTS, Computation, Instruction


class Leaf(NamedTuple):
    """An array: a numbered leaf of an instruction's result."""

    computation: str
    name: str
    number: int


class Buffers:
    """A union-find structure of the arrays of a module that share a buffer."""

    def __init__(self, computations: dict[str, Computation]):
        self._computations = computations
        self._parents: dict[Leaf, Leaf] = {}
        for name, computation in computations.items():
            for instruction in computation.values():
                for one, other in self._aliases(name, instruction):
                    self._parents[self.of(one)] = self.of(other)

    def of(self, leaf: Leaf) -> Leaf:
        """Return the representative leaf of this leaf's buffer."""
        while leaf in self._parents and self._parents[leaf] != leaf:
            leaf = self._parents[leaf]
        return leaf

    def shapes(self) -> Iterator[tuple[Leaf, str]]:
        """Yield every array of the module with its shape."""
        for name, computation in self._computations.items():
            for instruction in computation.values():
                for i, shape in enumerate(instruction.leaves):
                    yield Leaf(name, instruction.name, i), shape

    def _leaves(self, computation: str, name: str) -> list[Leaf]:
        count = len(self._computations[computation][name].leaves)
        return [Leaf(computation, name, i) for i in range(count)]

    def _aliases(self, name: str, instruction: Instruction) -> Iterator[tuple[Leaf, Leaf]]:
        """Yield the pairs of leaves that share a buffer because of `instruction`."""
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
            case op if op in STARTS:  # (operands, results)
                yield from zip(results, flat, strict=False)
            case op if op.endswith("-done"):
                start = len(self._computations[name][instruction.operands[0]].elements[0])
                yield from zip(results, flat[start:], strict=False)
            case "async-start":  # (operands, results, context...)
                num_inputs, num_results = map(len, instruction.elements[:2])
                yield from zip(results[:num_inputs], flat, strict=True)
                outputs = results[num_inputs : num_inputs + num_results]
                yield from call(str(instruction.called("calls")), flat, outputs)
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
