"""Losses against their definitions, position by position, and P-EAGLE's in torch."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.params import random_params
from support.training import AUX, HEAD_SIZES, LENGTH, TARGET, cross_entropy

from specjax.checkpoint.save import save_checkpoint
from specjax.device.drafters.dflash2 import DFlash2
from specjax.device.drafters.drafter import Params
from specjax.device.models.model import Features
from specjax.train.blocks import block_loss, dflash_logits
from specjax.train.context import CausalRows
from specjax.train.drafter import KINDS, draft_vocabulary
from specjax.train.losses import drafter_loss, medusa_loss, unrolled_loss
from specjax.train.teacher import Frozen, shift

K = 3
KEY = jax.random.key(0)
REFINEMENT = DFlash2(
    num_taps=2, group_size=16, rank=8, num_candidates=5, multiplier=0.5, soft_cap=3.0
)


def start_of(kind, documents=()):
    return KINDS[kind].make(TARGET, HEAD_SIZES, documents)


def float64(arrays):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), arrays)


def test_eagle3_learns_counted_positions(target_params, documents, features):
    start = start_of("eagle3", documents)
    head, ids = start.head, np.asarray(start.frozen["target_ids"])
    np.testing.assert_array_equal(ids, draft_vocabulary(documents, 64, 32))
    own, batch = random_params(head.specs(), 1), features.batch_at(0, 4, 0)

    @jax.jit
    def run(own, batch):
        frozen = Frozen(target_params, {"target_ids": jnp.array(ids)})
        loss, metrics = unrolled_loss(TARGET, head, own, frozen, batch, KEY, num_unrolled=1)
        params, flat = frozen.join(own), batch.hidden.reshape(4 * LENGTH, -1)
        fused = head.fuse(params.drafter, Features(flat, batch.auxiliary.reshape(len(flat), -1)))
        fed, rows = shift(batch.tokens, 1).reshape(-1), CausalRows.of(4, LENGTH)
        hidden, _ = head.extend(TARGET, params, fed, fused, rows, None)
        logits = TARGET.logits(target_params, flat), head.logits(TARGET, params, hidden)
        return loss, metrics, [x.reshape(4, LENGTH, -1) for x in logits]

    loss, metrics, (teacher, drafted) = float64(run(own, batch))
    losses = [
        cross_entropy(teacher[b, t + 1, ids], drafted[b, t])
        for b, t in np.ndindex(4, LENGTH - 2)
        if batch.is_answer[b, t + 2] and teacher[b, t + 1].argmax() in ids
    ]
    assert losses
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-4)
    assert 0 <= metrics["accuracy_1"] <= 1


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


@pytest.mark.parametrize("refinement", [None, REFINEMENT], ids=["DFlash", "DFlash2"])
def test_blocks_learn_the_answers_after_their_anchors(target_params, features, refinement):
    """With as many blocks as tokens, every token of an answer is an anchor once."""
    head = start_of("dflash").head
    head = head if refinement is None else replace(head, refinement=refinement)
    own, batch = random_params(head.specs(), 2), features.batch_at(0, 2, 0)
    params = Params(target_params, own)
    every = jnp.tile(jnp.arange(LENGTH), (2, 1))

    @jax.jit
    def run(params, batch):
        loss = partial(block_loss, dflash_logits, TARGET, head)
        loss = partial(loss, num_drafts=K, num_blocks=LENGTH, gamma=2.0)
        loss = jax.value_and_grad(loss, has_aux=True)
        frozen = Frozen(params.target, {})
        logits = dflash_logits(TARGET, params, head, batch, every, K)
        teacher = TARGET.logits(params.target, batch.hidden.reshape(2 * LENGTH, -1))
        return *loss(params.drafter, frozen, batch, KEY), logits, teacher

    (loss, metrics), gradient, *found = run(params, batch)
    trained, teacher = float64(found)
    teacher, total = teacher.reshape(2, LENGTH, -1), 0.0
    for k in range(1, K + 1):
        spots = [(b, n) for b in range(2) for n in range(4, 20 - k)]
        for logits in trained:
            pairs = [(teacher[b, n + k - 1], logits[b, n, k - 1]) for b, n in spots]
            total += np.exp(-(k - 1) / 2) * np.mean([cross_entropy(*pair) for pair in pairs])
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
        loss, _ = medusa_loss(TARGET, heads, own, Frozen(target_params, {}), batch, KEY)
        return loss, heads.logits(own, 2, hidden), TARGET.logits(target_params, hidden)

    loss, drafted, teacher = float64(run(own, batch))
    teacher, total = teacher.reshape(2, LENGTH, -1), 0.0
    for i in range(2):
        logits = drafted[:, i].reshape(2, LENGTH, -1)
        spots = [(b, p) for b in range(2) for p in range(2 - i, 18 - i)]  # p + 2 + i is an answer's
        losses = [cross_entropy(teacher[b, p + 1 + i], logits[b, p]) for b, p in spots]
        total += 0.8**i * np.mean(losses)
    np.testing.assert_allclose(loss, total, rtol=1e-4)


def torch_loss(oracle, masks, tokens, answer, auxiliary, teacher, ids):
    """P-EAGLE's loss in torch: a pass without a cache for every token of an answer."""
    torch, losses = pytest.importorskip("torch"), [[] for _ in range(K)]
    for b, n in zip(*np.nonzero(answer), strict=True):
        fed = torch.tensor([*tokens[b, 1 : n + 1], *[HEAD_SIZES.mask_token_id] * (K - 1)])
        states = torch.cat([auxiliary[b, :n], masks.expand(K - 1, -1)])
        x = oracle.run(oracle.embedding[fed], oracle.fused([states]))
        x = x + oracle.attend(oracle.norm(x, "layers.1.input_layernorm"), "layers.1")
        x = oracle.norm(oracle.after_attention(x, "layers.1"), "norm")
        for k, row in enumerate(x[n - 1 :]):
            spot = n + k  # of the row by which the target chooses the same token
            if spot + 1 < LENGTH and answer[b, spot + 1] and teacher[b, spot].argmax() in ids:
                expected = teacher[b, spot, ids].softmax(-1)
                losses[k].append(-expected @ (oracle.lm_head @ row).log_softmax(-1))
    return sum(torch.stack(one).mean() for one in losses)


def test_p_eagle_learns_what_it_would_in_torch(target_params, documents, features, tmp_path):
    """The loss, and its gradient by every tensor of the checkpoint."""
    torch, heads = pytest.importorskip("torch"), pytest.importorskip("support.torch_heads")
    safetensors = pytest.importorskip("safetensors.torch")
    torch.set_num_threads(1)
    start = start_of("p_eagle", documents)
    head, batch = start.head, jax.device_get(features.batch_at(0, 1, 0))
    own, frozen = random_params(head.specs(), 2), Frozen(target_params, start.frozen)
    # As many blocks as tokens: every token of an answer begins one.
    loss = partial(drafter_loss(TARGET, head, num_unrolled=K), num_blocks=LENGTH)
    loss = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, _), gradient = loss(own, frozen, batch, KEY)
    tensors = []
    for i, tree in enumerate((own, gradient)):
        save_checkpoint(tmp_path / str(i), head.specs(), tree, start.config, dtype=np.dtype("f4"))
        tensors.append(safetensors.load_file(tmp_path / str(i) / "model.safetensors"))
    weights = {name: x.requires_grad_() for name, x in tensors[0].items()}
    decoder = {"head_dim": 64, "rope_theta": TARGET.rope.theta, "rms_norm_eps": 1e-5}
    embedding = torch.from_numpy(np.array(target_params.embedding.values))
    oracle = heads.OracleHead(weights, decoder, embedding, weights["lm_head.weight"], AUX)
    teacher = jax.jit(TARGET.logits)(target_params, batch.hidden[0])
    arrays = np.array(batch.auxiliary), np.array(teacher)[None]
    states, teacher = map(torch.from_numpy, arrays)
    masks, ids = weights["mask_hidden"][0], torch.from_numpy(np.array(start.frozen["target_ids"]))
    expected = torch_loss(oracle, masks, batch.tokens, batch.is_answer, states, teacher, ids)
    np.testing.assert_allclose(value, expected.item(), rtol=1e-4)
    expected.backward()
    for name, found in tensors[1].items():
        other = weights[name].grad.numpy()
        scale = np.abs(other).max()
        assert scale > 0, name
        np.testing.assert_allclose(found.numpy(), other, atol=1e-3 * scale, err_msg=name)
