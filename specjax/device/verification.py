"""Deciding which drafts stand."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verdict:
    """What a verification emits: the first `num_accepted` + 1 of `tokens`."""

    tokens: jax.Array  # i32[B, K+1]
    num_accepted: jax.Array  # i32[B], 0..K


def verify_seed_exact(drafts: jax.Array, target_tokens: jax.Array) -> Verdict:
    """Accept the longest prefix of drafts i32[B, K] that equals the target's own tokens [B, K+1].

    The target's token at a position is a function of seed and position, so what is emitted is what
    decoding without drafts emits (Daliri, Musco and Suresh 2024, "drafter-invariant" decoding).
    """
    matches = (drafts == target_tokens[:, :-1]).astype(jnp.int32)
    return Verdict(target_tokens, jnp.cumprod(matches, axis=1).sum(axis=1, dtype=jnp.int32))
