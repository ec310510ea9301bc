"""Training of a hybrid's MTP module: what it unrolls is what drafting runs; its export loads."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.params import random_params
from support.targets import CONFIG_SIZES, LATENT_SIZES

from specjax.checkpoint.save import save_checkpoint
from specjax.config import SpeculativeConfig
from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.rows import CachedRows
from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.drafter import DraftContext, Observation, Params, Variant
from specjax.device.drafters.mtp import MTPHead
from specjax.device.drafters.registry import load_drafter
from specjax.device.edits import History
from specjax.device.models import qwen3_5
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.model import Features
from specjax.device.models.qwen3_5 import ATTENTION, DELTA
from specjax.device.models.registry import describe_model, load_model
from specjax.device.requests import init_requests
from specjax.train.context import CausalRows, UnrolledRows
from specjax.train.data import Document
from specjax.train.drafter import KINDS, HeadSizes, train_drafter
from specjax.train.features import FeatureSet
from specjax.train.loop import Schedule
from specjax.train.losses import Frozen, shift, unrolled_loss
from specjax.train.target import demo_qwen3_5, init_params

LENGTH, K = 24, 3
TARGET = replace(demo_qwen3_5(48, 2, 64), layer_types=(DELTA, ATTENTION))
HEAD = MTPHead(TARGET)
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def target_params():
    return jax.device_put(random_params(TARGET.specs(), 0))


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(0)
    return [Document(rng.integers(0, 48, 20).astype(np.int32), 4) for _ in range(12)]


@pytest.fixture(scope="module")
def features(target_params, documents):
    return FeatureSet.of(TARGET, target_params, documents, LENGTH, ())


def latent_target():
    """A target with latent attention and experts."""
    sizes = {**CONFIG_SIZES, **LATENT_SIZES, "vocab_size": 48, "num_hidden_layers": 1}
    return describe_model(HFConfig({"model_type": "glm4_moe_lite", **sizes}, "config.json"))


@pytest.mark.parametrize("make", [lambda: TARGET, pytest.param(latent_target, marks=SLOW)])
def test_the_unrolled_chain_is_what_drafting_computes(make):
    """Row i, step j of training equals the j-th draft after i + 1 verified tokens, paged."""
    last = 10  # rows 0..last are verified; token last + 1 is the newest
    target = make()
    head = MTPHead(target)
    params = Params(*(jax.device_put(random_params(of.specs(), 0)) for of in (target, head)))
    tokens = np.random.default_rng(3).integers(0, 48, (1, LENGTH)).astype(np.int32)

    @jax.jit
    def draft(params, tokens):
        features, _ = target.extend(params.target, tokens[0], CausalRows.of(1, LENGTH), None)
        drafter = ChainDrafter(head)
        state = drafter.init_state(CacheSizes(1, 4, 8, 1), jnp.float32)
        table, slots = jnp.arange(4, dtype=jnp.int32)[None], jnp.zeros(1, jnp.int32)
        rows = CachedRows(jnp.arange(last + 1), table)
        following = tokens[:, 1 : last + 2]
        features_seen = Features(features.hidden[: last + 1], None)
        seen = Observation(
            slots, rows, tokens[:, : last + 1], following, features_seen, jnp.array([last]), None
        )
        state = drafter.observe(target, params, state, seen)
        context = DraftContext(
            slots=slots,
            starts=jnp.array([last + 1]),
            is_active=jnp.ones(1, bool),
            page_table=table,
            requests=init_requests(1, target.vocab_size),  # greedy
            history=History(tokens, jnp.array([last + 2])),
            has_edits=jnp.array(False),
            kernels="auto",
            row_multiple=1,
            shares_noise=True,
            variant=Variant(),
        )
        return features.hidden, drafter.draft(target, params, state, context, K)[0].tokens

    @jax.jit
    def unroll(params, hidden, chain):
        kv, found = (), []
        for step in range(K):
            fed, rows = shift(chain, step + 1).reshape(-1), UnrolledRows.of(1, LENGTH, step)
            hidden, kv = head.extend(target, params, fed, hidden, rows, kv)
            found.append(head.logits(target, params, hidden)[last].argmax())
        return jnp.stack(found)

    hidden, drafts = draft(params, tokens)
    chain = np.concatenate([tokens[:, : last + 2], drafts], axis=1)
    chain = np.pad(chain, ((0, 0), (0, LENGTH - chain.shape[1])))
    assert unroll(params, hidden, chain).tolist() == drafts[0].tolist()


def test_the_loss_is_the_cross_entropy_of_answers(target_params, features):
    batch, own = features.batch_at(0, 4, 0), random_params(HEAD.specs(), 5)
    losses_of = jax.jit(partial(unrolled_loss, TARGET, HEAD, num_unrolled=1))
    loss, _ = losses_of(own, Frozen(target_params, {}), batch, jax.random.key(0))

    @jax.jit
    def logits_of(params, batch):
        flat, rows = batch.hidden.reshape(4 * LENGTH, -1), CausalRows.of(4, LENGTH)
        fed = shift(batch.tokens, 1).reshape(-1)
        hidden, _ = HEAD.extend(TARGET, params, fed, flat, rows, None)
        return TARGET.logits(params.target, flat), HEAD.logits(TARGET, params, hidden)

    found = logits_of(Params(target_params, own), batch)
    teacher, drafted = (np.asarray(x, np.float64).reshape(4, LENGTH, -1) for x in found)
    losses = []
    for b in range(4):
        for t in range(LENGTH - 2):
            if batch.is_answer[b, t + 2]:
                p = np.exp(teacher[b, t + 1] - teacher[b, t + 1].max())
                log_q = drafted[b, t] - np.log(np.exp(drafted[b, t]).sum())
                losses.append(-(p / p.sum()) @ log_q)
    assert losses
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-4)


def test_training_lowers_the_loss_and_the_module_lies_in_the_targets_files(
    target_params, documents, features, tmp_path
):
    schedule = Schedule(steps=12, batch_size=6, length=LENGTH, learning_rate=3e-3, seed=0)
    start = KINDS["mtp"].make(TARGET, HeadSizes(), documents)
    head = start.head
    params, _ = train_drafter(
        TARGET, target_params, start, documents, tmp_path / "run", schedule, num_unrolled=2
    )
    loss = jax.jit(partial(unrolled_loss, TARGET, head, num_unrolled=2))
    batch = features.batch_at(0, 12, 0)
    frozen, key = Frozen(target_params, {}), jax.random.key(1)
    before = loss(init_params(head.specs(), jax.random.key(0)), frozen, batch, key)[0]
    assert loss(params, frozen, batch, key)[0] < before

    folder = tmp_path / "both"
    specs, both = (TARGET.specs(), head.specs()), (target_params, params)
    save_checkpoint(folder, specs, both, qwen3_5.to_hf(TARGET), dtype=np.dtype("float32"))
    model, loaded = load_model(folder, np.dtype("float32"))
    assert replace(model, rope=TARGET.rope) == TARGET
    jax.tree.map(np.testing.assert_array_equal, loaded, target_params)
    speculation = SpeculativeConfig(method="mtp", num_speculative_tokens=K)
    drafter, loaded = load_drafter(folder, speculation, model, np.dtype("float32"))
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
