"""Thresholds in one Triton kernel, with a program per row that usually reads it twice.

The first read computes the maximum of each of a few thousand strided columns of the row, and the
sum of all probabilities. At least k logits are at or above the k-th largest of these maxima, and
not many more; for top_p the bound is where the maxima alone reach the required mass. The second
read gathers the logits from this bound on, the candidates, which usually fit in registers. Rows
with too many (a flat distribution, a large k) are read again for every few bits of the threshold.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.triton_call import barrier, load, store, triton_call
from pallas_kernels.truncation.order import INFINITE, NUM_BITS, ordered

MAX_ELEMENTS = 2**31  # offsets into an array are i32
ROUGH_BITS = 16  # bits of the lower bound of the candidates: all bits of a bf16 logit
STEP_BITS = 2  # bits of the threshold found per read of a row
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class TruncationTuning:
    """Block sizes (powers of two) and number of warps."""

    block: int  # columns at a time
    max_candidates: int
    num_warps: int


# With many rows two programs share a multiprocessor; with few, one must keep it busy alone.
MANY_ROWS = TruncationTuning(block=4096, max_candidates=4096, num_warps=8)
FEW_ROWS = TruncationTuning(block=8192, max_candidates=4096, num_warps=16)
FEW_ROWS_UP_TO = 132  # number of multiprocessors of an H200


def choose_config(num_rows: int) -> TruncationTuning:
    """Choose the block sizes for N rows."""
    return FEW_ROWS if num_rows <= FEW_ROWS_UP_TO else MANY_ROWS


def least_kept_triton(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    config: TruncationTuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return the key u32[N] of the smallest logit that `truncate` keeps per row; 0 keeps all.

    Raises:
        UnsupportedError: logits are not float32, or have too many elements.
    """
    num_rows, vocab_size = logits.shape
    if logits.dtype != jnp.float32:
        raise UnsupportedError(f"logits must be float32; got {logits.dtype}")
    if logits.size >= MAX_ELEMENTS:
        raise UnsupportedError(f"logits must have less than 2^31 elements; got {logits.size}")
    config = config or choose_config(num_rows)
    whole = max(pl.next_power_of_2(vocab_size), 16)
    block, num_candidates = min(config.block, whole), min(config.max_candidates, whole)
    kernel = partial(
        _kernel,
        vocab_size=vocab_size,
        block=block,
        max_candidates=num_candidates,
        has_threads=not interpret,
    )
    threshold, _ = triton_call(
        kernel,
        (logits, temperature, top_k.astype(jnp.int32), top_p, min_p),
        [
            jax.ShapeDtypeStruct((num_rows,), jnp.uint32),
            jax.ShapeDtypeStruct((num_rows, num_candidates + block), jnp.float32),  # candidates
        ],
        name="truncation",
        grid=(num_rows,),
        num_warps=config.num_warps,
        interpret=interpret,
    )
    return threshold


def _kernel(
    logits_ref,
    temperature_ref,
    top_k_ref,
    top_p_ref,
    min_p_ref,
    threshold_ref,
    candidates_ref,
    *,
    vocab_size: int,
    block: int,
    max_candidates: int,
    has_threads: bool,
):
    row = pl.program_id(0)
    top_k, top_p, min_p = top_k_ref[row], top_p_ref[row], min_p_ref[row]
    cuts_k, cuts_p, cuts_min = (top_k > 0) & (top_k < vocab_size), top_p < 1, min_p > 0
    zero = (0 * row).astype(jnp.uint32)  # not a literal: a branch may not return one
    column = jnp.arange(block)
    num_blocks = pl.cdiv(vocab_size, block)

    def read(i):
        at = i * block + column
        return load(logits_ref.at[row, at], mask=at < vocab_size, other=-jnp.inf)

    @pl.when(~(cuts_k | cuts_p | cuts_min))
    def _():
        threshold_ref[row] = jnp.uint32(0)

    @pl.when(cuts_k | cuts_p | cuts_min)
    def _():
        rate = LOG2_E / temperature_ref[row]

        def summarise(i, carry):
            largest, mass = carry
            x = read(i)
            larger = jnp.maximum(largest, x)
            shrunk = mass * jnp.exp2((largest - larger) * rate)
            return larger, shrunk + jnp.exp2((x - larger) * rate)

        lowest = jnp.finfo(jnp.float32).min  # finite, because differences of -inf are NaN
        start = jnp.full(block, lowest), jnp.zeros(block, jnp.float32)
        largest, mass = jax.lax.fori_loop(0, num_blocks, summarise, start)
        best = jnp.max(largest)
        mass = jnp.sum(mass * jnp.exp2((largest - best) * rate))
        floor = jnp.where(cuts_min, best + jnp.log(min_p) * temperature_ref[row], -jnp.inf)

        def weigh(x, counts):
            return jnp.where(counts, 1.0, jnp.exp2((x - best) * rate))

        # Required weight at or above the bound; not valid for top_p if min_p applies before it.
        wanted_p = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)
        wanted = jnp.where(cuts_k, top_k.astype(jnp.float32), wanted_p * mass)
        keys, weights = ordered(largest), weigh(largest, cuts_k)
        is_bounded = cuts_k | (cuts_p & ~cuts_min)
        rough = _search(
            lambda trial: jnp.sum(jnp.where(keys >= trial, weights, 0.0)),
            wanted,
            zero,
            ROUGH_BITS,
            is_bounded,
        )
        bound = jnp.maximum(jnp.maximum(rough, ordered(floor)), jnp.uint32(INFINITE + 1))

        def gather(i, count):
            x = read(i)
            is_candidate = ordered(x) >= bound
            number = jnp.sum(is_candidate.astype(jnp.int32))

            @pl.when(number > 0)
            def _():
                place = count + jnp.cumsum(is_candidate.astype(jnp.int32)) - 1
                fits = is_candidate & (place < max_candidates)
                # In interpret mode masked lanes store the old value, so each needs its own place.
                place = jnp.where(fits, place, max_candidates + column)
                store(candidates_ref.at[row, place], x, mask=fits)

            return count + number

        count = _repeat(num_blocks, gather, zero.astype(jnp.int32), cuts_k | cuts_p)
        if has_threads:
            barrier()  # a thread loads what other threads stored

        def finish(find: Callable, total: Callable):
            """Return the row's threshold: `find` gives that of a cut, `total` the mass it keeps."""
            left = find(True, top_k.astype(jnp.float32), cuts_k)
            left = jnp.maximum(left, ordered(floor))
            all_left = jnp.where(cuts_k | cuts_min, total(left), mass)
            return jnp.maximum(left, find(False, wanted_p * all_left, cuts_p))

        def in_registers():
            place = jnp.arange(max_candidates)
            x = load(candidates_ref.at[row, place], mask=place < count, other=-jnp.inf)
            keys = ordered(x)

            def through(counts):
                weights = weigh(x, counts)
                return lambda trial: jnp.sum(jnp.where(keys >= trial, weights, 0.0))

            def find(counts, wanted, is_asked):
                key = _search(through(counts), wanted, zero, NUM_BITS, is_asked)
                return jnp.where(is_asked, jnp.maximum(key, bound), jnp.uint32(0))

            return finish(find, through(False))

        def in_memory():
            def through(counts, trials):
                def add(i, sums):
                    x = read(i)
                    keys, weights = ordered(x), weigh(x, counts)
                    parts = [jnp.where(keys >= trial, weights, 0.0) for trial in trials]
                    return tuple(a + b for a, b in zip(sums, parts, strict=True))

                zero = tuple(jnp.zeros(block, jnp.float32) for _ in trials)
                return [jnp.sum(x) for x in jax.lax.fori_loop(0, num_blocks, add, zero)]

            def find(counts, wanted, is_asked):
                def refine(i, key):
                    shift = (NUM_BITS - STEP_BITS * (i + 1)).astype(jnp.uint32)
                    trials = [key | (jnp.uint32(j) << shift) for j in range(1, 2**STEP_BITS)]
                    for trial, sum_through in zip(trials, through(counts, trials), strict=True):
                        key = jnp.where(sum_through >= wanted, trial, key)
                    return key

                return _repeat(NUM_BITS // STEP_BITS, refine, zero, is_asked)

            return finish(find, lambda key: through(False, [key])[0])

        key = jax.lax.cond(count <= max_candidates, in_registers, in_memory)
        threshold_ref[row] = key


def _search(
    through: Callable, wanted: jax.Array, zero: jax.Array, num_bits: int, is_asked: jax.Array
) -> jax.Array:
    """Return the highest key with `num_bits` leading bits for which through(key) >= wanted."""

    def refine(bit, key):
        trial = key | (jnp.uint32(1) << (NUM_BITS - 1 - bit).astype(jnp.uint32))
        return jnp.where(through(trial) >= wanted, trial, key)

    return _repeat(num_bits, refine, zero, is_asked)


def _repeat(times: int, refine: Callable, start: jax.Array, is_asked: jax.Array) -> jax.Array:
    """Apply `refine` to `start` this many times if `is_asked`; otherwise return `start`."""
    return jax.lax.cond(
        is_asked, lambda x: jax.lax.fori_loop(0, times, refine, x), lambda x: x, start
    )
