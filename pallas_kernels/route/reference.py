"""The choice of experts and the sort of rows by expert, in plain JAX."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rule(NamedTuple):
    """How a router chooses experts and computes their weights.

    If there are several groups of experts, a row chooses experts only from its best groups. Groups
    are ranked by the sum of the two best scores in each group.
    """

    is_sigmoid: bool = False  # whether scores are sigmoids of the logits, or else their softmax
    normalises: bool = True  # whether the weights of a row's experts sum to one
    scaling: float = 1.0  # multiplies the weights, normalised or not
    num_groups: int = 1
    num_chosen_groups: int = 1


class Routes(NamedTuple):
    """The C chosen experts of each of N rows.

    Entry n C + c is the pair of row n and its c-th best expert.
    """

    weights: jax.Array  # f32[N, C]
    experts: jax.Array  # i32[N, C], the best first
    order: jax.Array  # i32[N C], the entries sorted by expert, then by entry
    rows: jax.Array  # i32[N C], the row of each entry in `order`
    sizes: jax.Array  # i32[E], the number of entries per expert


def route_reference(
    logits: jax.Array,
    num_chosen: int,
    rule: Rule,
    correction: jax.Array | None = None,
    is_padding: jax.Array | None = None,
) -> Routes:
    """Compute `route` in plain JAX. The weights are differentiable with respect to the logits."""
    weights, experts = (_by_sigmoid if rule.is_sigmoid else _by_softmax)(
        logits, num_chosen, rule, correction
    )
    if is_padding is not None:
        experts = jnp.where(is_padding[:, None], experts[:1], experts)
    chosen = experts.reshape(-1)
    # Sort one array, because sorting keys and indices as two would copy them first.
    order = jnp.sort(chosen * chosen.size + jnp.arange(chosen.size)) % chosen.size
    # Counting by comparison takes one kernel; a scatter needs another one to clear its result.
    sizes = jnp.sum(chosen[:, None] == jnp.arange(logits.shape[1])[None], axis=0, dtype=jnp.int32)
    return Routes(weights, experts, order, order // num_chosen, sizes)


def _by_softmax(
    logits: jax.Array, num_chosen: int, rule: Rule, _: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    best, chosen = jax.lax.top_k(logits, num_chosen)
    best = best.astype(jnp.float32)
    if rule.normalises:
        weights = jax.nn.softmax(best)
    else:
        total = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1, keepdims=True)
        weights = jnp.exp(best - total)
    return weights * rule.scaling, chosen


def _by_sigmoid(
    logits: jax.Array, num_chosen: int, rule: Rule, correction: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    scores = jax.nn.sigmoid(logits.astype(jnp.float32))
    corrected = scores if correction is None else scores + correction[None]
    _, chosen = jax.lax.top_k(_in_groups(corrected, rule), num_chosen)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if rule.normalises:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return weights * rule.scaling, chosen


def _in_groups(scores: jax.Array, rule: Rule) -> jax.Array:
    """Return the scores f32[N, E], with -inf outside the chosen groups."""
    if rule.num_chosen_groups == rule.num_groups:
        return scores
    groups = scores.reshape(scores.shape[0], rule.num_groups, -1)
    strength = jax.lax.top_k(groups, 2)[0].sum(axis=-1)  # [N, groups]
    _, kept = jax.lax.top_k(strength, rule.num_chosen_groups)
    is_kept = (kept[:, :, None] == jnp.arange(rule.num_groups)[None, None]).any(axis=1)
    return jnp.where(is_kept[..., None], groups, -jnp.inf).reshape(scores.shape)
