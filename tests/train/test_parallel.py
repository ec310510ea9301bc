"""Training of heads that draft all tokens at once: DFlash's blocks and Medusa's heads."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.params import random_params

from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.rows import CachedRows
from specjax.device.drafters.dflash import AttentionMask, DFlashDrafter
from specjax.device.drafters.drafter import DraftContext, Observation, Params, Variant
from specjax.device.edits import History
from specjax.device.models.model import Features
from specjax.device.requests import init_requests
from specjax.train.data import Document
from specjax.train.drafter import KINDS, HeadSizes
from specjax.train.features import FeatureSet
from specjax.train.losses import Frozen, block_logits, block_loss, medusa_loss
from specjax.train.target import demo_llama

LENGTH, K = 24, 3
TARGET = demo_llama(64, 3, 64)
SIZES = HeadSizes(aux_layers=(0, 2, 3), mask_token_id=7, num_heads=2)


@pytest.fixture(scope="module")
def target_params():
    return jax.device_put(random_params(TARGET.specs(), 0))


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(0)
    return [Document(rng.integers(0, 64, 20).astype(np.int32), 4) for _ in range(12)]


@pytest.fixture(scope="module")
def features(target_params, documents):
    return FeatureSet.of(TARGET, target_params, documents, LENGTH, (0, 2, 3))


def drafting(drafter, params, batch, starts):
    """Logits f32[N, K, V] that the engine's drafter draws from after each of `starts`."""
    batch_size, kept = len(starts), []

    class Recorded(DraftContext):
        def draw(self, logits, *others, **options):
            kept.append(logits)
            return super().draw(logits, *others, **options)

        def draw_together(self, logits, *others, **options):
            kept.extend(logits.swapaxes(0, 1))
            return super().draw_together(logits, *others, **options)

    def wide(x):  # one document for all requests
        return jnp.broadcast_to(x[0], (batch_size, *x.shape[1:])).reshape(-1, x.shape[-1])

    table = jnp.arange(batch_size * 4, dtype=jnp.int32).reshape(batch_size, 4)
    tokens = jnp.tile(batch.tokens[:1], (batch_size, 1))
    seen = Observation(
        jnp.arange(batch_size),
        CachedRows.starting_at(jnp.zeros_like(starts), starts, LENGTH, table),
        tokens,
        jnp.roll(tokens, -1, axis=1),
        Features(wide(batch.hidden), wide(batch.auxiliary)),
        starts - 1,
        None,
    )
    state = drafter.init_state(CacheSizes(batch_size, batch_size * 4, 8, 1), jnp.float32)
    state = drafter.observe(TARGET, params, state, seen)
    context = Recorded(
        slots=jnp.arange(batch_size),
        starts=starts,
        is_active=jnp.ones(batch_size, bool),
        page_table=table,
        requests=init_requests(batch_size, TARGET.vocab_size),
        history=History(tokens, starts + 1),
        wants_edits=jnp.array(False),
        kernels="auto",
        row_multiple=1,
        shares_noise=True,
        variant=Variant(),
    )
    drafter.draft(TARGET, params, state, context, K)
    return jnp.stack(kept, axis=1)


MASKS = {
    "full, causal": (AttentionMask(), AttentionMask(ahead=0)),
    "windows": (AttentionMask(back=4, ahead=1), AttentionMask(back=5, is_anchored=True)),
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=list(MASKS))
def test_a_block_in_training_is_a_block_in_drafting(target_params, features, masks):
    head = KINDS["dflash"].make(TARGET, SIZES, []).head
    head = replace(head, attention_masks=masks)
    params = Params(target_params, random_params(head.specs(), 2))
    batch, starts = features.batch_at(0, 1, 0), jnp.array([1, 9, 16])
    expected = jax.jit(partial(drafting, DFlashDrafter(head)))(params, batch, starts)
    trained = jax.jit(partial(block_logits, TARGET, head=head, num_drafts=K))
    np.testing.assert_allclose(
        trained(params, batch=batch, starts=starts[None])[0], expected, atol=1e-4
    )


def cross_entropy(teacher, logits):
    p, shifted = np.exp(teacher - teacher.max()), logits - logits.max()
    return -(p / p.sum()) @ (shifted - np.log(np.exp(shifted).sum()))


def test_the_loss_of_blocks_is_that_of_answers_after_their_anchors(target_params, features):
    """With as many blocks as tokens, every token of an answer is an anchor once."""
    head = KINDS["dflash"].make(TARGET, SIZES, []).head
    own, batch = random_params(head.specs(), 2), features.batch_at(0, 2, 0)
    params = Params(target_params, own)
    every = jnp.tile(jnp.arange(LENGTH), (2, 1))

    @jax.jit
    def run(params, batch):
        loss = partial(block_loss, TARGET, head, num_drafts=K, num_blocks=LENGTH, gamma=2.0)
        frozen = Frozen(params.target, {})
        logits = block_logits(TARGET, params, head, batch, every, K)
        teacher = TARGET.logits(params.target, batch.hidden.reshape(2 * LENGTH, -1))
        return *loss(params.drafter, frozen, batch, jax.random.key(0)), logits, teacher

    loss, metrics, *found = run(params, batch)
    drafted, teacher = (np.asarray(x, np.float64) for x in found)
    teacher, total = teacher.reshape(2, LENGTH, -1), 0.0
    for k in range(1, K + 1):
        spots = [(b, n) for b in range(2) for n in range(4, 20 - k)]
        losses = [cross_entropy(teacher[b, n + k - 1], drafted[b, n, k - 1]) for b, n in spots]
        right = [teacher[b, n + k - 1].argmax() == drafted[b, n, k - 1].argmax() for b, n in spots]
        total += np.exp(-(k - 1) / 2) * np.mean(losses)
        np.testing.assert_allclose(metrics[f"accuracy_{k}"], np.mean(right), atol=1e-6)
    np.testing.assert_allclose(loss, total, rtol=1e-4)


def test_every_head_of_medusa_learns_its_own_distance(target_params, features):
    heads = KINDS["medusa"].make(TARGET, SIZES, []).head
    own, batch = random_params(heads.specs(), 2), features.batch_at(0, 2, 0)

    @jax.jit
    def run(own, batch):
        hidden = batch.hidden.reshape(2 * LENGTH, -1)
        loss, _ = medusa_loss(
            TARGET, heads, own, Frozen(target_params, {}), batch, jax.random.key(0)
        )
        return loss, heads.logits(own, 2, hidden), TARGET.logits(target_params, hidden)

    loss, drafted, teacher = jax.tree.map(lambda x: np.asarray(x, np.float64), run(own, batch))
    teacher, total = teacher.reshape(2, LENGTH, -1), 0.0
    for i in range(2):
        logits = drafted[:, i].reshape(2, LENGTH, -1)
        spots = [(b, p) for b in range(2) for p in range(2 - i, 18 - i)]  # p + 2 + i is an answer's
        losses = [cross_entropy(teacher[b, p + 1 + i], logits[b, p]) for b, p in spots]
        total += 0.8**i * np.mean(losses)
    np.testing.assert_allclose(loss, total, rtol=1e-4)
