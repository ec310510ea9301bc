"""The cache of the gated delta rule: for each request a state, and buffers of its last tokens."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta_rule import (
    DeltaRuleCache,
    DeltaRuleWeights,
    Heads,
    gated_delta_rule,
)
from pallas_kernels.gated_delta_rule.reference import (
    convolve,
    gated_norm,
    recur_chunks,
    split_inputs,
    split_tokens,
)
from specjax.checks import check_multiple
from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.rows import CachedRows


class DeltaInputs(NamedTuple):
    """N rows after the layer's input projection, and the weights of the gated delta rule."""

    x: jax.Array  # [N, C + H_v D_v + 2 H_v], q | k | v, output gate, write gate, decay
    weights: DeltaRuleWeights

    def of_rows(self, part: slice) -> "DeltaInputs":
        """See `RowInputs.of_rows`."""
        return self._replace(x=self.x[part])


class Snapshots(NamedTuple):
    """Snapshots: copies of a recurrent state and of the last inputs of the convolution.

    A request that reuses a cached prefix needs a snapshot from the end of the prefix, and the pages
    of the prefix. Neither is useful alone. S is the number of snapshots here.
    """

    state: jax.Array  # f32[layers, S, H_v, D_v, D_k]
    tail: jax.Array  # [layers, S, W - 1, C], inputs that the convolution of later tokens reads


@dataclass(frozen=True, kw_only=True)
class DeltaRule:
    """The cache kind of Gated DeltaNet layers. A state is one matrix per head."""

    num_layers: int
    heads: Heads
    conv_width: int  # W
    rms_norm_eps: float  # eps of the output norm

    def __post_init__(self):
        check_multiple(num_values=self.heads.num_values, num_keys=self.heads.num_keys)

    @property
    def name(self) -> str:
        """The name of this kind of layer in Hugging Face configs."""
        return "linear_attention"

    @property
    def is_recurrent(self) -> bool:
        """True: each request has a state."""
        return True

    @property
    def token_shape(self) -> tuple[int, ...]:
        """(0,): there are no pages."""
        return (0,)

    @property
    def window(self) -> None:
        """None: there are no pages."""

    @property
    def row_size(self) -> int:
        """0: memory planning always includes the layer's inputs; see `CacheKind.row_size`."""
        return 0

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a state: one matrix per head."""
        return self.heads.num_values, self.heads.value_dim, self.heads.key_dim

    def init(self, sizes: CacheSizes, dtype: Any) -> DeltaRuleCache:
        """Create empty states, and ring buffers for steps of `sizes.max_rows` rows per request."""
        places = self.num_layers, sizes.num_slots
        shapes = DeltaRuleCache.shapes(
            *places, self.heads, self.conv_width, sizes.max_rows, np.dtype(dtype)
        )
        return DeltaRuleCache(*(jnp.zeros(x.shape, x.dtype) for x in shapes))

    def init_snapshots(self, num_snapshots: int, dtype: Any) -> Snapshots:
        """Allocate `num_snapshots` snapshots."""
        shape = self.num_layers, num_snapshots
        return Snapshots(
            jnp.zeros((*shape, *self.state_shape), jnp.float32),
            jnp.zeros((*shape, self.conv_width - 1, self.heads.channels), dtype),
        )

    def take(
        self,
        snapshots: Snapshots,
        ids: jax.Array,
        cache: DeltaRuleCache,
        slots: jax.Array,
        ends: jax.Array,
    ) -> Snapshots:
        """See `CacheKind.take`."""
        tail = cache.ring[:, slots[:, None], self._tail_columns(cache, ends)]
        tail = jnp.where((self._tail_places(ends) >= 0)[..., None], tail, 0)
        return Snapshots(
            snapshots.state.at[:, ids].set(cache.state[:, slots], mode="drop"),
            snapshots.tail.at[:, ids].set(tail, mode="drop"),
        )

    def restore(
        self,
        cache: DeltaRuleCache,
        slots: jax.Array,
        snapshots: Snapshots,
        ids: jax.Array,
        ends: jax.Array,
    ) -> DeltaRuleCache:
        """Copy snapshots to the states of requests; see `CacheKind.restore`."""
        columns = self._tail_columns(cache, ends)
        # As after a prompt, entries that must not be read are NaN.
        empty = (x.at[:, slots].set(jnp.nan, mode="drop") for x in cache[1:])
        restored = DeltaRuleCache(
            cache.state.at[:, slots].set(snapshots.state[:, ids], mode="drop"), *empty
        )
        tail = snapshots.tail[:, ids]
        return restored._replace(
            ring=restored.ring.at[:, slots[:, None], columns].set(tail, mode="drop")
        )

    def write(
        self, rows: CachedRows, cache: DeltaRuleCache, layer: jax.Array, inputs: DeltaInputs
    ) -> tuple[jax.Array, DeltaRuleCache]:
        """Run the rows; return the output [N, H_v, D_v] and the new cache.

        First, the recurrent states are updated with their pending tokens: accepted tokens that the
        states lack.
        """
        assert rows.slots is not None and rows.pending is not None, "rows without slots"
        out, cache = gated_delta_rule(
            rows.by_request(inputs.x),
            inputs.weights,
            cache,
            layer,
            rows.slots,
            rows.by_request(rows.positions),
            rows.pending,
            folds=rows.folds,
            eps=self.rms_norm_eps,
            kernels=rows.kernels,
        )
        return out.reshape(-1, *out.shape[2:]), cache

    def read(
        self,
        rows: CachedRows,
        cache: DeltaRuleCache,
        layer: jax.Array,
        inputs: DeltaInputs,
        queries: jax.Array,
    ) -> jax.Array:
        """Return `queries`: `write` has already computed the output."""
        return queries

    def causal(self, length: int, inputs: DeltaInputs) -> jax.Array:
        """Return the output [N, H_v, D_v] for sequences of `length` rows, from empty states."""
        weights = inputs.weights
        x = inputs.x.reshape(-1, length, inputs.x.shape[-1])
        raw, z, gates = split_inputs(x, weights, self.heads)
        padded = jnp.pad(raw, ((0, 0), (self.conv_width - 1, 0), (0, 0)))
        tokens = split_tokens(convolve(padded, weights.conv), gates, self.heads)
        _, out = recur_chunks(jnp.zeros((x.shape[0], *self.state_shape)), tokens)
        out = out.astype(x.dtype)
        if weights.norm is not None:
            out = gated_norm(out, z, weights.norm, self.rms_norm_eps)
        return out.reshape(-1, *out.shape[2:])

    def unrolled(self, length: int, kept: Any, inputs: DeltaInputs) -> tuple[jax.Array, Any]:
        """Raise NotImplementedError: drafters have no recurrent layers."""
        raise NotImplementedError("chains of drafts run attention layers only")

    def _tail_places(self, ends: jax.Array) -> jax.Array:
        length = self.conv_width - 1
        return ends[:, None] - length + jnp.arange(length)[None]

    def _tail_columns(self, cache: DeltaRuleCache, ends: jax.Array) -> jax.Array:
        return self._tail_places(ends) % cache.ring.shape[2]
