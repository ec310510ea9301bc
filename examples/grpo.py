"""Training rows, losses and the update of GRPO, as pure functions.

The loss is DeepSeekMath's (Shao et al. 2024, eq. 3) without a KL term, averaged over tokens as in
DAPO (Yu et al. 2025, eq. 8), so that each token has the same weight.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from arithmetic import MAX_TOKENS, Question, reward

from specjax.device.models.model import Model
from specjax.rl import PaddedRollouts, RolloutBatch
from specjax.train.context import CausalRows


class Rows(NamedTuple):
    """N sequences of L tokens, each a prompt and its answer, padded on the right."""

    tokens: Any  # i32[N, L]
    mask: Any  # f32[N, L - 1], 1 where the policy sampled the next token
    behaviour: Any  # f32[N, L - 1], log-probability of the next token when sampled
    advantages: Any  # f32[N]


class Learner(NamedTuple):
    """The state of training. Updates donate its arrays, so no other code may keep them."""

    params: Any
    optimizer_state: Any


Loss = Callable[[jax.Array, Rows], jax.Array]  # takes log-probabilities f32[N, L - 1]
Update = Callable[[Learner, Rows], tuple[Learner, jax.Array]]


def advantages(rewards: np.ndarray) -> np.ndarray:
    """Return the advantage f32[G, n] of each answer over all n answers to the same question."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return (centred / (rewards.std(axis=1, keepdims=True) + 1e-6)).astype(np.float32)


def rewards(questions: Sequence[Question], answers: RolloutBatch) -> np.ndarray:
    """Return the rewards f32[G, n] of answers, for n answers to each of G questions."""
    judged = [reward(questions[answer.prompt_index], answer.text or "") for answer in answers]
    return np.array(judged, np.float32).reshape(len(questions), -1)


def training_rows(rollouts: PaddedRollouts, advantages: np.ndarray) -> Rows:
    """Return rollouts and their advantages as training rows, with all padding at the end."""
    rows = rollouts.joined()
    return Rows(rows.tokens, rows.mask.astype(np.float32), rows.logprobs, advantages)


def grpo_loss(logprobs: jax.Array, rows: Rows, *, clip: float = 0.2) -> jax.Array:
    """Return the clipped surrogate loss. Ratios are relative to the policy of the rollouts."""
    ratio = jnp.exp(jnp.where(rows.mask > 0, logprobs - rows.behaviour, 0.0))
    advantage = rows.advantages[:, None]
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)
    return -(surrogate * rows.mask).sum() / rows.mask.sum()


def imitation_loss(logprobs: jax.Array, rows: Rows) -> jax.Array:
    """Return the cross-entropy of the rows' answers, in nats per token."""
    return -(logprobs * rows.mask).sum() / rows.mask.sum()


def token_logprobs(model: Model, params: Any, tokens: jax.Array) -> jax.Array:
    """Return the log-probability of every token but the first, f32[N, L - 1]."""
    size, length = tokens.shape
    rows = CausalRows.of(size, length - 1)
    features, _ = model.extend(params, tokens[:, :-1].reshape(-1), rows, None)
    logits = model.logits(params, features.hidden).reshape(size, length - 1, -1)
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def make_optimizer(rate: float) -> optax.GradientTransformation:
    """Return AdamW with five warm-up steps and then a constant rate."""
    schedule = optax.linear_schedule(rate / 5, rate, 5)
    adamw = optax.adamw(schedule, b2=0.99, weight_decay=0.0)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def begin(params: Any, optimizer: optax.GradientTransformation) -> Learner:
    """Return a learner with copies of `params`, because an engine's arrays must not be donated."""
    copies = jax.tree.map(lambda x: jnp.array(x, copy=True), params)
    place = jax.tree.leaves(copies)[0].sharding
    # The result of an update has one sharding; the same here avoids a second compilation.
    return jax.device_put(Learner(copies, optimizer.init(copies)), place)


def make_update(model: Model, optimizer: optax.GradientTransformation, loss: Loss) -> Update:
    """Return a function that takes one optimiser step on rows. It is compiled for each shape."""

    @partial(jax.jit, donate_argnums=0)
    def update(learner: Learner, rows: Rows) -> tuple[Learner, jax.Array]:
        def mean_loss(params: Any) -> jax.Array:
            return loss(token_logprobs(model, params, rows.tokens), rows)

        value, gradient = jax.value_and_grad(mean_loss)(learner.params)
        change, state = optimizer.update(gradient, learner.optimizer_state, learner.params)
        return Learner(optax.apply_updates(learner.params, change), state), value

    return update


def improve(
    update: Update,
    learner: Learner,
    answers: RolloutBatch,
    judged: np.ndarray,
    num_minibatches: int,
    rng: np.random.Generator,
) -> Learner:
    """Train one epoch on the rollouts of a step, in random minibatches of equal shape."""
    rows = training_rows(answers.padded(0, length=MAX_TOKENS), advantages(judged).reshape(-1))
    for index in np.split(rng.permutation(len(rows.tokens)), num_minibatches):
        learner, loss = update(learner, Rows(*(part[index] for part in rows)))
        loss.block_until_ready()  # so that the next rollouts' time excludes the update
    return learner
