"""What stops outputs on the simulated device stops them on the real one, with drafts and without.

The demo's drafts are often right, and its texts are real; the tiny target's repeat, so that prompt
lookup finds them.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from support.engines import make_llm
from support.stopping import (
    FREE,
    Long,
    assert_idle,
    assert_stopped,
    cut,
    generate,
    in_runs,
    run_on,
    some_stops,
    text_between,
)
from support.texts import LETTERS_EOS, letters_folder

from specjax import LLM
from specjax.bench.workload import read_questions
from specjax.checkpoint.demo import demo_folder

EOS = 1  # of the demo
CUES = ["#### ", " The answer is: #### 1", "\n#### 25", "So #### 3", " = 12.\n####", "####"]


@dataclass
class Device:
    """Engines with drafts and without, and what they give when nothing stops them."""

    drafting: LLM
    plain: LLM
    longs: list[Long]


def make_device(folder, prompts_of, *drafter) -> Device:
    drafting, plain = make_llm(folder, *drafter), make_llm(folder)
    prompts = prompts_of(drafting.tokenizer)
    free = replace(FREE, max_tokens=32)
    params = [replace(free, temperature=float(i % 4 == 3), seed=i) for i in range(len(prompts))]
    longs = run_on(drafting, prompts, params)
    others = generate(plain, prompts, params)
    assert [o.outputs[0].token_ids for o in others] == [long.token_ids for long in longs]
    return Device(drafting, plain, longs)


def demo_prompts(tokenizer):
    texts = [f"Question: {question}\nAnswer:" for question in read_questions()]
    return sorted((tokenizer.encode(text)[-29:] for text in texts), key=sum)[:4]


@pytest.fixture(scope="module")
def tiny(checkpoints) -> Device:
    prompts = np.random.default_rng(0).integers(0, LETTERS_EOS, (8, 12)).tolist()
    return make_device(letters_folder(checkpoints), lambda _: prompts, "ngram")


@pytest.fixture(scope="module")
def demo() -> Device:
    head = demo_folder("demo-llama-eagle3")
    return make_device(demo_folder("demo-llama"), demo_prompts, "eagle3", head)


@pytest.fixture(scope="module", params=["tiny", pytest.param("demo", marks=pytest.mark.slow)])
def device(request) -> Device:
    return request.getfixturevalue(request.param)


def test_texts_stop_outputs(device):
    """Those that end inside accepted runs, and any others."""
    rng = np.random.default_rng(1)
    llm, wishes = device.drafting, []
    for long in device.longs:
        wishes.append((long, some_stops(llm, long, rng)))
        for start, length in in_runs(long):
            end = start + length - 1  # of the run, all but the last token
            stops = [text_between(llm, long, max(end - n, 0), end) for n in (2, 4, 8, 12)]
            new = [s for s in stops if len(cut(llm.tokenizer, long.token_ids, [s])[0]) == end]
            if length > 2 and new:
                wishes.append((long, (new[0],)))
    assert len(wishes) >= len(device.longs) + 3
    wishes = wishes[-16:]
    longs, stops = zip(*wishes, strict=True)
    params = [replace(long.params, stop=stop) for long, stop in wishes]
    assert any(stops)
    for llm in device.drafting, device.plain:
        before = llm.metrics().num_generation_tokens
        outputs = generate(llm, [long.prompt for long in longs], params)
        assert_stopped(llm, outputs, params, longs)
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert llm.metrics().num_generation_tokens - before == num_tokens
        assert_idle(llm)


def test_ids_stop_outputs(device):
    params = [
        replace(long.params, stop_token_ids=[long.token_ids[j] for j in (11 + i, 25)])
        for i, long in enumerate(device.longs)
    ]
    for llm in device.drafting, device.plain:
        outputs = generate(llm, [long.prompt for long in device.longs], params)
        for output, wish, long in zip(outputs, params, device.longs, strict=True):
            place = min(long.token_ids.index(token) for token in wish.stop_token_ids)
            sample = output.outputs[0]
            assert sample.token_ids == long.token_ids[: place + 1]
            assert (sample.finish_reason, sample.stop_reason) == ("stop", long.token_ids[place])
        assert_idle(llm)


@pytest.fixture(scope="module")
def ended(demo):
    """(prompt, tokens up to and with the end of sequence) of prompts whose answers end in time."""
    texts = [f"Question: How many {cue[-3:]}?\nAnswer: It is 2.\n{cue}" for cue in CUES]
    prompts = [demo.drafting.tokenizer.encode(text) for text in texts]
    params = replace(FREE, ignore_eos=False, max_tokens=40)
    found = []
    for output in generate(demo.drafting, prompts, params):
        sample = output.outputs[0]
        if sample.token_ids[-1] == EOS and len(sample.token_ids) < 35:
            assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
            found.append((output.prompt_token_ids, sample.token_ids))
    assert len(found) >= 3
    return found


@pytest.mark.slow
def test_ends_of_sequence_that_are_the_models_own(demo, ended):
    """They may be ignored, or kept away by `min_tokens`, with drafts as without."""
    prompts = [prompt for prompt, _ in ended]
    ignored = replace(FREE, max_tokens=40)
    kept_away = [
        replace(ignored, ignore_eos=False, min_tokens=len(until_eos) + 5) for _, until_eos in ended
    ]
    drafted, plain = (
        [
            [output.outputs[0].token_ids for output in generate(llm, prompts, params)]
            for params in (ignored, kept_away)
        ]
        for llm in (demo.drafting, demo.plain)
    )
    assert drafted == plain
    for (_, until_eos), free, later, params in zip(ended, *drafted, kept_away, strict=True):
        assert free[: len(until_eos)] == until_eos and len(free) == 40
        assert later[: len(until_eos) - 1] == until_eos[:-1]
        assert len(later) >= params.min_tokens and EOS not in later[: params.min_tokens]
