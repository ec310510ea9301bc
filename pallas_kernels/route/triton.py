"""A Triton kernel that finds the experts of each row, and the rows of each expert.

The kernel is a single program.

If possible, all scores of a row are in the registers of one warp. Scores are mapped to sortable
integers, called keys. To choose an expert, the kernel finds the maximum key of a row. It replaces
the i-th maximum by `LOWEST` + i, which is below the keys of all scores. So the expert is not chosen
twice, and its rank is known.

A row chooses an expert at most once. So the index of a row among the rows of an expert is the
number of earlier rows that chose this expert, and no sort is needed.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.route.reference import Routes, Rule
from pallas_kernels.triton_call import load, store, triton_call

DTYPES = "bfloat16", "float16", "float32"
MAX_EXPERTS = 512
MAX_LOGITS = 8192  # including padding: 16 per thread in 16 warps, held in registers
LANES = 32  # threads per warp
MAX_CHOSEN = LANES
MAX_WARPS = 16
LOWEST = -(2**31)  # key of a row's first choice; the keys of later choices follow
NOT_CHOSEN = LOWEST + MAX_CHOSEN  # key of padding
LOW_BITS = 0xFFFF  # mask for a key's low bits


def fits(num_rows: int, num_experts: int, num_chosen: int, rule: Rule) -> bool:
    """Return whether the kernel supports inputs of these sizes, and this rule."""
    num_logits = _padded(num_rows) * _num_pieces(num_experts) * LANES
    is_small = num_rows > 0 and num_experts <= MAX_EXPERTS and num_logits <= MAX_LOGITS
    return is_small and num_chosen <= MAX_CHOSEN and rule.num_chosen_groups == rule.num_groups


def route_triton(
    logits: jax.Array,
    num_chosen: int,
    rule: Rule,
    correction: jax.Array | None = None,
    is_padding: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> Routes:
    """See `route`. All indices of experts are valid, even if logits are infinite or NaN.

    Raises:
        UnsupportedError: the rule excludes groups, the dtype is not in DTYPES, N is 0, or there
            are too many logits, experts or chosen experts.
    """
    num_rows, num_experts = logits.shape
    if logits.dtype not in DTYPES:
        raise UnsupportedError(f"logits are {logits.dtype}; {', '.join(DTYPES)} are supported")
    if not fits(num_rows, num_experts, num_chosen, rule):
        raise UnsupportedError(
            f"logits are {logits.shape}, num_chosen is {num_chosen}, rule has {rule.num_groups} "
            f"groups; 1 to {MAX_LOGITS} logits, padded to powers of two, of at most {MAX_EXPERTS} "
            f"experts, at most {MAX_CHOSEN} choices, and no groups are supported"
        )
    given = {"correction": correction, "is_padding": is_padding}
    given = {name: one for name, one in given.items() if one is not None}
    num_entries = num_rows * num_chosen
    made = triton_call(
        partial(_kernel, given=tuple(given), num_chosen=num_chosen, rule=rule),
        (logits, *given.values()),
        [
            jax.ShapeDtypeStruct((num_rows, num_chosen), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, num_chosen), jnp.int32),
            jax.ShapeDtypeStruct((num_entries,), jnp.int32),
            jax.ShapeDtypeStruct((num_entries,), jnp.int32),
            jax.ShapeDtypeStruct((num_experts,), jnp.int32),
        ],
        name="route",
        grid=(1,),
        num_warps=min(MAX_WARPS, _padded(num_rows)),
        interpret=interpret,
    )
    return Routes(*made)


def _padded(size: int) -> int:
    return pl.next_power_of_2(size)


def _num_pieces(num_experts: int) -> int:
    return pl.cdiv(_padded(num_experts), LANES)


def _kernel(logits_ref, *refs, given: tuple[str, ...], num_chosen: int, rule: Rule):
    *given_refs, weights_ref, experts_ref, order_ref, rows_ref, sizes_ref = refs
    optional = dict(zip(given, given_refs, strict=True))
    num_rows, num_experts = logits_ref.shape
    rows, lanes, pieces = map(jnp.arange, (_padded(num_rows), LANES, _num_pieces(num_experts)))
    # [pieces, rows, lanes], in descending order within a warp. In ascending order, Triton would
    # give a thread several neighbours to load, a row fewer lanes, and convert between layouts.
    row = rows[None, :, None]
    expert = LANES * pieces[:, None, None] + (LANES - 1 - lanes)[None, None]
    is_row, is_expert = row < num_rows, expert < num_experts

    def read(row, expert, mask):
        return load(logits_ref.at[row, expert], mask=mask, other=-jnp.inf).astype(jnp.float32)

    logits = read(row, expert, is_row & is_expert)
    if "is_padding" in optional:
        is_padding = load(optional["is_padding"].at[row], mask=is_row, other=False)
        logits = jnp.where(is_padding, read(jnp.zeros_like(row), expert, is_expert), logits)
    scores = _sigmoid(logits) if rule.is_sigmoid else logits
    if "correction" in optional:
        # Load it for all rows: a single row would get a separate layout.
        at = optional["correction"].at[jnp.broadcast_to(expert, scores.shape)]
        scores += load(at, mask=is_row & is_expert, other=0.0)

    keys = _sortable(scores)
    # 16-bit scores leave 16 bits for the expert, so that the maximum identifies the expert.
    has_expert = logits_ref.dtype == jnp.bfloat16 and not rule.is_sigmoid
    if has_expert:
        keys = keys & ~LOW_BITS | LOW_BITS - expert

    def choose(i, carry):
        keys, chosen = carry
        best = _over_experts(jnp.max, keys)
        is_found = keys == best[None]
        if has_expert:
            found = LOW_BITS - (best & LOW_BITS)
        else:
            found = _over_experts(jnp.min, jnp.where(is_found, expert, num_experts - 1))
            is_found = expert == found[None]
        keys = jnp.where(is_found, LOWEST + i, keys)
        return keys, jnp.where(lanes[None] == i, found, chosen)

    keys = jnp.where(is_row & is_expert, keys, NOT_CHOSEN)
    chosen = jnp.zeros((rows.size, LANES), jnp.int32)
    keys, chosen = jax.lax.fori_loop(0, num_chosen, choose, (keys, chosen))

    at = rows[:, None], lanes[None]
    is_pick = (at[0] < num_rows) & (at[1] < num_chosen)
    store(experts_ref.at[at], chosen, mask=is_pick)
    weights = _weights(read(at[0], chosen, is_pick), logits, rule)
    store(weights_ref.at[at], weights, mask=is_pick)

    is_chosen = is_row & (keys < LOWEST + num_chosen)
    sizes, before = _counts(is_chosen, row)
    store(sizes_ref.at[expert], sizes, mask=is_expert)
    of_pieces = jnp.cumsum(jnp.sum(sizes, axis=2, keepdims=True), axis=0)
    starts = of_pieces - jnp.cumsum(sizes, axis=2)
    # Masked lanes point past the end: in interpret mode a masked store writes the old value, which
    # must not overwrite a value written by another lane.
    place = jnp.where(is_chosen, starts + before, order_ref.size)
    store(order_ref.at[place], row * num_chosen + (keys - LOWEST), mask=is_chosen)
    store(rows_ref.at[place], jnp.broadcast_to(row, place.shape), mask=is_chosen)


def _over_experts(reduce: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    """Reduce x [pieces, N, LANES] over the first and last axes, and return the result [N, 1].

    The experts are divided into pieces of LANES experts.
    """
    return reduce(reduce(x, axis=0), axis=1, keepdims=True)


def _counts(is_chosen: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return how many rows chose each expert: among all rows, and among the rows before each row.

    The counts are [pieces, 1, LANES] and [pieces, N, LANES] (see `_over_experts`). For each expert,
    words of 32 bits have one bit per row, which is 1 if the row chose the expert. A count is the
    number of these bits that are 1. A cumulative sum over rows would take longer, because the warps
    would exchange rows.
    """
    sizes = before = jnp.int32(0)
    for first in range(0, row.size, 32):
        bit = jnp.where((first <= row) & (row < first + 32), 1 << (row & 31), 0)
        word = jnp.sum(jnp.where(is_chosen, bit, 0), axis=1, keepdims=True)
        sizes += jax.lax.population_count(word)
        before += jax.lax.population_count(word & jnp.where(row < first, 0, bit - 1))
    return sizes, before


def _sortable(x: jax.Array) -> jax.Array:
    """Map floats x f32 to keys i32 that have the same order.

    Every key is above the keys that mark chosen experts, even if its low 16 bits are replaced.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.maximum(jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), LOWEST + LOW_BITS + 1)


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _weights(best: jax.Array, logits: jax.Array, rule: Rule) -> jax.Array:
    """Return the weights of the chosen experts, whose logits are `best` [N, LANES].

    `best` is -inf from column C on.
    """
    if rule.is_sigmoid:
        weights = _sigmoid(best)
        total = jnp.sum(weights, axis=1, keepdims=True) + 1e-20
    else:
        of = best[None] if rule.normalises else logits
        top = _over_experts(jnp.max, of)
        weights = jnp.exp(best - top)
        total = _over_experts(jnp.sum, jnp.exp(of - top[None]))
    if rule.normalises or not rule.is_sigmoid:
        weights /= total
    return weights * rule.scaling
