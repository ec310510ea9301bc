"""Split rounds, in which only some requests draft: same tokens, in one program or in two."""

from collections import Counter

import numpy as np
import pytest
from support.engines import generate, make_llm, tokens_of
from support.schedules import AnyPolicy

from specjax import SamplingParams
from specjax.engine.programs import Decode, SplitRound
from specjax.host.speculation.policy import StaticPolicy
from specjax.host.speculation.rounds import SplitShape

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_test")]

K = 2
PROMPTS = [list(range(1, 1 + length)) for length in (9, 3, 20, 1, 12)]
PARAMS = [
    SamplingParams(
        temperature=(0.0, 0.8)[i % 2],
        seed=i,
        n=(1, 2)[i == 2],
        max_tokens=14 + i,
        ignore_eos=True,
        logprobs=(None, 2)[i == 3],
    )
    for i in range(len(PROMPTS))
]


def make(checkpoints, name, **options):
    """Return an LLM with two batch sizes."""
    target = checkpoints.target(name)
    if name == "llama":
        arguments = target.folder, "eagle", checkpoints.eagle(target).folder
    else:
        arguments = checkpoints.mtp(target).folder, "mtp"
    return make_llm(*arguments, k=K, decode_batches=(2, 4), **options)


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
def test_the_same_tokens_as_without_splits(checkpoints, name, is_async):
    """Requests come, go and resume. Some are sampled, and one has two samples."""
    with make(checkpoints, name, async_scheduling=is_async) as llm:
        engine, programs = llm.engine, llm.engine.programs
        engine.set_policy(StaticPolicy(K))
        expected = generate(llm, PROMPTS, PARAMS)
        runs, run = Counter(), programs.run
        programs.run = lambda key, *rest: (runs.update([type(key)]), run(key, *rest))[1]
        for is_whole in (False, True):
            policy = AnyPolicy((0, K), np.random.default_rng(1))
            engine.set_policy(policy)
            if is_whole:
                (variant,) = {one.variant for one in programs.ready if isinstance(one, Decode)}
                split = SplitRound(SplitShape(2, K, 2), variant)
                programs.compile_ahead([split], show_progress=False)
            runs.clear()
            llm.reset_prefix_cache()
            taken = engine.scheduler.pages.allocate(engine.scheduler.pages.num_free - 18)
            found = generate(llm, PROMPTS, PARAMS)
            engine.scheduler.pages.release(taken)
            assert tokens_of(found) == tokens_of(expected)
            assert (runs[SplitRound] > 3) == is_whole
    for one, other in zip(
        found[3].outputs[0].logprobs, expected[3].outputs[0].logprobs, strict=True
    ):
        assert list(one) == list(other)
