"""OpenAI's own client gets tool calls and reasoning, whole or streamed; simulated."""

import json

import pytest
from openai import OpenAI
from support.http import served
from support.scripts import Echo
from support.texts import VOCAB, letters_folder, simulated_llm

from specjax.messages.formats import FORMATS

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %};A:"
OWN = dict(FORMATS["qwen3"].template) | {"start_anchor": "A:"}
TOOLS = [{"type": "function", "function": {"name": name}} for name in "fg"]
CALLS = '<tool_call> {"name": "f", "arguments": {"a": 12}} </tool_call>'
CALLS += '<tool_call> {"name": "g", "arguments": {}} </tool_call>'
GIVEN = {
    "model": "echo",
    "messages": [{"role": "user", "content": f"<think>why</think>So {CALLS}"}],
}


@pytest.fixture(scope="module")
def client(checkpoints):
    folder = checkpoints.copy(letters_folder(checkpoints))
    config = {"chat_template": TEMPLATE, "response_template": OWN}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    llm = simulated_llm(folder, "ngram", k=3, script=Echo(VOCAB), max_model_len=512)
    with llm, served(llm, model="echo") as running:
        with OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
            yield made


def names_of(calls):
    return [(call.function.name, call.function.arguments, call.type) for call in calls]


def test_a_whole_answer(client):
    answer = client.chat.completions.create(**GIVEN, tools=TOOLS)
    (choice,) = answer.choices
    message = choice.message
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("why")
    assert (message.content, message.model_extra["reasoning"]) == ("So", "why")
    expected = [("f", '{"a": 12}', "function"), ("g", "{}", "function")]
    assert names_of(message.tool_calls) == expected and choice.finish_reason == "tool_calls"
    given = {"tools": TOOLS, "parallel_tool_calls": False}
    (choice,) = client.chat.completions.create(
        **GIVEN, **given, extra_body={"include_reasoning": False}
    ).choices
    assert names_of(choice.message.tool_calls) == expected[:1]
    assert "reasoning" not in choice.message.model_extra
    (choice,) = client.chat.completions.create(**GIVEN).choices
    assert choice.message.content == f"So {CALLS}" and choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def test_a_stream_adds_up(client):
    """The client's own accumulator joins the stream."""
    options = {"stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**GIVEN, tools=TOOLS, **options) as stream:
        reasoning = [
            event.chunk.choices[0].delta.model_extra.get("reasoning", "")
            for event in stream
            if event.type == "chunk" and event.chunk.choices
        ]
        answer = stream.get_final_completion()
        choice = answer.choices[0]
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("why")
    assert "".join(reasoning) == "why" and choice.message.content == "So"
    assert choice.finish_reason == "tool_calls"
    assert names_of(choice.message.tool_calls) == [
        ("f", '{"a": 12}', "function"),
        ("g", "{}", "function"),
    ]
    ids = {call.id for call in choice.message.tool_calls}
    assert len(ids) == 2 and None not in ids
