"""Attention over pages of latents in the plain form, for prefill chunks.

The context is processed in blocks. For each block, the plain form first computes every head's keys
and values from the latents. Then all rows attend to the block. The other form, which is called
absorbed, uses the latents themselves as keys and values. A latent is wider than a head's key and
value, so the plain form needs fewer products for each pair of a query and a key. In return, each
chunk recomputes the keys and values of the whole context.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.latent_attention.reference import dequantised
from pallas_kernels.paged_attention import paged_attention_part
from specjax.device.cache.pages import Pages
from specjax.device.cache.rows import CachedRows
from specjax.device.weights.latent_up import LatentProjection


def attend_plainly(
    rows: CachedRows,
    cache: Pages,
    layer: jax.Array,
    nope: jax.Array,
    rope: jax.Array,
    up: LatentProjection,
    scale: float,
) -> jax.Array:
    """Return the output [N, H, D_v] of attention. A row attends to all tokens up to itself.

    Args:
        rows: the rows of prefill chunks. The context is processed in blocks as long as a chunk.
        cache: pages [layers, pages, page_size, R + D_r] of latents, including those of `rows`.
        layer: i32[] index into the pages.
        nope: [N, H, D_n] the parts of queries that are not rotated.
        rope: [N, H, D_r] the rotated parts of queries.
        up: the weight that projects latents to keys and values.
        scale: multiplies the scores.
    """
    page_size, width = cache.values.shape[2:]
    (_, num_heads, nope_dim), rope_dim = nope.shape, rope.shape[2]
    rank, value_dim = width - rope_dim, up.value_dim
    dim = head_dim(nope_dim + rope_dim, value_dim)  # by which the kernel scales the scores
    q = rows.by_request(_padded(jnp.concatenate([nope, rope], axis=-1), dim) * (scale * dim**0.5))

    pages = max(1, rows.width // page_size)  # per block
    batch, num_tokens = rows.page_table.shape[0], pages * page_size
    ids = jnp.pad(jnp.maximum(rows.page_table, 0), ((0, 0), (0, -rows.page_table.shape[1] % pages)))
    table = jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
    positions = rows.by_request(rows.positions)

    def part(i: int | jax.Array) -> tuple[jax.Array, jax.Array]:
        """Attend to block i; return the output f32[B, T, H, D_v] and the scores' log-sum-exp."""
        own = jax.lax.dynamic_slice_in_dim(ids, i * pages, pages, axis=1)
        entries = cache.values[layer, own]
        entries = dequantised(entries, cache.scales, layer, own, rank, q.dtype)
        entries = entries.reshape(batch, num_tokens, width)
        keys, values = up.expand(entries[..., :rank])
        shared = jnp.broadcast_to(entries[..., None, rank:], (*keys.shape[:3], rope_dim))
        keys = jnp.concatenate([keys, shared], axis=-1)
        kv = jnp.stack([_padded(keys, dim), _padded(values, dim)], axis=2)
        kv = kv.reshape(1, batch * pages, page_size, *kv.shape[2:])
        within = positions - i * num_tokens
        out, lse = paged_attention_part(q, kv, jnp.int32(0), table, within, kernels=rows.kernels)
        return out[..., :value_dim], lse

    def add(i: jax.Array, so_far: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, lse = part(i)
        total = jnp.logaddexp(so_far[1], lse)
        finite = jnp.where(jnp.isfinite(total), total, 0.0)
        mine, others = (jnp.exp(x - finite)[..., None] for x in (lse, so_far[1]))
        return out * mine + so_far[0] * others, total

    num_blocks = jnp.minimum(positions.max() // num_tokens + 1, ids.shape[1] // pages)
    out, _ = jax.lax.fori_loop(1, num_blocks, add, part(0))
    return out.astype(q.dtype).reshape(-1, num_heads, value_dim)


def head_dim(key_dim: int, value_dim: int) -> int:
    """Return the common width of keys and values in the kernel, a power of two."""
    return 1 << (max(key_dim, value_dim) - 1).bit_length()


def _padded(x: jax.Array, dim: int) -> jax.Array:
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, dim - x.shape[-1]),))
