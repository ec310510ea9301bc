"""Sleep frees the device's memory, and rollouts are none the wiser."""

import jax
import pytest
from support.rollouts import PROMPTS, SAMPLED, assert_same


def live_bytes():
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.mark.parametrize("level", [1, 2])
def test_sleeping_changes_nothing_and_frees_memory(build, level):
    with build() as engine, build() as awake:
        for one in engine, awake:
            one.generate(PROMPTS, SAMPLED)  # leaves pages, which are gone after sleep
        weights = sum(x.nbytes for x in jax.tree.leaves(engine.params))
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
