"""What a call brings that cannot be served is refused in one line and harms no other; simulated."""

import asyncio
import json
import math

import numpy as np
import pytest
from support.engines import simulated_engines
from support.refusals import label, refusal
from support.scripts import TextScript
from support.texts import VOCAB, letters_folder, simulated_llm

from specjax import AsyncLLM, SamplingParams

MAX_LEN = 128
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAY = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(checkpoints):
    folder = checkpoints.copy(letters_folder(checkpoints))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def shared(folder):
    with simulated_llm(folder, script=TextScript(VOCAB)) as llm:
        yield llm


@pytest.fixture
def llm(shared):
    """The LLM, in the middle of a stream, which goes on afterwards as if nothing had happened."""
    expected = shared.generate([1, 2, 3], GREEDY, use_tqdm=False)[0].outputs
    stream = shared.generate_stream([1, 2, 3], GREEDY)
    next(stream)
    yield shared
    *_, last = stream
    assert last.outputs == expected and not shared.engine.has_work


BAD_PROMPTS = [
    ("", ["prompt 0 is empty: ''", "at least one token"]),
    ([[]], ["prompt 0 is empty: []", "at least one token"]),
    (["a", ""], ["prompt 1 is empty", "at least one token"]),
    ("é", ["prompt 0 is empty: 'é' has no tokens"]),  # which this tokenizer does not know
    (None, ["prompts=None", "a text, token ids"]),
    (5, ["prompts=5", "a text, token ids"]),
    (np.array(5), ["prompts=array(5)", "a text, token ids"]),
    (object, ["prompts=<class 'object'>", "a text, token ids"]),
    ([None], ["prompt 0 is None", "a list of token ids"]),
    ([1, "a"], ["prompt 0 is 1", "a list of token ids"]),
    ([1.5], ["prompt 0 is 1.5", "a list of token ids"]),
    ([np.array(3)], ["prompt 0 is array(3)", "a list of token ids"]),
    ([[1], object], ["prompt 1 is <class 'object'>", "a list of token ids"]),
    ([[1.5]], ["prompt 0 has 1.5", "integers"]),
    ([[math.nan]], ["prompt 0 has nan", "integers"]),
    ([[None]], ["prompt 0 has None", "integers"]),
    ([["a"]], ["prompt 0 has 'a'", "integers", "a text"]),
    ([[[1]]], ["prompt 0 has [1]", "integers"]),
    ([[1], [2, True]], ["prompt 1 has True", "integers"]),
    (np.array([[1.0, 2.0]]), ["prompt 0 has", "1.0", "integers"]),
    ([np.array([True])], ["prompt 0 has", "True", "integers"]),
    ([np.array([[1, 2]])], ["prompt 0 has array([1, 2])", "integers"]),
    ([[1, -1]], ["prompt 0", "token id -1", "vocabulary of 96", "0..95"]),
    ([[1], [96]], ["prompt 1", "token id 96", "vocabulary of 96", "0..95"]),
    ([[2**70]], ["prompt 0", str(2**70), "0..95"]),
    ([[1] * MAX_LEN], ["128 tokens", "max_model_len=128", "shorten"]),
    ("a" * 200, ["200 tokens", "max_model_len=128", "shorten"]),
    (b"abc", ["prompt 0 is bytes", "decode"]),
    (["a", b"abc"], ["prompt 1 is bytes", "decode"]),
    ("\udc80", ["prompt 0", "surrogate"]),
    ({}, ["prompt 0 has no keys", "prompt_token_ids"]),
    ({"prompt": None}, ["prompt=None", "text"]),
    ({"prompt": ["a"]}, ["prompt=['a']", "text"]),
    ({"prompt_token_ids": "abc"}, ["prompt_token_ids='abc'", "token ids"]),
    ({"prompt_token_ids": None}, ["prompt 0 is None", "token ids"]),
    ({"prompt_token_ids": [1.0]}, ["prompt 0 has 1.0", "integers"]),
    ({"prompt_embeds": []}, ["'prompt_embeds'", "prompt_token_ids"]),
    ({"prompt": "a", "multi_modal_data": {}}, ["'multi_modal_data'", "prompt_token_ids"]),
]


@pytest.mark.parametrize("prompts, words", BAD_PROMPTS, ids=label)
def test_bad_prompts(llm, prompts, words):
    message = refusal(lambda: llm.generate(prompts, GREEDY, use_tqdm=False), *words)
    assert "\n" not in message
    refusal(lambda: llm.generate_stream(prompts, GREEDY), *words)


def test_no_prompts_have_no_outputs(llm):
    assert llm.generate([], GREEDY) == llm.chat([], GREEDY) == []


BAD_CALLS = [
    ({"sampling_params": [GREEDY]}, ["sampling_params has 1 entries for 2", "one per prompt"]),
    ({"sampling_params": [GREEDY] * 3}, ["sampling_params has 3 entries for 2", "one per prompt"]),
    ({"sampling_params": []}, ["sampling_params has 0 entries for 2", "one per prompt"]),
    ({"sampling_params": SamplingParams}, ["sampling_params has", "not a SamplingParams"]),
    ({"priority": 1}, ["priority=1", "scheduling_policy='priority'"]),
    ({"priority": "1"}, ["priority='1'", "integer"]),
    ({"priority": [0, 1.5]}, ["prompt 1: priority=1.5", "integer"]),
    ({"priority": [0]}, ["priority has 1 entries for 2", "one per prompt"]),
    ({"lora_request": "x"}, ["lora_request='x'", "merge"]),
    ({"tokenization_kwargs": 5}, ["tokenization_kwargs=5", "truncate_prompt_tokens"]),
    ({"tokenization_kwargs": {"padding": 1}}, ["tokenization_kwargs", "padding"]),
    ({"tokenization_kwargs": {"truncate_prompt_tokens": 0}}, ["truncate_prompt_tokens=0"]),
]


@pytest.mark.parametrize("options, words", BAD_CALLS, ids=label)
def test_bad_options_of_a_call(llm, options, words):
    options = {"sampling_params": GREEDY} | options
    refusal(lambda: llm.generate([[1], [2]], use_tqdm=False, **options), *words)


BAD_CHATS = [
    ({"chat_template": 5}, ["chat_template=5", "text"]),
    ({"chat_template": "{{"}, ["chat template", "failed"]),
    ({"chat_template": "{{ 1 / 0 }}"}, ["chat template", "division by zero"]),
    ({"chat_template": "{{ raise_exception('no tools') }}"}, ["chat template", "no tools"]),
    ({"chat_template": "{{ messages[7].content }}"}, ["chat template", "no element 7"]),
    ({"chat_template": ""}, ["prompt 0 is empty"]),
    ({"chat_template_kwargs": 5}, ["chat_template_kwargs=5", "mapping"]),
    ({"chat_template_kwargs": {1: 2}}, ["chat_template_kwargs={1: 2}", "names"]),
    ({"tools": 5}, ["tools=5", "JSON schemas"]),
    ({"tools": ["search"]}, ["tools=['search']", "mapping"]),
    ({"chat_template_content_format": 5}, ["content_format=5", "openai"]),
    ({"sampling_params": [GREEDY] * 2}, ["2 entries for 1"]),
    ({"messages": [SAY, SAY[0]]}, ["conversation 1={'role'", "list of messages"]),
    ({"messages": [*SAY, SAY]}, ["messages[1]=[{'role'", "message"]),
    ({"messages": [{"role": "user", "content": "x" * 500}]}, ["506 tokens", "shorten"]),
    ({"messages": [{"role": "user", "content": b"x"}]}, ["content=b'x'", "text"]),
]


@pytest.mark.parametrize("options, words", BAD_CHATS, ids=label)
def test_bad_chats(llm, options, words):
    options = {"messages": SAY, "sampling_params": GREEDY} | options
    refusal(lambda: llm.chat(use_tqdm=False, **options), *words)


BAD_NUMBERS = [
    *(("temperature", value) for value in (b"1", np.True_, np.array([0.5, 1.0]), 10**400, 1j)),
    *(("top_p", value) for value in (b"1", 10**400, [0.5])),
    *(("min_p", value) for value in (np.True_, np.float32(math.nan))),
    *(("repetition_penalty", value) for value in (b"1", 10**400)),
    *(("presence_penalty", value) for value in (np.True_, -(10**400))),
    *(("frequency_penalty", value) for value in (b"1", object)),
    *((name, np.array([1, 2])) for name in ("n", "top_k", "seed", "max_tokens", "min_tokens")),
    *((name, np.array([1, 2])) for name in ("logprobs", "prompt_logprobs")),
    *((name, np.True_) for name in ("n", "top_k", "truncate_prompt_tokens")),
]


@pytest.mark.parametrize(
    "name, value", BAD_NUMBERS, ids=[f"{name}-{label(value)[:20]}" for name, value in BAD_NUMBERS]
)
def test_numbers_of_another_type(name, value):
    refusal(lambda: SamplingParams(**{name: value}), f"{name}={value!r}", "must be")


def test_a_bias_of_hundreds_of_digits():
    refusal(lambda: SamplingParams(logit_bias={1: 10**400}), "logit_bias[1]=1000", "number in")


@pytest.mark.parametrize("request_id", [[1], {"a": 1}], ids=label)
def test_an_id_that_is_none(llm, request_id):
    made = lambda: llm.make_request([1], GREEDY, request_id=request_id)  # noqa: E731
    refusal(made, f"request_id={request_id!r} must be hashable", "text")


def test_a_profile_that_cannot_be_written(llm, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file/profile"):
        llm.start_profile(str(tmp_path / "file" / "profile"))


def test_what_is_closed_says_so(folder):
    with simulated_llm(folder, script=TextScript(VOCAB)) as llm:
        stream = llm.generate_stream([1, 2], GREEDY)
        request = llm.make_request([1], GREEDY)
    llm.close()
    calls = [
        *(lambda: llm.generate([1]), lambda: llm.generate_stream([1]), lambda: llm.chat(SAY)),
        *(llm.metrics, llm.get_metrics, llm.reset_prefix_cache, llm.sleep, llm.wake_up),
        *(llm.is_sleeping, lambda: llm.make_request([1], GREEDY), lambda: llm.start(request)),
        lambda: next(stream),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="this LLM is closed; build a new one"):
            call()


def test_a_bad_wish_of_many_callers_is_its_own(folder):
    async def main():
        async with AsyncLLM(folder, verbose=False) as llm:
            good = asyncio.ensure_future(llm.generate([1, 2, 3], GREEDY))
            for prompt, word in ([96], "0..95"), ("", "is empty"), (None, "None"), ([[1]], "[1]"):
                with pytest.raises(ValueError, match=f"prompt.*{word}".replace("[", r"\[")):
                    await llm.generate(prompt, GREEDY)
            with pytest.raises(ValueError, match="must be a SamplingParams"):
                await llm.generate([1], {"temperature": 0})
            with pytest.raises(ValueError, match="must be hashable"):
                await llm.generate([1], GREEDY, [1])
            return await good

    with simulated_engines(TextScript(VOCAB)):
        assert len(asyncio.run(main()).outputs[0].token_ids) == GREEDY.max_tokens
