"""Softmax attention over pages of keys and values; a page table assigns pages to requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rope_write import HeadWeights, rope_write, split_heads
from specjax.checks import check_multiple
from specjax.device.cache.kind import PagesOnly
from specjax.device.cache.pages import Pages
from specjax.device.cache.rows import CachedRows


class ProjectedHeads(NamedTuple):
    """Projected queries, gates, keys and values of N rows."""

    qkv: jax.Array  # [N, F]
    weights: HeadWeights  # bias and norms, applied next
    angles: tuple[jax.Array, jax.Array]  # cos and sin of the rotary angles, f32[N, n]
    sinks: jax.Array | None = None  # [H], see `paged_attention`
    query_scales: jax.Array | None = None  # f32[N, 1, 1], multiply rotated queries

    def of_rows(self, part: slice) -> "ProjectedHeads":
        """See `RowInputs.of_rows`."""
        cos, sin = self.angles
        scales = None if self.query_scales is None else self.query_scales[part]
        return self._replace(qkv=self.qkv[part], angles=(cos[part], sin[part]), query_scales=scales)


@dataclass(frozen=True, kw_only=True)
class PagedAttention(PagesOnly):
    """Grouped-query attention of each row over the rows of its request up to the row itself.

    If `window` is set, a row attends only to the last `window` rows, including itself. The cache's
    pages have the shape [layers, pages, page_size, 2, H_kv, D_h]; axis 3 holds a token's key and
    value. Scales of tokens have the shape [layers, pages, page_size, 2, H_kv].
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    has_centred_norms: bool = False  # whether the weights of q and k norms are stored minus one
    window: int | None = None  # None: no limit
    query_scale: float = 1.0  # multiplies rotated queries, in addition to head_dim^-1/2
    soft_cap: float | None = None  # c in c tanh(score / c), which bounds scores
    keeps_dtype: bool = False  # see `PagesOnly`
    layer_scales: tuple[tuple[float, float], ...] = ()  # of keys and of values, see `PagesOnly`

    def __post_init__(self):
        check_multiple(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)

    @property
    def name(self) -> str:
        """The name of this kind of layer in Hugging Face configs."""
        return "full_attention" if self.window is None else "sliding_attention"

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of a token's key and value."""
        return 2, self.num_kv_heads, self.head_dim

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scales of a token's keys and values."""
        return 2, self.num_kv_heads

    def write(
        self, rows: CachedRows, cache: Pages, layer: jax.Array, inputs: ProjectedHeads
    ) -> tuple[tuple[jax.Array, jax.Array], Pages]:
        """Write keys and values to the pages.

        Return the queries [B, T, H, D_h] with their positions i32[B, T], and the new cache. If
        `rows.attends` is false, there are no queries, and H is 0.
        """
        cos, sin = map(rows.by_request, inputs.angles)
        positions, page_table = rows.by_request(rows.positions), rows.table(self.window)
        q, values, scales = rope_write(
            rows.by_request(inputs.qkv),
            inputs.weights,
            (cos, sin),
            cache.values,
            layer,
            page_table,
            positions,
            num_heads=self.num_heads if rows.attends else 0,
            scales=cache.scales,
            eps=self.rms_norm_eps,
            is_centred=self.has_centred_norms,
            writes=rows.writes,
            kernels=rows.kernels,
        )
        return (q, positions), Pages(values, scales)

    def read(
        self,
        rows: CachedRows,
        cache: Pages,
        layer: jax.Array,
        inputs: ProjectedHeads,
        queries: tuple[jax.Array, jax.Array],
    ) -> jax.Array:
        """Attend to the pages; return the output [N, H, D_h]. H is 0 if `rows.attends` is false."""
        q, positions = queries
        if not rows.attends:
            return jax.lax.collapse(q, 0, 2)
        scales = inputs.query_scales
        q = self._scaled(q, None if scales is None else rows.by_request(scales))
        reach = positions if rows.reach is None else rows.by_request(rows.reach)
        origin = None if rows.origin is None else rows.by_request(rows.origin)
        out = paged_attention(
            q,
            cache.values,
            layer,
            rows.table(self.window),
            reach,
            scales=cache.scales,
            window=self.window,
            origins=None if self.window is None else origin,
            soft_cap=self.soft_cap,
            sinks=inputs.sinks,
            kernels=rows.kernels,
        )
        return out.reshape(-1, *out.shape[2:])

    def causal(self, length: int, inputs: ProjectedHeads) -> jax.Array:
        """Return the output [N, H, D_h] of causal attention within sequences of `length` rows."""
        q, k, v = self.split(inputs)
        weights = _softmax([self._causal_scores(q, k, length)], inputs.sinks)
        return _weighted_values(weights, v, q.shape)

    def unrolled(self, length: int, kept: tuple, inputs: ProjectedHeads) -> tuple[jax.Array, tuple]:
        """Run one more drafting step; return its output [N, H, D_h], and `kept` for the next step.

        `kept` is a tuple with the keys and values (k, v) of each step so far. The rows of step 0
        are the tokens of the sequences. Row t of a later step is one more draft after token t. This
        row attends to rows 0 to t of step 0, and to row t of steps 1, 2, ... up to this step, in
        one softmax.
        """
        q, k, v = self.split(inputs)
        kept = (*kept, (k, v))
        (k0, v0), drafted = kept[0], kept[1:]
        queries = _grouped(q, k.shape[1], length) * (q.shape[-1] ** -0.5)
        scores = [self._causal_scores(q, k0, length, distance=len(drafted))]
        for i, (key, _) in enumerate(drafted, start=1):
            own = _heads_first(key, length)[:, :, None]
            score = self._capped((queries * own).sum(-1, keepdims=True).astype(jnp.float32))
            is_seen = self.window is None or len(drafted) - i < self.window
            scores.append(score if is_seen else jnp.full_like(score, -jnp.inf))
        weights = _softmax(scores, inputs.sinks)
        out = _weighted_values(weights[..., :length], v0, q.shape)
        for i, (_, value) in enumerate(drafted):
            own = weights[..., length + i].transpose(0, 3, 1, 2)  # [B, T, H_kv, G]
            own = own.reshape(q.shape[0], k.shape[1], -1, 1).astype(v.dtype)
            out = out + (own * value[:, :, None]).reshape(q.shape)
        return out, kept

    def split(self, inputs: ProjectedHeads) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return rotated queries [N, H, D_h], keys and values [N, H_kv, D_h]."""
        q, k, v = split_heads(
            inputs.qkv,
            *inputs.weights,
            *inputs.angles,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            eps=self.rms_norm_eps,
            is_centred=self.has_centred_norms,
        )
        return self._scaled(q, inputs.query_scales), k, v

    def _scaled(self, q: jax.Array, scales: jax.Array | None) -> jax.Array:
        """Multiply queries [..., H, D_h] by their rows' `scales`, if any, and by `query_scale`."""
        if scales is not None:
            q = q * scales.astype(q.dtype)
        if self.query_scale == 1:
            return q
        # Rounding the scale to q's dtype would shift all scores in the same direction.
        return (q.astype(jnp.float32) * self.query_scale).astype(q.dtype)

    def _capped(self, scores: jax.Array) -> jax.Array:
        """Return scores after the soft cap, or unchanged if there is no cap."""
        cap = self.soft_cap
        return scores if cap is None else cap * jnp.tanh(scores / cap)

    def _causal_scores(
        self, q: jax.Array, k: jax.Array, length: int, distance: int = 0
    ) -> jax.Array:
        """Return scaled and capped scores f32[B, H_kv, G, T, T] of q [N, H, D_h] and k.

        k is [N, H_kv, D_h], N = B T, and H = H_kv G. Row t of q sees rows 0 to t of k. Scores of
        keys that a row does not see are -inf.

        If there is a window, a row sees only keys among the last `window` positions up to its own.
        Row t of q is at position t + `distance`, and row s of k is at position s.
        """
        queries = _grouped(q, k.shape[1], length) * (q.shape[-1] ** -0.5)
        scores = jnp.einsum("bhgtd,bhsd->bhgts", queries, _heads_first(k, length))
        mask = jnp.tril(jnp.ones((length, length), bool))
        if self.window is not None:
            mask &= ~jnp.tril(mask, distance - self.window)
        return jnp.where(mask, self._capped(scores.astype(jnp.float32)), -jnp.inf)


def _heads_first(x: jax.Array, length: int) -> jax.Array:
    """Transpose [N, H, D_h] to [B, H, T, D_h]."""
    return x.reshape(-1, length, *x.shape[1:]).transpose(0, 2, 1, 3)


def _grouped(q: jax.Array, num_kv_heads: int, length: int) -> jax.Array:
    """Return queries q [N, H, D_h] grouped by key head: [B, H_kv, H / H_kv, T, D_h]."""
    q = _heads_first(q, length)
    return q.reshape(q.shape[0], num_kv_heads, -1, *q.shape[2:])


def _softmax(scores: Sequence[jax.Array], sinks: jax.Array | None) -> jax.Array:
    """Concatenate `scores`, each f32[B, H_kv, G, T, ...], on the last axis; return the softmax.

    `sinks` [H] are additional scores, one per head, whose weights are dropped.
    """
    if sinks is None:
        return jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    shape = (*scores[0].shape[:-1], 1)
    sink = sinks.astype(jnp.float32).reshape(1, *shape[1:3], 1, 1)
    joined = jnp.concatenate([*scores, jnp.broadcast_to(sink, shape)], axis=-1)
    return jax.nn.softmax(joined, axis=-1)[..., :-1]


def _weighted_values(weights: jax.Array, v: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the sums of values v weighted by `weights` [B, H_kv, G, T, T], as [N, H, D_h]."""
    length = weights.shape[-2]
    out = jnp.einsum("bhgts,bhsd->bhgtd", weights.astype(v.dtype), _heads_first(v, length))
    return out.transpose(0, 3, 1, 2, 4).reshape(shape)
