"""Weights that project latents up to the keys and values of every head (MLA)."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoint.spec import stored
from specjax.device.weights.weight import Weight, weight


class LatentProjection(Weight):
    """A matrix [R, D_n + D_v] for each of H heads, which turns latents into keys and values.

    R is the width of a latent. D_n is the width of a head's key without its rotated part, and D_v
    is the width of a head's value.
    """

    @property
    def value_dim(self) -> int:
        """The width D_v of a head's value."""
        raise NotImplementedError

    def expand(self, latents: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the keys [..., H, D_n] and values [..., H, D_v] of latents [..., R]."""
        raise NotImplementedError

    def absorb(self, queries: jax.Array) -> jax.Array:
        """Convert queries that are compared with keys to queries that are compared with latents.

        `queries` is [N, H, D_n], and the result is [N, H, R].
        """
        raise NotImplementedError

    def project(self, mixed: jax.Array) -> jax.Array:
        """Convert weighted sums of latents [N, H, R] to weighted sums of values [N, H, D_v]."""
        raise NotImplementedError


@weight
@dataclass(frozen=True)
class LatentUp(LatentProjection):
    """The matrices of all heads as one array [H (D_n + D_v), R].

    The first D_n rows of a head give its keys, and its other rows give its values.
    """

    values: jax.Array  # [H (D_n + D_v), R]
    num_heads: int
    key_dim: int  # D_n

    @property
    def value_dim(self) -> int:
        """See `LatentProjection`."""
        return self.values.shape[0] // self.num_heads - self.key_dim

    def expand(self, latents: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `LatentProjection`."""
        made = jnp.einsum("...r,xr->...x", latents, self.values)
        made = made.reshape(*latents.shape[:-1], self.num_heads, -1)
        return made[..., : self.key_dim], made[..., self.key_dim :]

    def absorb(self, queries: jax.Array) -> jax.Array:
        """See `LatentProjection`."""
        return jnp.einsum("nhd,hdr->nhr", queries, self._by_head()[:, : self.key_dim])

    def project(self, mixed: jax.Array) -> jax.Array:
        """See `LatentProjection`."""
        return jnp.einsum("nhr,hdr->nhd", mixed, self._by_head()[:, self.key_dim :])

    def _by_head(self) -> jax.Array:
        """Return the weights [H, D_n + D_v, R].

        XLA fuses slices of the middle axis into the products. It would copy slices of another axis.
        """
        return self.values.reshape(self.num_heads, -1, self.values.shape[1])


def latent_up(name: str, num_heads: int, key_dim: int, value_dim: int, rank: int) -> Any:
    """Return a `LatentUp` whose array is the `TensorSpec` of the tensor `name`.

    The tensor is [H (D_n + D_v), R], for all heads.
    """
    shape = num_heads * (key_dim + value_dim), rank
    return LatentUp(stored([name], shape, rows="heads"), num_heads, key_dim)
