"""Refits: the step is optax's on the current target's features, and a drafter catches up by it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.engines import VOCAB, K
from support.refits import (
    LENGTH,
    LENGTHS,
    NUM_UNROLLED,
    RATE,
    SAMPLED,
    assert_equal,
    distiller,
    moved,
    shared_steps,
)
from support.rollouts import copied

from specjax import SamplingParams
from specjax.checkpoint.save import save_checkpoint
from specjax.device.drafters.drafter import Params
from specjax.device.models.model import Features
from specjax.device.models.registry import load_model
from specjax.train.context import CausalRows, UnrolledRows
from specjax.train.data import Document
from specjax.train.drafter import KINDS, HeadSizes
from specjax.train.losses import split_frozen
from specjax.train.target import init_params
from specjax.train.teacher import shift

CHAINS = "eagle3", pytest.param("mtp", marks=pytest.mark.slow)
PARALLEL = "dflash", "medusa", "p_eagle"
METHODS = (
    *CHAINS,
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("eagle", "dflash")),
    *(pytest.param(name, marks=pytest.mark.nightly) for name in ("medusa", "p_eagle")),
)


@pytest.fixture(scope="module", autouse=True)
def one_step():
    with shared_steps():
        yield


@pytest.fixture
def open_engine(checkpoints, build, target, module, tmp_path):
    """Engines on tiny checkpoints, by method of drafting."""

    def open_one(method):
        config, folder = {"method": method, "num_speculative_tokens": K}, target.folder
        if method == "eagle3":
            return build()
        if method == "mtp":
            folder = module.folder
        elif method in PARALLEL:
            config["model"] = str(untrained(method, target, tmp_path))
        else:
            config["model"] = str(checkpoints.eagle(target, embedding="own").folder)
        return build(folder, drafts=config)

    return open_one


def untrained(method, target, folder):
    """The folder of a head with random weights, as `specjax train` begins with."""
    model, _ = load_model(target.folder, np.dtype("float32"))
    sizes = HeadSizes(aux_layers=(0, 1), mask_token_id=0, num_heads=K, draft_vocab_size=16)
    kind, words = KINDS[method], Document(np.arange(VOCAB), 0)
    start = kind.make(model, sizes, [words])
    params, dtype = init_params(start.head.specs(), jax.random.key(0)), np.dtype("float32")
    extra = kind.vocabulary(start.head, replace(params, **start.frozen))
    save_checkpoint(folder, start.head.specs(), params, start.config, dtype=dtype, extra=extra)
    return folder


@pytest.fixture
def prompts(ragged_prompts):
    return ragged_prompts(*LENGTHS, vocab_size=VOCAB)


@pytest.mark.parametrize("method", METHODS)
def test_a_refit_learns_and_changes_no_output(open_engine, prompts, method):
    engine = open_engine(method)
    greedy = SamplingParams(temperature=0, max_tokens=12)
    rollouts = engine.generate(prompts, SAMPLED)
    before = [one.token_ids.tolist() for one in engine.generate(prompts, greedy)]
    old = copied(engine.params.drafter)
    report = distiller(engine).refit(rollouts, steps=30)
    assert report.last["loss"] < report.first["loss"] - 0.1
    assert report.num_rollouts == len(rollouts)
    assert report.num_tokens == sum(len(one.token_ids) for one in rollouts)
    assert engine.drafter_version == 1
    assert [one.token_ids.tolist() for one in engine.generate(prompts, greedy)] == before
    new = engine.params.drafter
    for name in "embedding", "target_ids":  # which are not trained
        pair = getattr(new, name, None), getattr(old, name, None)
        jax.tree.map(np.testing.assert_array_equal, *pair)
    changed = jax.tree.map(
        lambda a, b: (np.asarray(a) != b).mean(), *(split_frozen(p)[0] for p in (new, old))
    )
    assert min(jax.tree.leaves(changed)) > 0.9


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


@pytest.mark.parametrize("method", CHAINS)
def test_a_step_is_optax_on_what_the_current_target_makes_of_the_rollouts(
    open_engine, prompts, method
):
    engine = open_engine(method)
    rollouts = engine.generate(prompts, SAMPLED)
    engine.update_weights(moved(engine.params.target))
    start, target_params = copied(engine.params.drafter), copied(engine.params.target)
    assert getattr(start, "embedding", None) is None  # it is the target's, whose new one counts
    target, head = engine.target, engine.drafter.head
    report = distiller(engine).refit(rollouts, steps=1)

    ids = getattr(start, "target_ids", None)
    floats = start if ids is None else replace(start, target_ids=None)
    adamw = optax.adamw(RATE / 10, b2=0.95, weight_decay=0.01)  # the rate rises in ten steps

    @jax.jit
    def step(floats, ids, target_params):
        def loss(floats):
            whole = floats if ids is None else replace(floats, target_ids=ids)
            return plain_loss(target, head, whole, target_params, rollouts, LENGTH)

        value, gradient = jax.value_and_grad(loss)(floats)
        norm = optax.tree.norm(gradient)
        gradient = jax.tree.map(lambda g: g / jnp.maximum(1, norm), gradient)
        updates, _ = adamw.update(gradient, adamw.init(floats), floats)
        return value, norm, optax.apply_updates(floats, updates)

    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        value, norm, expected = step(floats, ids, target_params)
    np.testing.assert_allclose(report.first["loss"], value, rtol=1e-4)
    np.testing.assert_allclose(report.first["grad_norm"], norm, rtol=1e-3)
    new = engine.params.drafter
    for name in "fc", "norm", "lm_head":
        pair = getattr(new, name, None), getattr(expected, name, None)
        for one, other in zip(*map(jax.tree.leaves, pair), strict=True):
            np.testing.assert_allclose(one, other, atol=0.02 * RATE / 10, err_msg=name)


def test_refits_after_the_first_compile_nothing(open_engine, prompts, compilations):
    engine = open_engine("eagle3")
    refits = distiller(engine, memory=8, length=LENGTH - 2)  # a shape that no other test has
    first, second = engine.generate(prompts[:4], SAMPLED), engine.generate(prompts[4:], SAMPLED)
    refits.refit(first, steps=2)
    weights = moved(engine.params.target)
    engine.update_weights(weights)
    with compilations.none_expected():
        assert refits.refit(second, steps=3).num_rollouts == 6
        engine.update_weights(weights)
        assert refits.refit(first, steps=1).num_rollouts == 8  # the newest, and no more
    assert refits.num_steps == 6


@pytest.mark.parametrize("method", CHAINS)
def test_a_restored_run_goes_on_bit_for_bit(open_engine, prompts, method, tmp_path):
    whole, halves = open_engine(method), open_engine(method)
    rollouts = whole.generate(prompts, SAMPLED)
    for engine in whole, halves:
        engine.update_weights(moved(engine.params.target), version=5)
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
