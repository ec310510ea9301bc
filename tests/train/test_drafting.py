"""Drafts computed in training equal drafts in serving, which uses a paged cache."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.params import random_params
from support.targets import CONFIG_SIZES, LATENT_SIZES
from support.training import AUX, HEAD_SIZES, HYBRID, LENGTH, TARGET, VOCAB, drafting

from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.dflash import AttentionMask, DFlashDrafter
from specjax.device.drafters.dflash2 import DFlash2
from specjax.device.drafters.drafter import Params
from specjax.device.drafters.mtp import MTPHead
from specjax.device.drafters.p_eagle import PEagleDrafter
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.model import Features
from specjax.device.models.registry import describe_model
from specjax.train.blocks import dflash_logits, p_eagle_logits
from specjax.train.context import UnrolledRows
from specjax.train.data import Document
from specjax.train.drafter import KINDS
from specjax.train.features import FeatureSet
from specjax.train.teacher import shift

pytestmark = pytest.mark.slow

K, STARTS = 3, jnp.array([1, 9, 16])
WORDS = [Document(np.arange(VOCAB), 0)]


def latent_target():
    """Return a target with latent attention and experts."""
    sizes = {**CONFIG_SIZES, **LATENT_SIZES, "vocab_size": VOCAB, "num_hidden_layers": 1}
    return describe_model(HFConfig({"model_type": "glm4_moe_lite", **sizes}, "config.json"))


CHAINS = {
    "EAGLE-3": lambda: (TARGET, KINDS["eagle3"].make(TARGET, HEAD_SIZES, WORDS).head),
    "MTP of a hybrid": lambda: (HYBRID, MTPHead(HYBRID)),
    "MTP of latent attention": lambda: (target := latent_target(), MTPHead(target)),
}
SLOW = pytest.param("MTP of latent attention", marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", ["EAGLE-3", "MTP of a hybrid", SLOW])
def test_an_unrolled_chain(documents, kind):
    """Row i at step j of training is draft j after i + 1 verified tokens."""
    target, head = CHAINS[kind]()
    params = Params(*(jax.device_put(random_params(of.specs(), 2)) for of in (target, head)))
    layers = AUX if kind == "EAGLE-3" else ()
    features = FeatureSet.of(target, params.target, documents[:1], LENGTH, layers, batch=1)
    batch = features.batch_at(0, 1, 0)

    @jax.jit
    def unroll(params, batch):
        hidden = head.fuse(params.drafter, Features(batch.hidden[0], batch.auxiliary[0]))
        kv, found = (), []
        for step in range(K):
            fed = shift(batch.tokens, step + 1).reshape(-1)
            rows = UnrolledRows.of(1, LENGTH, step)
            hidden, kv = head.extend(target, params, fed, hidden, rows, kv)
            found.append(head.logits(target, params, hidden)[STARTS - 1])
        return jnp.stack(found, axis=1)

    draft = jax.jit(partial(drafting, target, ChainDrafter(head), k=K))
    expected = draft(params, batch=batch, starts=STARTS)
    np.testing.assert_allclose(unroll(params, batch), expected, atol=1e-4)


def head_of(kind, **changes):
    return replace(KINDS[kind].make(TARGET, HEAD_SIZES, WORDS).head, **changes)


WINDOWS = AttentionMask(back=4, ahead=1), AttentionMask(back=5, is_anchored=True)
REFINEMENT = DFlash2(
    num_taps=2, group_size=16, rank=8, num_candidates=5, multiplier=0.5, soft_cap=3.0
)
BLOCKS = {
    "DFlash, full, causal": head_of(
        "dflash", attention_masks=(AttentionMask(), AttentionMask(ahead=0))
    ),
    "DSpark, windows": head_of("dspark", attention_masks=WINDOWS),
    "DFlash2": head_of("dflash", refinement=REFINEMENT),
    "P-EAGLE": head_of("p_eagle"),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block(target_params, features, kind):
    head = BLOCKS[kind]
    drafter, logits_of = DFlashDrafter(head), dflash_logits
    if kind == "P-EAGLE":
        drafter, logits_of = PEagleDrafter(head), p_eagle_logits
    params = Params(target_params, random_params(head.specs(), 2))
    batch = features.batch_at(0, 1, 0)
    draft = jax.jit(partial(drafting, TARGET, drafter, k=K))
    expected = draft(params, batch=batch, starts=STARTS)
    trained = jax.jit(partial(logits_of, TARGET, head=head, num_drafts=K))
    *others, drawn = trained(params, batch=batch, starts=STARTS[None])
    np.testing.assert_allclose(drawn[0], expected, atol=1e-4)
    if kind == "DFlash2":  # its candidates are the best of the other logits
        best = np.argsort(-others[0], axis=-1)[..., :5]
        assert np.isfinite(np.take_along_axis(np.asarray(drawn), best, -1)).all()
        assert np.isfinite(drawn).sum() == 3 * K * 5
