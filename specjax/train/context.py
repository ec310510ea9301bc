"""Rows without a cache, for training: whole sequences under a causal mask."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from specjax.device.cache.kind import CacheKind


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CausalRows:
    """B concatenated sequences of T tokens; row b*T + t is position t of sequence b."""

    positions: jax.Array  # i32[B T]
    length: int = field(metadata={"static": True})
    kernels: str = field(default="reference", metadata={"static": True})  # kernels have no gradient

    @classmethod
    def of(cls, batch: int, length: int) -> "CausalRows":
        """Return the rows of `batch` sequences that all start at position 0."""
        return cls(jnp.tile(jnp.arange(length, dtype=jnp.int32), batch), length)

    def mix(
        self, kind: CacheKind, cache: Any, layer: jax.Array, inputs: Any
    ) -> tuple[jax.Array, Any]:
        """See `Rows.mix`; the cache is not used."""
        return kind.causal(self.length, inputs), cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UnrolledRows:
    """Causal rows at the `step`-th draft of an unrolled chain (EAGLE-3's training-time test).

    As at inference, a row attends to the verified rows up to its own (step 0, causal) and, in each
    later step, only to its own drafts. The cache collects the steps so far and starts as ().
    """

    positions: jax.Array  # i32[B T], shifted by `step`
    length: int = field(metadata={"static": True})
    kernels: str = field(default="reference", metadata={"static": True})  # kernels have no gradient

    @classmethod
    def of(cls, batch: int, length: int, step: int) -> "UnrolledRows":
        """Return the rows of `batch` sequences at draft `step`."""
        return cls(jnp.tile(jnp.arange(length, dtype=jnp.int32) + step, batch), length)

    def mix(
        self, kind: CacheKind, cache: Any, layer: jax.Array, inputs: Any
    ) -> tuple[jax.Array, Any]:
        """See `Rows.mix`."""
        return kind.unrolled(self.length, cache, inputs)
