"""Drafter losses against what drafting does, and exports against what is loaded."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.params import random_params

from specjax.checkpoint.save import save_checkpoint
from specjax.config import SpeculativeConfig
from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.rows import CachedRows
from specjax.device.drafters import eagle3
from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.drafter import DraftContext, Observation, Params, Variant
from specjax.device.drafters.registry import load_drafter
from specjax.device.edits import History
from specjax.device.models.layers.moe import Experts
from specjax.device.models.model import Features
from specjax.device.requests import init_requests
from specjax.train.context import CausalRows, UnrolledRows
from specjax.train.data import Document
from specjax.train.drafter import KINDS, HeadSizes, draft_vocabulary, train_drafter, warm_start
from specjax.train.features import FeatureSet, feature_bytes
from specjax.train.loop import Schedule
from specjax.train.losses import drafter_loss, split_frozen, unrolled_loss
from specjax.train.target import demo_glm4_moe_lite, demo_llama, demo_qwen3_5, init_params
from specjax.train.teacher import Frozen, shift

LENGTH = 24
TARGET = demo_llama(64, 3, 64)
HYBRID = demo_qwen3_5(64, 4, 64)
# The targets of new heads: a head is a dense layer, whatever its target's layers are.
LATENT = demo_glm4_moe_lite(64, 3, 64)
SPARSE = replace(TARGET, experts=Experts(num_experts=4, num_chosen=2, intermediate_size=32))
TARGETS = {
    "eagle1": HYBRID,
    "eagle3": LATENT,
    "dspark": SPARSE,
    "p_eagle": TARGET,
    "medusa": TARGET,
}
AUX = (0, 1, 2)


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


def _head():
    return eagle3.Eagle3Head(
        shape=replace(TARGET, num_layers=1),
        target_hidden_size=64,
        draft_vocab_size=32,
        aux_layers=AUX,
    )


def test_unrolled_chain_is_what_drafting_computes(target_params):
    """Row i, step j of training equals the j-th draft after i + 1 verified tokens, paged."""
    head, k, last = _head(), 4, 10  # rows 0..last are verified; token last + 1 is the newest
    ids = np.sort(np.random.default_rng(1).permutation(64)[:32]).astype(np.int32)
    own = replace(random_params(head.specs(), 2), target_ids=ids)
    params = Params(target_params, own)
    tokens = np.random.default_rng(3).integers(0, 64, (1, LENGTH)).astype(np.int32)

    @jax.jit
    def draft(params, tokens):
        features, _ = TARGET.extend(
            params.target, tokens.reshape(-1), CausalRows.of(1, LENGTH), None, AUX
        )
        drafter = ChainDrafter(head)
        state = drafter.init_state(CacheSizes(1, 4, 8, 1), jnp.float32)
        table, slots = jnp.arange(4, dtype=jnp.int32)[None], jnp.zeros(1, jnp.int32)
        rows, following = CachedRows(jnp.arange(last + 1), table), tokens[:, 1 : last + 2]
        features_seen = Features(features.hidden[: last + 1], features.auxiliary[: last + 1])
        seen = Observation(
            slots, rows, tokens[:, : last + 1], following, features_seen, jnp.array([last]), None
        )
        state = drafter.observe(TARGET, params, state, seen)
        context = DraftContext(
            slots=slots,
            starts=jnp.array([last + 1]),
            is_active=jnp.ones(1, bool),
            page_table=table,
            requests=init_requests(1, TARGET.vocab_size),  # greedy
            history=History(tokens, jnp.array([last + 2])),
            has_edits=jnp.array(False),
            kernels="auto",
            row_multiple=1,
            shares_noise=True,
            variant=Variant(),
        )
        return features, drafter.draft(TARGET, params, state, context, k)[0].tokens

    @jax.jit
    def unroll(params, features, chain):
        hidden, kv, found = head.fuse(params.drafter, features), (), []
        for step in range(k):
            fed, rows = shift(chain, step + 1).reshape(-1), UnrolledRows.of(1, LENGTH, step)
            hidden, kv = head.extend(TARGET, params, fed, hidden, rows, kv)
            best = head.logits(TARGET, params, hidden)[last].argmax()
            found.append(params.drafter.target_ids[best])
        return jnp.stack(found)

    features, drafts = draft(params, tokens)
    # Training is fed the same tokens that drafting fed itself.
    chain = np.concatenate([tokens[:, : last + 2], drafts], axis=1)
    chain = np.pad(chain, ((0, 0), (0, LENGTH - chain.shape[1])))
    assert unroll(params, features, chain).tolist() == drafts[0].tolist()


def test_eagle3_loss_is_the_cross_entropy_of_counted_positions(target_params, documents, features):
    head = _head()
    ids = draft_vocabulary(documents, 64, 32)
    batch = features.batch_at(0, 4, 0)
    own = random_params(head.specs(), 1)
    losses_of = jax.jit(partial(unrolled_loss, TARGET, head, num_unrolled=1))
    frozen = Frozen(target_params, {"target_ids": jnp.array(ids)})
    loss, metrics = losses_of(own, frozen, batch, jax.random.key(0))

    # The same, position by position.
    @jax.jit
    def logits_of(full, batch):
        fused = head.fuse(
            full.drafter, Features(batch.hidden, batch.auxiliary.reshape(4 * LENGTH, -1))
        )
        fed, rows = shift(batch.tokens, 1).reshape(-1), CausalRows.of(4, LENGTH)
        hidden, _ = head.extend(TARGET, full, fed, fused, rows, None)
        flat = batch.hidden.reshape(4 * LENGTH, -1)
        return TARGET.logits(full.target, flat), head.logits(TARGET, full, hidden)

    found = logits_of(Params(target_params, replace(own, target_ids=ids)), batch)
    teacher, drafted = (np.asarray(x, np.float64).reshape(4, LENGTH, -1) for x in found)
    losses = []
    for b in range(4):
        for t in range(LENGTH - 2):
            if batch.is_answer[b, t + 2] and teacher[b, t + 1].argmax() in ids:
                p = np.exp(teacher[b, t + 1, ids] - teacher[b, t + 1, ids].max())
                log_q = drafted[b, t] - np.log(np.exp(drafted[b, t]).sum())
                losses.append(-(p / p.sum()) @ log_q)
    assert losses
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-4)
    assert 0 <= metrics["accuracy_1"] <= 1


def test_features_do_not_depend_on_the_padding_of_the_last_batch(
    target_params, documents, features
):
    split = FeatureSet.of(TARGET, target_params, documents, LENGTH, AUX, batch=5)
    for a, b in zip(features.rows, split.rows, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)
    told = feature_bytes(TARGET, len(documents), LENGTH, AUX)
    assert told == sum(part.nbytes for part in features.rows)


def test_exported_features_are_those_of_the_rows_that_are_kept(documents, features):
    whole = features.rows
    exported = list(zip(whole.hidden[:, :19], whole.auxiliary[:, :19], strict=True))
    for length in LENGTH, 18, 10:  # all fits; the front goes; the front and the end
        rows = FeatureSet.exported(documents, exported, length).rows
        start = {LENGTH: 0, 18: 2, 10: 3}[length]
        stop = min(start + length, 20)
        count = stop - start
        np.testing.assert_array_equal(rows.tokens[:, :count], whole.tokens[:, start:stop])
        np.testing.assert_array_equal(rows.is_answer[:, :count], whole.is_answer[:, start:stop])
        count = min(stop, 19) - start  # the last token has not been run
        for mine, all_of_it in (
            (rows.hidden, whole.hidden),
            (rows.auxiliary, whole.auxiliary),
        ):
            assert mine.shape[:2] == (len(documents), length)
            np.testing.assert_array_equal(mine[:, :count], all_of_it[:, start : start + count])
            assert not mine[:, count:].any()


def test_what_does_not_count_has_no_part_in_the_loss(target_params, documents, features):
    head = _head()
    ids = jnp.array(draft_vocabulary(documents, 64, 32))
    batch = jax.device_get(features.batch_at(0, 4, 0))
    last = 19  # whose features nobody exports
    hidden, auxiliary = batch.hidden.copy(), batch.auxiliary.copy()
    hidden[:, last:] = auxiliary[:, last:] = 0
    other = batch._replace(hidden=hidden, auxiliary=auxiliary)
    loss = jax.jit(
        jax.value_and_grad(partial(unrolled_loss, TARGET, head, num_unrolled=3), has_aux=True)
    )
    own, key = random_params(head.specs(), 1), jax.random.key(0)
    frozen = Frozen(target_params, {"target_ids": ids})
    (one, _), gradient = loss(own, frozen, batch, key)
    (two, _), same = loss(own, frozen, other, key)
    assert one == two
    jax.tree.map(np.testing.assert_array_equal, gradient, same)


def test_draft_vocabulary_holds_the_most_frequent_answer_tokens():
    documents = [Document(np.array([9, 9, 9, 3, 5, 5, 3, 3, 7]), 3)]
    np.testing.assert_array_equal(draft_vocabulary(documents, 10, 2), [3, 5])


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "dspark", "p_eagle", "medusa"])
def test_training_lowers_the_loss_and_its_export_reloads_bit_identically(
    kind, target_params, documents, features, tmp_path
):
    schedule = Schedule(steps=12, batch_size=6, length=LENGTH, learning_rate=3e-3, seed=0)
    target = TARGETS[kind]
    if target is not TARGET:
        target_params = jax.device_put(random_params(target.specs(), 0))
    sizes = HeadSizes(
        aux_layers=AUX, draft_vocab_size=32, mask_token_id=0, num_heads=2, markov_rank=8
    )
    start = KINDS[kind].make(target, sizes, documents)
    params, _ = train_drafter(
        target, target_params, start, documents, tmp_path / "run", schedule, num_unrolled=2
    )
    head, extra = start.head, KINDS[kind].vocabulary(start.head, params)
    if target is not TARGET:
        features = FeatureSet.of(target, target_params, documents, LENGTH, head.aux_layers)
    loss, batch = jax.jit(drafter_loss(target, head, num_unrolled=2)), features.batch_at(0, 12, 0)
    frozen, (floats, _) = Frozen(target_params, start.frozen), split_frozen(params)
    before = loss(init_params(head.specs(), jax.random.key(0)), frozen, batch, jax.random.key(1))[0]
    after = loss(floats, frozen, batch, jax.random.key(1))[0]
    assert after < before

    dtype = np.dtype("float32")
    save_checkpoint(tmp_path, head.specs(), floats, start.config, dtype=dtype, extra=extra)
    speculation = SpeculativeConfig(method=KINDS[kind].method, model="", num_speculative_tokens=2)
    drafter, loaded = load_drafter(tmp_path, speculation, target, dtype)
    assert drafter.weights == head
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    again = warm_start(KINDS[kind], tmp_path, target)  # what was saved is what one begins with
    assert again.head == head and again.config == start.config
    jax.tree.map(np.testing.assert_array_equal, again.trainable, floats)


def test_medusa_heads_are_trained_further_in_their_authors_file(target_params, tmp_path):
    """Its names and the file's are kept."""
    start, dtype = KINDS["medusa"].make(TARGET, HeadSizes(), []), np.dtype("float32")
    names = ["0.1.weight"]  # which tells the authors' layout
    params = random_params(start.head.specs(names), 1)
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    written = {"specs": start.head.specs(names), "params": params, "config": config, "dtype": dtype}
    save_checkpoint(tmp_path / "init", **written, file="medusa_lm_head.safetensors")
    again = warm_start(KINDS["medusa"], tmp_path / "init", TARGET)
    assert (again.file, again.config) == ("medusa_lm_head.safetensors", config)
    jax.tree.map(np.testing.assert_array_equal, again.trainable, params)
    assert KINDS["medusa"].num_drafts(again) == 3

    specs, trained = again.head.specs(again.names), jax.tree.map(lambda x: 2 * x, again.trainable)
    save_checkpoint(tmp_path, specs, trained, again.config, dtype=dtype, file=again.file)
    assert {path.name for path in tmp_path.iterdir()} == {"init", "config.json", again.file}
    speculation = SpeculativeConfig(method="medusa", model="", num_speculative_tokens=3)
    jax.tree.map(
        np.testing.assert_array_equal,
        load_drafter(tmp_path, speculation, TARGET, dtype)[1],
        trained,
    )


def test_a_length_without_answers_is_refused(target_params, documents):
    with pytest.raises(ValueError, match="length=4 .*raise it"):
        FeatureSet.of(TARGET, target_params, documents, 4, AUX)
