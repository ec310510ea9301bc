"""Sleep frees the device's memory, and does not change rollouts."""

import gc
from dataclasses import replace

import jax
import numpy as np
import pytest
from support.rollouts import PROMPTS, SAMPLED, assert_same, lasting, noisy


def live_bytes():
    gc.collect()  # arrays of engines before, which only cycles keep
    return sum(x.nbytes for x in jax.live_arrays())


def weight_bytes(engine):
    """Return the bytes of the weights, and of their form for multiplication on a CPU."""
    both = *jax.tree.leaves(engine.params), *engine._engine.programs._weights
    return sum({id(x): x.nbytes for x in both}.values())


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_sleeping_changes_nothing_and_frees_memory(build, level):
    with build() as engine, build() as awake:
        for one in engine, awake:
            one.generate(PROMPTS, SAMPLED)  # leaves pages, which are gone after sleep
        weights = weight_bytes(engine)
        state = sum(x.nbytes for x in jax.tree.leaves(engine._engine.programs.state))
        checksum = engine.checksum()
        before = live_bytes()
        engine.sleep(level)
        freed = before - live_bytes()
        assert freed == state + (weights if level == 2 else 0)
        engine.wake_up()
        assert live_bytes() == before
        assert engine.checksum() == checksum
        assert_same(engine.generate(PROMPTS, SAMPLED), awake.generate(PROMPTS, SAMPLED))


def test_asleep_in_the_middle(engine, original):
    """Rollouts wait, and do not change. Weights may be updated during the sleep."""
    params = [replace(one, seed=one.max_tokens) for one in lasting(2, 40, 39, 38)]
    expected = engine.generate(PROMPTS, params)
    stream = engine.stream(PROMPTS, params)
    rollouts = [next(stream)]
    engine.sleep(1)
    engine.sleep(2)
    with pytest.raises(RuntimeError, match="asleep"):
        engine.resume()
    engine.wake_up()
    rollouts += stream
    assert_same(sorted(rollouts, key=lambda one: one.prompt_index), expected)
    engine.sleep(2)
    weights = noisy(original, 6)
    engine.update_weights(weights)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(engine.params))
    engine.wake_up()
    jax.tree.map(np.testing.assert_array_equal, engine.params.target, weights)
    assert len(engine.generate(PROMPTS, params)) == 4
