"""Inputs of paged attention, and its definition in NumPy in float64."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import paged_attention

LAYER, NUM_LAYERS = 1, 2


@dataclass(frozen=True)
class Case:
    """The sizes and options of one call of `paged_attention`.

    Request b has starts[b] old tokens in the pool and counts[b] new tokens. Each request has T =
    `num_rows` rows. If `table_columns` is given, all `starts` and `counts` use the same compiled
    program.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    num_rows: int
    group: int = 2
    num_kv_heads: int = 2
    dim: int = 64
    page_size: int = 16
    table_columns: int | None = None  # None: one more than the longest request has pages
    dtype: str = "float32"
    pool: str | None = None  # its dtype, if another
    window: int | None = None
    is_block: bool = False  # rows see each other; windows count from the row or from the first
    soft_cap: float | None = None
    has_sinks: bool = False

    @property
    def lengths(self) -> list[int]:
        return [start + count for start, count in zip(self.starts, self.counts, strict=True)]

    @property
    def num_columns(self) -> int:
        return self.table_columns or -(-max(self.lengths) // self.page_size) + 1


@functools.cache
def compiled(kernels: str) -> Callable[..., jax.Array]:
    """Return a jitted implementation. It is cached, so that all tests share its programs."""
    return jax.jit(
        functools.partial(paged_attention, kernels=kernels),
        static_argnames=("window", "soft_cap"),
    )


def arguments(case: Case) -> tuple[np.ndarray, ...]:
    """Return q, kv, layer, page_table and positions.

    Keys and values that no row may read are NaN.
    """
    rng = np.random.default_rng(0)
    kv, page_table, positions = paged(case, rng, 2, case.num_kv_heads, case.dim)
    num_heads = case.num_kv_heads * case.group
    q = rng.normal(size=(len(case.starts), case.num_rows, num_heads, case.dim))
    if case.pool == "int8":  # int8 has no NaN; scales are NaN instead
        kv = np.rint(40 * np.nan_to_num(kv)).clip(-127, 127)
    return (
        q.astype(jnp.dtype(case.dtype)),
        kv.astype(jnp.dtype(case.pool or case.dtype)),
        np.int32(LAYER),
        page_table,
        positions,
    )


def paged(case: Case, rng: np.random.Generator, *entry: int) -> tuple[np.ndarray, ...]:
    """Return a pool [layer, page, offset, *entry], page_table and positions; see `arguments`."""
    batch, pages_per_seq = len(case.starts), case.num_columns
    shape = NUM_LAYERS, batch * pages_per_seq + 3, case.page_size, *entry
    pool, page_table = np.full(shape, np.nan, np.float32), np.full((batch, pages_per_seq), -1)
    free = rng.permutation(pool.shape[1]).tolist()
    for b, (length, count) in enumerate(zip(case.lengths, case.counts, strict=True)):
        oldest = max(0, case.starts[b] - case.window + 1) if case.window else 0
        for column in range(-(-length // case.page_size)):
            page_table[b, column] = page = free.pop()
            start = column * case.page_size
            seen = slice(max(0, oldest - start), length - start if count else 0)
            pool[LAYER, page, seen] = rng.normal(size=pool[LAYER, page, seen].shape)
    row = np.arange(case.num_rows)[None]
    starts, counts = np.array(case.starts)[:, None], np.array(case.counts)[:, None]
    ends = starts + counts - 1 if case.is_block else starts + row
    positions = np.where(row < counts, ends, -1)
    return pool, page_table.astype(np.int32), positions.astype(np.int32)


def options(case: Case) -> dict[str, Any]:
    """Return the options of the case, out of window, origins, soft_cap, scales and sinks."""
    found: dict[str, Any] = {"window": case.window, "soft_cap": case.soft_cap}
    if case.is_block:
        starts = np.array(case.starts, np.int32)[:, None]
        rows = np.arange(case.num_rows, dtype=np.int32)
        found["origins"] = starts + rows * (np.arange(len(starts)) % 2)[:, None].astype(np.int32)
    if case.has_sinks:
        num_heads = case.num_kv_heads * case.group
        sinks = 3 * np.random.default_rng(0).standard_normal(num_heads)
        found["sinks"] = sinks.astype(jnp.dtype(case.dtype))
    if case.pool == "float8_e4m3fn":
        scales = np.random.default_rng(0).uniform(0.5, 2.0, (NUM_LAYERS, 2))
        found["scales"] = scales.astype(np.float32)
    if case.pool == "int8":
        scales, *_ = paged(case, np.random.default_rng(0), 2, case.num_kv_heads)
        found["scales"] = (1 + np.abs(scales)) / 80
    return {name: value for name, value in found.items() if value is not None}


def attention_by_definition(
    q,
    kv,
    layer,
    page_table,
    positions,
    *,
    window=10**6,
    origins=None,
    soft_cap=None,
    scales=None,
    sinks=None,
):
    """Compute paged attention for one row and one head at a time."""
    pool = kv[layer].astype(np.float64)
    if scales is not None:
        own = scales[layer].astype(np.float64)
        pool = pool * (own[:, None, None] if own.ndim == 1 else own[..., None])
    out, page_size = np.zeros(q.shape, np.float64), pool.shape[1]
    origins = positions if origins is None else origins
    group = q.shape[2] // pool.shape[3]
    for b, t in np.argwhere(positions >= 0):
        end = min(positions[b, t] + 1, page_table.shape[1] * page_size)
        places = np.arange(max(0, origins[b, t] - window + 1), end)
        places = places[page_table[b, places // page_size] >= 0]
        seen = pool[page_table[b, places // page_size], places % page_size]  # [n, 2, H_kv, D]
        for h in range(q.shape[2]):
            keys, values = seen[:, :, h // group].swapaxes(0, 1)
            scores = keys @ q[b, t, h].astype(np.float64) / np.sqrt(q.shape[3])
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            sink = -np.inf if sinks is None else float(sinks[h])
            maximum = max(scores.max(), sink)
            weights = np.exp(scores - maximum)
            out[b, t, h] = weights @ values / (weights.sum() + np.exp(sink - maximum))
    return out
