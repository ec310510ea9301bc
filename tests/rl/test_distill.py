"""Refits: the step is optax's on the current target's features, and a drafter catches up by it."""

import weakref
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.tree_util import keystr, tree_leaves_with_path
from safetensors.numpy import load_file

from specjax import SamplingParams
from specjax.device.drafters.drafter import Params
from specjax.device.models.model import Features
from specjax.rl.distill import OnlineDistiller
from specjax.rl.engine import RolloutEngine
from specjax.train.context import CausalRows, UnrolledRows
from specjax.train.data import Document, shuffled_indices, window
from specjax.train.drafter import shift

METHODS = pytest.param("eagle", marks=pytest.mark.slow), "eagle3", "mtp"
SIZES = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12)
NUM_UNROLLED = 2


@pytest.fixture
def open_engine(checkpoints):
    """Engines on tiny checkpoints, by method of drafting."""
    opened = []

    def open_one(method, **target):
        if method == "mtp":
            made = checkpoints.mtp(checkpoints.target("qwen3_5_text", **target)).folder
            drafter = None
        else:
            files = checkpoints.target("llama", **target)
            made = files.folder
            heads = {
                "eagle": partial(checkpoints.eagle, embedding="own"),
                "eagle3": partial(checkpoints.eagle3, draft_vocab=60),
            }
            drafter = str(heads[method](files).folder) if method in heads else None
        config = {"method": method, "model": drafter, "num_speculative_tokens": 2}
        engine = RolloutEngine(made, speculative_config=config if method else None, **SIZES)
        engine.folder = made
        opened.append(engine)
        return engine

    yield open_one
    for engine in opened:
        engine.close()


@pytest.fixture
def prompts(ragged_prompts):
    return ragged_prompts(7, 5, 9, 6, 11, 8)


def distiller(engine, **settings):
    return OnlineDistiller(
        engine, **{"batch_size": 6, "length": 24, "num_unrolled": NUM_UNROLLED} | settings
    )


def moved(params, scale=0.05):
    """Weights, a step of training further."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    pairs = zip(leaves, keys, strict=True)

    def move(x, key):
        noise = jax.random.normal(key, x.shape)
        return x + scale * x.std() * noise if x.dtype == jnp.float32 else x

    return jax.tree.unflatten(tree, [move(x, key) for x, key in pairs])


def shifted(engine):
    """The target's weights, a step of training further."""
    return moved(engine.params.target)


def copied(tree):
    return jax.tree.map(np.array, tree)


def assert_equal(one, other):
    """Every array of two trees is the same, bit for bit."""
    for (path, a), (_, b) in zip(
        tree_leaves_with_path(one), tree_leaves_with_path(other), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=keystr(path))


@pytest.mark.parametrize("method", METHODS)
def test_a_refit_learns_and_changes_no_output(open_engine, prompts, method):
    engine = open_engine(method)
    greedy = SamplingParams(temperature=0, max_tokens=12)
    rollouts = engine.generate(prompts, SAMPLED)
    before = [one.token_ids.tolist() for one in engine.generate(prompts, greedy)]
    old = copied(engine.params.drafter)
    report = distiller(engine, learning_rate=3e-3).refit(rollouts, steps=30)
    assert report.last["loss"] < report.first["loss"] - 0.1
    assert report.num_rollouts == len(rollouts)
    assert report.num_tokens == sum(len(one.token_ids) for one in rollouts)
    assert engine.drafter_version == 1
    assert [one.token_ids.tolist() for one in engine.generate(prompts, greedy)] == before
    new = engine.params.drafter
    for name in "embedding", "target_ids":  # which are not trained
        if getattr(new, name, None) is not None:
            np.testing.assert_array_equal(getattr(new, name), getattr(old, name))
    assert (np.asarray(new.fc) != old.fc).mean() > 0.9


def plain_loss(target, head, drafter, target_params, rollouts, length):
    """What a refit minimises, of all rollouts at once, on features of a forward without a cache."""
    size = len(rollouts)
    tokens, is_answer = np.zeros((size, length), np.int32), np.zeros((size, length), bool)
    for row, one in enumerate(rollouts):
        both = np.concatenate([one.prompt_token_ids, one.token_ids])[:length]
        tokens[row, : len(both)] = both
        is_answer[row, len(one.prompt_token_ids) : len(both)] = True
    rows = CausalRows.of(size, length)
    features, _ = target.extend(target_params, tokens.reshape(-1), rows, None, head.aux_layers)
    features = jax.lax.stop_gradient(Features(features.hidden, features.auxiliary))
    teacher = target.logits(target_params, features.hidden)
    ids = head.target_ids(drafter)
    counted = jnp.ones(size * length, bool)
    if ids is not None:
        counted, teacher = jnp.isin(teacher.argmax(-1), ids), teacher[:, ids]
    teacher = jax.nn.softmax(teacher).reshape(size, length, -1)
    params = Params(target_params, drafter)
    hidden, kv, total = head.fuse(drafter, features), (), 0.0
    for step in range(NUM_UNROLLED):
        fed = shift(jnp.array(tokens), step + 1).reshape(-1)
        rows = UnrolledRows.of(size, length, step)
        hidden, kv = head.extend(target, params, fed, hidden, rows, kv)
        logits = head.logits(target, params, hidden).reshape(size, length, -1)
        which = shift(jnp.array(is_answer), step + 2)
        which &= shift(counted.reshape(size, length), step + 1)
        losses = -(shift(teacher, step + 1) * jax.nn.log_softmax(logits)).sum(-1)
        total += 0.8**step * jnp.where(which, losses, 0).sum() / which.sum()
    return total


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_step_is_optax_on_what_the_current_target_makes_of_the_rollouts(
    open_engine, prompts, method
):
    engine, rate = open_engine(method), 0.01
    rollouts = engine.generate(prompts, SAMPLED)
    engine.update_weights(shifted(engine))
    start = jax.tree.map(jnp.array, engine.params.drafter)
    assert getattr(start, "embedding", None) is None  # it is the target's, whose new one counts
    target_params = jax.tree.map(jnp.array, engine.params.target)
    target, head = engine.target, engine.drafter.head
    report = distiller(engine, learning_rate=rate).refit(rollouts, steps=1)

    ids = getattr(start, "target_ids", None)

    def loss(floats):
        whole = floats if ids is None else replace(floats, target_ids=ids)
        return plain_loss(target, head, whole, target_params, rollouts, 24)

    floats = start if ids is None else replace(start, target_ids=None)
    value, gradient = jax.value_and_grad(loss)(floats)
    np.testing.assert_allclose(report.first["loss"], value, rtol=1e-4)
    np.testing.assert_allclose(report.first["grad_norm"], optax.tree.norm(gradient), rtol=1e-3)
    gradient = jax.tree.map(lambda g: g / jnp.maximum(1, optax.tree.norm(gradient)), gradient)
    new = engine.params.drafter
    adamw = optax.adamw(rate / 10, b2=0.95, weight_decay=0.01)  # the rate rises in ten steps
    expected = optax.apply_updates(floats, adamw.update(gradient, adamw.init(floats), floats)[0])
    for name in "fc", "norm", "lm_head":
        if hasattr(new, name):
            np.testing.assert_allclose(
                getattr(new, name), getattr(expected, name), atol=0.02 * rate / 10, err_msg=name
            )


def test_refits_after_the_first_compile_nothing(open_engine, prompts, compilations):
    engine = open_engine("eagle3")
    refits = distiller(engine, memory=8)
    first, second = engine.generate(prompts[:4], SAMPLED), engine.generate(prompts[4:], SAMPLED)
    refits.refit(first, steps=2)
    weights = shifted(engine)
    engine.update_weights(weights)
    with compilations.none_expected():
        assert refits.refit(second, steps=3).num_rollouts == 6
        engine.update_weights(weights)
        assert refits.refit(first, steps=1).num_rollouts == 8  # the newest, and no more
    assert refits.num_steps == 6


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_restored_run_goes_on_bit_for_bit(open_engine, prompts, method, tmp_path):
    whole, halves = open_engine(method), open_engine(method)
    rollouts = whole.generate(prompts, SAMPLED)
    for engine in whole, halves:
        engine.update_weights(shifted(engine), version=5)
    distiller(whole).refit(rollouts, steps=8)
    first = distiller(halves)
    first.save(tmp_path)  # an older one, which the next save replaces
    first.refit(rollouts, steps=4)
    first.save(tmp_path)

    fresh = open_engine(method)
    second = distiller(fresh)
    second.restore(tmp_path)
    assert fresh.version == 5
    assert second.num_steps == 4
    assert_equal(fresh.params, halves.params)
    second.refit([], steps=4)  # the rollouts are remembered
    assert_equal(fresh.params, whole.params)


def give_drafter(engine):
    """Another drafter by update_drafter, the embedding that is not trained included."""
    engine.update_drafter(moved(engine.params.drafter))


def give_both(engine):
    """Another drafter beside new weights of the target."""
    engine.update_weights(shifted(engine), drafter=moved(engine.params.drafter))


def give_module(engine):
    """Another drafter as part of the target's own checkpoint."""
    found = sorted(engine.folder.glob("*.safetensors"))
    tensors = {name: array for file in found for name, array in load_file(file).items()}
    engine.update_weights(moved({name: jnp.array(array) for name, array in tensors.items()}))


@pytest.mark.parametrize(
    "method, give", [("eagle", give_drafter), ("eagle3", give_both), ("mtp", give_module)]
)
def test_a_refit_goes_on_from_the_drafter_that_others_gave_the_engine(
    open_engine, prompts, method, give
):
    engine = open_engine(method)
    rollouts = engine.generate(prompts, SAMPLED)
    refits = distiller(engine)
    old = copied(engine.params.drafter)
    give(engine)
    given = copied(engine.params.drafter)
    assert (np.asarray(given.fc) != old.fc).all()
    report, trained = refits.refit(rollouts, steps=3), copied(engine.params.drafter)
    engine.update_drafter(given)
    expected = distiller(engine).refit(rollouts, steps=3)
    np.testing.assert_allclose(report.first["loss"], expected.first["loss"], rtol=1e-5)
    np.testing.assert_allclose(report.last["loss"], expected.last["loss"], rtol=1e-4)
    for (path, a), b in zip(
        tree_leaves_with_path(trained), jax.tree.leaves(engine.params.drafter), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-5, err_msg=keystr(path))
    for name in "embedding", "target_ids":
        if getattr(given, name, None) is not None:
            np.testing.assert_array_equal(getattr(trained, name), getattr(given, name))


def test_a_drafter_that_others_gave_is_saved_and_steps_are_counted_on(
    open_engine, prompts, tmp_path
):
    engine, fresh = open_engine("eagle"), open_engine("eagle")
    refits = distiller(engine)
    rollouts = engine.generate(prompts, SAMPLED)
    refits.refit(rollouts, steps=2)
    give_drafter(engine)
    given = copied(engine.params.drafter)
    refits.save(tmp_path)
    assert_equal(engine.params.drafter, given)
    assert refits.num_steps == 2
    restored = distiller(fresh)
    restored.restore(tmp_path)
    assert_equal(fresh.params, engine.params)  # the embedding, which is not trained, included
    refits.refit([], steps=2)
    assert refits.num_steps == 4
    restored.refit([], steps=2)
    assert_equal(fresh.params, engine.params)


def test_a_drafter_that_comes_during_a_refit_stays(open_engine, prompts, monkeypatch):
    engine = open_engine("eagle3")
    rollouts = engine.generate(prompts, SAMPLED)
    refits, score = distiller(engine), engine.score

    def late(*given, **options):
        scores = score(*given, **options)
        give_drafter(engine)
        return scores

    with monkeypatch.context() as patch:
        patch.setattr(engine, "score", late)
        with pytest.raises(RuntimeError, match="another drafter while .* refit again"):
            refits.refit(rollouts, steps=1)
    given = copied(engine.params.drafter)
    assert engine.drafter_version == 1
    refits.refit([], steps=1)
    assert engine.drafter_version == 2
    np.testing.assert_allclose(engine.params.drafter.fc, given.fc, atol=1e-3)


def test_whole_features_of_a_batch_at_most_are_there_at_a_time(open_engine, prompts, monkeypatch):
    engine = open_engine("eagle3")
    rollouts = engine.generate(prompts, SAMPLED)
    rollouts = [*rollouts, *rollouts[:4]]
    score, arrays, alive, sizes, wholes = engine.score, [], [], [], []

    def counted(samples, **options):
        alive.append(sum(ref() is not None for ref in arrays))
        scores = score(samples, **options)
        sizes.append(len(scores))
        arrays.extend(weakref.ref(part) for one in scores for part in (one.hidden, one.auxiliary))
        wholes.extend((one.hidden.copy(), one.auxiliary.copy()) for one in scores)
        return scores

    monkeypatch.setattr(engine, "score", counted)
    refits = distiller(engine, batch_size=4, length=8)
    train_step = refits._train_step

    def observed(state, frozen, batch):
        alive.append(sum(ref() is not None for ref in arrays))
        for row, number in enumerate(shuffled_indices(len(rollouts), 0, 4, 0)):
            one = rollouts[number]
            tokens = np.concatenate([one.prompt_token_ids, one.token_ids])
            kept = window(Document(tokens, len(one.prompt_token_ids)), 8)
            np.testing.assert_array_equal(batch.tokens[row], tokens[kept])
            for part, whole in zip(batch[2:], wholes[number], strict=True):
                expected = whole[kept]  # the last token's are not known
                np.testing.assert_array_equal(part[row, : len(expected)], expected)
        return train_step(state, frozen, batch)

    monkeypatch.setattr(refits, "_train_step", observed)
    refits.refit(rollouts, steps=1)
    assert sizes == [4, 4, 2]
    assert alive == [0, 0, 0, 0]  # before each batch, and in the step


def test_a_checkpoint_that_does_not_fit_is_refused(open_engine, prompts, tmp_path):
    engine = open_engine("eagle3")
    refits = distiller(engine)
    with pytest.raises(ValueError, match="no checkpoint of a distiller"):
        refits.restore(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no checkpoint of a distiller"):
        refits.restore(tmp_path)
    refits.save(tmp_path)
    wider = distiller(open_engine("eagle3", intermediate_size=64))
    with pytest.raises(ValueError, match=r"mlp.*float32\[.*the engine's is float32\["):
        wider.restore(tmp_path)
    with pytest.raises(ValueError, match="of other models"):
        distiller(open_engine("mtp")).restore(tmp_path)
    with pytest.raises(ValueError, match="different weights of version 0"):
        distiller(open_engine("eagle3", seed=3)).restore(tmp_path)
    engine.update_weights(engine.params.target)
    with pytest.raises(ValueError, match="version 0, the engine is at 1"):
        refits.restore(tmp_path)


@pytest.mark.parametrize("method", ["ngram", None])
def test_an_engine_without_weights_to_refit_is_refused(open_engine, method):
    with pytest.raises(ValueError, match="no weights to refit; build it with .*eagle3"):
        OnlineDistiller(open_engine(method))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be"),
        ({"length": 1.5}, "length=1.5 must be"),
        ({"num_unrolled": 0}, "num_unrolled=0 must be"),
        ({"memory": -1}, "memory=-1 must be"),
        ({"learning_rate": 0.0}, r"learning_rate=0.0 must be in \(0, 1\)"),
    ],
)
def test_settings_that_cannot_be_are_named(open_engine, settings, message):
    with pytest.raises(ValueError, match=message):
        distiller(open_engine("eagle3"), **settings)


def test_nothing_to_learn_from_is_said(open_engine, prompts):
    engine = open_engine("eagle3")
    refits = distiller(engine)
    with pytest.raises(ValueError, match="none in memory"):
        refits.refit([], steps=1)
    rollouts = engine.generate(prompts, SAMPLED)
    with pytest.raises(ValueError, match="steps=0 must be"):
        refits.refit(rollouts, steps=0)
    assert engine.drafter_version == 0
