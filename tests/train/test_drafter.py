"""Training of drafters, from features to files: the loss falls, and exports can be loaded."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from support.marks import marked
from support.params import random_params
from support.training import AUX, HEAD_SIZES, HYBRID, LENGTH, TARGET, VOCAB

from specjax.checkpoint.save import save_checkpoint
from specjax.config import SpeculativeConfig
from specjax.device.drafters.registry import load_drafter
from specjax.device.models import qwen3_5
from specjax.device.models.layers.moe import Experts
from specjax.device.models.registry import load_model
from specjax.train.data import Document
from specjax.train.drafter import KINDS, HeadSizes, draft_vocabulary, train_drafter, warm_start
from specjax.train.features import FeatureSet, feature_bytes
from specjax.train.loop import Schedule
from specjax.train.losses import drafter_loss, split_frozen
from specjax.train.target import demo_glm4_moe_lite, init_params
from specjax.train.teacher import Frozen

FLOAT32 = np.dtype("float32")
# The targets of new heads: a head is a dense layer, whatever its target's layers are.
TARGETS = {
    "eagle1": HYBRID,
    "mtp": HYBRID,
    "eagle3": demo_glm4_moe_lite(VOCAB, 3, 64),
    "dspark": replace(TARGET, experts=Experts(4, num_chosen=2, intermediate_size=32)),
    "p_eagle": TARGET,
    "medusa": TARGET,
}


def test_features_do_not_depend_on_the_padding_of_the_last_batch(
    target_params, documents, features
):
    split = FeatureSet.of(TARGET, target_params, documents, LENGTH, AUX, batch=5)
    for a, b in zip(features.rows, split.rows, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)
    told = feature_bytes(TARGET, len(documents), LENGTH, AUX)
    assert told == sum(part.nbytes for part in features.rows)
    with pytest.raises(ValueError, match="length=4 .*raise it"):  # a prompt has as many
        FeatureSet.of(TARGET, target_params, documents, 4, AUX)


@pytest.mark.parametrize("length, start", [(LENGTH, 0), (18, 2), (10, 3)])
def test_exported_features_are_those_of_the_rows_that_are_kept(documents, features, length, start):
    """Either all 20 tokens fit, or the front is cut, or also the end.

    The prompt's front is cut first.
    """
    whole = features.rows
    exported = list(zip(whole.hidden[:, :19], whole.auxiliary[:, :19], strict=True))
    rows = FeatureSet.exported(documents, exported, length).rows
    stop = min(start + length, 20)
    for name in "tokens", "is_answer":
        found, expected = getattr(rows, name), getattr(whole, name)
        np.testing.assert_array_equal(found[:, : stop - start], expected[:, start:stop])
    stop = min(stop, 19)  # the last token has not been run
    for name in "hidden", "auxiliary":
        found, expected = getattr(rows, name), getattr(whole, name)
        assert found.shape[:2] == (len(documents), length)
        np.testing.assert_array_equal(found[:, : stop - start], expected[:, start:stop])
        assert not found[:, stop - start :].any()


def test_draft_vocabulary_holds_the_most_frequent_answer_tokens():
    documents = [Document(np.array([9, 9, 9, 3, 5, 5, 3, 3, 7]), 3)]
    np.testing.assert_array_equal(draft_vocabulary(documents, 10, 2), [3, 5])


@pytest.mark.slow
@pytest.mark.parametrize("kind", marked(TARGETS, fast=["mtp", "medusa"]))
def test_training_lowers_the_loss_and_its_export_reloads_bit_identically(kind, documents, tmp_path):
    target = TARGETS[kind]
    target_params = jax.device_put(random_params(target.specs(), 0))
    start = KINDS[kind].make(target, HEAD_SIZES, documents)
    schedule = Schedule(steps=12, batch_size=6, length=LENGTH, learning_rate=3e-3, seed=0)
    params, _ = train_drafter(
        target, target_params, start, documents, tmp_path / "run", schedule, num_unrolled=2
    )
    head, frozen = start.head, Frozen(target_params, start.frozen)
    features = FeatureSet.of(target, target_params, documents, LENGTH, head.aux_layers)
    batch, (floats, _) = features.batch_at(0, 12, 0), split_frozen(params)
    loss, key = jax.jit(drafter_loss(target, head, num_unrolled=2)), jax.random.key(1)
    before = loss(init_params(head.specs(), jax.random.key(0)), frozen, batch, key)[0]
    assert loss(floats, frozen, batch, key)[0] < before

    speculation = SpeculativeConfig(method=KINDS[kind].method, model="", num_speculative_tokens=2)
    if kind == "mtp":  # which lies in the target's files
        both = (target.specs(), head.specs()), (target_params, params)
        save_checkpoint(tmp_path, *both, qwen3_5.to_hf(target), dtype=FLOAT32)
        model, loaded = load_model(tmp_path, FLOAT32)
        assert replace(model, rope=target.rope) == target
        jax.tree.map(np.testing.assert_array_equal, loaded, target_params)
        speculation = replace(speculation, model=None)
    else:
        extra = KINDS[kind].vocabulary(head, params)
        save_checkpoint(tmp_path, head.specs(), floats, start.config, dtype=FLOAT32, extra=extra)
    drafter, loaded = load_drafter(tmp_path, speculation, target, FLOAT32)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    if kind != "mtp":
        assert drafter.weights == head
        again = warm_start(KINDS[kind], tmp_path, target)  # what was saved is what one begins with
        assert again.head == head and again.config == start.config
        jax.tree.map(np.testing.assert_array_equal, again.trainable, floats)


def test_medusa_heads_are_trained_further_in_their_authors_file(tmp_path):
    """The names of the file and of its tensors are kept."""
    start, names = KINDS["medusa"].make(TARGET, HeadSizes(), []), ["0.1.weight"]  # of the authors
    params = random_params(start.head.specs(names), 1)
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    written = {"config": config, "dtype": FLOAT32, "file": "medusa_lm_head.safetensors"}
    save_checkpoint(tmp_path / "init", start.head.specs(names), params, **written)
    again = warm_start(KINDS["medusa"], tmp_path / "init", TARGET)
    assert (again.file, again.config) == (written["file"], config)
    jax.tree.map(np.testing.assert_array_equal, again.trainable, params)
    assert KINDS["medusa"].num_drafts(again) == 3

    trained = jax.tree.map(lambda x: 2 * x, again.trainable)
    save_checkpoint(tmp_path, again.head.specs(again.names), trained, **written)
    assert {path.name for path in tmp_path.iterdir()} == {"init", "config.json", again.file}
    speculation = SpeculativeConfig(method="medusa", model="", num_speculative_tokens=3)
    _, loaded = load_drafter(tmp_path, speculation, TARGET, FLOAT32)
    jax.tree.map(np.testing.assert_array_equal, loaded, trained)
