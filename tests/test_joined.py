"""Chunks and a round in one program give the tokens of two programs, for all kinds of caches."""

from collections import Counter

import numpy as np
import pytest
from support.engines import generate, make_llm, record_second_times, tokens_of
from support.marks import marked
from support.shared_models import NUM_SNAPSHOTS, eagle3, hybrid, llama

from specjax import SamplingParams
from specjax.engine.programs import Begin, Decode, Joined, Prefill

pytestmark = pytest.mark.usefixtures("small_test")

LENGTHS = (40, 3, 70, 1, 33, 20, 9, 50)  # of prompts: up to three chunks


def make(checkpoints, name):
    """Return an LLM of a model, with a drafter if there is one for it."""
    if name == "llama":
        return make_llm(llama(checkpoints).folder, "eagle3", eagle3(checkpoints).folder)
    if name == "qwen3_5_text":
        return make_llm(hybrid(checkpoints), "mtp", num_snapshots=NUM_SNAPSHOTS)
    return make_llm(checkpoints.target(name).folder, "ngram")


NAMES = "llama", "qwen3_5_text", "deepseek_v3", "gpt_oss", "gemma3_text"


# With a GPU's shapes, CI runs the hybrid.
@pytest.mark.parametrize("name", marked(NAMES, slow=["qwen3_5_text"]))
def test_the_same_tokens_as_apart(checkpoints, name):
    """Requests come, go and resume. Some are sampled, penalised, or report log-probabilities."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, 30, length).tolist() for length in LENGTHS]
    params = [
        SamplingParams(
            temperature=(0.0, 0.8)[i % 2],
            seed=i,
            max_tokens=5 + 4 * i % 11,
            ignore_eos=True,
            presence_penalty=(0.0, 0.5)[i == 2],
            logprobs=(None, 2)[i == 3],
        )
        for i in range(len(LENGTHS))
    ]
    with make(checkpoints, name) as llm:
        apart = generate(llm, prompts, params)
        programs = llm.engine.programs
        (begin,) = (key for key in programs.ready if isinstance(key, Begin))
        (decode,) = (key for key in programs.ready if isinstance(key, Decode))
        programs.compile_ahead([Joined(begin, decode)], show_progress=False)
        run, runs, times = programs.run, Counter(), record_second_times(llm.engine)
        programs.run = lambda key, *rest: (runs.update([type(key)]), run(key, *rest))[1]
        llm.reset_prefix_cache()
        joined = generate(llm, prompts, params)
    assert times == [None] * runs[Joined], "the chunks have the program's time"
    assert runs[Joined] >= 4 and runs[Prefill] < 4, "only the first chunks come without a round"
    assert tokens_of(joined) == tokens_of(apart)
    for one, other in zip(joined[3].outputs[0].logprobs, apart[3].outputs[0].logprobs, strict=True):
        assert list(one) == list(other)
        values = [[x.logprob for x in row.values()] for row in (one, other)]
        np.testing.assert_allclose(*values, atol=1e-4)
