"""Refits take optax's steps on the current target's features, and restore acceptance."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.engines import K
from support.refits import (
    LENGTH,
    NUM_UNROLLED,
    RATE,
    SAMPLED,
    distiller,
    moved,
)
from support.rollouts import copied
from support.shared_models import llama, parallel_head

from specjax import SamplingParams
from specjax.train.context import CausalRows
from specjax.train.data import Document, padded_rows
from specjax.train.features import Batch
from specjax.train.losses import drafter_loss, split_frozen
from specjax.train.teacher import Frozen

pytestmark = pytest.mark.usefixtures("one_step")

CHAINS = "eagle3", pytest.param("mtp", marks=pytest.mark.nightly)
PARALLEL = "dflash", "medusa", "p_eagle"
METHODS = (
    *CHAINS,
    *(pytest.param(x, marks=pytest.mark.nightly) for x in ("eagle", "dflash", "medusa", "p_eagle")),
)


@pytest.fixture
def open_engine(checkpoints, build, target, module):
    """Return a function that makes an engine with a drafting method, on tiny checkpoints."""

    def open_one(method):
        config, folder = {"method": method, "num_speculative_tokens": K}, target.folder
        if method == "eagle3":
            return build()
        if method == "mtp":
            folder = module.folder
        elif method in PARALLEL:
            folder = llama(checkpoints).folder
            config["model"] = str(parallel_head(checkpoints, method))
        else:
            config["model"] = str(checkpoints.eagle(target, embedding="own").folder)
        return build(folder, drafts=config)

    return open_one


@pytest.mark.slow
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


def batch_of(target, params, rollouts, aux_layers):
    """Return a batch of all rollouts, with features of a forward pass without a cache."""
    pairs = [(one.prompt_token_ids, one.token_ids) for one in rollouts]
    documents = [Document(np.concatenate(pair), len(pair[0])) for pair in pairs]
    tokens, is_answer = padded_rows(documents, LENGTH)
    rows = CausalRows.of(*tokens.shape)
    features, _ = target.extend(params, tokens.reshape(-1), rows, None, aux_layers)
    parts = features.hidden, features.hidden[:, :0] if aux_layers == () else features.auxiliary
    return Batch(tokens, is_answer, *(x.reshape(*tokens.shape, -1) for x in parts))


@pytest.mark.slow
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

    floats, frozen = split_frozen(start)
    adamw = optax.adamw(RATE / 10, b2=0.95, weight_decay=0.01)  # the rate rises in ten steps
    loss = jax.value_and_grad(drafter_loss(target, head, num_unrolled=NUM_UNROLLED), has_aux=True)

    @jax.jit
    def step(floats, frozen):
        batch = batch_of(target, frozen.target, rollouts, head.aux_layers)
        (value, _), gradient = loss(floats, frozen, batch, jax.random.key(0))
        norm = optax.tree.norm(gradient)
        gradient = jax.tree.map(lambda g: g / jnp.maximum(1, norm), gradient)
        updates, _ = adamw.update(gradient, adamw.init(floats), floats)
        return value, norm, optax.apply_updates(floats, updates)

    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        value, norm, expected = step(floats, Frozen(target_params, frozen))
    np.testing.assert_allclose(report.first["loss"], value, rtol=1e-4)
    np.testing.assert_allclose(report.first["grad_norm"], norm, rtol=1e-3)
    new = engine.params.drafter
    for name in "fc", "norm", "lm_head":
        pair = getattr(new, name, None), getattr(expected, name, None)
        for one, other in zip(*map(jax.tree.leaves, pair), strict=True):
            np.testing.assert_allclose(one, other, atol=0.02 * RATE / 10, err_msg=name)


@pytest.mark.slow
def test_refits_after_the_first_compile_nothing(open_engine, prompts, compilations):
    engine = open_engine("eagle3")
    refits = distiller(engine, memory=8, length=LENGTH - 2)  # a shape that no other test has
    first, second = (
        engine.generate(prompts[:4], SAMPLED),
        engine.generate(prompts[4:], SAMPLED),
    )
    refits.refit(first, steps=2)
    weights = moved(engine.params.target)
    engine.update_weights(weights)
    with compilations.none_expected():
        assert refits.refit(second, steps=3).num_rollouts == 6
        engine.update_weights(weights)
        assert refits.refit(first, steps=1).num_rollouts == 8  # the newest, and no more
    assert refits.num_steps == 6
