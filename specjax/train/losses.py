"""The training losses of drafters: one loss for each class of drafter weights."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from specjax.device.drafters.chain import Head
from specjax.device.drafters.dflash import DFlashHead
from specjax.device.drafters.drafter import DrafterWeights
from specjax.device.drafters.eagle import EagleHead, EagleParams
from specjax.device.drafters.eagle3 import Eagle3Head
from specjax.device.drafters.medusa import MedusaHeads, MedusaParams
from specjax.device.drafters.mtp import MTPHead
from specjax.device.drafters.p_eagle import PEagleHead
from specjax.device.models.model import Features, Model
from specjax.train.blocks import block_loss, dflash_logits, p_eagle_logits
from specjax.train.context import CausalRows, UnrolledRows
from specjax.train.features import Batch
from specjax.train.loop import Loss
from specjax.train.target import matrix_labels
from specjax.train.teacher import Frozen, Teacher, distance, shift

# Names of fields of drafters' parameters: first the frozen fields, then the output heads.
UNTRAINED = ("embedding", "target_ids")
LM_HEADS = ("lm_head", "lm_heads")


def split_frozen(params: Any) -> tuple[Any, dict[str, Any]]:
    """Return a drafter's parameters with None in the frozen fields, and the frozen fields by name.

    A draft vocabulary is frozen because it is not a weight. A drafter's embedding is a copy, and is
    frozen because training would change only the rows of tokens that occur in the data.
    """
    frozen = {name: getattr(params, name) for name in UNTRAINED if hasattr(params, name)}
    return replace(params, **dict.fromkeys(frozen)), frozen


def drafter_loss(target: Model, weights: DrafterWeights, *, num_unrolled: int) -> Loss:
    """Return the loss function that trains this kind of head on `num_unrolled` consecutive drafts.

    EAGLE-1 always trains on one draft, and Medusa on one draft per head.

    Raises:
        ValueError: this kind of head cannot be trained.
    """
    unrolled = partial(unrolled_loss, num_unrolled=num_unrolled)
    losses = {
        EagleHead: eagle1_loss,
        Eagle3Head: unrolled,
        MTPHead: unrolled,
        DFlashHead: partial(block_loss, dflash_logits, num_drafts=num_unrolled),
        # All depths have the same weight, as in the published recipe.
        PEagleHead: partial(block_loss, p_eagle_logits, num_drafts=num_unrolled, gamma=math.inf),
        MedusaHeads: medusa_loss,
    }
    if type(weights) not in losses:
        raise ValueError(
            f"drafters of kind {type(weights).__name__} cannot be trained here; one of "
            f"{', '.join(kind.__name__ for kind in losses)} can"
        )
    return partial(losses[type(weights)], target, weights)


def drafter_labels(params: Any) -> Any:
    """Return the label of each array for `muon_and_adamw`.

    Output heads have "adamw"; see `matrix_labels` for other arrays.
    """
    labels = matrix_labels(params)
    heads = {name: getattr(labels, name) for name in LM_HEADS if hasattr(labels, name)}
    return replace(labels, **jax.tree.map(lambda _: "adamw", heads))


def unrolled_loss(
    target: Model,
    head: Head,
    trainable: Any,
    frozen: Frozen,
    batch: Batch,
    key: jax.Array,
    *,
    num_unrolled: int,
    decay: float = 0.8,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss and metrics of a head that drafts each token from the head's last output.

    In training, the head makes its drafts in the same way as in serving ("training-time test", Li
    et al. 2025, section 3.2). The loss is the `distance` of the head's distributions from
    the target's, a mean over tokens of answers, summed over drafts. Draft j = 0, 1, ... has the
    weight decay^j. A token is ignored if the draft vocabulary lacks the target's most likely token.
    """
    params = frozen.join(trainable)
    teacher = Teacher.of(target, params, head, batch)
    size, length = batch.tokens.shape
    flat = (x.reshape(size * length, -1) for x in (batch.hidden, batch.auxiliary))
    hidden = head.fuse(params.drafter, Features(*flat))
    kv: tuple = ()
    total, metrics = jnp.float32(0), {}
    for step in range(num_unrolled):
        tokens = shift(batch.tokens, step + 1).reshape(-1)
        rows = UnrolledRows.of(size, length, step)
        hidden, kv = head.extend(target, params, tokens, hidden, rows, kv)
        logits = head.logits(target, params, hidden).reshape(size, length, -1)
        loss, accuracy = _ahead(logits, teacher, batch.is_answer, step)
        total += decay**step * loss
        metrics[f"accuracy_{step + 1}"] = accuracy
    return total, metrics


def medusa_loss(
    target: Model,
    heads: MedusaHeads,
    trainable: MedusaParams,
    frozen: Frozen,
    batch: Batch,
    key: jax.Array,
    *,
    decay: float = 0.8,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss and metrics of Medusa heads.

    The loss is the sum of all heads' `distance` from the target's distributions. Head
    i = 0, 1, ... has the weight decay^i (Cai et al. 2024, section 2.2).
    """
    params = frozen.join(trainable)
    teacher = Teacher.of(target, params, heads, batch)
    size, length = batch.tokens.shape
    hidden = batch.hidden.reshape(size * length, -1)
    total, metrics = jnp.float32(0), {}
    drafted = heads.logits(params.drafter, heads.num_heads, hidden)
    for i in range(heads.num_heads):
        logits = drafted[:, i].reshape(size, length, -1)
        loss, accuracy = _ahead(logits, teacher, batch.is_answer, i)
        total += decay**i * loss
        metrics[f"accuracy_{i + 1}"] = accuracy
    return total, metrics


def _ahead(
    logits: jax.Array, teacher: Teacher, is_answer: jax.Array, step: int
) -> tuple[jax.Array, jax.Array]:
    """Return the mean loss and the mean accuracy of logits [B, T, V_d] of draft tokens.

    The target predicts token p + 1 at row p. The logits of row p predict token p + 2 + `step`.
    """
    counts = shift(is_answer, step + 2) & shift(teacher.is_drafted, step + 1)
    return distance(logits, shift(teacher.probs, step + 1), counts)


def eagle1_loss(
    target: Model,
    head: EagleHead,
    trainable: EagleParams,
    frozen: Frozen,
    batch: Batch,
    key: jax.Array,
    *,
    noise: float = 0.1,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the smooth L1 loss to the target's next feature plus 0.1 times the cross-entropy.

    This is the loss of Li et al. 2024, section 3.2. Uniform noise on the input features simulates
    the head's errors, since drafting runs the head on its own outputs.
    """
    size, length = batch.tokens.shape
    params = frozen.join(trainable)
    flat = batch.hidden.reshape(size * length, -1)
    noisy = flat + noise * jax.random.uniform(key, flat.shape, minval=-1.0)
    tokens = shift(batch.tokens, 1).reshape(-1)
    rows = CausalRows.of(size, length)
    predicted, _ = head.extend(target, params, tokens, noisy, rows, None)
    expected = shift(batch.hidden, 1).reshape(flat.shape)
    counts = shift(batch.is_answer, 2).reshape(-1)
    weight = counts.astype(jnp.float32) / jnp.maximum(counts.sum(), 1).astype(jnp.float32)
    feature_loss = (optax.losses.huber_loss(predicted, expected).mean(-1) * weight).sum()
    logits = head.logits(target, params, predicted)
    teacher = target.logits(params.target, expected)
    token_loss = -(jax.nn.softmax(teacher) * jax.nn.log_softmax(logits)).sum(-1)
    token_loss = (token_loss * weight).sum()
    right = logits.argmax(-1) == teacher.argmax(-1)
    accuracy = (right.astype(jnp.float32) * weight).sum()
    metrics = {"feature_loss": feature_loss, "accuracy_1": accuracy}
    return feature_loss + 0.1 * token_loss, metrics
