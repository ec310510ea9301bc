"""Options of an LLM: step shapes, options that were removed, and unknown ones."""

import threading

import pytest
from support.refusals import refusal
from support.scripts import TextScript
from support.texts import VOCAB, simulated_llm

from specjax import LLM, AsyncLLM, SamplingParams
from specjax.engine.programs import Begin, Decode, Prefill
from specjax.engine.tracing import Program
from specjax.rl import RolloutEngine

BATCHES, SHAPES = (2, 6), ((1, 24), (3, 8))
SIZES = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "script": TextScript(VOCAB)}


def run_watched(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], set[Program]]:
    """Generate outputs of increasing lengths; return them and the programs that ran."""
    ran, run = set(), llm.engine.programs.run
    params = [
        SamplingParams(temperature=0, max_tokens=5 * (i + 1), ignore_eos=True)
        for i in range(len(prompts))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.programs, "run", lambda key, *a: ran.add(key) or run(key, *a))
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], ran


@pytest.mark.parametrize("method", [None, "ngram"])
def test_steps_run_in_the_shapes_that_are_given(letters, ragged_prompts, method):
    """All given shapes are used, none is compiled late, and outputs are unchanged."""
    prompts = ragged_prompts(40, 6, 5, 7, 4, 30, 3)
    # In any order, and more than once.
    given = {"decode_batches": [6, 2, 6], "prefill_shapes": [[3, 8], (1, 24)]}
    with simulated_llm(letters, method, **SIZES, **given) as llm:
        config = llm.engine.config
        assert (config.decode_batches, config.prefill_shapes) == (BATCHES, ((3, 8), (1, 24)))
        outputs, ran = run_watched(llm, prompts)
        assert llm.metrics().num_compiles_after_warmup == 0
    assert {key.batch for key in ran if isinstance(key, Decode)} == set(BATCHES)
    for kind in Prefill, Begin:
        assert {(key.batch, key.width) for key in ran if isinstance(key, kind)} == set(SHAPES)
    usual = {"decode_batches": None, "prefill_shapes": None}
    with simulated_llm(letters, method, **SIZES, **usual) as llm:
        assert llm.engine.config.decode_batches == (1, 2, 4, 6)
        assert run_watched(llm, prompts)[0] == outputs


@pytest.mark.parametrize("make", [LLM, AsyncLLM, RolloutEngine])
def test_options_that_are_not_there(letters, make, monkeypatch):
    """For a removed option, the error names its replacement; for others, the nearest option."""
    monkeypatch.setattr(
        "specjax.serving.assembly.load_weights", lambda *_: pytest.fail("weights were read")
    )
    num_threads = threading.active_count()
    refusal(lambda: make(letters, steps_per_dispatch=4), "steps_per_dispatch=4", "async_scheduling")
    refusal(lambda: make(letters, show_progress=False), "show_progress=False", "verbose=False")
    for name, nearest in ("max_seqs", "max_num_seqs"), ("async_schedule", "async_scheduling"):
        with pytest.raises(TypeError, match=f"unknown option '{name}'.*mean '{nearest}'"):
            make(letters, **{name: 3})
    with pytest.raises(TypeError, match="unknown option 'zzz'$"):
        make(letters, zzz=1)
    assert threading.active_count() == num_threads
