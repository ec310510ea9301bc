"""A parser of optimized HLO text into computations of instructions."""

import math
import re
from dataclasses import dataclass

PALLAS_TARGETS = "__gpu$xla.gpu.triton", "triton_kernel_call", "mosaic_gpu"
COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"}
# XLA may split a collective, or its fusion, into two instructions. The first one is the kernel. Its
# result is the pair (operands, results).
STARTS = {f"{op}-start" for op in (*COLLECTIVES, "fusion")}
HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
SHAPE = re.compile(r"[a-z]\w*\[([\d,]*)\]")


@dataclass(frozen=True)
class Instruction:
    name: str
    op: str
    elements: tuple[tuple[str, ...], ...]  # shapes of the leaves of each tuple element
    operands: tuple[str, ...]
    argument: str  # the text between the parentheses
    attributes: str
    is_root: bool

    @property
    def leaves(self) -> tuple[str, ...]:
        return tuple(shape for element in self.elements for shape in element)

    def called(self, attribute: str) -> str | None:
        """Return the name of the computation in this attribute; None if the attribute is absent."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None

    @property
    def branches(self) -> list[str]:
        """The names of a conditional's branch computations, in the order of `jax.lax.cond`.

        For a boolean predicate, the false branch comes first.
        """
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
        """The target of a custom call."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def pallas_name(self) -> str | None:
        """The name of a Pallas kernel, which precedes the primitive's name in `op_name`.

        None for other instructions.
        """
        if not self.target.startswith(PALLAS_TARGETS):
            return None
        return (["", *self.source.split("/")])[-2]

    @property
    def aliases(self) -> list[tuple[int, int]]:
        """The pairs (index of an output, index of an operand) that share a buffer."""
        found = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", self.attributes)
        pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}", found[1] if found else "")
        return [(int(output or 0), int(operand)) for output, operand in pairs]


class Computation(dict[str, Instruction]):
    """The instructions of a computation by name, in the order of the text."""

    @property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.values() if instruction.is_root)

    @property
    def parameters(self) -> list[Instruction]:
        found = [instruction for instruction in self.values() if instruction.op == "parameter"]
        return sorted(found, key=lambda instruction: int(instruction.argument))


def num_elements_of(shape: str) -> int:
    """Return the number of elements of a shape such as f32[256,1024]."""
    return math.prod(dimensions_of(shape))


def element_bytes_of(shape: str) -> int:
    """Return the bytes per element of a shape like bf16[256,1024]; sub-byte types count as 1."""
    bits = re.match(r"[a-z]+(\d+)", shape)
    return max(int(bits[1]) // 8, 1) if bits else 1


def dimensions_of(shape: str) -> list[int]:
    """Return the dimensions of a shape such as f32[256,1024]."""
    found = SHAPE.match(shape)
    return [int(size) for size in found[1].split(",") if size] if found else []


def parse(hlo: str) -> tuple[dict[str, Computation], str]:
    """Return the computations by name, and the name of the entry computation."""
    computations: dict[str, Computation] = {}
    current, entry = Computation(), ""
    for line in hlo.splitlines():
        if header := HEADER.match(line):
            current = computations[header[2]] = Computation()
            entry = header[2] if header[1] else entry
        elif found := INSTRUCTION.match(line):
            current[found[2]] = _instruction(found[2], found[3], bool(found[1]))
    return computations, entry


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
    """Return the index after the parenthesis that closes the first parenthesis of `text`."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"unbalanced: {text[:80]}")


def _top_level(text: str) -> list[str]:
    """Split `text` at the commas that are outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return parts + [text[start:]] if text else []
