"""Losses, compared with their definitions, position by position in float64."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.params import random_params
from support.training import HEAD_SIZES, LENGTH, TARGET, VOCAB, distance

from specjax.device.drafters.dflash2 import DFlash2
from specjax.device.models.model import Features
from specjax.train.blocks import block_loss, dflash_logits, p_eagle_logits
from specjax.train.context import UnrolledRows
from specjax.train.data import Document
from specjax.train.drafter import KINDS, draft_vocabulary
from specjax.train.losses import medusa_loss, unrolled_loss
from specjax.train.teacher import Frozen, shift

K = 3
KEY, WORDS = jax.random.key(0), [Document(np.arange(VOCAB), 0)]
REFINEMENT = DFlash2(
    num_taps=2, group_size=16, rank=8, num_candidates=5, multiplier=0.5, soft_cap=3.0
)


def start_of(kind, documents=WORDS):
    return KINDS[kind].make(TARGET, HEAD_SIZES, documents)


def float64(arrays):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), arrays)


@pytest.mark.slow
def test_a_chain_learns_counted_positions(target_params, documents, features):
    """Positions count if the target's token can be drafted. The second draft weighs less."""
    start = start_of("eagle3", documents)
    head, ids = start.head, np.asarray(start.frozen["target_ids"])
    np.testing.assert_array_equal(ids, draft_vocabulary(documents, 64, 32))
    own, batch = random_params(head.specs(), 1), features.batch_at(0, 4, 0)

    @jax.jit
    def run(own, batch):
        frozen = Frozen(target_params, {"target_ids": jnp.array(ids)})
        loss, metrics = unrolled_loss(TARGET, head, own, frozen, batch, KEY, num_unrolled=2)
        params, flat = frozen.join(own), batch.hidden.reshape(4 * LENGTH, -1)
        auxiliary = batch.auxiliary.reshape(len(flat), -1)
        hidden, kv = head.fuse(params.drafter, Features(flat, auxiliary)), ()
        logits = [TARGET.logits(target_params, flat)]
        for step in range(2):
            fed = shift(batch.tokens, step + 1).reshape(-1)
            rows = UnrolledRows.of(4, LENGTH, step)
            hidden, kv = head.extend(TARGET, params, fed, hidden, rows, kv)
            logits.append(head.logits(TARGET, params, hidden))
        return loss, metrics, [x.reshape(4, LENGTH, -1) for x in logits]

    loss, metrics, (teacher, *drafted) = float64(run(own, batch))
    total = 0.0
    for step, logits in enumerate(drafted):
        losses = [
            distance(teacher[b, t + 1 + step, ids], logits[b, t])
            for b, t in np.ndindex(4, LENGTH - 2 - step)
            if batch.is_answer[b, t + 2 + step] and teacher[b, t + 1 + step].argmax() in ids
        ]
        total += 0.8**step * np.mean(losses)
    np.testing.assert_allclose(loss, total, rtol=1e-4)
    assert 0 <= metrics["accuracy_1"] <= 1


@pytest.mark.slow
def test_what_does_not_count_has_no_part_in_the_loss(target_params, documents, features):
    start = start_of("eagle3", documents)
    batch = jax.device_get(features.batch_at(0, 4, 0))
    last = 19  # whose features nobody exports
    hidden, auxiliary = batch.hidden.copy(), batch.auxiliary.copy()
    hidden[:, last:] = auxiliary[:, last:] = 0
    other = batch._replace(hidden=hidden, auxiliary=auxiliary)
    loss = partial(unrolled_loss, TARGET, start.head, num_unrolled=3)
    loss = jax.jit(jax.value_and_grad(loss, has_aux=True))
    own, frozen = random_params(start.head.specs(), 1), Frozen(target_params, start.frozen)
    (one, _), gradient = loss(own, frozen, batch, KEY)
    (two, _), same = loss(own, frozen, other, KEY)
    assert one == two
    jax.tree.map(np.testing.assert_array_equal, gradient, same)


BLOCKS = {
    "dflash": (start_of("dflash").head, dflash_logits, 2.0),
    "dflash2": (replace(start_of("dflash").head, refinement=REFINEMENT), dflash_logits, 2.0),
    "p_eagle": (start_of("p_eagle").head, p_eagle_logits, math.inf),  # all depths count the same
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_learn_the_answers_after_their_anchors(target_params, documents, features, kind):
    """There are as many blocks as tokens, so every answer token starts one block."""
    head, logits_of, gamma = BLOCKS[kind]
    own, batch = random_params(head.specs(), 2), features.batch_at(0, 2, 0)
    frozen, ids = {}, np.arange(VOCAB)
    if kind == "p_eagle":  # which drafts some tokens only
        frozen = start_of(kind, documents).frozen
        ids = np.asarray(frozen["target_ids"])
    frozen = Frozen(target_params, frozen)
    every = jnp.tile(jnp.arange(LENGTH), (2, 1))

    @jax.jit
    def run(own, batch):
        loss = partial(block_loss, logits_of, TARGET, head)
        loss = partial(loss, num_drafts=K, num_blocks=LENGTH, gamma=gamma)
        loss = jax.value_and_grad(loss, has_aux=True)
        logits = logits_of(TARGET, frozen.join(own), head, batch, every, K)
        teacher = TARGET.logits(target_params, batch.hidden.reshape(2 * LENGTH, -1))
        return *loss(own, frozen, batch, KEY), logits, teacher

    (loss, metrics), gradient, *found = run(own, batch)
    trained, teacher = float64(found)
    teacher, total = teacher.reshape(2, LENGTH, -1), 0.0
    for k in range(1, K + 1):
        spots = [(b, n) for b in range(2) for n in range(4, 20 - k)]
        spots = [(b, n) for b, n in spots if teacher[b, n + k - 1].argmax() in ids]
        for logits in trained:
            pairs = [(teacher[b, n + k - 1, ids], logits[b, n, k - 1]) for b, n in spots]
            total += np.exp(-(k - 1) / gamma) * np.mean([distance(*pair) for pair in pairs])
        right = np.mean([one.argmax() == other.argmax() for one, other in pairs])
        np.testing.assert_allclose(metrics[f"accuracy_{k}"], right, atol=1e-6)
    np.testing.assert_allclose(loss, total, rtol=1e-4)
    for x in jax.tree.leaves(gradient):
        assert np.isfinite(x).all() and np.abs(x).max() > 0


def test_every_head_of_medusa_learns_its_own_distance(target_params, features):
    heads = start_of("medusa").head
    own, batch = random_params(heads.specs(), 2), features.batch_at(0, 2, 0)

    @jax.jit
    def run(own, batch):
        hidden = batch.hidden.reshape(2 * LENGTH, -1)
        loss = medusa_loss(TARGET, heads, own, Frozen(target_params, {}), batch, KEY)
        return *loss, heads.logits(own, 2, hidden), TARGET.logits(target_params, hidden)

    loss, metrics, drafted, teacher = float64(run(own, batch))
    teacher, total = teacher.reshape(2, LENGTH, -1), 0.0
    for i in range(2):
        logits = drafted[:, i].reshape(2, LENGTH, -1)
        spots = [(b, p) for b in range(2) for p in range(2 - i, 18 - i)]  # p + 2 + i is an answer's
        pairs = [(teacher[b, p + 1 + i], logits[b, p]) for b, p in spots]
        total += 0.8**i * np.mean([distance(*pair) for pair in pairs])
        right = np.mean([one.argmax() == other.argmax() for one, other in pairs])
        np.testing.assert_allclose(metrics[f"accuracy_{i + 1}"], right, atol=1e-6)
    np.testing.assert_allclose(loss, total, rtol=1e-4)
