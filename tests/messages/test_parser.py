"""Responses are parsed as in transformers, however their text is split."""

import json
import random
import re

import pytest
from support.responses import RESPONSES, F, call
from transformers.utils.chat_parsing import parse_response

from specjax.messages.deltas import add_up
from specjax.messages.formats import FORMATS
from specjax.messages.parser import ResponseParser
from specjax.messages.template import ResponseTemplate
from specjax.outputs import ChatMessage, ToolCall

CASES = [(name, *case) for name, listed in RESPONSES.items() for case in listed]
THINK = "<|im_start|>user\nno <think><|im_end|>\n<|im_start|>assistant\n"
QWEN3, CODER = FORMATS["qwen3"].parsed, FORMATS["qwen3_coder"].parsed


def read(template, chunks, **options):
    parser = ResponseParser(template, **options)
    return add_up([*map(parser.feed, chunks), parser.finish()])


def splits(text, num_random=8):
    """Yield the text in two parts, in parts of equal size, and split at random places."""
    yield from ((text[:i], text[i:]) for i in range(len(text)))
    yield from ([text[i : i + n] for i in range(0, len(text), n)] for n in (1, 2, 3, 5, 8, 13))
    rng = random.Random(text)
    for _ in range(num_random):
        cuts = sorted(rng.sample(range(1, len(text)), min(len(text) - 1, rng.randint(2, 20))))
        yield [text[i:j] for i, j in zip([0, *cuts], [*cuts, None], strict=True)]


def as_transformers(name, text, tools=None):
    """Return the result of transformers' parser, in the form of our messages."""
    found = parse_response(text, dict(FORMATS[name].template), prefix="", tools=tools)
    calls = found.get("tool_calls", [])
    calls = [one["function"] for one in (calls if isinstance(calls, list) else [calls])]
    key = "parameters" if any("parameters" in one for one in calls) else "arguments"
    return (
        found.get("content") or None,
        found.get("reasoning"),
        [(one["name"], one[key]) for one in calls],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name, text, message", CASES)
def test_formats(name, text, message):
    template = FORMATS[name].parsed
    assert read(template, [text]) == message
    calls = [(one.name, json.loads(one.arguments)) for one in message.tool_calls]
    assert (message.content or None, message.reasoning, calls) == as_transformers(name, text)
    for chunks in splits(text):
        assert read(template, chunks) == message, chunks
    assert set(RESPONSES) == set(FORMATS)


@pytest.mark.slow
@pytest.mark.parametrize("name, text, message", CASES)
def test_outputs_that_end_early(name, text, message):
    """Shown text never changes, and the last part is complete when the response ends."""
    template, rng = FORMATS[name].parsed, random.Random(text)
    for end in rng.sample(range(1, len(text)), min(len(text) - 1, 25)):
        cut = text[:end]
        found = read(template, [cut])
        for chunks in (cut, [cut[: end // 2], cut[end // 2 :]]):
            assert read(template, chunks) == found, cut
        assert (message.reasoning or "").startswith(found.reasoning or "") or found.content == ""
        for known, part in zip(message.tool_calls, found.tool_calls, strict=False):
            assert part.name == known.name


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_any_text(name):
    """For pieces of responses in any order, no split changes the message, and nothing raises."""
    rng, template = random.Random(name), FORMATS[name].parsed
    marks = [
        part for text, _ in RESPONSES[name] for part in re.split(r"(?<=[>\]}])|(?=[<\[{])", text)
    ]
    pieces = [*marks, " ", "\n", "x", '"', "\\", "<", "{", "}", "é"]
    for _ in range(60):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 12)))
        prompt = rng.choice(["", template.start.pattern.pattern.replace("\\", "").split("|")[0]])
        prompt += "".join(rng.choices(pieces, k=rng.randint(0, 2)))
        message = read(template, [text], prompt=prompt)
        some = list(splits(text, 2)) if len(text) > 1 else [text]
        for chunks in rng.sample(some, min(len(some), 12)):
            assert read(template, chunks, prompt=prompt) == message, (prompt, chunks)


BROKEN = [
    # what the model wrote as a call; its arguments, or None if there is no call
    ('{"name": "f", "arguments": {"a": [1,', '{"a": [1,'),
    ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
    ('{"name": "f", "arguments": {a: 1}}', "{a: 1}"),
    ('{"name": "f", "arguments": {"a": 1}}}', '{"a": 1}'),
    ('{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}', '{"a": "é"}'),
    ('{"arguments": {"a": 1} , "name": "f"}', '{"a": 1}'),
    ('{"name": "f"}', "{}"),
    ('{"name": "f", "arguments": null}', "null"),
    ('{"n\\u0061me": "f", "arguments": { } }', "{ }"),
    ("f(a=1)", None),
    ('{"name": 5, "arguments": {}}', None),
    ('{"name": "", "arguments": {}}', None),
    ('["name", "f"]', None),
    ("[" * 5000, None),
]


@pytest.mark.parametrize("body, arguments", BROKEN)
def test_broken_calls_lose_nothing(body, arguments):
    text = f"<tool_call>\n{body}\n</tool_call>"
    calls = () if arguments is None else (ToolCall("f", arguments),)
    message = ChatMessage(text if arguments is None else None, None, calls)
    for chunks in [[text], text, [text[:20], text[20:]]]:
        assert read(QWEN3, chunks) == message
    parts = [f"before {text}", " after"]
    content = "before  after" if calls else f"before{text} after".replace("before", "before", 1)
    found = read(QWEN3, parts)
    assert found.tool_calls == calls and found.content.replace(" ", "") == content.replace(" ", "")


def test_what_follows_a_call_in_its_region_is_content():
    text = '<tool_call>{"name": "f", "arguments": {}} and {"a": 1}</tool_call>'
    for chunks in ([text], text):
        assert read(QWEN3, chunks) == ChatMessage('{"a": 1}and', None, (call("f", {}),))


PROMPTS = [
    # end of the prompt; text; content, reasoning
    ("", "<think>a</think>b", "b", "a"),
    ("<think>\n", "a\n</think>\n\nb", "b", "a"),
    ("<think>\n\n</think>\n\n", "b <think", "b <think", None),
    ("<think>\nIt is ", " a</think>b", "b", " a"),
    ("<think>given</think>The answer is", " 4 ", " 4", None),
    ("The <thi", "nk>a</think>b", "b", "a"),
    ("The <thi", "ng", "ng", None),
]


@pytest.mark.parametrize("prompt, text, content, reasoning", PROMPTS)
def test_a_prompt_begins_the_response(prompt, text, content, reasoning):
    for chunks in ([text], text):
        found = read(QWEN3, chunks, prompt=THINK + prompt)
        assert found == ChatMessage(content, reasoning)
    assert read(QWEN3, [text], prompt=prompt.replace("<|im_start|>", "")) == read(QWEN3, [text])


def test_a_prompt_may_begin_a_call():
    whole, begun = (
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", ',
    )
    for chunks in (['"arguments": {"a": 1}}</tool_call>b'], '"arguments": {"a": 1}}</tool_call>b'):
        found = read(QWEN3, chunks, prompt=f"{THINK}{begun}")
        assert found == ChatMessage("b", None, (call("f", {"a": 1}),))
        assert read(QWEN3, "b" + begun + chunks[0], prompt=THINK + whole).tool_calls[0].name == "f"


TYPES = {
    **{name: {"type": name} for name in ("integer", "number", "boolean", "string", "object")},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "either": {"type": ["string", "boolean"]},
    "nullable": {"type": "number", "nullable": True},
    "list": {"type": "array", "items": {"type": "integer"}},
    "unknown": {},
}
VALUES = "7", "7.0", "1e3", "-0.5", "true", "0", "None", "null", '{"a": 1}', "[1]", "nan", "x", ""


def test_values_without_types_are_cast_by_the_schema():
    """Every type and text is cast as in transformers."""
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object", "properties": TYPES}},
        }
    ]
    for value in VALUES:
        parts = (f"<parameter={name}>\n{value}\n</parameter>\n" for name in [*TYPES, "extra"])
        text = f"<tool_call>\n<function=f>\n{''.join(parts)}</function>\n</tool_call>"
        (found,) = read(CODER, [text], schemas={"f": TYPES}).tool_calls
        ((_, expected),) = as_transformers("qwen3_coder", text, tools)[2]
        assert json.dumps(json.loads(found.arguments)) == json.dumps(expected), value


def test_only_one_call(caplog):
    text = RESPONSES["qwen3"][0][0]
    for chunks in ([text], text):
        assert [one.name for one in read(QWEN3, chunks, max_calls=1).tool_calls] == ["f"]
    assert "a further call, of g, is left out" in caplog.text


def test_without_calls_they_are_content():
    text = RESPONSES["qwen3"][0][0]
    found = read(QWEN3.without_calls(), text)
    assert found.content == text.partition("</think>")[2].strip() and not found.tool_calls


def test_arguments_arrive_while_they_are_written():
    for name, text, message in CASES:
        parser = ResponseParser(FORMATS[name].parsed)
        deltas = [one for char in text for one in parser.feed(char).tool_calls]
        assert all((one.name is None) == (one.id is None) for one in deltas)
        if F in message.tool_calls:  # JSON: with each of its characters but spaces
            assert len(deltas) > 0.8 * len(F.arguments), name
        elif name == "qwen3_coder" and len(message.tool_calls) == 2:
            assert [one.arguments for one in deltas[:2]] == ["", '{"path": "a.py"']


@pytest.mark.slow
def test_long_arguments_take_linear_time():
    """Searching the whole text again for each chunk would take minutes."""
    value = "x <b>\n" * 50_000
    text = f"<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>"
    (found,) = read(CODER, (text[i : i + 12] for i in range(0, len(text), 12))).tool_calls
    assert json.loads(found.arguments) == {"a": value}


STANDARD = {
    "kv-lines": (
        {"open": "<call>", "close": "</call>", "content": "kv-lines", "transform": None},
        "<call>name: f\narguments: 1\n</call>",
    ),
    "python": (
        {
            "open": "<calls>",
            "close": "</calls>",
            "content": "python-call-list",
            "transform_each": True,
            "transform": {"name": "{name}", "arguments": "{arguments}"},
        },
        "<calls>[f(a=1, b=[True, None], c={'x': 'é'}), g()]</calls>",
    ),
    "merged": (
        {
            "open_pattern": r"<(?P<name>\w+)\[",
            "close": "]>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"(?P<key>\w+)=(?P<value>[^;]*);",
                "merge_duplicates": True,
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "<f[a=1;b=x;a=2;]><g[]>",
    ),
    "nested": (
        {
            "open": "<call>",
            "close": ["</call>", "</call>!"],
            "repeats": True,
            "content": "json",
            "transform": {"function": {"name": "{content.fn.name}", "arguments": "{content.args}"}},
        },
        '<call>{"fn": {"name": "f"}, "args": {"a": 1}}</call>!<call>oops</call>',
    ),
}


@pytest.mark.parametrize("kind", STANDARD)
def test_other_kinds_of_the_standard(kind):
    field, text = STANDARD[kind]
    field = {key: value for key, value in field.items() if value is not None}
    given = {"start_anchor": "A:", "fields": {"tool_calls": field, "content": {}}}
    template = ResponseTemplate.of(given)
    message = read(template, [text])
    for chunks in splits(text):
        assert read(template, chunks) == message, chunks
    is_broken = text.partition("<call>oops")
    found = parse_response(is_broken[0], given, prefix="")["tool_calls"]
    found = [one.get("function", one) for one in (found if isinstance(found, list) else [found])]
    assert [(one.name, json.loads(one.arguments)) for one in message.tool_calls] == [
        (one["name"], json.loads(one["arguments"]) if kind == "kv-lines" else one["arguments"])
        for one in found
    ][: len(message.tool_calls)]
    assert message.content == ("".join(is_broken[1:]) or None)
