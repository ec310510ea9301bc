"""`LLM.chat` returns messages, and refuses invalid input before any work; simulated."""

import json
from dataclasses import replace

import pytest
from support.refusals import label, refusal
from support.scripts import Echo
from support.texts import VOCAB, letters_folder, simulated_llm

from specjax import LLM, ChatMessage, RequestOutputKind, SamplingParams, ToolCall
from specjax.messages.chat import Chat, ChatFormat, ChatOptions
from specjax.messages.deltas import add_up
from specjax.messages.formats import FORMATS

pytest.importorskip("llguidance")

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"
    "{% endfor %};{{ tools | tojson if tools }}{{ reasoning_effort }}A:"
    "{{ '<think>' if enable_thinking }}"
)
OWN = dict(FORMATS["qwen3"].template) | {"start_anchor": "A:"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call> {"name": "f", "arguments": {"a": 12}} </tool_call>'
TEXT = f"<think>why</think> Well. {CALL}"
MESSAGE = ChatMessage("Well.", "why", (ToolCall("f", '{"a": 12}'),))
GREEDY = SamplingParams(temperature=0, max_tokens=None)


def build(checkpoints, **config) -> LLM:
    folder = checkpoints.copy(letters_folder(checkpoints))
    config = {"chat_template": TEMPLATE} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return simulated_llm(folder, "ngram", k=3, script=Echo(VOCAB), max_model_len=512)


@pytest.fixture(scope="module")
def llm(checkpoints):
    """An LLM with drafts, so that most steps add several tokens."""
    with build(checkpoints, response_template=OWN) as llm:
        yield llm


def ask(llm, text, params=GREEDY, **options):
    return llm.chat([{"role": "user", "content": text}], params, use_tqdm=False, **options)[0]


def message(*arguments, **options):
    return ask(*arguments, **options).outputs[0].message


def test_a_chat_returns_messages(llm):
    before = llm.metrics().num_accepted_tokens
    output = ask(llm, TEXT, replace(GREEDY, n=2), tools=TOOLS)
    assert [one.message for one in output.outputs] == [MESSAGE] * 2
    assert [one.text for one in output.outputs] == [TEXT] * 2 and json.dumps(TOOLS) in output.prompt
    ids = [one.message.tool_calls[0].id for one in output.outputs]
    assert len(set(ids)) == 2 and all(one.isalnum() and len(one) == 9 for one in ids)
    assert llm.metrics().num_accepted_tokens > before
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        assert message(llm, TEXT, **options) == ChatMessage(f"Well. {CALL}", "why")
    assert message(llm, CALL + CALL, tools=TOOLS, parallel_tool_calls=False) == ChatMessage(
        None, None, MESSAGE.tool_calls
    )


def test_strict_tools_have_a_grammar_where_the_format_allows_it(llm, caplog):
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    choice = ChatOptions(tools=strict).choice
    for name, is_enforced in {"qwen3": True, "harmony": False, "gemma4": False}.items():
        known = ChatFormat(llm.get_tokenizer(), "", name)
        params = known.response("", GREEDY, choice).params
        assert (params.structured_outputs is not None) == is_enforced
    assert caplog.text.count("strict is not enforced") == 2


def test_a_message_goes_on_in_the_conversation(llm):
    given = ask(llm, TEXT, tools=TOOLS).outputs[0].message.as_dict()
    talk = [{"role": "user", "content": "a"}, given, {"role": "tool", "content": "3"}]
    (output,) = llm.chat([*talk, {"role": "user", "content": "Hi"}], GREEDY, use_tqdm=False)
    assert '"arguments": {"a": 12}' in output.prompt and output.outputs[0].message.content == "Hi"


def test_streams_add_up_to_the_message(llm):
    params = replace(GREEDY, output_kind=RequestOutputKind.DELTA, n=2)
    options = ChatOptions(tools=TOOLS)
    tokenizer = llm.get_tokenizer()
    talk = [{"role": "user", "content": TEXT}]
    chat = Chat.of(tokenizer, talk, params, options, content_format="auto")
    parsers = [chat.responses[0].parser() for _ in range(2)]
    deltas, sizes = [[], []], set()
    for output in llm.generate_stream(chat.prompts, chat.params):
        for sample in output.outputs:
            deltas[sample.index].append(parsers[sample.index].feed(sample.text))
            sizes.add(len(sample.token_ids))
    for parser, own in zip(parsers, deltas, strict=True):
        assert add_up([*own, parser.finish()]) == MESSAGE
    assert len(sizes) > 1


def test_outputs_that_end_at_max_tokens(llm):
    cut = TEXT.index("12") + 1
    sample = ask(llm, TEXT, replace(GREEDY, max_tokens=cut), tools=TOOLS).outputs[0]
    assert sample.finish_reason == "length"
    assert sample.message.tool_calls == (ToolCall("f", '{"a": 1'),)
    without = ask(llm, "Hi", replace(GREEDY, detokenize=False)).outputs[0]
    assert without.text is None and without.message is None


def test_variables_of_the_template(llm):
    variables = {"enable_thinking": True}
    assert message(llm, "why</think> Hi", chat_template_kwargs=variables) == ChatMessage(
        "Hi", "why"
    )
    assert ask(llm, "Hi", reasoning_effort="low").prompt.endswith("lowA:")


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_calls_are_forced(llm, choice):
    """The simulated model always says the same text; the engine accepts only a valid call."""
    text = '{"name": "f", "parameters": {"a": 12}}'
    options = {"tools": TOOLS, "tool_choice": choice, "response_template": "llama3"}
    assert message(llm, text, **options).tool_calls == MESSAGE.tool_calls
    refused = ask(llm, "Well.", **options).outputs[0]
    assert refused.finish_reason == "error" and "not allowed" in str(refused.error)


def test_formats_are_found_by_the_chat_template(checkpoints):
    template = TEMPLATE + "{# <|im_start|> <tool_call> #}"
    with build(checkpoints, chat_template=template) as llm:
        assert message(llm, TEXT, tools=TOOLS) == MESSAGE
        assert message(llm, f" {TEXT} ", chat_template=TEMPLATE) == ChatMessage(f" {TEXT} ")
        unknown = {"chat_template": TEMPLATE, "tools": TOOLS}
        refusal(lambda: ask(llm, "hi", **unknown), "tools", "no known format", "qwen3", "'none'")
        assert message(llm, "hi", tool_choice="none", **unknown) == ChatMessage("hi")


def of_parameters(parameters):
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def of_property(schema):
    return of_parameters({"type": "object", "properties": {"a": schema}})


BAD = [
    ({"tools": TOOLS, "tool_choice": "any"}, ["tool_choice='any'", "required"]),
    ({"tools": TOOLS, "tool_choice": {"function": {"name": "g"}}}, ["'g'", "which has: f"]),
    ({"tool_choice": NAMED}, ["which has: none"]),
    ({"tool_choice": "required"}, ["needs tools"]),
    ({"tools": []} | {"tool_choice": "required"}, ["needs tools"]),
    ({"parallel_tool_calls": 1}, ["parallel_tool_calls=1"]),
    ({"reasoning_effort": 3}, ["reasoning_effort=3"]),
    (
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
        ["'low'", "'high'"],
    ),
    ({"response_template": "qwen4"}, ["response_template='qwen4'", "qwen3"]),
    ({"response_template": {"fields": {}}}, ["start_anchor"]),
    ({"response_template": 5}, ["response_template=5"]),
    (
        {"tools": TOOLS, "tool_choice": "required", "response_template": "gemma4"},
        ["tool_choice", "'auto'"],
    ),
    ({"tools": [{"type": "custom"}]}, ["tools[0].type='custom'"]),
    ({"tools": [{"function": 5}]}, ["tools[0].function=5"]),
    ({"tools": [{"function": {}}]}, ["tools[0].function.name=None"]),
    ({"tools": [*TOOLS, *TOOLS]}, ["'f' twice"]),
    ({"tools": [{"name": "a b"}]}, ["tools[0].name='a b'"]),
    ({"tools": of_parameters(5)}, ["tools[0].function.parameters=5"]),
    ({"tools": of_parameters({"type": "string"})}, ["parameters.type='string'"]),
    ({"tools": of_parameters({"properties": []})}, ["parameters.properties=[]"]),
    ({"tools": of_parameters({"required": "a"})}, ["parameters.required='a'"]),
    ({"tools": of_property({"type": "text"})}, ["properties.a.type='text'", "string"]),
    ({"tools": of_property({"enum": 5})}, ["properties.a.enum=5"]),
    ({"tools": of_property({"anyOf": {}})}, ["properties.a.anyOf={}"]),
    ({"tools": of_property({"items": 5})}, ["properties.a.items=5"]),
]


@pytest.mark.parametrize("options, words", BAD, ids=label)
def test_bad_chats_with_tools(llm, options, words):
    before = llm.metrics().num_prompt_tokens
    assert "\n" not in refusal(lambda: ask(llm, "hi", **options), *words)
    assert llm.metrics().num_prompt_tokens == before


def test_two_constraints(llm):
    params = replace(GREEDY, structured_outputs={"regex": "a"})
    options = {"tools": TOOLS, "tool_choice": "required", "response_template": "llama3"}
    refusal(lambda: ask(llm, "hi", params, **options), "structured_outputs", "tool_choice")
    assert message(llm, "a", params, tools=TOOLS) == ChatMessage("a")
