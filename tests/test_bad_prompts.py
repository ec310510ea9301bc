"""Invalid prompts and arguments are refused in one line, and harm no other call; simulated."""

import json
import math

import numpy as np
import pytest
from support.refusals import label, refusal
from support.scripts import TextScript
from support.texts import VOCAB, letters_folder, simulated_llm

from specjax import SamplingParams

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
    """An LLM in the middle of a stream. After the test, the stream must continue unchanged."""
    expected = shared.generate([1, 2, 3], GREEDY, use_tqdm=False)[0].outputs
    stream = shared.generate_stream([1, 2, 3], GREEDY)
    next(stream)
    yield shared
    *_, last = stream
    assert last.outputs == expected and not shared.engine.has_work


BAD_PROMPTS = [
    ("", ["prompt 0 is empty: ''"]),
    ([[]], ["prompt 0 is empty: []"]),
    (["a", ""], ["prompt 1 is empty"]),
    ("é", ["prompt 0 is empty: 'é' has no tokens"]),  # which this tokenizer does not know
    *((value, [f"prompts={value!r}"]) for value in (None, 5, 1.5, np.array(5), object)),
    *(([value], [f"prompt 0 is {value!r}"]) for value in (None, 1.5, np.array(3))),
    ([1, "a"], ["prompt 0 is 1"]),
    ([[1], object], ["prompt 1 is <class 'object'>"]),
    *(([[value]], [f"prompt 0 has {value!r}"]) for value in (1.5, math.nan, None, "a", [1], True)),
    ([[1], [2, True]], ["prompt 1 has True"]),
    (np.array([[1.0, 2.0]]), ["prompt 0 has", "1.0"]),
    ([np.array([True])], ["prompt 0 has", "True"]),
    ([np.array([[1, 2]])], ["prompt 0 has array([1, 2])"]),
    ([[1, -1]], ["prompt 0", "token id -1", "0..95"]),
    ([[1], [96]], ["prompt 1", "token id 96", "0..95"]),
    ([[2**70]], ["prompt 0", str(2**70), "0..95"]),
    ([[1] * MAX_LEN], ["128 tokens", "max_model_len=128"]),
    ("a" * 200, ["200 tokens", "max_model_len=128"]),
    (b"abc", ["prompt 0 is bytes"]),
    (["a", b"abc"], ["prompt 1 is bytes"]),
    (["a", "b\ud83d"], ["prompt 1", "surrogate"]),
    ({}, ["prompt 0 has no keys"]),
    *(({"prompt": value}, [f"prompt={value!r}"]) for value in (None, ["a"])),
    ({"prompt_token_ids": "abc"}, ["prompt_token_ids='abc'"]),
    ({"prompt_token_ids": None}, ["prompt 0 is None"]),
    ({"prompt_token_ids": [1.0]}, ["prompt 0 has 1.0"]),
    ({"prompt_embeds": []}, ["'prompt_embeds'"]),
    ({"prompt": "a", "multi_modal_data": {}}, ["'multi_modal_data'"]),
]


@pytest.mark.slow
@pytest.mark.parametrize("prompts, words", BAD_PROMPTS, ids=label)
def test_bad_prompts(llm, prompts, words):
    message = refusal(lambda: llm.generate(prompts, GREEDY, use_tqdm=False), *words)
    assert "\n" not in message
    refusal(lambda: llm.generate_stream(prompts, GREEDY), *words)


def test_no_prompts_have_no_outputs(llm):
    assert llm.generate([], GREEDY) == llm.chat([], GREEDY) == []


NO_PARAMS = {"temperature": 0}, [{"temperature": 0}] * 2, ["x"] * 2, [None] * 2, 5, SamplingParams
BAD_CALLS = [
    *(({"sampling_params": [GREEDY] * n}, [f"sampling_params has {n} entries"]) for n in (0, 1, 3)),
    *(({"sampling_params": params}, ["SamplingParams"]) for params in NO_PARAMS),
    ({"priority": 1}, ["priority=1", "scheduling_policy"]),
    ({"priority": "1"}, ["priority='1'"]),
    ({"priority": [0, 1.5]}, ["prompt 1: priority=1.5"]),
    ({"priority": [0]}, ["priority has 1 entries for 2"]),
    ({"lora_request": "x"}, ["lora_request='x'"]),
    ({"tokenization_kwargs": 5}, ["tokenization_kwargs=5"]),
    ({"tokenization_kwargs": {"padding": 1}}, ["tokenization_kwargs", "padding"]),
    ({"tokenization_kwargs": {"truncate_prompt_tokens": 0}}, ["truncate_prompt_tokens=0"]),
]


@pytest.mark.parametrize("options, words", BAD_CALLS, ids=label)
def test_bad_options_of_a_call(llm, options, words):
    options = {"sampling_params": GREEDY} | options
    refusal(lambda: llm.generate([[1], [2]], use_tqdm=False, **options), *words)


def talk(**fields):
    """Return a conversation; `fields` replace fields of its first message."""
    return {"messages": [SAY[0] | fields, *SAY]}


NO_CALLS = 5, [5], [{"type": "custom"}], [{"function": 3}]
BAD_CHATS = [
    ({"chat_template": 5}, ["chat_template=5"]),
    ({"chat_template": "{{"}, ["given as chat_template", "failed"]),
    ({"chat_template": "{{ 1 / 0 }}"}, ["given as chat_template", "division by zero"]),
    ({"chat_template": "{{ raise_exception('no tools') }}"}, ["chat_template", "no tools"]),
    ({"chat_template": "{{ messages[7].content }}"}, ["chat_template", "no element 7"]),
    ({"chat_template": ""}, ["prompt 0 is empty"]),
    ({"chat_template_kwargs": 5}, ["chat_template_kwargs=5"]),
    ({"chat_template_kwargs": {1: 2}}, ["chat_template_kwargs={1: 2}"]),
    ({"chat_template_kwargs": {"messages": []}}, ["chat_template_kwargs", "'messages'"]),
    *(({"tools": tools}, [f"tools={tools!r}"]) for tools in (5, ["search"])),
    *(({"chat_template_content_format": x}, [f"content_format={x!r}"]) for x in (5, "xml")),
    ({"continue_final_message": True}, ["add_generation_prompt=False"]),
    *(
        ({name: value}, [f"{name}={value!r}", "True or False"])
        for name in ("add_generation_prompt", "continue_final_message")
        for value in ("yes", 0, None)
    ),
    ({"lora_request": 1}, ["lora_request"]),
    ({"sampling_params": [GREEDY] * 2}, ["2 entries for 1"]),
    *(({"messages": x}, []) for x in ("hi", ["hi"], [["hi"]], None, 5, {"role": "user"}, [[]])),
    ({"messages": [SAY, SAY[0]]}, ["conversation 1={'role'"]),
    ({"messages": [*SAY, SAY]}, ["messages[1]=[{'role'"]),
    ({"messages": [{"rol": "user"}, *SAY]}, ["[0]", "'rol'"]),
    ({"messages": [{"content": "hi"}, *SAY]}, ["[0]", "role"]),
    ({"messages": [{"role": "user"}, *SAY]}, ["[0]", "content"]),
    (talk(role=3), ["[0]", "role"]),
    (talk(content="x" * 500), ["tokens", "max_model_len"]),
    (talk(content=None), ["[0]", "content"]),
    *((talk(content=content), [f"content={content!r}"]) for content in (5, b"x")),
    (talk(content=[5]), ["content[0]=5"]),
    (talk(content=[{"type": "text"}]), ["content[0]"]),
    (talk(content=[{"type": "image_url"}]), ["'image_url'"]),
    *((talk(role="assistant", tool_calls=calls), ["[0].tool_calls"]) for calls in NO_CALLS),
]


@pytest.mark.slow
@pytest.mark.parametrize("options, words", BAD_CHATS, ids=label)
def test_bad_chats(llm, options, words):
    options = {"messages": SAY, "sampling_params": GREEDY} | options
    refusal(lambda: llm.chat(use_tqdm=False, **options), *words)


def test_bad_arguments_of_a_request(llm):
    refusal(lambda: llm.make_request([1], GREEDY, request_id=[1]), "request_id=[1]")
    refusal(lambda: llm.make_request([1], {"temperature": 0}), "SamplingParams")


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
        with pytest.raises(RuntimeError, match="LLM is closed"):
            call()
