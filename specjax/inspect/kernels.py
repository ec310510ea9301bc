"""Finds the kernels of an HLO module, and the arrays that each kernel reads and writes.

- A kernel is an instruction outside of fusions that does work: for example a fusion, a custom call
  or a copy, but not a tuple or a bitcast. A kernel reads each operand buffer once, regardless of
  the number of uses, and writes each output once.
- A fusion that only slices or gathers from an operand reads only the selected elements; an in-place
  update writes only the update. A custom call reads whole operands.
- A cuBLAS call's scratch buffer is not an output.
- A kernel inside a conditional records its branch, numbered as in `jax.lax.cond`: 0 is the false
  branch. A kernel inside a loop counts once per trip, or once if the trip count is unknown.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from specjax.inspect.buffers import Leaf
from specjax.inspect.hlo_text import (
    COLLECTIVES,
    STARTS,
    Computation,
    Instruction,
    num_elements_of,
)

NAMING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
NAMING |= {"opt-barrier", "add-dependency", "partition-id", "replica-id", "copy-done", "async-done"}
NAMING |= {start.replace("-start", "-done") for start in STARTS}
CONTROL = {"while", "conditional", "call", "async-start"}
# Ops that read only some elements of operand 0.
SELECTING = {"slice", "dynamic-slice", "gather"}
# Ops that write only an update, and the index of the operand that holds the update.
UPDATING = {"dynamic-update-slice": 1, "scatter": 2}


class Kernel(NamedTuple):
    """A kernel, and where and how often it is launched."""

    computation: str
    instruction: Instruction
    branches: tuple[tuple[str, int], ...]  # enclosing conditionals, with the kernel's branch
    times: int  # number of runs, unless a conditional takes another branch
    outermost: str  # the entry computation's instruction that contains the kernel


def kernels_of(
    computations: dict[str, Computation],
    name: str,
    branches: tuple[tuple[str, int], ...] = (),
    times: int = 1,
    outermost: str | None = None,
) -> Iterator[Kernel]:
    """Yield the kernels of the computation `name` and of the computations that it calls.

    The other arguments describe where this computation is called (see `Kernel`).
    """
    for instruction in computations[name].values():
        top = outermost or instruction.name
        if instruction.op == "conditional":
            for i, branch in enumerate(instruction.branches):
                inner = (*branches, (instruction.name, i))
                yield from kernels_of(computations, branch, inner, times, top)
        elif instruction.op == "while":
            known = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
            trips = times * (int(known[1]) if known else 1)
            for part in "condition", "body":
                body = str(instruction.called(part))
                yield from kernels_of(computations, body, branches, trips, top)
        elif instruction.op in CONTROL:
            callee = instruction.called("to_apply") or instruction.called("calls")
            yield from kernels_of(computations, str(callee), branches, times, top)
        elif instruction.op not in NAMING:
            yield Kernel(name, instruction, branches, times, top)


def accesses(
    computations: dict[str, Computation], name: str, kernel: Instruction
) -> Iterator[tuple[str, list[tuple[Leaf, int, str]]]]:
    """Yield two pairs: ("read", a list of a kernel's reads) and ("write", a list of its writes).

    A read or a write is a tuple (leaf, number of elements, shape).
    """
    operands = [computations[name][operand] for operand in kernel.operands]
    whole = [[num_elements_of(shape) for shape in operand.leaves] for operand in operands]
    written = [num_elements_of(shape) for shape in kernel.leaves]
    if kernel.op == "fusion":
        reads, written = _touched_by_fusion(computations[str(kernel.called("calls"))])
        whole = [[amount] for amount in reads]  # an operand of a fusion is one array
    elif kernel.op == "copy-start":
        written = [written[0], 0, 0]
    elif kernel.op in STARTS:  # the first element of the result has the operands
        num_operands = len(kernel.elements[0])
        written[:num_operands] = [0] * num_operands
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
    """Return the number of elements read from each parameter and written to each output."""
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
    """Return the number of operand elements that `user` reads to compute `needed` elements."""
    is_selected = user.op in ("slice", "dynamic-slice") or (user.op == "gather" and position == 0)
    is_elementwise = len(user.leaves) == 1 and num_elements_of(user.leaves[0]) == size
    return min(size, needed) if is_selected or is_elementwise or user.op == "broadcast" else size


def source_of(computations: dict[str, Computation], kernel: Instruction) -> str:
    """Return a kernel's JAX operation. If a fusion has none, return its root's operation."""
    body = kernel.called("calls")
    while not kernel.source and body in computations:
        kernel = computations[str(body)].root
        body = kernel.called("calls")
    return kernel.source


def kind_of(computations: dict[str, Computation], kernel: Instruction) -> str:
    """Return the kind of a kernel that is not Pallas.

    It is "gemm", a name in `COLLECTIVES`, the target of a custom call, the kind of a fusion, or the
    name of the instruction, like "copy". A kernel that XLA made for a collective has the
    collective's name.
    """
    body = kernel.called("calls")
    op = computations[str(body)].root.op if body in computations else kernel.op
    if op.removesuffix("-start") in COLLECTIVES:
        return op.removesuffix("-start")
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
