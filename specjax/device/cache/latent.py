"""Attention over pages of latents, from which all heads' keys and values are computed (MLA)."""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.quantisation import as_stored
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rope_write.reference import pages_of, rotate
from specjax.device.cache.kind import PagesOnly
from specjax.device.cache.latent_prompt import attend_plainly, head_dim
from specjax.device.cache.pages import Pages
from specjax.device.cache.rows import CachedRows
from specjax.device.weights.latent_up import LatentProjection

NORM_EPS = 1e-6  # of the latent norm; fixed, independent of the model's rms_norm_eps
# Number of products that a GPU computes in the time that it takes to move one 16-bit number: 184
# measured on an H100, about 130 expected on an H200.
PRODUCTS_PER_NUMBER = 150


class ProjectedLatents(NamedTuple):
    """Projected queries and latents of N rows, and the weights to compute keys and values."""

    q: jax.Array  # [N, H (D_n + D_r)]
    latent: jax.Array  # [N, R + D_r], the latent, then the key part shared by all heads
    norm: jax.Array  # [R], norm of the latent
    up: LatentProjection
    angles: tuple[jax.Array, jax.Array]  # cos and sin of the rotary angles, f32[N, D_r / 2]

    def of_rows(self, part: slice) -> "ProjectedLatents":
        """See `RowInputs.of_rows`."""
        cos, sin = self.angles
        return self._replace(
            q=self.q[part], latent=self.latent[part], angles=(cos[part], sin[part])
        )


@dataclass(frozen=True, kw_only=True)
class LatentAttention(PagesOnly):
    """Attention of each row over all rows of its request up to itself (DeepSeek-V2, section 2.1).

    A head's key is (W_k c, r) and its value is W_v c, where c is the latent and r is the rotated
    part, which all heads share. The cache's pages [layers, pages, page_size, R + D_r] hold c and r.
    Scales of tokens have the shape [layers, pages, page_size, 2], for c and for r.

    Cached rows usually take the absorbed form: W_k is applied to the queries and W_v to the output,
    so that latents need not be expanded. Wide prefill chunks take the plain form: keys and values
    are recomputed from latents. This takes fewer operations if a chunk has many rows.
    """

    num_layers: int
    num_heads: int
    rank: int  # R, width of the latent
    nope_dim: int  # D_n, the part of a query or key that is not rotated
    rope_dim: int  # D_r, the rotated part of a query or key
    value_dim: int  # D_v, width of a value
    scale: float  # multiplies the scores
    is_interleaved: bool  # rotates pairs (2 i, 2 i + 1) rather than (i, i + D_r / 2)
    keeps_dtype: bool = False  # see `PagesOnly`
    layer_scales: tuple[tuple[float, float], ...] = ()  # of c and of r, see `PagesOnly`

    @property
    def name(self) -> str:
        """The name of this kind of layer in reports. Configs have no name for it."""
        return "latent_attention"

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of a token's latent and shared key part."""
        return (self.rank + self.rope_dim,)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scales of a token's latent and of its shared key part."""
        return (2,)

    @property
    def scaled_parts(self) -> tuple[str, str]:
        """("k", "k"): latents and rotated key parts both use the checkpoint's scale of keys."""
        return "k", "k"

    @property
    def window(self) -> None:
        """None: a row attends to all rows up to itself."""

    @property
    def plain_width(self) -> float:
        """The estimated number of rows in a chunk above which the plain form is faster.

        The plain form computes every head's keys and values from the latents; the absorbed form
        attends to the latents themselves. For each token of the context, the plain form needs fewer
        operations per row. But it first has to compute the token's keys and values, and this pays
        off only in chunks of many rows. The length of the context does not matter, because the cost
        of both forms is proportional to it.
        """
        made = self.nope_dim + self.value_dim
        moved = made + 2 * self._head_dim + 6 * self.value_dim
        saved = 2 * self.rank + self.rope_dim - 2 * self._head_dim
        return (self.rank * made + PRODUCTS_PER_NUMBER * moved) / saved if saved > 0 else inf

    @property
    def row_size(self) -> int:
        """The number of intermediate numbers per row in the plain form.

        These numbers are queries; keys and values, once as computed and once padded for the kernel;
        and two f32 outputs. Attention processes the context in blocks, and has one output for the
        latest block and one for all blocks so far. The absorbed form needs fewer numbers.
        """
        return self.num_heads * (5 * self._head_dim + self.nope_dim + 3 * self.value_dim)

    @property
    def _head_dim(self) -> int:
        return head_dim(self.nope_dim + self.rope_dim, self.value_dim)

    def write(
        self, rows: CachedRows, cache: Pages, layer: jax.Array, inputs: ProjectedLatents
    ) -> tuple[tuple[jax.Array, jax.Array], Pages]:
        """Write latents to the pages.

        Return the unrotated and the rotated part of the queries, as in `_queries`, and the cache.
        """
        queries = self._queries(inputs)
        if rows.writes:
            cache = _write(cache, layer, rows, *self._entries(inputs))
        return queries, cache

    def read(
        self,
        rows: CachedRows,
        cache: Pages,
        layer: jax.Array,
        inputs: ProjectedLatents,
        queries: tuple[jax.Array, jax.Array],
    ) -> jax.Array:
        """Attend to the pages; return the output [N, H, D_v]."""
        nope, rope = queries
        if rows.folds and rows.width >= self.plain_width:
            return attend_plainly(rows, cache, layer, nope, rope, inputs.up, self.scale)
        q = jnp.concatenate([inputs.up.absorb(nope), rope], axis=-1)
        reach = rows.by_request(rows.positions if rows.reach is None else rows.reach)
        mixed = latent_attention(
            rows.by_request(q),
            cache.values,
            layer,
            rows.page_table,
            reach,
            rank=self.rank,
            scale=self.scale,
            scales=cache.scales,
            kernels=rows.kernels,
        )
        return inputs.up.project(mixed.reshape(-1, *mixed.shape[2:]))

    def causal(self, length: int, inputs: ProjectedLatents) -> jax.Array:
        """Return the output [N, H, D_v] of causal attention within sequences of `length` rows."""
        q, k, v = (_by_sequence(x, length) for x in self._heads(inputs))
        weights = jax.nn.softmax(self._causal_scores(q, k), axis=-1)
        return _mixed(weights, v).reshape(-1, *v.shape[2:])

    def unrolled(
        self, length: int, kept: tuple, inputs: ProjectedLatents
    ) -> tuple[jax.Array, tuple]:
        """Run one more drafting step; return its output [N, H, D_v] and the new `kept`.

        `kept` is a tuple with the keys and values (k, v) of each step so far. The rows of step 0
        are the tokens of the sequences. Row t of a later step is one more draft after token t. This
        row attends to rows 0 to t of step 0, and to row t of steps 1, 2, ... up to this step, in
        one softmax.
        """
        q, k, v = (_by_sequence(x, length) for x in self._heads(inputs))
        kept = (*kept, (k, v))
        (k0, v0), drafted = kept[0], kept[1:]
        scores = [self._causal_scores(q, k0)]
        for key, _ in drafted:
            own = jnp.einsum("bthd,bthd->bht", q, key).astype(jnp.float32)
            scores.append(own[..., None] * self.scale)
        weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
        out = _mixed(weights[..., :length], v0)
        for i, (_, value) in enumerate(drafted):
            own = weights[..., length + i].swapaxes(1, 2)[..., None]  # [B, T, H, 1]
            out = out + own.astype(v.dtype) * value
        return out.reshape(-1, *v.shape[2:]), kept

    def _queries(self, inputs: ProjectedLatents) -> tuple[jax.Array, jax.Array]:
        """Return the unrotated part [N, H, D_n] and the rotated part [N, H, D_r] of queries."""
        q = inputs.q.reshape(inputs.q.shape[0], self.num_heads, -1)
        return q[..., : self.nope_dim], self._rotated(q[..., self.nope_dim :], inputs.angles)

    def _entries(self, inputs: ProjectedLatents) -> tuple[jax.Array, jax.Array]:
        """Return normed latents [N, R] and the rotated shared part of keys [N, D_r]."""
        latent, rope = jnp.split(inputs.latent, [self.rank], axis=-1)
        rotated = self._rotated(rope[:, None], inputs.angles)[:, 0]
        return rms_norm(latent, inputs.norm, NORM_EPS), rotated

    def _heads(self, inputs: ProjectedLatents) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries and keys [N, H, D_n + D_r] and values [N, H, D_v] of every head."""
        latent, shared = self._entries(inputs)
        keys, values = inputs.up.expand(latent)
        shared = jnp.broadcast_to(shared[:, None], (*keys.shape[:2], self.rope_dim))
        q = jnp.concatenate(self._queries(inputs), axis=-1)
        return q, jnp.concatenate([keys, shared], axis=-1), values

    def _rotated(self, x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Return x [N, heads, D_r] after the rotary embedding, which rotates pairs of dimensions.

        The result has the first dimensions of all pairs, followed by the second dimensions. Scores
        do not depend on this order, because queries and keys have the same order.
        """
        if self.is_interleaved:
            x = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
        return rotate(x, *angles)

    def _causal_scores(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Return scaled scores f32[B, H, T, T] of q and k [B, T, H, D].

        The scores of keys after a query's position are -inf.
        """
        scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) * self.scale
        return jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -jnp.inf)


def _by_sequence(x: jax.Array, length: int) -> jax.Array:
    """Reshape x [N, ...] to [B, T, ...], where T is `length`."""
    return x.reshape(-1, length, *x.shape[1:])


def _mixed(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Return the sums [B, T, H, D_v] of values v, weighted by `weights` f32[B, H, T, T]."""
    return jnp.einsum("bhts,bshd->bthd", weights.astype(v.dtype), v)


def _write(
    cache: Pages, layer: jax.Array, rows: CachedRows, latent: jax.Array, rope: jax.Array
) -> Pages:
    """Write latents [N, R] and key parts [N, D_r] to the pages of their rows.

    Rows without a page are skipped.
    """
    pool, scales = cache
    given = (None, None)
    if scales is not None and scales.ndim == 2:  # of layers
        given = scales[layer, 0], scales[layer, 1]
    each = zip((latent, rope), given, strict=True)
    parts, made = zip(*(as_stored(x, pool.dtype, one) for x, one in each), strict=True)
    entries = jnp.concatenate(parts, axis=-1)
    positions, page_size = rows.by_request(rows.positions), pool.shape[2]
    page = pages_of(pool, rows.page_table, positions)
    if scales is not None and made[0] is not None:
        new = rows.by_request(jnp.stack(made, axis=-1))
        scales = scales.at[layer, page, positions % page_size].set(new, mode="drop")
    entries = rows.by_request(entries)
    return Pages(pool.at[layer, page, positions % page_size].set(entries, mode="drop"), scales)
