"""What drafters are trained to minimise, by the kind of their weights."""

import math
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from specjax.device.drafters.chain import Head
from specjax.device.drafters.dflash import DFlashDrafter, DFlashHead, DFlashParams, Refinement
from specjax.device.drafters.drafter import DrafterWeights, Params
from specjax.device.drafters.eagle import EagleHead, EagleParams
from specjax.device.drafters.eagle3 import Eagle3Head
from specjax.device.drafters.medusa import MedusaHeads, MedusaParams
from specjax.device.drafters.mtp import MTPHead
from specjax.device.models.model import Features, Model
from specjax.train.context import BlockRows, CausalRows, ContextRows, UnrolledRows
from specjax.train.features import Batch
from specjax.train.loop import Loss
from specjax.train.target import matrix_labels

# Fields of drafters' parameters: those that are frozen, and output heads.
UNTRAINED = ("embedding", "target_ids")
LM_HEADS = ("lm_head", "lm_heads")


class Teacher(NamedTuple):
    """The target's distributions over a draft vocabulary; row p is of the token at p + 1."""

    probs: jax.Array  # f32[B, T, V_d]
    is_drafted: jax.Array  # bool[B, T], whether its most likely token is in the draft vocabulary

    @classmethod
    def of(cls, target: Model, params: Params, head: DrafterWeights, batch: Batch) -> "Teacher":
        """Return the distributions of all rows of a batch."""
        size, length = batch.tokens.shape
        target_ids = head.target_ids(params.drafter)
        logits = target.logits(params.target, batch.hidden.reshape(size * length, -1))
        is_drafted = jnp.ones((size, length), bool)
        if target_ids is not None:
            is_drafted = jnp.isin(logits.argmax(-1), target_ids).reshape(size, length)
            logits = logits[:, target_ids]
        return cls(jax.nn.softmax(logits).reshape(size, length, -1), is_drafted)


def shift(x: jax.Array, count: int) -> jax.Array:
    """Shift x [B, T, ...] by `count` positions to the left, with zeros at the end."""
    return jnp.pad(x[:, count:], ((0, 0), (0, count)) + ((0, 0),) * (x.ndim - 2))


class Frozen(NamedTuple):
    """Parameters that a drafter's loss uses and does not train."""

    target: Any  # the target's parameters
    drafter: dict[str, Any]  # the drafter's frozen parameters, by field

    def join(self, trainable: Any) -> Params:
        """Return the full parameters of target and drafter."""
        return Params(self.target, replace(trainable, **self.drafter))


def split_frozen(params: Any) -> tuple[Any, dict[str, Any]]:
    """Split a drafter's parameters into the trained ones, and the frozen ones by field.

    A draft vocabulary is not a weight. An embedding of the drafter is a copy and stays frozen:
    training would change only the rows of tokens that occur in the data.
    """
    frozen = {name: getattr(params, name) for name in UNTRAINED if hasattr(params, name)}
    return replace(params, **dict.fromkeys(frozen)), frozen


def drafter_loss(target: Model, weights: DrafterWeights, *, num_unrolled: int) -> Loss:
    """Return the training loss of a kind of head, over `num_unrolled` consecutive drafts.

    For EAGLE-1 it is always one draft, for Medusa that of every head.

    Raises:
        ValueError: a kind that has none.
    """
    unrolled = partial(unrolled_loss, num_unrolled=num_unrolled)
    losses = {
        EagleHead: eagle1_loss,
        Eagle3Head: unrolled,
        MTPHead: unrolled,
        DFlashHead: partial(block_loss, num_drafts=num_unrolled),
        MedusaHeads: medusa_loss,
    }
    if type(weights) not in losses:
        raise ValueError(
            f"drafters of kind {type(weights).__name__} cannot be trained here; one of "
            f"{', '.join(kind.__name__ for kind in losses)} can"
        )
    return partial(losses[type(weights)], target, weights)


def drafter_labels(params: Any) -> Any:
    """Return each array's optimiser for `muon_and_adamw`; AdamW for LM heads."""
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
    """Cross-entropy to the target's distribution over the draft vocabulary, over an unrolled chain.

    Step j runs the head on its own previous output, as drafting does, and is weighted decay^j
    (Li et al. 2025, section 3.2, training-time test). Positions whose most likely token is not in
    the draft vocabulary are ignored.
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
    """Cross-entropy to the target's distribution of every head, that of head i weighted decay^i
    (Cai et al. 2024, section 2.2)."""
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
    """Return mean loss and accuracy of logits [B, T, V_d] at rows p for tokens p + 2 + step."""
    counts = shift(is_answer, step + 2) & shift(teacher.is_drafted, step + 1)
    return _cross_entropy(logits, shift(teacher.probs, step + 1), counts)


def _cross_entropy(
    logits: jax.Array, expected: jax.Array, counts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return cross-entropy and accuracy of logits [..., V_d], means over where `counts` [...]."""
    weight = counts.astype(jnp.float32) / jnp.maximum(counts.sum(), 1).astype(jnp.float32)
    loss = -(expected * jax.nn.log_softmax(logits)).sum(-1)
    right = logits.argmax(-1) == expected.argmax(-1)
    return (loss * weight).sum(), (right.astype(jnp.float32) * weight).sum()


def block_loss(
    target: Model,
    head: DFlashHead,
    trainable: DFlashParams,
    frozen: Frozen,
    batch: Batch,
    key: jax.Array,
    *,
    num_drafts: int,
    num_blocks: int = 32,
    gamma: float = 4.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Cross-entropy to the target's distribution of blocks of masks at random tokens of answers.

    Every document has `num_blocks` blocks, that begin at different tokens. Draft k is weighted
    exp(-(k - 1) / gamma): one after a wrong draft is worth nothing (Chen et al. 2026).
    """
    params = frozen.join(trainable)
    teacher = Teacher.of(target, params, head, batch)
    length = batch.tokens.shape[1]
    noise = jax.random.uniform(key, batch.tokens.shape)
    starts = jax.lax.top_k(jnp.where(batch.is_answer, noise, -1), min(num_blocks, length))[1]
    logits = block_logits(target, params, head, batch, starts, num_drafts)
    total, metrics = jnp.float32(0), {}
    for k in range(1, num_drafts + 1):
        spots = jnp.minimum(starts + k, length - 1)
        counts = _at(batch.is_answer, starts) & _at(batch.is_answer, spots) & (starts + k < length)
        counts &= _at(teacher.is_drafted, spots - 1)
        expected = _at(teacher.probs, spots - 1)
        loss, accuracy = _cross_entropy(logits[:, :, k - 1], expected, counts)
        total += math.exp(-(k - 1) / gamma) * loss
        metrics[f"accuracy_{k}"] = accuracy
    return total, metrics


def block_logits(
    target: Model,
    params: Params,
    head: DFlashHead,
    batch: Batch,
    starts: jax.Array,
    num_drafts: int,
) -> jax.Array:
    """Return draft logits f32[B, N, num_drafts, V_d] of blocks that begin at `starts` i32[B, N].

    Raises:
        ValueError: while tracing; the head is a DSpark or DFlash2 head.
    """
    if head.refinement != Refinement() or head.first_row != 1:
        raise ValueError(
            "DSpark and DFlash2 heads are not trained here; begin with a DFlash head, or a new one"
        )
    drafter, (size, count) = DFlashDrafter(head), starts.shape
    auxiliary = batch.auxiliary.reshape(batch.tokens.size, -1)
    kind = head.shape.attention
    empty = jnp.zeros(
        (kind.num_layers, batch.tokens.size, kind.num_kv_heads, kind.head_dim), auxiliary.dtype
    )
    context = ContextRows.of(*batch.tokens.shape)
    kv = drafter.read(params.drafter, auxiliary, context, (empty, empty))
    anchors = _at(batch.tokens, starts).reshape(-1)
    x = drafter.embed(target, params, anchors, num_drafts + 1)
    rows = [BlockRows(starts, num_drafts + 1, mask) for mask in head.attention_masks]
    hidden, _ = drafter.run(params.drafter, x, rows, kv)
    hidden = hidden.reshape(size, count, num_drafts + 1, -1)[:, :, 1:]
    logits = head.logits(target, params, hidden.reshape(-1, hidden.shape[-1]))
    return logits.reshape(size, count, num_drafts, -1)


def _at(x: jax.Array, spots: jax.Array) -> jax.Array:
    """Return x [B, T, ...] at `spots` i32[B, N]: [B, N, ...]."""
    return x[jnp.arange(len(x))[:, None], spots]


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
    """Smooth L1 to the target's next feature plus 0.1 cross-entropy (Li et al. 2024, section 3.2).

    Uniform noise on the input features simulates the head's own errors, since it drafts from its
    own outputs.
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
