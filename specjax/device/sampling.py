"""From logits to tokens: the one path that prefill, plain decoding and verification share."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from specjax.device.noise import gumbel_noise


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of B requests; `at` picks the rows of a batch from per-slot arrays."""

    temperature: jax.Array  # f32[B]; 0 is greedy
    seeds: jax.Array  # u32[B]

    def at(self, slots: jax.Array) -> "Sampling":
        """The parameters of the requests at `slots`."""
        return jax.tree.map(lambda x: x[slots], self)

    def repeat(self, count: int) -> "Sampling":
        """The parameters of each request, `count` times in a row."""
        return jax.tree.map(lambda x: jnp.repeat(x, count), self)


def sample(
    logits: jax.Array,
    sampling: Sampling,
    positions: jax.Array,
    token_ids: jax.Array | None = None,
    vocab_size: int | None = None,
) -> jax.Array:
    """The token of each row of logits f32[N, V]: argmax(logits / T + Gumbel(seed, position)).

    That is a draw from softmax(logits / T) (Gumbel-max), made a function of seed and position.
    Rows at temperature 0 take the plain argmax; ties go to the lowest id. `positions` i32[N] are
    those the tokens will stand at. Logits over part of the vocabulary name their columns by
    `token_ids` i32[V], within `vocab_size`, so that they share the noise of the full one; the
    result is then still a column.
    """

    def perturbed(logits):
        noise = gumbel_noise(sampling.seeds, positions, vocab_size or logits.shape[1])
        noise = noise if token_ids is None else noise[:, token_ids]
        greedy = (sampling.temperature == 0)[:, None]
        scaled = logits / jnp.where(greedy, 1.0, sampling.temperature[:, None])
        return jnp.where(greedy, logits, scaled + noise)

    # Noise costs more than the argmax: a batch that is all greedy does not draw any.
    scores = jax.lax.cond((sampling.temperature > 0).any(), perturbed, lambda x: x, logits)
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)
