"""The demo targets learn another style of answer, and refits bring their drafters after them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax import SamplingParams
from specjax.checkpoint.demo import DRAFTERS, demo_folder
from specjax.rl.distill import OnlineDistiller
from specjax.rl.engine import RolloutEngine
from specjax.train.target import next_token_loss

NAMES = "Anna Ben Carla David Emma Frank Grace Henry Ivan Julia Kate Liam".split()
THINGS = "apples pencils marbles stickers coins books shells cards".split()


def problems(seed, count):
    """Questions with answers in a style that the demo models have not seen."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        one, other = rng.choice(NAMES, 2, replace=False)
        thing, (x, y) = rng.choice(THINGS), sorted(map(int, rng.integers(11, 99, 2)))
        question = f"{one} has {y} {thing} and gives {x} of them to {other}. How many are left?"
        answer = (
            f" We know: {thing} first = {y}; {thing} given = {x}. So {y} minus {x} is {y - x}. "
            f"Therefore, {one} keeps {y - x} {thing} for now. Result: {y - x}"
        )
        found.append((f"Question: {question}\nAnswer:", answer))
    return found


def train_on(engine, pairs, steps):
    """Supervised training of the engine's target; the new weights."""
    tokenizer = engine.tokenizer
    stream = np.concatenate([[*tokenizer.encode(q + a), *engine.eos_ids] for q, a in pairs])
    optimizer = optax.adamw(5e-4, b2=0.95)

    @jax.jit
    def step(state, rows):
        params, opt_state = state
        gradient = jax.grad(lambda p: next_token_loss(engine.target, p, rows))(params)
        with jax.numpy_dtype_promotion("standard"):  # optax relies on it
            updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jax.tree.map(lambda x: jnp.array(x, copy=True), engine.params.target)
    # All in one place, as a step leaves it: the second must not compile anew.
    place = jax.tree.leaves(params)[0].sharding
    state = jax.device_put((params, optimizer.init(params)), place)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        starts = rng.integers(0, len(stream) - 97, 8)
        state = step(state, jnp.array(stream[starts[:, None] + np.arange(97)]))
    return state[0]


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_drafter_catches_up_with_a_target_that_has_moved(method):
    model = "demo-qwen3.5" if method == "mtp" else "demo-llama"
    drafter = str(demo_folder(DRAFTERS[model][method]))
    config = {"method": method, "model": drafter, "num_speculative_tokens": 3}
    sizes = {
        "max_model_len": 160,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "decode_batches": (4,),
        "prefill_shapes": ((2, 64),),
    }
    with RolloutEngine(demo_folder(model), speculative_config=config, **sizes) as engine:
        unseen = [question for question, _ in problems(2, 16)]
        greedy = SamplingParams(temperature=0, max_tokens=48)

        def acceptance_length():
            engine.generate(unseen, greedy)
            return engine.acceptance()[-1].acceptance_length(3)

        before = acceptance_length()
        engine.update_weights(train_on(engine, problems(0, 200), steps=10))
        behind = acceptance_length()
        seen = [question for question, _ in problems(1, 16)]
        rollouts = engine.generate(seen, SamplingParams(temperature=1.0, max_tokens=64))
        report = OnlineDistiller(engine, batch_size=8, length=96).refit(rollouts, steps=15)
        after = acceptance_length()
    print(f"{method}: {before:.2f}, then {behind:.2f}, after {report.seconds:.0f} s {after:.2f}")
    assert behind < before - 0.3
    assert after > behind + 0.5 * (before - behind)
