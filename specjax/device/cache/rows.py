"""Rows that go on from what the caches hold: the context of every serving step."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule import DeltaRuleCache, DeltaRuleWeights, gated_delta_rule
from pallas_kernels.gated_delta_rule import Heads as DeltaHeads
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rope_write import rope_write
from specjax.device.models.layers.rows import AttentionShape, ProjectedHeads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CachedRows:
    """T rows for each of B requests, laid end to end; row b*T + t belongs to request b.

    Rejected tokens need no undoing. Their keys and values lie past a request's length, where no row
    looks and where the next extension writes. A recurrent state lags behind by the `pending` tokens
    that the last extension ran and that stand: this one folds them in first. Rows that `folds`
    marks as certain, as a prompt's are, leave nothing pending. Rows that stand in the pages already
    are run again without `writes`: pages are shared, and another program may round differently.
    """

    positions: jax.Array  # i32[B T], absolute; -1 for a padding row
    page_table: jax.Array  # i32[B, P]; -1 where no page is assigned
    slots: jax.Array | None = None  # i32[B], of recurrent states; past the last for a padding row
    pending: jax.Array | None = None  # i32[B]
    folds: bool = field(default=False, metadata={"static": True})
    writes: bool = field(default=True, metadata={"static": True})
    kernels: str = field(default="auto", metadata={"static": True})

    @classmethod
    def starting_at(
        cls, starts: jax.Array, counts: jax.Array, num_rows: int, page_table: jax.Array, **others
    ) -> "CachedRows":
        """`num_rows` rows per request from position starts[b] on, of which counts[b] are real."""
        row = jnp.arange(num_rows, dtype=jnp.int32)[None]
        positions = jnp.where(row < counts[:, None], starts[:, None] + row, -1)
        return cls(positions.reshape(-1), page_table, **others)

    @property
    def width(self) -> int:
        """T, rows per request."""
        return self.positions.shape[0] // self.page_table.shape[0]

    def attend(
        self, kv: jax.Array, layer: jax.Array, heads: ProjectedHeads, shape: AttentionShape
    ) -> tuple[jax.Array, jax.Array]:
        """Write keys and values to the pages, then attend the queries over them: [B T, H, D]."""
        positions, qkv, cos, sin = map(self._by_request, (self.positions, heads.qkv, *heads.angles))
        q, kv = rope_write(
            qkv,
            heads.weights,
            (cos, sin),
            kv,
            layer,
            self.page_table,
            positions,
            num_heads=shape.num_heads,
            eps=shape.rms_norm_eps,
            is_centred=shape.has_centred_norms,
            writes=self.writes,
            kernels=self.kernels,
        )
        out = paged_attention(q, kv, layer, self.page_table, positions, kernels=self.kernels)
        return out.reshape(-1, *out.shape[2:]), kv

    def recur(
        self,
        cache: DeltaRuleCache,
        layer: jax.Array,
        x: jax.Array,
        weights: DeltaRuleWeights,
        heads: DeltaHeads,
        eps: float,
    ) -> tuple[jax.Array, DeltaRuleCache]:
        """Bring the states up to date, then run the rows x [B T, ...] on from them."""
        positions, x = map(self._by_request, (self.positions, x))
        assert self.slots is not None and self.pending is not None, "rows without slots"
        out, cache = gated_delta_rule(
            x,
            weights,
            cache,
            layer,
            self.slots,
            positions,
            self.pending,
            folds=self.folds,
            eps=eps,
            kernels=self.kernels,
        )
        return out.reshape(-1, *out.shape[2:]), cache

    def _by_request(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.page_table.shape[0], -1, *x.shape[1:])


def padded_width(batch: int, width: int, multiple: int) -> int:
    """The least T >= width with batch * T a multiple of `multiple`, as matrix units want it."""
    while batch * width % multiple:
        width += 1
    return width
