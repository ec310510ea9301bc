"""Counts the bytes that this project's Pallas kernels read and write.

Some operands are whole pools (the arrays of all pages), of which a kernel reads only some pages.
`TOUCHED` has a function for each kernel, by the kernel's name. Any other kernel counts as reading
all operands and writing all outputs.

Operands are recognized by shape, so that a kernel can have them in any order. Below, L is the
number of layers, and S the number of request slots. M is the maximum number of pending tokens:
accepted tokens that a recurrent state does not include yet. A ring is a buffer of recent tokens, in
which new tokens overwrite the oldest.

- A pool of keys and values has six axes, [L, pages, page_size, 2, H_kv, D].
- A pool of latents has four axes, [L, pages, page_size, width].
- Scales of tokens have the same first three axes as their pool. They have fewer elements.
- `gated_delta_rule` updates in place a recurrent state [L, S, H_v, D_v, D_k] and a ring of
  corrections [L, S, M, H_v, D_v].
- `gated_delta_rule_inputs` updates three rings in place: raw inputs [L, S, columns, C], keys [L, S,
  2 M, H_k, D_k] and decays [L, S, 2 M, H_v].
- Weights and scales of experts have three axes, [experts, ...].
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple


class CachedContext(NamedTuple):
    """The sizes that determine how many bytes the kernels of a step read and write."""

    batch: int  # number of requests
    context: int  # number of keys that each request attends to
    rows: int | None = None  # maximum number of rows per request without padding; None for all
    num_chosen: int | None = None  # experts per row; None if each product has a different expert


class Array(NamedTuple):
    """An operand or an output of a kernel."""

    shape: tuple[int, ...]
    element_bytes: int
    is_float: bool = True

    @property
    def size(self) -> int:
        """The number of bytes of the whole array."""
        return math.prod(self.shape) * self.element_bytes

    def per(self, num_axes: int) -> int:
        """Return the bytes of the subarray at one index into the first `num_axes` axes."""
        return math.prod(self.shape[num_axes:]) * self.element_bytes


class Call(NamedTuple):
    """The operands and outputs of one call of a kernel."""

    operands: tuple[Array, ...]
    outputs: tuple[Array, ...]  # outputs that are not aliased to an operand
    aliased: frozenset[int]  # indices of the operands that are updated in place

    @property
    def pool(self) -> Array:
        """The pool of keys and values."""
        return next(one for one in self.operands if len(one.shape) == 6)

    def entry(self, pool: Array) -> int:
        """Return the bytes of a token's entry in the pool, with its scales if it has any."""
        like = [one for one in self.operands if one.shape[:3] == pool.shape[:3]]
        return sum(one.per(3) for one in like)

    @property
    def in_place(self) -> list[Array]:
        """The operands that are updated in place."""
        return [self.operands[i] for i in sorted(self.aliased)]

    @property
    def others(self) -> list[Array]:
        """The operands that are neither a pool of keys and values nor updated in place.

        Scales of tokens belong to the pool.
        """
        pools = [one.shape[:3] for one in self.operands if len(one.shape) == 6]
        return [
            one
            for i, one in enumerate(self.operands)
            if i not in self.aliased and (len(one.shape) < 5 or one.shape[:3] not in pools)
        ]


def touched(name: str, call: Call, load: CachedContext) -> tuple[int, int]:
    """Return the number of bytes that a kernel reads, and the number that it writes.

    If the operands do not have the expected shapes, whole operands and outputs count.
    """
    count = TOUCHED.get(name)
    if name.startswith("grouped_"):
        count = _grouped_matmul
    if name.startswith("paged_attention_window_"):
        window = int(name.rpartition("_")[2])
        count, load = _paged_attention, load._replace(context=min(load.context, window))
    try:
        return _whole(call) if count is None else count(call, load)
    except (StopIteration, IndexError, ValueError):
        return _whole(call)


def _total(arrays: Iterable[Array]) -> int:
    return sum(one.size for one in arrays)


def _whole(call: Call) -> tuple[int, int]:
    return _total(call.operands), _total(call.outputs) + _total(call.in_place)


def _paged_attention(call: Call, load: CachedContext) -> tuple[int, int]:
    """Return the bytes read (queries, all keys and values) and written (partial results)."""
    context = load.batch * load.context * call.entry(call.pool)
    return _total(call.others) + context, sum(_of_real_rows(one, load) for one in call.outputs)


def _paged_attention_combine(call: Call, load: CachedContext) -> tuple[int, int]:
    """Return the bytes read (partial results) and written (the output)."""
    return sum(_of_real_rows(one, load) for one in call.operands), _total(call.outputs)


def _latent_attention(call: Call, load: CachedContext) -> tuple[int, int]:
    """Return the bytes read (queries, all cached entries) and written (partial results)."""
    pools = [one for one in call.operands if len(one.shape) == 4]  # and scales
    context = load.batch * load.context * call.entry(pools[0])
    return _total(call.operands) - _total(pools) + context, _total(call.outputs)


def _of_real_rows(one: Array, load: CachedContext) -> int:
    """Return the number of bytes of an array without its padding rows.

    Padding rows are left out only of partial results, f32[requests, rows, heads, splits, ...].
    Other arrays count as a whole.
    """
    if one.element_bytes != 4 or len(one.shape) < 4 or load.rows is None:
        return one.size
    _, num_rows, *_ = one.shape
    return one.size * min(load.rows, num_rows) // num_rows


def _rope_write(call: Call, load: CachedContext) -> tuple[int, int]:
    """Return the bytes read (q, k and v) and written (rotated q, cached keys and values).

    A call without query heads writes no q.
    """
    num_rows = math.prod(next(one for one in call.others if len(one.shape) == 3).shape[:2])
    return _total(call.others), _total(call.outputs) + num_rows * call.entry(call.pool)


def _gated_delta_rule_inputs(call: Call, load: CachedContext) -> tuple[int, int]:
    """Return the bytes that the kernel reads, and the bytes that it writes.

    It reads the projected new tokens and the weights. It also reads the raw inputs of the W - 1
    tokens before each request's new tokens from their ring. W is the number of tokens that the
    convolution spans. It writes q, v and beta of the new tokens, and these tokens' entries in the
    three rings.
    """
    rings = call.in_place
    ring = max((one for one in rings if len(one.shape) == 4), key=lambda one: one.size)
    conv = next(one for one in call.others if one.is_float and len(one.shape) == 2)
    x = next(one for one in call.others if len(one.shape) == 3)
    history = load.batch * (conv.shape[0] - 1) * ring.per(3)
    new = math.prod(x.shape[:2]) * sum(one.per(3) for one in rings)
    return _total(call.others) + history, _total(call.outputs) + new


def _gated_delta_rule(call: Call, load: CachedContext) -> tuple[int, int]:
    """Return the bytes that the kernel reads, and the bytes that it writes.

    It reads and writes each request's state once. It reads the keys and decays of the pending and
    the new tokens, and the corrections of the pending tokens, for M pending tokens per request. It
    writes the outputs, and the corrections of the new tokens.
    """
    u, state = sorted(call.in_place, key=lambda one: one.size)
    places = *state.shape[:2], 2 * u.shape[2]
    rings = [one for one in call.others if one.shape[:3] == places]
    inputs = [one for one in call.others if one not in rings]
    num_new = math.prod(max(inputs, key=lambda one: one.is_float * one.size).shape[:2])
    num_pending = load.batch * u.shape[2]
    states = load.batch * state.per(2)
    read = num_pending * u.per(3) + (num_pending + num_new) * sum(one.per(3) for one in rings)
    return (
        _total(inputs) + states + read,
        _total(call.outputs) + states + num_new * u.per(3),
    )


def _gated_delta_rule_norm(call: Call, load: CachedContext) -> tuple[int, int]:
    """Return the bytes read (outputs, gates, norm weights) and written (normalised outputs).

    The gates are a part of a larger operand. They take as many bytes as the outputs.
    """
    out = _total(call.in_place)
    norm = min(one.size for one in call.others)
    return 2 * out + norm, out


def _grouped_matmul(call: Call, load: CachedContext) -> tuple[int, int]:
    """Return the bytes read (rows, experts that rows can use) and written (products).

    Padding rows use the experts of a real row; see `layers.moe.moe`.
    """
    weights = [one for one in call.others if len(one.shape) == 3]  # numbers, and perhaps scales
    # Not the number of input rows: each row goes to several experts.
    products = max(one.shape[0] for one in (*call.outputs, *call.in_place) if len(one.shape) == 2)
    num_used = min(weights[0].shape[0], _of_real_products(products, load))
    used = num_used * sum(one.per(1) for one in weights)
    others = _total(call.others) - _total(weights)
    return others + used, _total(call.outputs) + _total(call.in_place)


def _of_real_products(products: int, load: CachedContext) -> int:
    if load.num_chosen is None or load.rows is None:
        return products
    return min(products, load.batch * load.rows * load.num_chosen)


TOUCHED: dict[str, Callable[[Call, CachedContext], tuple[int, int]]] = {
    "paged_attention": _paged_attention,
    "paged_attention_combine": _paged_attention_combine,
    "latent_attention": _latent_attention,
    "rope_write": _rope_write,
    "gated_delta_rule_inputs": _gated_delta_rule_inputs,
    "gated_delta_rule": _gated_delta_rule,
    "gated_delta_rule_norm": _gated_delta_rule_norm,
}
