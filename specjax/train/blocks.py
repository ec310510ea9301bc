"""The training loss of heads that draft several tokens in one forward pass.

The forward pass has one row for the last known token, and one row for each of several mask tokens.
Such a group of rows is a block. In training, a document has many blocks, each of which starts at a
random token of the answer. The drafts of a block predict the tokens after this random token. All
blocks of a document share the features that the target computed for the document.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.device.drafters.dflash import AttentionMask, DFlashDrafter, DFlashHead
from specjax.device.drafters.drafter import DrafterWeights, Params
from specjax.device.drafters.p_eagle import PEagleHead
from specjax.device.models.model import Features, Model
from specjax.train.context import BlockRows, ContextRows
from specjax.train.features import Batch
from specjax.train.teacher import Frozen, Teacher, at, distance, shift

# A function of (target, params, head, batch, starts i32[B, N], K). It returns the arrays of logits
# that are trained, each f32[B, N, K, V_d]; drafts are drawn from the last array.
BlockLogits = Callable[[Model, Params, Any, Batch, jax.Array, int], Sequence[jax.Array]]


def block_loss(
    logits_of: BlockLogits,
    target: Model,
    head: DrafterWeights,
    trainable: Any,
    frozen: Frozen,
    batch: Batch,
    key: jax.Array,
    *,
    num_drafts: int,
    num_blocks: int = 32,
    gamma: float = 4.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the distance to the target's distribution, for drafts after random answer tokens.

    A document has up to `num_blocks` blocks, which start at different tokens. The loss is the sum
    over drafts k = 1, 2, ... of the mean over blocks. Draft k has the weight exp(-(k - 1) / gamma),
    because a draft after a wrong draft is useless (Chen et al. 2026).
    """
    params = frozen.join(trainable)
    teacher = Teacher.of(target, params, head, batch)
    length = batch.tokens.shape[1]
    # A block starts after at least one token that the target has run.
    is_start = batch.is_answer.at[:, 0].set(False)
    noise = jax.random.uniform(key, batch.tokens.shape)
    starts = jax.lax.top_k(jnp.where(is_start, noise, -1), min(num_blocks, length))[1]
    trained = logits_of(target, params, head, batch, starts, num_drafts)
    total, metrics = jnp.float32(0), {}
    for k in range(1, num_drafts + 1):
        spots = jnp.minimum(starts + k, length - 1)
        counts = at(is_start, starts) & at(batch.is_answer, spots) & (starts + k < length)
        counts &= at(teacher.is_drafted, spots - 1)
        expected = at(teacher.probs, spots - 1)
        for logits in trained:
            loss, accuracy = distance(logits[:, :, k - 1], expected, counts)
            total += math.exp(-(k - 1) / gamma) * loss
            metrics[f"accuracy_{k}"] = accuracy
    return total, metrics


def dflash_logits(
    target: Model,
    params: Params,
    head: DFlashHead,
    batch: Batch,
    starts: jax.Array,
    num_drafts: int,
) -> Sequence[jax.Array]:
    """Return the logits of a DFlash, DSpark or DFlash2 head; see `BlockLogits`.

    If a draft's logits depend on the previous token, this token is taken from the document.
    """
    drafter, own, (size, count) = DFlashDrafter(head), params.drafter, starts.shape
    context = ContextRows.of(*batch.tokens.shape)
    auxiliary = batch.auxiliary.reshape(batch.tokens.size, -1)
    kv = drafter.read(own, auxiliary, context, context.init(head.shape.attention))
    width = head.first_row + num_drafts
    x = drafter.embed(target, params, at(batch.tokens, starts).reshape(-1), width)
    rows = [BlockRows(starts, width, mask) for mask in head.attention_masks]
    hidden, _ = drafter.run(own, x, rows, kv)
    hidden = hidden.reshape(size, count, width, -1)[:, :, head.first_row :]
    hidden = hidden.reshape(size * count, num_drafts, -1)
    logits = head.logits(target, params, hidden.reshape(-1, hidden.shape[-1]))
    before = starts[..., None] + jax.lax.broadcast_to_rank(jnp.arange(num_drafts), starts.ndim + 1)
    before = jnp.minimum(before, batch.tokens.shape[1] - 1).reshape(size, -1)
    previous = at(batch.tokens, before).reshape(-1)
    by_block = logits.reshape(size * count, num_drafts, -1)
    block = head.refinement.of_block(own.refinement, hidden, by_block)
    rows_of_block = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), block)
    refined = head.refinement.logits(own.refinement, rows_of_block, previous)
    trained = head.refinement.trained(logits, refined)
    return [one.reshape(size, count, num_drafts, -1) for one in trained]


def p_eagle_logits(
    target: Model,
    params: Params,
    head: PEagleHead,
    batch: Batch,
    starts: jax.Array,
    num_drafts: int,
) -> Sequence[jax.Array]:
    """Return the logits of a P-EAGLE head; see `BlockLogits`.

    The row of the last known token predicts the first draft, and the mask rows predict the others.
    """
    own, (size, count), length = params.drafter, starts.shape, batch.tokens.shape[1]
    context = ContextRows.of(size, length)
    flat = (x.reshape(size * length, -1) for x in (batch.hidden, batch.auxiliary))
    fused, tokens = head.fuse(own, Features(*flat)), shift(batch.tokens, 1).reshape(-1)
    kv = context.init(head.shape.attention)
    hidden, kv = head.extend(target, params, tokens, fused, context, kv)
    hidden = at(hidden.reshape(size, length, -1), starts - 1)[:, :, None]
    if num_drafts > 1:
        rows = BlockRows(starts, num_drafts - 1, AttentionMask(ahead=0))
        tokens, masks = head.mask_rows(own, len(rows.positions))
        masks, _ = head.extend(target, params, tokens, masks, rows, kv)
        masks = masks.reshape(size, count, num_drafts - 1, -1)
        hidden = jnp.concatenate([hidden, masks], axis=2)
    logits = head.logits(target, params, hidden.reshape(-1, hidden.shape[-1]))
    return [logits.reshape(size, count, num_drafts, -1)]
