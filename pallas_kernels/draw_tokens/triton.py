"""Sampling in two Triton kernels.

The first kernel finds the best token of every tile of a row, and the second kernel the best token
of the row. Rows with a temperature above 0 are bound by arithmetic, not by memory. So one call of
threefry gives the random bits of two tokens, and the noise is computed with the GPU's approximate
logarithms where these are accurate.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.draw_tokens.reference import MIN_TAIL, MIN_TEMPERATURE, PAIRED
from pallas_kernels.triton_call import load, log2, multiply_add, triton_call

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)  # Salmon et al. 2011, threefry 2x32
PARITY = 0x1BD11BDA


@dataclass(frozen=True)
class DrawTuning:
    """Tuning of the kernel that finds the best token of every tile.

    The fields are the tokens per tile (a multiple of 64), and the warps per program.

    By default, a row of 128k tokens has 32 tiles, so a few rows fill the GPU.
    """

    block_tokens: int = 4096
    num_warps: int = 8


DEFAULT = DrawTuning()


def draw_tokens_triton(
    logits: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    stream: int,
    counters: tuple[jax.Array, ...],
    token_ids: jax.Array | None,
    vocab_size: int | None,
    first: jax.Array | None = None,
    *,
    config: DrawTuning = DEFAULT,
    interpret: bool = False,
) -> Any:
    """See `draw_tokens`, or `draw_scored` if `first` is not None.

    Raises:
        UnsupportedError: the logits are not float32.
    """
    if logits.dtype != jnp.float32:
        raise UnsupportedError(f"logits are {logits.dtype}; float32 is supported")
    num_rows, num_tokens = logits.shape
    num_tiles = pl.cdiv(num_tokens, config.block_tokens)
    kernel = functools.partial(
        _kernel,
        stream=stream,
        rows_per_request=num_rows // len(seeds),
        num_tokens=num_tokens,
        block=config.block_tokens,
        has_ids=token_ids is not None,
        has_first=first is not None,
        interpret=interpret,
    )
    optional = [x for x in (token_ids, None if first is None else first[None]) if x is not None]
    best, token = triton_call(
        kernel,
        [logits, temperature, seeds, *counters, *optional],
        [
            jax.ShapeDtypeStruct((num_rows, num_tiles), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, num_tiles), jnp.int32),
        ],
        name="draw_tokens",
        grid=(num_rows, num_tiles),
        num_warps=config.num_warps,
        interpret=interpret,
    )
    result = [jnp.int32] if first is None else [jnp.int32, jnp.float32]
    tokens, *scores = triton_call(
        functools.partial(_combine_kernel, num_tiles=num_tiles),
        [best, token],
        [jax.ShapeDtypeStruct((num_rows,), dtype) for dtype in result],
        name="draw_tokens_combine",
        grid=(num_rows,),
        num_warps=1,
        interpret=interpret,
    )
    return (tokens, *scores) if scores else tokens


def _kernel(
    logits_ref,
    temperature_ref,
    seeds_ref,
    *refs,
    stream,
    rows_per_request,
    num_tokens,
    block,
    has_ids,
    has_first,
    interpret,
):
    row, tile = pl.program_id(0), pl.program_id(1)
    num_counters = len(refs) - has_ids - has_first - 2
    call = tile * (block // 2) + jnp.arange(block // 2, dtype=jnp.int32)
    column = call // PAIRED * (2 * PAIRED) + call % PAIRED
    first = refs[num_counters + has_ids][0] if has_first else 0  # the token of the first column
    columns = column, column + PAIRED  # one call of threefry makes the words of both
    logits = tuple(
        load(logits_ref.at[row, column], mask=column < num_tokens, other=-jnp.inf)
        for column in columns
    )
    request, t = row // rows_per_request, row % rows_per_request
    temperature = temperature_ref[request]

    def perturbed():
        zero = jnp.uint32(0)
        key = threefry((zero, seeds_ref[request]), (zero, jnp.uint32(stream)))
        for i in range(num_counters):
            counter = refs[i][request] + (t if i == 0 else 0)
            key = threefry(key, (zero, counter.astype(jnp.uint32)))
        if has_ids:
            ids = refs[num_counters]
            names = (load(ids.at[c], mask=c < num_tokens, other=0) for c in columns)
            words = [_word(key, name) for name in names]
        else:
            number = (call + first // 2 if has_first else call).astype(jnp.uint32)
            words = threefry(key, (jnp.zeros_like(call, jnp.uint32), number))
        scale = 1 / jnp.maximum(temperature, MIN_TEMPERATURE)
        return tuple(
            multiply_add(x, jnp.full_like(x, scale), _gumbel(word, interpret), interpret=interpret)
            for x, word in zip(logits, words, strict=True)
        )

    one, other = jax.lax.cond(temperature == 0, lambda: logits, perturbed)
    best = jnp.max(jnp.maximum(one, other))
    # A GPU's maximum skips NaN, and no column equals a maximum that is NaN.
    place = jnp.where(other == best, columns[1], num_tokens - 1)
    place = jnp.where(one == best, columns[0], place)
    has_nan = (one != one) | (other != other)
    place = jnp.min(jnp.where(has_nan, -1, place))
    best_ref, token_ref = refs[-2:]
    best_ref[row, tile] = best
    if has_ids:
        place = jnp.where(place < 0, place, refs[num_counters][jnp.maximum(place, 0)])
    token_ref[row, tile] = jnp.where(place < 0, place, place + first) if has_first else place


def _combine_kernel(best_ref, token_ref, out_ref, *score_ref, num_tiles):
    row, tile = pl.program_id(0), jnp.arange(pl.next_power_of_2(num_tiles), dtype=jnp.int32)
    best = load(best_ref.at[row, tile], mask=tile < num_tiles, other=-jnp.inf)
    tokens = load(token_ref.at[row, tile], mask=tile < num_tiles, other=0)
    maximum = jnp.max(best)
    first = jnp.min(jnp.where(best == maximum, tile, num_tiles - 1))
    has_nan = jnp.min(tokens) < 0
    has_token = (maximum > -jnp.inf) & ~has_nan
    out_ref[row] = jnp.where(has_token, token_ref[row, first], -1)
    for ref in score_ref:
        ref[row] = jnp.where(has_nan, jnp.nan, maximum)


def _word(key: tuple[jax.Array, jax.Array], token: jax.Array) -> jax.Array:
    """Return the random bits u32 for an array of arbitrary token ids (see `token_bits`)."""
    call = token // (2 * PAIRED) * PAIRED + token % PAIRED
    first, second = threefry(key, (jnp.zeros_like(call, jnp.uint32), call.astype(jnp.uint32)))
    return jnp.where(token // PAIRED % 2 == 0, first, second)


def _gumbel(bits: jax.Array, interpret: bool) -> jax.Array:
    """Return `as_gumbel(bits)` with errors up to 6e-6, using a third of the instructions."""
    log = functools.partial(log2, interpret=interpret)
    u = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - MIN_TAIL)
    series = jnp.full_like(u, 1 / 7)
    for n in range(6, 0, -1):  # -log(1 - u) / u as a series, used where 1 - u would be rounded
        series = multiply_add(series, u, jnp.full_like(u, 1 / n), interpret=interpret)
    exponential = jnp.where(u < 0.125, series * u, -math.log(2) * log(1 - u))
    return -math.log(2) * log(exponential)


def threefry(
    key: tuple[jax.Array, jax.Array], count: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return two u32 words, mixed from two words of a key and two words of a counter.

    The words are mixed in 20 rounds, as in `jax.random`.
    """
    schedule = *key, key[0] ^ key[1] ^ jnp.uint32(PARITY)
    x, y = count[0] + schedule[0], count[1] + schedule[1]
    for i in range(5):
        for rotation in ROTATIONS[i % 2]:
            x = x + y
            y = ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation))) ^ x
        x = x + schedule[(i + 1) % 3]
        y = y + schedule[(i + 2) % 3] + jnp.uint32(i + 1)
    return x, y
