"""Executables: compiled once per shape, ahead of time, and counted when they are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from specjax.config import EngineConfig
from specjax.device.drafters.drafter import NoDrafter, Params
from specjax.device.models.layers.rope import Rope
from specjax.device.models.llama import Llama
from specjax.engine import Engine
from specjax.host.scheduler import DecodePlan, PrefillPlan
from specjax.host.speculation.policy import StaticPolicy
from specjax.precompile import Executables, keep_compilations
from specjax.request import Request


def make_engine():
    target = Llama(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope=Rope(head_dim=8),
        max_position=64,
    )
    weights = jax.tree.map(lambda spec: jnp.full(spec.shape, 0.1), target.specs())
    config = EngineConfig(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64, num_pages=8)
    return Engine(config, target, NoDrafter(), Params(weights, None), StaticPolicy(0))


@pytest.fixture(scope="module")
def engine():
    return make_engine()


def run_all(engine, requests):
    for i, (length, max_tokens) in enumerate(requests):
        engine.add(Request(i, tuple(np.arange(length) % 31), max_tokens, 0.0, 0, ()))
    while engine.has_work:
        engine.step()


def test_everything_a_request_needs_is_compiled_ahead(engine, compilations):
    config, metrics = engine.config, engine.metrics()
    assert config.decode_batches == (1, 2)
    assert config.prefill_shapes == ((1, 32), (2, 32), (1, 64))
    assert metrics.num_compilations == 5
    assert metrics.num_compiles_after_warmup == 0
    assert metrics.compile_seconds > 0
    with compilations.none_expected():
        run_all(engine, [(1, 1), (30, 5), (33, 20), (20, 9), (63, 1), (2, 62)])
    assert engine.metrics().num_compilations == 5


def test_what_is_in_hand_is_not_compiled_again(engine, compilations):
    before = engine.metrics()
    with compilations.none_expected():
        engine.set_policy(StaticPolicy(0))
    after = engine.metrics()
    assert after.num_compilations == before.num_compilations
    assert after.num_compiles_after_warmup == 0


@pytest.fixture
def executables(engine):
    """Executables of the engine's model that are its own, with nothing compiled."""
    made = engine._executables
    return Executables(engine.params, engine._state, made._model, engine.config.pages_per_seq)


def launch(executables, engine, plan):
    """Run a step in which every row is padding, on a state of its own."""
    state = jax.tree.map(jnp.copy, engine._state)
    from_host = np.full((plan.batch, 1 + engine.config.pages_per_seq), -1, np.int32)
    from_host[:, 0] = engine.config.max_num_seqs
    _, outputs = executables.run(plan, engine.params, state, jax.device_put(from_host))
    return np.asarray(outputs)


def test_each_shape_is_compiled_once(executables, compilations):
    plans = [PrefillPlan((), 1, 32), PrefillPlan((), 1, 32), DecodePlan((), 1, 0)]
    executables.compile_ahead(plans, show_progress=False)
    assert (executables.num_compilations, executables.num_late) == (2, 0)
    with compilations.none_expected():
        executables.compile_ahead(plans, show_progress=False)
    assert (executables.num_compilations, executables.num_late) == (2, 0)
    executables.compile_ahead([*plans, DecodePlan((), 2, 0)], show_progress=False)
    assert (executables.num_compilations, executables.num_late) == (3, 0)


def test_a_late_compilation_is_counted_once(executables, engine, compilations):
    executables.compile_ahead([DecodePlan((), 1, 0)], show_progress=False)
    seconds = executables.compile_seconds
    outputs = launch(executables, engine, DecodePlan((), 2, 0))
    assert outputs.shape == (2, 2) and not outputs[:, 0].any()
    assert (executables.num_compilations, executables.num_late) == (2, 1)
    assert executables.compile_seconds > seconds
    with compilations.none_expected():
        launch(executables, engine, DecodePlan((), 2, 0))
        launch(executables, engine, DecodePlan((), 1, 0))
    assert (executables.num_compilations, executables.num_late) == (2, 1)
    # Compiling it ahead afterwards does not make up for it.
    executables.compile_ahead([DecodePlan((), 2, 0)], show_progress=False)
    assert (executables.num_compilations, executables.num_late) == (2, 1)


CACHE_OPTIONS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture
def cache_options():
    """Sets JAX's cache options; afterwards they are as before."""
    before = {name: getattr(jax.config, name) for name in CACHE_OPTIONS}

    def update(**options):
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    yield update
    update(**before)


def test_compilations_are_kept_in_the_folder(cache_options, tmp_path):
    cache_options(jax_compilation_cache_dir=None)
    jax.jit(lambda x: x - 41)(1.0)  # JAX compiles before it knows of the folder
    keep_compilations(tmp_path / "kept")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "kept")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.jit(lambda x: x * 3 + 17)(2.0)
    assert list((tmp_path / "kept").iterdir())


def test_a_cache_that_jax_already_has_is_respected(cache_options, tmp_path):
    cache_options(
        jax_compilation_cache_dir=str(tmp_path / "theirs"),
        jax_persistent_cache_min_compile_time_secs=7.0,
    )
    keep_compilations(tmp_path / "ours")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "theirs")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 7.0
    assert not (tmp_path / "ours").exists()
