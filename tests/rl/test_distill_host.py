"""Distillers adopt new drafters, resume from checkpoints, and refuse wrong input.

Engines are simulated, with made-up scores. Training steps are real.
"""

import weakref
from functools import partial

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.engines import VOCAB, K
from support.refits import (
    SAMPLED,
    assert_equal,
    distiller,
    give_drafter,
    made_up_scores,
    moved,
)
from support.rollouts import SETTINGS, copied

from specjax.rl import distill
from specjax.rl.distill import OnlineDistiller
from specjax.rl.engine import RolloutEngine
from specjax.train.data import Document, shuffled_indices, window

pytestmark = [pytest.mark.usefixtures("simulated_device", "one_step"), pytest.mark.slow]


@pytest.fixture
def open_engine(checkpoints):
    """Return a function that makes an engine with a drafting method. Its scores are made up."""
    opened = []

    def open_one(method, **config):
        kind = "qwen3_5" if method == "mtp" else "llama"
        target = checkpoints.target(kind, vocab_size=VOCAB, **config)
        folder, model = target.folder, None
        if method == "mtp":
            folder = checkpoints.mtp(target).folder
        elif method == "eagle":
            model = str(checkpoints.eagle(target, embedding="own").folder)
        elif method == "eagle3":
            model = str(checkpoints.eagle3(target, draft_vocab=20).folder)
        config = {"method": method, "model": model, "num_speculative_tokens": K}
        engine = RolloutEngine(folder, speculative_config=config if method else None, **SETTINGS)
        engine.folder = folder
        engine.score = made_up_scores(engine)
        opened.append(engine)
        return engine

    yield open_one
    for engine in opened:
        engine.close()


def give_both(engine):
    """Replace the weights of the target and of the drafter."""
    engine.update_weights(moved(engine.params.target), drafter=moved(engine.params.drafter))


def give_module(engine):
    """Replace the weights of the target and, in the same checkpoint, of its MTP module."""
    found = sorted(engine.folder.glob("*.safetensors"))
    tensors = {name: array for file in found for name, array in load_file(file).items()}
    engine.update_weights(moved(tensors))


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
    assert (np.asarray(given.fc.values) != old.fc.values).all()
    report, trained = refits.refit(rollouts, steps=3), copied(engine.params.drafter)
    engine.update_drafter(given)
    expected = distiller(engine).refit(rollouts, steps=3)
    np.testing.assert_allclose(report.first["loss"], expected.first["loss"], rtol=1e-5)
    np.testing.assert_allclose(report.last["loss"], expected.last["loss"], rtol=1e-4)
    compare = partial(np.testing.assert_allclose, atol=1e-5)
    jax.tree.map(compare, trained, copied(engine.params.drafter))
    for name in "embedding", "target_ids":
        if getattr(given, name, None) is not None:
            assert_equal(getattr(trained, name), getattr(given, name))


@pytest.mark.parametrize("method, is_given", [("eagle", True), ("eagle3", False), ("mtp", False)])
def test_a_restored_run_goes_on_bit_for_bit(open_engine, prompts, method, is_given, tmp_path):
    """The run may also start from a replaced drafter, whose embedding is not trained."""
    whole, halves, fresh = (open_engine(method) for _ in range(3))
    rollouts = whole.generate(prompts, SAMPLED)
    for engine in whole, halves:
        engine.update_weights(moved(engine.params.target), version=5)
    uninterrupted, first, second = map(distiller, (whole, halves, fresh))
    first.save(tmp_path)  # an older one, which the next save replaces
    first.refit(rollouts, steps=4)
    uninterrupted.refit(rollouts, steps=4 if is_given else 8)
    if is_given:
        give_drafter(halves)
        give_drafter(whole)
        uninterrupted.refit([], steps=4)
    before = copied(halves.params.drafter)
    first.save(tmp_path)
    assert_equal(halves.params.drafter, before)
    second.restore(tmp_path)
    assert fresh.version == 5 and first.num_steps == second.num_steps == 4
    assert_equal(fresh.params, halves.params)
    second.refit([], steps=4)  # the rollouts are remembered
    assert uninterrupted.num_steps == second.num_steps == 8
    assert_equal(fresh.params, whole.params)


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
    np.testing.assert_allclose(engine.params.drafter.fc.values, given.fc.values, atol=1e-3)


def test_whole_features_of_a_batch_at_most_are_there_at_a_time(open_engine, prompts, monkeypatch):
    engine = open_engine("eagle3")
    rollouts = engine.generate(prompts, SAMPLED)
    rollouts = [*rollouts, *rollouts[:4]]
    score, arrays, alive, sizes, wholes = engine.score, [], [], [], []

    def count_alive():
        alive.append(sum(ref() is not None for ref in arrays))

    def counted(samples, **options):
        count_alive()
        scores = score(samples, **options)
        sizes.append(len(scores))
        arrays.extend(weakref.ref(part) for one in scores for part in (one.hidden, one.auxiliary))
        wholes.extend((one.hidden.copy(), one.auxiliary.copy()) for one in scores)
        return scores

    refits = distiller(engine, batch_size=4, length=8)

    def observed(state, frozen, batch):
        count_alive()
        for row, number in enumerate(shuffled_indices(len(rollouts), 0, 4, 0)):
            one = rollouts[number]
            tokens = np.concatenate([one.prompt_token_ids, one.token_ids])
            kept = window(Document(tokens, len(one.prompt_token_ids)), 8)
            np.testing.assert_array_equal(batch.tokens[row], tokens[kept])
            for part, whole in zip(batch[2:], wholes[number], strict=True):
                expected = whole[kept]  # the last token's are not known
                np.testing.assert_array_equal(part[row, : len(expected)], expected)
        return state, {"loss": 0.0}

    monkeypatch.setattr(engine, "score", counted)
    monkeypatch.setattr(refits, "_train_step", observed)
    refits.refit(rollouts, steps=1)
    assert sizes == [4, 4, 2]
    assert alive == [0, 0, 0, 0]  # before each batch, and in the step


def test_a_checkpoint_that_does_not_fit_is_refused(open_engine, prompts, tmp_path):
    engine = open_engine("eagle3")
    refits = distiller(engine)
    for folder in tmp_path / "nowhere", tmp_path:
        with pytest.raises(ValueError, match="no checkpoint of a distiller"):
            refits.restore(folder)
    own, facts = refits._arrays(), {"version": 0, "rollouts": []}
    other = jax.tree.map(lambda x: {"values": x}, own)  # as an earlier version did
    distill._write(tmp_path / "earlier", other, {**facts, "shapes": distill._shapes(own)})
    with pytest.raises(ValueError, match="earlier stores .* another form; .*version of specjax"):
        refits.restore(tmp_path / "earlier")
    refits.save(tmp_path)
    wider = distiller(open_engine("eagle3", intermediate_size=64))
    with pytest.raises(ValueError, match=r"mlp.*float32\[.*the engine's is float32\["):
        wider.restore(tmp_path)
    with pytest.raises(ValueError, match="of other models.* same models, .*version"):
        distiller(open_engine("mtp")).restore(tmp_path)
    with pytest.raises(ValueError, match="different weights of version 0"):
        distiller(open_engine("eagle3", seed=3)).restore(tmp_path)
    engine.update_weights(engine.params.target)
    with pytest.raises(ValueError, match="version 0, .* the engine is at 1"):
        refits.restore(tmp_path)


@pytest.mark.parametrize("method", ["ngram", None])
def test_an_engine_without_weights_to_refit_is_refused(open_engine, method):
    with pytest.raises(ValueError, match="no weights to refit; build it with .*eagle3"):
        OnlineDistiller(open_engine(method))


def test_settings_that_cannot_be_are_named(open_engine, prompts):
    engine = open_engine("eagle3")
    for name, value, range_ in (
        *(("batch_size", 0, ""), ("length", 1.5, ""), ("num_unrolled", 0, ""), ("memory", -1, "")),
        ("learning_rate", 0.0, r"in \(0, 1\)"),
    ):
        with pytest.raises(ValueError, match=f"{name}={value} must be {range_}"):
            distiller(engine, **{name: value})
    refits = distiller(engine)
    with pytest.raises(ValueError, match="none in memory"):
        refits.refit([], steps=1)
    with pytest.raises(ValueError, match="steps=0 must be"):
        refits.refit(engine.generate(prompts, SAMPLED), steps=0)
    assert engine.drafter_version == 0
