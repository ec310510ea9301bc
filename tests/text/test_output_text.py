"""The text of an output, by one rule for all calls: vLLM's rule."""

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.decoders import KINDS, make_case, make_sentencepiece
from support.engines import SIZES, simulated_engines
from support.scripts import TextScript
from tokenizers import AddedToken, Tokenizer, decoders

from specjax import LLM, AsyncLLM, SamplingParams
from specjax.outputs import CompletionOutput
from specjax.rl import RolloutEngine
from specjax.sampling_params import RequestOutputKind
from specjax.text.detokenizer import StopStrings, decode_after, prompt_context

PROMPTS = ["", "<s>", "a foo", "<s>a", "<s> ", "a世", "a</s>", "<s><s><s><s><s><s><s><s>a<s><s><s>"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skips", [True, False])
def test_an_outputs_text_follows_its_prompt_as_in_vllm(kind, skips):
    """vLLM decodes with a DecodeStream of tokenizers, after the prompt."""
    case, rng = make_case(kind), random.Random(7)
    tokenizer = case.tokenizer.for_outputs(skip_special_tokens=skips)
    bpe, last = tokenizer.tokenizer, tokenizer.tokenizer.get_vocab()["."]
    whole = [i for i in case.ids if "\ufffd" not in bpe.decode([i])]
    for prompt in PROMPTS * 10:
        given = bpe.encode(prompt, add_special_tokens=False).ids
        ids = [*rng.choices(whole, k=rng.randint(1, 5)), last]
        if case.byte_ids is not None:
            ids[1:1] = [case.byte_ids[byte] for byte in rng.choice(["", "é", "世b"]).encode()]
        stream = decoders.DecodeStream(ids=given, skip_special_tokens=skips)
        theirs = [stream.step(bpe, token) or "" for token in ids]
        context = prompt_context(tokenizer, given)
        assert len(context) <= 16
        stops = StopStrings(tokenizer, (), context=context)
        ours = [stops.append([token]) or stops.text for token in ids]
        assert ours == ["".join(theirs[: i + 1]) for i in range(len(ids))], (prompt, ids)
        assert decode_after(tokenizer, context, ids) == ours[-1]


@pytest.mark.parametrize("kind", ["demo", "llama-2", "gemma"])
def test_a_prompt_that_ends_with_what_looks_like_half_a_character(kind):
    case = make_case(kind)
    bpe = case.tokenizer.tokenizer
    ids = bpe.encode("foo", add_special_tokens=False).ids
    for prompt in "a foo\ufffd", "\ufffd", "\ufffd\ufffd\ufffd\ufffd\ufffd":
        context = prompt_context(case.tokenizer, bpe.encode(prompt, add_special_tokens=False).ids)
        stops = StopStrings(case.tokenizer, (), context=context)
        stops.append(ids)
        assert stops.text.strip() == decode_after(case.tokenizer, context, ids).strip() == "foo"


# --- the doors ------------------------------------------------------------------------------------

VOCAB = 300
SETTINGS = {**SIZES, "compile_ahead": False, "decode_batches": None, "prefill_shapes": None}
SPECIAL = {"eos_token": "</s>", "extra_special_tokens": ["<think>"]}
GREEDY = SamplingParams(temperature=0, max_tokens=60)
SHOWN = replace(GREEDY, skip_special_tokens=False)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    tokenizer = make_sentencepiece(decoders.Strip(" ", 1, 0))
    tokenizer.add_tokens([AddedToken(name, special=True) for name in ("</s>", "<think>")])
    return tokenizer


@pytest.fixture(scope="module")
def folder(checkpoints, bpe) -> Path:
    """A target whose end of sequence is known only from the tokenizer."""
    made = checkpoints.copy(checkpoints.target("llama", vocab_size=VOCAB).folder, eos_token_id=None)
    bpe.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
    return made


def text_of_vllm(bpe: Tokenizer, prompt: list[int], output: CompletionOutput, params) -> str | None:
    """Return vLLM's text of an output without a stop text."""
    if not params.detokenize:
        return None
    is_hidden = output.finish_reason == "stop" and not params.include_stop_str_in_output
    ids = output.token_ids[: len(output.token_ids) - is_hidden]
    stream = decoders.DecodeStream(prompt, skip_special_tokens=params.skip_special_tokens)
    return "".join(stream.step(bpe, token) or "" for token in ids)


def by_generate(llm, prompts, params):
    return [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]


def by_stream(llm, prompts, params):
    """Stream deltas, and join them."""
    deltas = replace(params, output_kind=RequestOutputKind.DELTA)
    found: dict[int, dict[int, CompletionOutput]] = {}
    for output in llm.generate_stream(prompts, deltas):
        samples = found.setdefault(int(output.request_id), {})
        for one in output.outputs:
            before = samples.get(one.index, replace(one, text=one.text and "", token_ids=[]))
            text = None if one.text is None else before.text + one.text
            samples[one.index] = replace(one, text=text, token_ids=before.token_ids + one.token_ids)
    return [[one for _, one in sorted(found[number].items())] for number in sorted(found)]


def by_async(llm, prompts, params):
    async def run():
        async with AsyncLLM(llm, **SETTINGS) as engine:
            asked = [engine.generate(prompt, params) for prompt in prompts]
            return [output.outputs for output in await asyncio.gather(*asked)]

    return asyncio.run(run())


def by_rollouts(llm, prompts, params):
    with RolloutEngine(llm, **SETTINGS) as engine:
        found = engine.generate(prompts, params)
    found = sorted(found, key=lambda one: (one.prompt_index, one.sample_index))
    return [[one for one in found if one.prompt_index == i] for i in range(len(prompts))]


DOORS = [by_generate, by_stream, by_async, by_rollouts]


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_every_door_shows_the_text_of_vllm(folder, bpe, door):
    end, think, foo = (bpe.token_to_id(name) for name in ("</s>", "<think>", "▁foo"))
    words = [bpe.token_to_id(name) for name in ("▁a", "b", "c", "▁", "▁s", "世")]
    script = TextScript(VOCAB, ids=(*words, *words, foo, think, end))
    prompts = [bpe.encode(prompt, add_special_tokens=False).ids for prompt in ("<s>", "a", "<s>ab")]
    at_foo = replace(GREEDY, stop_token_ids=[foo])
    cases = [
        *(GREEDY, SHOWN, replace(SHOWN, include_stop_str_in_output=True)),
        *(replace(SHOWN, detokenize=False), replace(SHOWN, stop_token_ids=[foo, words[1]])),
        replace(at_foo, include_stop_str_in_output=True),
        replace(at_foo, stop=["foo", " foo", "no such text"]),
        replace(at_foo, n=3, temperature=1.0, seed=1, ignore_eos=True),
    ]
    reasons, thinks = set(), set()
    with simulated_engines(script):
        is_llm = door in (by_generate, by_stream)
        llm = LLM(folder, **SETTINGS) if is_llm else folder
        for params in cases:
            for prompt, outputs in zip(prompts, door(llm, prompts, params), strict=True):
                assert len(outputs) == params.n
                for output in outputs:
                    theirs = replace(output, token_ids=[*map(int, output.token_ids)])
                    assert output.text == text_of_vllm(bpe, prompt, theirs, params), params
                    reasons.add((output.finish_reason, int(output.token_ids[-1])))
                    if think in output.token_ids and output.text is not None:
                        thinks.add((params.skip_special_tokens, "<think>" in output.text))
        if is_llm:
            llm.close()
    assert {("stop", end), ("stop", foo), ("stop", words[1])} <= reasons
    assert thinks == {(False, True), (True, False)}
