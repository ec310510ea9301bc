"""The truncation settings of a row, as the Triton kernels read them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.truncation.order import ordered

LOG2_E = 1.4426950408889634


class Asked(NamedTuple):
    """A row's truncation settings, and whether each of them may exclude tokens."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    cuts_k: jax.Array  # whether top_k may exclude tokens
    cuts_p: jax.Array  # whether top_p may exclude tokens
    cuts_min: jax.Array  # whether min_p may exclude tokens

    @classmethod
    def read(cls, refs: Any, row: jax.Array, vocab_size: int) -> "Asked":
        """Return a row's settings, read from the refs of temperature, top_k, top_p and min_p."""
        temperature, top_k, top_p, min_p = (ref[row] for ref in refs)
        cuts_k = (top_k > 0) & (top_k < vocab_size)
        # A top_p that rounds to 0 keeps the best token.
        least = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)
        return cls(temperature, top_k, least, min_p, cuts_k, top_p < 1, min_p > 0)

    @property
    def cuts(self) -> jax.Array:
        """Whether any setting may exclude tokens."""
        return self.cuts_k | self.cuts_p | self.cuts_min

    def weigh(self, x: jax.Array, best: jax.Array) -> jax.Array:
        """Return the weights exp((x - best) / temperature) of logits x; the largest weight is 1."""
        return jnp.exp2((x - best) * (LOG2_E / self.temperature))

    def floor(self, best: jax.Array) -> jax.Array:
        """Return the key (see `ordered`) of the smallest logit that min_p keeps.

        Without min_p, return the key of -inf.
        """
        least = best + jnp.log(self.min_p) * self.temperature
        return ordered(jnp.where(self.cuts_min, least, -jnp.inf))
