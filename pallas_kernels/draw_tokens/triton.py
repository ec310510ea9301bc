"""Sampling in two Triton kernels: the best token of every tile of a row, then of these.

Rows with a temperature wait for arithmetic, not for memory: of about 140 PTX instructions per token
77 make its random bits, and some 50 are the two logarithms.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.draw_tokens.reference import MIN_TEMPERATURE, as_gumbel
from pallas_kernels.triton_call import load, triton_call

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)  # Salmon et al. 2011, threefry 2x32
PARITY = 0x1BD11BDA


@dataclass(frozen=True)
class DrawTuning:
    """Tile size. A row of 128k has 32 tiles, so that even a few rows fill the GPU."""

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
    *,
    config: DrawTuning = DEFAULT,
    interpret: bool = False,
) -> jax.Array:
    """See `draw_tokens`."""
    if logits.dtype != jnp.float32:
        raise UnsupportedError(f"logits are {logits.dtype}; float32 is supported")
    num_rows, num_tokens = logits.shape
    num_tiles = pl.cdiv(num_tokens, config.block_tokens)
    kernel = functools.partial(
        _kernel,
        stream=stream,
        num_counters=len(counters),
        rows_per_request=num_rows // len(seeds),
        num_tokens=num_tokens,
        block=config.block_tokens,
        has_ids=token_ids is not None,
    )
    best, token = triton_call(
        kernel,
        [logits, temperature, seeds, *counters, *([] if token_ids is None else [token_ids])],
        [
            jax.ShapeDtypeStruct((num_rows, num_tiles), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, num_tiles), jnp.int32),
        ],
        name="draw_tokens",
        grid=(num_rows, num_tiles),
        num_warps=config.num_warps,
        interpret=interpret,
    )
    (tokens,) = triton_call(
        functools.partial(_combine_kernel, num_tiles=num_tiles),
        [best, token],
        [jax.ShapeDtypeStruct((num_rows,), jnp.int32)],
        name="draw_tokens_combine",
        grid=(num_rows,),
        num_warps=1,
        interpret=interpret,
    )
    return tokens


def _kernel(
    logits_ref,
    temperature_ref,
    seeds_ref,
    *refs,
    stream,
    num_counters,
    rows_per_request,
    num_tokens,
    block,
    has_ids,
):
    row, tile = pl.program_id(0), pl.program_id(1)
    column = tile * block + jnp.arange(block, dtype=jnp.int32)
    mask = column < num_tokens
    logits = load(logits_ref.at[row, column], mask=mask, other=-jnp.inf)
    name = load(refs[num_counters].at[column], mask=mask, other=0) if has_ids else column
    request, t = row // rows_per_request, row % rows_per_request
    temperature = temperature_ref[request]

    def perturbed():
        zero = jnp.uint32(0)
        key = threefry((zero, seeds_ref[request]), (zero, jnp.uint32(stream)))
        for i in range(num_counters):
            counter = refs[i][request] + (t if i == 0 else 0)
            key = threefry(key, (zero, counter.astype(jnp.uint32)))
        first, second = threefry(key, (jnp.zeros_like(name, jnp.uint32), name.astype(jnp.uint32)))
        return logits / jnp.maximum(temperature, MIN_TEMPERATURE) + as_gumbel(first ^ second)

    scores = jax.lax.cond(temperature == 0, lambda: logits, perturbed)
    best = jnp.max(scores)
    # If the maximum is NaN, no column equals it, and the last column is taken.
    place = jnp.min(jnp.where(scores == best, column, num_tokens - 1))
    best_ref, token_ref = refs[-2:]
    best_ref[row, tile] = best
    token_ref[row, tile] = refs[num_counters][place] if has_ids else place


def _combine_kernel(best_ref, token_ref, out_ref, *, num_tiles):
    row, tile = pl.program_id(0), jnp.arange(pl.next_power_of_2(num_tiles), dtype=jnp.int32)
    best = load(best_ref.at[row, tile], mask=tile < num_tiles, other=-jnp.inf)
    first = jnp.min(jnp.where(best == jnp.max(best), tile, num_tiles - 1))
    out_ref[row] = token_ref[row, first]


def threefry(
    key: tuple[jax.Array, jax.Array], count: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Mix two words u32 of a key and two of a counter in 20 rounds, as `jax.random` does."""
    schedule = *key, key[0] ^ key[1] ^ jnp.uint32(PARITY)
    x, y = count[0] + schedule[0], count[1] + schedule[1]
    for i in range(5):
        for rotation in ROTATIONS[i % 2]:
            x = x + y
            y = ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation))) ^ x
        x = x + schedule[(i + 1) % 3]
        y = y + schedule[(i + 2) % 3] + jnp.uint32(i + 1)
    return x, y
