"""What our Pallas kernels read and write, which their operands do not tell: pools come whole.

By the name that a kernel was given; one that is not listed reads all operands and writes all
outputs. Operands are known by what they look like, as their order is the kernels' own affair:

- a pool of keys and values has six axes, [L, pages, page_size, 2, H_kv, D];
- a recurrent state is the operand of five axes that ends [H_v, D_v, D_k], updated in place, beside
  its ring [L, S, columns, C] and the ring's gates [L, S, columns, 2, H_v];
- the weights of experts are the operand of three axes, [E, K, N].
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple


class CachedContext(NamedTuple):
    """What the requests of a step find in the caches."""

    batch: int
    context: int  # keys that each attends over
    rows: int | None = None  # of each, at most so many are no padding; all if None


class Array(NamedTuple):
    """An operand or an output."""

    shape: tuple[int, ...]
    element_bytes: int
    is_float: bool = True

    @property
    def size(self) -> int:
        """Bytes of all of it."""
        return math.prod(self.shape) * self.element_bytes

    def per(self, num_axes: int) -> int:
        """Bytes of what one index of the first `num_axes` axes holds."""
        return math.prod(self.shape[num_axes:]) * self.element_bytes


class Call(NamedTuple):
    """A kernel's arguments."""

    operands: tuple[Array, ...]
    outputs: tuple[Array, ...]  # without those that take an operand's place
    aliased: frozenset[int]  # operands that are updated in place

    @property
    def pool(self) -> Array:
        """The pool of keys and values."""
        return next(one for one in self.operands if len(one.shape) == 6)

    @property
    def others(self) -> list[Array]:
        """Operands that are neither a pool nor updated in place."""
        return [
            one
            for i, one in enumerate(self.operands)
            if i not in self.aliased and len(one.shape) != 6
        ]


def touched(name: str, call: Call, load: CachedContext) -> tuple[int, int]:
    """Bytes that the kernel of that name reads, and writes.

    A call that does not look as this table expects counts whole.
    """
    count = TOUCHED.get(name)
    if name.startswith("grouped_matmul"):
        count = _grouped_matmul
    try:
        return _whole(call) if count is None else count(call, load)
    except (StopIteration, IndexError, ValueError):
        return _whole(call)


def _total(arrays: Iterable[Array]) -> int:
    return sum(one.size for one in arrays)


def _whole(call: Call) -> tuple[int, int]:
    in_place = _total([call.operands[i] for i in call.aliased])
    return _total(call.operands), _total(call.outputs) + in_place


def _paged_attention(call: Call, load: CachedContext) -> tuple[int, int]:
    """The keys and values of every request's context, once; queries, and partial results."""
    context = load.batch * load.context * call.pool.per(3)
    return _total(call.others) + context, sum(_of_real_rows(one, load) for one in call.outputs)


def _paged_attention_combine(call: Call, load: CachedContext) -> tuple[int, int]:
    """Partial results in, and the output out."""
    return sum(_of_real_rows(one, load) for one in call.operands), _total(call.outputs)


def _of_real_rows(one: Array, load: CachedContext) -> int:
    """Bytes of partial results [B, T, H, splits, ...], which padding rows do not have; of outputs
    [B, T, H, D], all."""
    if one.element_bytes != 4 or len(one.shape) < 4 or load.rows is None:
        return one.size
    _, num_rows, *_ = one.shape
    return one.size * min(load.rows, num_rows) // num_rows


def _rope_write(call: Call, load: CachedContext) -> tuple[int, int]:
    """q | k | v in; q [B, T, H, D] out, and a row of keys and values for each row of it."""
    num_rows = math.prod(call.outputs[0].shape[:2])
    return _total(call.others), _total(call.outputs) + num_rows * call.pool.per(3)


def _gated_delta_rule(call: Call, load: CachedContext) -> tuple[int, int]:
    """Each request's state once in and once out; its ring in, and the new columns out."""
    state, ring, gates = _recurrent(call)
    x = max(call.others, key=lambda one: one.is_float * one.size)
    columns = load.batch * ring.shape[2]
    num_new = min(columns, math.prod(x.shape[:-1]))
    per_column = ring.per(3) + gates.per(3)
    states = load.batch * state.per(2)
    return (
        _total(call.others) + states + columns * per_column,
        _total(call.outputs) + states + num_new * per_column,
    )


def _gated_delta_rule_norm(call: Call, load: CachedContext) -> tuple[int, int]:
    """The outputs in and out; of x, as many gates; and the norm's weights."""
    out = _total(call.operands[i] for i in call.aliased)
    norm = min(one.size for one in call.others)
    return 2 * out + norm, out


def _recurrent(call: Call) -> tuple[Array, Array, Array]:
    aliased = [call.operands[i] for i in sorted(call.aliased)]
    ring = next(one for one in aliased if len(one.shape) == 4)
    five = [one for one in aliased if len(one.shape) == 5]
    gates = next(one for one in five if one.shape[2:4] == (ring.shape[2], 2))
    state = next(one for one in five if one is not gates)
    return state, ring, gates


def _grouped_matmul(call: Call, load: CachedContext) -> tuple[int, int]:
    """The weights of as many experts as there are, or rows, whichever is less."""
    weights = max((one for one in call.others if len(one.shape) == 3), key=lambda one: one.size)
    rows = max((one for one in call.others if len(one.shape) == 2), key=lambda one: one.size)
    num_used = min(weights.shape[0], rows.shape[0])
    others = _total(call.others) - weights.size
    in_place = _total([call.operands[i] for i in call.aliased])
    return others + num_used * weights.per(1), _total(call.outputs) + in_place


TOUCHED: dict[str, Callable[[Call, CachedContext], tuple[int, int]]] = {
    "paged_attention": _paged_attention,
    "paged_attention_combine": _paged_attention_combine,
    "rope_write": _rope_write,
    "gated_delta_rule": _gated_delta_rule,
    "gated_delta_rule_norm": _gated_delta_rule_norm,
}
