"""Training of heads that draft all tokens at once: blocks of DFlash and P-EAGLE, Medusa's heads."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.params import random_params

from specjax.checkpoint.save import save_checkpoint
from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.rows import CachedRows
from specjax.device.drafters.dflash import AttentionMask, DFlashDrafter
from specjax.device.drafters.dflash2 import DFlash2
from specjax.device.drafters.drafter import DraftContext, Observation, Params, Variant
from specjax.device.drafters.p_eagle import PEagleDrafter
from specjax.device.edits import History
from specjax.device.models.model import Features
from specjax.device.requests import init_requests
from specjax.train.blocks import block_loss, dflash_logits, p_eagle_logits
from specjax.train.data import Document
from specjax.train.drafter import KINDS, HeadSizes
from specjax.train.features import FeatureSet
from specjax.train.losses import drafter_loss, medusa_loss
from specjax.train.target import demo_llama
from specjax.train.teacher import Frozen

LENGTH, K = 24, 3
TARGET = demo_llama(64, 3, 64)
AUX = 0, 2, 3
SIZES = HeadSizes(aux_layers=AUX, mask_token_id=7, num_heads=2, draft_vocab_size=32, markov_rank=8)


@pytest.fixture(scope="module")
def target_params():
    return jax.device_put(random_params(TARGET.specs(), 0))


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(0)
    return [Document(rng.integers(0, 64, 20).astype(np.int32), 4) for _ in range(12)]


@pytest.fixture(scope="module")
def features(target_params, documents):
    return FeatureSet.of(TARGET, target_params, documents, LENGTH, AUX)


def drafting(drafter, params, batch, starts):
    """Logits f32[N, K, V] that the engine's drafter draws from after each of `starts`, if every
    draft is the document's token."""
    batch_size, kept = len(starts), []

    class Recorded(DraftContext):
        def draw(self, logits, ids, vocab_size, before, **options):
            kept.append(logits)
            return batch.tokens[0, starts + 1 + len(before)], None

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
        has_edits=jnp.array(False),
        kernels="auto",
        row_multiple=1,
        shares_noise=True,
        variant=Variant(),
    )
    drafter.draft(TARGET, params, state, context, K)
    return jnp.stack(kept, axis=1)


def head_of(kind, documents):
    return KINDS[kind].make(TARGET, SIZES, documents).head


def masked(kind, *masks):
    """A DFlash or DSpark head with what rows see, by layer."""
    return lambda documents: replace(head_of(kind, documents), attention_masks=masks)


def chosen(documents):
    """A DFlash2 head."""
    added = {"num_taps": 2, "group_size": 16, "rank": 8, "num_candidates": 5}
    refinement = DFlash2(**added, multiplier=0.5, soft_cap=3.0)
    return replace(head_of("dflash", documents), refinement=refinement)


HEADS = {
    "DFlash, full, causal": masked("dflash", AttentionMask(), AttentionMask(ahead=0)),
    "DSpark, windows": masked(
        "dspark", AttentionMask(back=4, ahead=1), AttentionMask(back=5, is_anchored=True)
    ),
    "DFlash2": chosen,
    "P-EAGLE": partial(head_of, "p_eagle"),
}


@pytest.mark.parametrize("make", HEADS.values(), ids=list(HEADS))
def test_a_block_in_training_is_a_block_in_drafting(target_params, documents, features, make):
    head = make(documents)
    drafter, logits_of = DFlashDrafter(head), dflash_logits
    if make is HEADS["P-EAGLE"]:
        drafter, logits_of = PEagleDrafter(head), p_eagle_logits
    params = Params(target_params, random_params(head.specs(), 2))
    batch, starts = features.batch_at(0, 1, 0), jnp.array([1, 9, 16])
    expected = jax.jit(partial(drafting, drafter))(params, batch, starts)
    trained = jax.jit(partial(logits_of, TARGET, head=head, num_drafts=K))
    *others, drawn = trained(params, batch=batch, starts=starts[None])
    np.testing.assert_allclose(drawn[0], expected, atol=1e-4)
    if make is HEADS["DFlash2"]:  # its candidates are the best of the other logits
        best = np.argsort(-others[0], axis=-1)[..., :5]
        assert np.isfinite(np.take_along_axis(np.asarray(drawn), best, -1)).all()
        assert np.isfinite(drawn).sum() == 3 * K * 5


def cross_entropy(teacher, logits):
    p, shifted = np.exp(teacher - teacher.max()), logits - logits.max()
    log_q = shifted - np.log(np.exp(shifted).sum())
    return -(p / p.sum())[np.isfinite(log_q)] @ log_q[np.isfinite(log_q)]


@pytest.mark.parametrize("make", [partial(head_of, "dflash"), chosen], ids=["DFlash", "DFlash2"])
def test_the_loss_of_blocks_is_that_of_answers_after_their_anchors(target_params, features, make):
    """With as many blocks as tokens, every token of an answer is an anchor once."""
    head = make([])
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
        return *loss(params.drafter, frozen, batch, jax.random.key(0)), logits, teacher

    (loss, metrics), gradient, *found = run(params, batch)
    trained, teacher = jax.tree.map(lambda x: np.asarray(x, np.float64), found)
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
    heads = head_of("medusa", [])
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


def torch_loss(oracle, masks, tokens, answer, auxiliary, teacher, ids):
    """P-EAGLE's loss in torch: a pass without a cache for every token of an answer."""
    torch, losses = pytest.importorskip("torch"), [[] for _ in range(K)]
    for b, n in zip(*np.nonzero(answer), strict=True):
        fed = torch.tensor([*tokens[b, 1 : n + 1], *[SIZES.mask_token_id] * (K - 1)])
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
    start = KINDS["p_eagle"].make(TARGET, SIZES, documents)
    head, batch = start.head, jax.device_get(features.batch_at(0, 1, 0))
    own, frozen = random_params(head.specs(), 2), Frozen(target_params, start.frozen)
    # As many blocks as tokens: every token of an answer begins one.
    loss = partial(drafter_loss(TARGET, head, num_unrolled=K), num_blocks=LENGTH)
    loss = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, _), gradient = loss(own, frozen, batch, jax.random.key(0))
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
