"""Templates that are malformed or not supported are refused in one line."""

import pytest
from support.refusals import label, refusal

from specjax.messages.formats import FORMATS
from specjax.messages.template import ResponseTemplate

CALL = FORMATS["qwen3_coder"].template["fields"]["tool_calls"]
JSON = {"open": "<", "close": ">", "content": "json"}


def with_field(**fields):
    return {"start_anchor": "A", "fields": fields}


def calls(**changes):
    return with_field(tool_calls=CALL | changes)


BAD = [
    (5, ["response_template=5"]),
    ({"fields": {"content": {}}}, ["start_anchor"]),
    ({"start_anchor": "", "fields": {"content": {}}}, ["start_anchor=''"]),
    ({"start_anchor": "A", "start_anchor_pattern": "A"}, ["both start_anchor"]),
    (with_field(content={}) | {"version": 2}, ["version=2"]),
    (with_field(content={}) | {"anchor": "A"}, ["'anchor'", "start_anchor"]),
    (with_field(), ["fields={}"]),
    (with_field(plan={}), ["fields.plan", "content"]),
    (with_field(content=5), ["fields.content=5"]),
    (with_field(content={"begin": "x"}), ["fields.content", "'begin'"]),
    (with_field(content={"open": []}), ["fields.content.open=[]"]),
    (with_field(content={"open_pattern": "("}), ["fields.content.open_pattern='('"]),
    (with_field(content={"open": "a", "open_pattern": "a"}), ["both open"]),
    (with_field(content={"join": "\n"}), ["join=", "repeats"]),
    (with_field(content={"content": "json"}), ["fields.content", "text"]),
    (with_field(content={"content_args": {"trim": 1}}), ["content_args", "'trim'"]),
    (with_field(content={"content_args": 5}), ["content_args=5"]),
    (with_field(content={}, thinking={}), ["neither open nor open_pattern"]),
    (with_field(reasoning=JSON, thinking=JSON), ["fields.reasoning", "text"]),
    (with_field(reasoning={"open": "a"}, thinking={"open": "b"}), ["two fields"]),
    (calls(content="yaml"), ["content='yaml'", "json"]),
    (calls(content_args={}), ["content_args", "'tag_pattern'"]),
    (calls(content_args={"tag_pattern": "("}), ["tag_pattern='('"]),
    (calls(content_args={"tag_pattern": "(?P<key>a)"}), ["key and value"]),
    (calls(content_args={"pattern": "a"}), ["content_args", "'pattern'"]),
    (calls(transform={"name": "{name}"}), ["arguments=None", "placeholder"]),
    (calls(transform="{content} of"), ["placeholder"]),
    (
        calls(content_args=CALL["content_args"] | {"value_parser": {"name": "yaml"}}),
        ["value_parser", "text or json"],
    ),
]


@pytest.mark.parametrize("given, words", BAD, ids=label)
def test_bad_templates(given, words):
    assert "\n" not in refusal(lambda: ResponseTemplate.of(given), *words)
