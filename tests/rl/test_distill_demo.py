"""Demo targets learn another style of answers, and refits adapt their drafters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import SamplingParams
from specjax.checkpoint.demo import DRAFTERS, demo_folder
from specjax.rl.distill import OnlineDistiller
from specjax.rl.engine import RolloutEngine
from specjax.train.data import Document, packed_rows
from specjax.train.loop import begin, make_train_step
from specjax.train.optimizer import steady_adamw
from specjax.train.target import next_token_loss

NAMES = "Anna Ben Carla David Emma Frank Grace Henry Ivan Julia Kate Liam".split()
THINGS = "apples pencils marbles stickers coins books shells cards".split()


def problems(seed, count):
    """Return questions, with answers in a style that the demo models have not seen."""
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
    """Train the engine's target on the pairs; return the new weights."""
    encode, optimizer = engine.tokenizer.encode, steady_adamw(5e-4, warmup=2)
    texts = [np.array([*encode(q + a), *engine.eos_ids], np.int32) for q, a in pairs]
    documents = [Document(tokens, 0) for tokens in texts]

    def loss(params, frozen, rows, key):
        return next_token_loss(engine.target, params, rows), {}

    step = make_train_step(loss, optimizer, 0)
    params = jax.tree.map(lambda x: jnp.array(x, copy=True), engine.params.target)
    # All in one place, as a step leaves it: the second must not compile anew.
    state = jax.device_put(begin(params, optimizer), jax.tree.leaves(params)[0].sharding)
    for i in range(steps):
        state, _ = step(state, None, jnp.array(packed_rows(documents, i, 8, 96, 0)))
    return state.trainable


@pytest.mark.nightly
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
