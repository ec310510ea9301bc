"""What a layer asks of the rows it runs on."""

from typing import Any, NamedTuple, Protocol

import jax

from pallas_kernels.gated_delta_rule import DeltaRuleWeights
from pallas_kernels.gated_delta_rule import Heads as DeltaHeads
from pallas_kernels.rope_write import HeadWeights


class AttentionShape(Protocol):
    """The static geometry of an attention layer; a model has these fields."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def has_centred_norms(self) -> bool:
        """Whether a norm's weight is stored as its distance from one."""
        ...


class ProjectedHeads(NamedTuple):
    """Queries, gates, keys and values of N rows as their projection left them."""

    qkv: jax.Array  # [N, F]
    weights: HeadWeights  # what each goes through
    angles: tuple[jax.Array, jax.Array]  # cos and sin of the rotation, f32[N, n]


class Rows(Protocol):
    """The N token rows of one extension: where each stands (i32[N]) and what it goes on from."""

    @property
    def positions(self) -> jax.Array: ...
    @property
    def kernels(self) -> str: ...

    def attend(
        self, kv: Any, layer: jax.Array, heads: ProjectedHeads, shape: AttentionShape
    ) -> tuple[jax.Array, Any]:
        """Make keys and values part of the context `kv`, then attend the queries over it: the
        output [N, H, D], and the context that holds them."""
        ...

    def recur(
        self,
        cache: Any,
        layer: jax.Array,
        x: jax.Array,
        weights: DeltaRuleWeights,
        heads: DeltaHeads,
        eps: float,
    ) -> tuple[jax.Array, Any]:
        """Run the gated delta rule on projected inputs x [N, C + H_v D_v + 2 H_v]: outputs
        [N, H_v, D_v], and the cache that the rows left. See `pallas_kernels.gated_delta_rule`."""
        ...
