"""The inputs that all drafters' losses share: frozen parameters and the target's distributions."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.device.drafters.drafter import DrafterWeights, Params
from specjax.device.models.model import Model
from specjax.train.features import Batch

VARIATION_WEIGHT = 4.0  # of the total variation in the loss, relative to the cross-entropy's


class Frozen(NamedTuple):
    """Parameters that a drafter's loss uses but does not train."""

    target: Any  # the target's parameters
    drafter: dict[str, Any]  # the drafter's frozen parameters, by field

    def join(self, trainable: Any) -> Params:
        """Return the full parameters of target and drafter."""
        return Params(self.target, replace(trainable, **self.drafter))


class Teacher(NamedTuple):
    """The target's distributions over a draft vocabulary.

    Row p has the distribution of the token at position p + 1.
    """

    probs: jax.Array  # f32[B, T, V_d]
    is_drafted: jax.Array  # bool[B, T], whether the most likely token is in the draft vocabulary

    @classmethod
    def of(cls, target: Model, params: Params, head: DrafterWeights, batch: Batch) -> "Teacher":
        """Return the target's distributions for all rows of a batch of documents."""
        size, length = batch.tokens.shape
        target_ids = head.target_ids(params.drafter)
        logits = target.logits(params.target, batch.hidden.reshape(size * length, -1))
        is_drafted = jnp.ones((size, length), bool)
        if target_ids is not None:
            is_drafted = jnp.isin(logits.argmax(-1), target_ids).reshape(size, length)
            logits = logits[:, target_ids]
        return cls(jax.nn.softmax(logits).reshape(size, length, -1), is_drafted)


def distance(
    logits: jax.Array, expected: jax.Array, counts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return how far logits [..., V_d] are from the target's distributions, and their accuracy.

    The distance of a row is the cross-entropy plus `VARIATION_WEIGHT` times the total variation. A
    draft is accepted with a probability of at most 1 - total variation (Leviathan et al. 2023,
    theorem 3.5), and a small head cannot make both terms minimal.

    V_d is the size of the draft vocabulary. Both results are means over the rows where `counts`
    bool[...] is true. `expected` [..., V_d] has the target's probabilities. Tokens with a logit of
    -inf are not candidates; the cross-entropy ignores them.
    """
    weight = counts.astype(jnp.float32) / jnp.maximum(counts.sum(), 1).astype(jnp.float32)
    own = jax.nn.log_softmax(logits)
    log_probs = jnp.where(logits > -jnp.inf, own, 0)
    variation = 1 - jnp.minimum(expected, jnp.exp(own)).sum(-1)
    right = logits.argmax(-1) == expected.argmax(-1)
    loss = VARIATION_WEIGHT * variation - (expected * log_probs).sum(-1)
    return (loss * weight).sum(), (right.astype(jnp.float32) * weight).sum()


def shift(x: jax.Array, count: int) -> jax.Array:
    """Shift x [B, T, ...] by `count` positions to the left, with zeros at the end."""
    return jnp.pad(x[:, count:], ((0, 0), (0, count)) + ((0, 0),) * (x.ndim - 2))


def at(x: jax.Array, spots: jax.Array) -> jax.Array:
    """Return the rows of x [B, T, ...] at the positions `spots` i32[B, N], as [B, N, ...]."""
    return x[jnp.arange(len(x))[:, None], spots]
