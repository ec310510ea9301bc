"""Counter-based noise: a request's draws depend on its seed and positions, not on the batch."""

from enum import IntEnum

import jax

from pallas_kernels.draw_tokens import gumbel_noise as gumbel_noise
from pallas_kernels.draw_tokens import keys


class Stream(IntEnum):
    """Names of independent streams of random numbers that belong to one seed."""

    TARGET = 0  # for the token at a position, with or without drafts
    DRAFT = 1  # for drafts that must not share the target's noise
    ACCEPT = 2  # for accepting a draft


def uniform_noise(
    seeds: jax.Array, stream: Stream, counters: tuple[jax.Array, ...], count: int
) -> jax.Array:
    """Return uniform draws f32[N, count] in [0, 1), a function of seed, stream and counters."""
    return jax.vmap(lambda key: jax.random.uniform(key, (count,)))(keys(seeds, stream, counters))
