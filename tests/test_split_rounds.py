"""Split rounds, in which only some requests draft: same tokens, in one program or in two."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from support.engines import K, generate, make_llm, record_second_times, tokens_of
from support.marks import marked
from support.schedules import AnyPolicy
from support.shared_models import NUM_SNAPSHOTS, eagle3, hybrid, llama

from specjax import SamplingParams
from specjax.engine.programs import Decode, SplitRound
from specjax.host.speculation.policy import StaticPolicy
from specjax.host.speculation.rounds import SplitShape

pytestmark = pytest.mark.usefixtures("small_test")

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


def make(checkpoints, name):
    """Return an LLM with two batch sizes."""
    if name == "llama":
        arguments = llama(checkpoints).folder, "eagle3", eagle3(checkpoints).folder
    else:
        arguments = hybrid(checkpoints), "mtp"
    return make_llm(*arguments, num_snapshots=NUM_SNAPSHOTS, decode_batches=(2, 4))


@pytest.mark.parametrize("name", marked(["llama", "qwen3_5_text"], slow=["llama"]))
def test_the_same_tokens_as_without_splits(checkpoints, name):
    """Requests come, go and resume. Some are sampled, and one has two samples."""
    with make(checkpoints, name) as llm:
        engine, programs = llm.engine, llm.engine.programs
        engine.set_policy(StaticPolicy(K))
        expected = generate(llm, PROMPTS, PARAMS)
        runs, run, times = Counter(), programs.run, record_second_times(engine)
        programs.run = lambda key, *rest: (runs.update([type(key)]), run(key, *rest))[1]
        for is_whole, is_async in product((False, True), repeat=2):
            engine.config = replace(engine.config, async_scheduling=is_async)
            policy = AnyPolicy((0, K), np.random.default_rng(1))
            engine.set_policy(policy)
            if is_whole:
                (variant,) = {one.variant for one in programs.ready if isinstance(one, Decode)}
                split = SplitRound(SplitShape(2, K, 2), variant)
                programs.compile_ahead([split], show_progress=False)
            runs.clear()
            times.clear()
            llm.reset_prefix_cache()
            taken = engine.scheduler.pages.allocate(engine.scheduler.pages.num_free - 18)
            found = generate(llm, PROMPTS, PARAMS)
            engine.scheduler.pages.release(taken)
            assert tokens_of(found) == tokens_of(expected)
            assert (runs[SplitRound] > 3) == is_whole
            assert times == [None] * runs[SplitRound], "the first part has the program's time"
            logprobs = [one[3].outputs[0].logprobs for one in (found, expected)]
            assert [list(one) for one in logprobs[0]] == [list(one) for one in logprobs[1]]
