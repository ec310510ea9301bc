"""GRPO: what the policy is trained on, and the update, as pure functions.

The loss is that of DeepSeekMath (Shao et al. 2024, eq. 3) without a KL term, averaged over tokens
as in DAPO (Yu et al. 2025, eq. 8), so that a long answer counts for as much as it has tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax.device.models.model import Model
from specjax.rl import PaddedRollouts
from specjax.train.context import CausalRows


class Rows(NamedTuple):
    """N sequences of L tokens, each a prompt and its answer, padded on the right."""

    tokens: Any  # i32[N, L]
    mask: Any  # f32[N, L - 1], 1 where the token that follows is the policy's own
    behaviour: Any  # f32[N, L - 1], log-probability with which it was drawn
    advantages: Any  # f32[N]


class Learner(NamedTuple):
    """What an update takes and gives back; it is donated, so nobody else may hold its arrays."""

    params: Any
    optimizer_state: Any


Loss = Callable[[jax.Array, Rows], jax.Array]  # of log-probabilities f32[N, L - 1]
Update = Callable[[Learner, Rows], tuple[Learner, jax.Array]]


def advantages(rewards: np.ndarray) -> np.ndarray:
    """How much better each answer is than the others to its question, f32[G, n] of rewards."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return (centred / (rewards.std(axis=1, keepdims=True) + 1e-6)).astype(np.float32)


def training_rows(rollouts: PaddedRollouts, advantages: np.ndarray) -> Rows:
    """Rollouts with the padding between the edge and the prompt moved to the end."""
    rows = rollouts.joined()
    return Rows(rows.tokens, rows.mask.astype(np.float32), rows.logprobs, advantages)


def grpo_loss(logprobs: jax.Array, rows: Rows, *, clip: float = 0.2) -> jax.Array:
    """The clipped surrogate against the log-probabilities that the rollouts came with."""
    ratio = jnp.exp(jnp.where(rows.mask > 0, logprobs - rows.behaviour, 0.0))
    advantage = rows.advantages[:, None]
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)
    return -(surrogate * rows.mask).sum() / rows.mask.sum()


def imitation_loss(logprobs: jax.Array, rows: Rows) -> jax.Array:
    """Cross-entropy of answers that were given: nats per token."""
    return -(logprobs * rows.mask).sum() / rows.mask.sum()


def token_logprobs(model: Model, params: Any, tokens: jax.Array) -> jax.Array:
    """Log-probability of every token but the first given those before, f32[N, L - 1]."""
    size, length = tokens.shape
    rows = CausalRows.of(size, length - 1)
    features, _ = model.extend(params, tokens[:, :-1].reshape(-1), rows, None)
    logits = model.logits(params, features.hidden).reshape(size, length - 1, -1)
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def begin(params: Any, optimizer: optax.GradientTransformation) -> Learner:
    """A learner with copies of `params`: an engine's own arrays must not be donated."""
    copies = jax.tree.map(lambda x: jnp.array(x, copy=True), params)
    place = jax.tree.leaves(copies)[0].sharding
    # All in one place, as an update leaves them: the second must not compile anew.
    return jax.device_put(Learner(copies, optimizer.init(copies)), place)


def make_update(model: Model, optimizer: optax.GradientTransformation, loss: Loss) -> Update:
    """One step of the optimiser on the mean loss of some rows, compiled once per shape."""

    @partial(jax.jit, donate_argnums=0)
    def update(learner: Learner, rows: Rows) -> tuple[Learner, jax.Array]:
        def mean_loss(params: Any) -> jax.Array:
            return loss(token_logprobs(model, params, rows.tokens), rows)

        value, gradient = jax.value_and_grad(mean_loss)(learner.params)
        change, state = optimizer.update(gradient, learner.optimizer_state, learner.params)
        return Learner(optax.apply_updates(learner.params, change), state), value

    return update
