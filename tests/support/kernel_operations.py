"""Calls of all operations that have Triton kernels. Every kernel runs, with several programs.

`OPERATIONS["folder/variant"](kernels)` returns a function without arguments, which runs an
operation. The operation is compiled in the first call. Up to rounding, its result is the same for
all values of `kernels`. Sizes are not multiples of tile sizes, so that the edges of tiles are
tested.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support import kernels_paged_attention
from support.kernels_delta_rule import LAYER, Serving, Sizes, Streams
from support.kernels_paged_attention import Case

from pallas_kernels.batched_scaled_matmul import batched_scaled_matmul
from pallas_kernels.draw_tokens import draw_tokens
from pallas_kernels.gated_delta_rule import Heads
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_packed_matmul import grouped_packed_matmul
from pallas_kernels.grouped_scaled_matmul import grouped_scaled_matmul
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.packed_matmul import FourBits, packed_matmul
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rms_norm import add_rms_norm
from pallas_kernels.rope_write import HeadWeights, rope_write
from pallas_kernels.route import Rule, route
from pallas_kernels.scaled_matmul import scaled_matmul
from pallas_kernels.truncation import truncate

Operation = Callable[[str], Callable[[], Any]]


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


def of(function: Callable[..., Any], *given: Any, **named: Any) -> Operation:
    return lambda kernels: partial(jax.jit(partial(function, kernels=kernels)), *given, **named)


def draw(*, has_ids: bool) -> Operation:
    """Draw tokens from rows of two whole tiles and a part of a third tile."""
    token_ids = np.random.default_rng(0).permutation(9000)[:8500].astype(np.int32)
    temperature, seeds = np.array([0.0, 0.5, 1.0], np.float32), np.arange(3, dtype=np.uint32)
    counters = np.array([5, 9, 70], np.int32), np.array([0, 1, 2], np.int32)

    def run(logits, temperature, seeds, counters, *, kernels):
        given = logits, temperature, seeds, 2, counters
        names = {"token_ids": jnp.array(token_ids), "vocab_size": 9000} if has_ids else {}
        return draw_tokens(*given, **names, kernels=kernels)

    return of(run, 3 * normal(3, 8500), temperature, seeds, counters)


def rope(pool: str = "float32") -> Operation:
    """Run `rope_write` for two requests of three rows. One row's page is not assigned."""
    num_heads, num_kv_heads, dim, half = 4, 2, 32, 8
    width = (num_heads + 2 * num_kv_heads) * dim
    weights = HeadWeights(normal(width), normal(dim, seed=1), normal(dim, seed=2))
    angles = normal(2, 3, half), normal(2, 3, half, seed=3)
    kv = normal(2, 6, 16, 2, num_kv_heads, dim, dtype=pool)
    scales = {"int8": normal(*kv.shape[:-1]), "float8_e4m3fn": np.float32([[1, 1], [0.5, 2]])}
    table = np.array([[4, 2], [1, -1]], np.int32)
    positions = np.array([[15, 16, -1], [14, 15, 16]], np.int32)
    given = normal(2, 3, width), weights, angles, kv, np.int32(1), table, positions
    run = partial(rope_write, num_heads=num_heads, eps=1e-5)
    return of(run, *given, scales=scales.get(pool))


def truncation() -> Operation:
    """Truncate rows of eight tiles.

    The last row but one has many candidates. In the last row, logits are so similar that the
    candidates do not fit in their buffer.
    """
    top_k = np.array([5, 0, 40, 0, 0, 0], np.int32)
    top_p = np.array([1, 0.6, 0.9, 1, 0.9, 0.99], np.float32)
    min_p = np.array([0, 0, 0.01, 0, 0.01, 0], np.float32)
    scale = np.array([3, 3, 3, 3, 1, 0.1], np.float32)
    logits = scale[:, None] * normal(6, 60_000)
    return of(truncate, logits, np.full(6, 0.7, np.float32), top_k, top_p, min_p)


def routes() -> Operation:
    """Choose experts for more rows than a word has bits, with sigmoid scores."""
    is_padding = np.arange(40) % 7 == 6

    def run(logits, correction, *, kernels):
        rule = Rule(is_sigmoid=True, scaling=2.5)
        made = route(logits, 4, rule, correction, is_padding, kernels=kernels)
        return made._replace(weights=jnp.where(is_padding[:, None], 0, made.weights))

    return of(run, normal(40, 100), normal(100, seed=1) / 8)


def packed(form: FourBits, *, has_zeros: bool) -> Operation:
    rng, groups = np.random.default_rng(0), (form.num_groups(200), 150)
    values = rng.integers(0, 256, (150, form.width(200)), np.uint8)
    zeros = rng.integers(0, 16, groups, np.uint8) if has_zeros else None
    factors = None if has_zeros else normal(150)
    given = normal(20, 200), values, normal(*groups) / 32, zeros, factors
    return of(partial(packed_matmul, form=form), *given)


def latents(pool: str | None = None) -> Operation:
    """Run latent attention for two requests. One of them has a padding row."""
    scales, dtype = None, "bfloat16" if pool else "float32"
    entries = normal(2, 6, 16, 80, dtype=dtype)
    if pool:
        entries, scales = (40 * normal(2, 6, 16, 80)).astype(pool), abs(normal(2, 6, 16, 2)) / 40
    run = partial(latent_attention, rank=64, scale=0.2)
    given = normal(2, 2, 5, 80, dtype=dtype), entries, np.int32(1)
    where = (np.array(x, np.int32) for x in ([[3, 0, 5], [2, 4, 1]], [[40, 41], [7, -1]]))
    return of(run, *given, *where, scales=scales)


def attention(case: Case) -> Operation:
    options = kernels_paged_attention.options(case)
    scales = options.pop("scales", None)
    given = kernels_paged_attention.arguments(case)
    return of(partial(paged_attention, **options), *given, scales=scales)


def delta_rule(heads: Heads, batch: int) -> Operation:
    """Run prompts and rounds until the ring buffers wrap. Return outputs and caches.

    Some drafts of the rounds are rejected.
    """
    streams = Streams.random(sizes := Sizes(heads), 3, 32)

    def run(kernels: str) -> Any:
        serving = Serving(kernels, streams, sizes, batch=batch)
        serving.prompt(3, 5, 2, width=8)
        for counts, stands in (
            ((4, 3, 1), (2, 3, 1)),
            ((4, 2, 4), (4, 1, 4)),
            ((4, 4, 4), (1, 4, 1)),
        ):
            serving.step(counts, stands)
        serving.prompt(7, 1, 0, width=8)
        serving.check()
        return serving.out, [np.asarray(x)[LAYER] for x in serving.cache]

    return lambda kernels: partial(run, kernels)


GROUPS = np.array([0, 17, 1, 0, 6], np.int32)  # their numbers of rows


def grouped_packed(form: FourBits, *, of_powers: bool) -> Operation:
    """Multiply by groups' matrices of 4-bit numbers.

    Scales are powers of two if `of_powers`. Otherwise, they are arbitrary, and there are zero
    points.
    """
    rng, groups = np.random.default_rng(0), (5, form.num_groups(96), 40)
    values = rng.integers(0, 256, (5, 40, form.width(96)), np.uint8)
    scales = rng.integers(120, 124, groups, np.uint8) if of_powers else normal(*groups) / 32
    zeros = None if of_powers else rng.integers(0, 16, groups, np.uint8)
    given = normal(24, 96), values, scales, zeros, None, GROUPS
    return of(partial(grouped_packed_matmul, form=form), *given)


OPERATIONS: dict[str, Operation] = {
    "rms_norm": of(
        partial(add_rms_norm, eps=1e-6, is_centred=True),
        *(normal(3, 320), normal(3, 320, seed=1), normal(320)),
    ),
    "draw_tokens": draw(has_ids=False),
    "draw_tokens/ids": draw(has_ids=True),
    "rope_write": rope(),
    "rope_write/fp8": rope("float8_e4m3fn"),
    "rope_write/int8": rope("int8"),
    "truncation": truncation(),
    "batched_scaled_matmul": of(
        partial(batched_scaled_matmul, block=(64, 32)),
        *(normal(20, 3, 80) / 8, normal(3, 90, 80, dtype="float8_e4m3fn")),
        np.square(normal(3, 2, 3)),
    ),
    "grouped_matmul": of(grouped_matmul, normal(24, 40), normal(5, 40, 24), GROUPS),
    "grouped_packed_matmul/powers": grouped_packed(FourBits(32, is_float=True), of_powers=True),
    "grouped_packed_matmul/zeros": grouped_packed(FourBits(32), of_powers=False),
    "grouped_scaled_matmul": of(
        partial(grouped_scaled_matmul, block=(64, 128)),
        *(normal(24, 200) / 14, normal(5, 90, 200, dtype="float8_e4m3fn")),
        *(np.square(normal(5, 2, 2)), GROUPS),
    ),
    "latent_attention": latents(),
    "latent_attention/int8": latents("int8"),
    # Integers with zero points, and floats with factors.
    "packed_matmul/integers": packed(FourBits(32), has_zeros=True),
    "packed_matmul/floats": packed(FourBits(16, is_float=True), has_zeros=False),
    "route": routes(),
    "scaled_matmul": of(
        partial(scaled_matmul, block=(64, 128)),
        *(normal(20, 200), normal(150, 200, dtype="float8_e4m3fn"), normal(3, 2)),
    ),
    # Few requests are split.
    "paged_attention/split": attention(Case((150, 5, 0), (4, 3, 0), 4, has_sinks=True)),
    "paged_attention/window": attention(
        Case((70,), (3,), 4, window=20, soft_cap=2.0, dtype="bfloat16", pool="float8_e4m3fn")
    ),
    "paged_attention/int8": attention(Case((150, 5), (4, 3), 4, dtype="bfloat16", pool="int8")),
    # Tiles for few requests, and for many.
    "gated_delta_rule/few": delta_rule(Heads(2, 4, 16, 32), 5),
    "gated_delta_rule/many": delta_rule(Heads(1, 2, 32, 64), 9),
}
