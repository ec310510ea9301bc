"""The inputs that all drafters' losses share: frozen parameters and the target's distributions."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.device.drafters.drafter import DrafterWeights, Params
from specjax.device.models.model import Model
from specjax.train.features import Batch


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


def cross_entropy(
    logits: jax.Array, expected: jax.Array, counts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the mean cross-entropy and the mean accuracy of logits [..., V_d].

    V_d is the size of the draft vocabulary. The means are over the rows where `counts` bool[...] is
    true. `expected` [..., V_d] has the target's probabilities. Tokens with a logit of -inf are not
    candidates, and are ignored.
    """
    weight = counts.astype(jnp.float32) / jnp.maximum(counts.sum(), 1).astype(jnp.float32)
    log_probs = jnp.where(logits > -jnp.inf, jax.nn.log_softmax(logits), 0)
    right = logits.argmax(-1) == expected.argmax(-1)
    loss = -(expected * log_probs).sum(-1)
    return (loss * weight).sum(), (right.astype(jnp.float32) * weight).sum()


def shift(x: jax.Array, count: int) -> jax.Array:
    """Shift x [B, T, ...] by `count` positions to the left, with zeros at the end."""
    return jnp.pad(x[:, count:], ((0, 0), (0, count)) + ((0, 0),) * (x.ndim - 2))


def at(x: jax.Array, spots: jax.Array) -> jax.Array:
    """Return the rows of x [B, T, ...] at the positions `spots` i32[B, N], as [B, N, ...]."""
    return x[jnp.arange(len(x))[:, None], spots]
