"""Rows without a cache: whole sequences under a causal mask, as training sees them."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from specjax.device.cache.kind import CacheKind


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CausalRows:
    """B sequences of T tokens laid end to end; row b*T + t stands at position t of sequence b."""

    positions: jax.Array  # i32[B T]
    length: int = field(metadata={"static": True})
    kernels: str = field(default="reference", metadata={"static": True})  # kernels have no gradient

    @classmethod
    def of(cls, batch: int, length: int) -> "CausalRows":
        """Rows of `batch` sequences that all start at position 0."""
        return cls(jnp.tile(jnp.arange(length, dtype=jnp.int32), batch), length)

    def mix(
        self, kind: CacheKind, cache: Any, layer: jax.Array, inputs: Any
    ) -> tuple[jax.Array, Any]:
        """See `Rows.mix`; there is nothing to keep."""
        return kind.causal(self.length, inputs), cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UnrolledRows:
    """Causal rows on the `step`-th draft of an unrolled chain (EAGLE-3's training-time test).

    As at inference, a row sees the verified rows up to its own (step 0, causal) and, of each later
    step, only what it drafted itself. What they keep of the steps so far begins as ().
    """

    positions: jax.Array  # i32[B T], shifted by `step`
    length: int = field(metadata={"static": True})
    kernels: str = field(default="reference", metadata={"static": True})  # kernels have no gradient

    @classmethod
    def of(cls, batch: int, length: int, step: int) -> "UnrolledRows":
        """Rows of `batch` sequences, `step` drafts on."""
        return cls(jnp.tile(jnp.arange(length, dtype=jnp.int32) + step, batch), length)

    def mix(
        self, kind: CacheKind, cache: Any, layer: jax.Array, inputs: Any
    ) -> tuple[jax.Array, Any]:
        """See `Rows.mix`."""
        return kind.unrolled(self.length, cache, inputs)
