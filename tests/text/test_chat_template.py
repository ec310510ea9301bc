"""Chat templates render conversations as in transformers; and which template is used."""

import time
from typing import Any

import jinja2
import pytest
from support.refusals import label, refusal
from support.texts import write_files
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from specjax.text.chat import check_conversation, render_conversations
from specjax.text.chat_template import render
from specjax.text.tokenizer import load_tokenizer

CALL = {"type": "function", "function": {"name": "f", "arguments": {"é": [1, None], "b": "<&>"}}}
MESSAGES = [
    {"role": "user", "content": "Hi <b> \n"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "why"},
    {"role": "tool", "content": "3", "name": None},
]
LOOP = "{% for m in messages %}"
SNIPPETS = [
    LOOP + "{% generation %}{{ m.content }}|{% endgeneration %}{% endfor %}",
    LOOP + "\n  {%- generation -%}\n a {{ loop.index }} \n{%- endgeneration %}\n{% endfor %}",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    *(
        "{{ messages | tojson(" + options + ") }}"
        for options in ("", "indent=2", "separators=(',', ':')", "sort_keys=true", "true, 1")
    ),
    "{{ messages | tojson(ensure_ascii=True, separators=(', ', ' : '), indent='  ') }}",
    "{{ tools | tojson }}{{ tools is none }}{{ documents is defined }}{{ documents is none }}",
    LOOP + "{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    LOOP + "{{ m.thinking }},{{ m.reasoning_content }},{{ m.reasoning }};{% endfor %}",
    LOOP + "{{ 'content' in m }}{{ m.content is none }}{{ m.name is defined }}{% endfor %}",
    "{% set ns = namespace(a=1, self=2) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns.self }}",
    "{% set ns = namespace(_a=1) %}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ dict(a=1).a }}{{ dict.fromkeys('ab') }}{{ dict.__class__ }}",
    "{{ dict.mro }}{{ ().__class__.__base__ }}",
    "{{ raise_exception('no system role') }}",
    "{{ messages.append(1) }}",
    "{{ nothing }}{{ nothing.more }}",
    "{{ strftime_now('%Y-%m-%d') }}{{ range(3) | list }}{{ 'abc'[::-1] }}{{ 'a' ~ 1 }}",
    "  {% if true %}\n  a\n  {% endif %}\n\n{# b #}\n c \n",
    "{{ messages[0].content | trim }}{{ messages | length }}{{ [1, 2] | map('string') | join }}",
    LOOP
    + "{% for k, v in (m.tool_calls or [{}])[0] | items %}{{ k }}{{ v }}{% endfor %}{% endfor %}",
    "{% macro f(x, y='z') %}{{ x }}{{ y }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}",
    "{{ lipsum is defined }}{{ 'a' is string }}{{ messages[0] is mapping }}",
    "{% include 'x' %}",
    "{% for x in [1] recursive %}{{ loop.depth }}{% endfor %}{{ cycler(1, 2).next() }}",
]


def outcome(make: Any) -> str:
    """Return the text, or the name of the error's class."""
    try:
        return make()
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("template", SNIPPETS, ids=label)
@pytest.mark.parametrize("variables", [{}, {"tools": [CALL], "documents": [{"text": "d"}]}])
def test_templates_render_as_in_transformers(template, variables):
    given = [{key: x for key, x in message.items() if x is not None} for message in MESSAGES]
    options = variables | {"chat_template": template}
    theirs = outcome(lambda: render_jinja_template([given], **options)[0][0])
    options = {"tools": None, "add_generation_prompt": False} | variables
    assert outcome(lambda: render(template, MESSAGES, **options)) == theirs


DEFAULT, TOOLS, RAG = (
    "default:{{ messages[0].content }}",
    "tools:{{ tools }}",
    "rag:{{ documents }}",
)
LISTED = [{"name": name, "template": text} for name, text in (("default", DEFAULT), ("rag", RAG))]
TOOL_USE = {"name": "tool_use", "template": TOOLS}
TEMPLATE_FILES = [
    {"tokenizer_config.json": {"chat_template": DEFAULT}},
    {"tokenizer_config.json": {"chat_template": LISTED}},
    {"tokenizer_config.json": {"chat_template": [*LISTED, TOOL_USE]}},
    {"chat_template.jinja": DEFAULT, "tokenizer_config.json": {"chat_template": LISTED}},
    {"chat_template.jinja": DEFAULT, "additional_chat_templates/tool_use.jinja": TOOLS},
    {"additional_chat_templates/tool_use.jinja": TOOLS, "additional_chat_templates/rag.jinja": RAG},
    {"tokenizer_config.json": {"chat_template": LISTED[1:]}},
    {},
]
CHOICES = [None, "default", "tool_use", "rag", "own {{ messages[0].role }}"]


@pytest.mark.slow
@pytest.mark.parametrize("files", TEMPLATE_FILES, ids=label)
@pytest.mark.parametrize("chosen", CHOICES)
@pytest.mark.parametrize("tools", [None, [], [CALL]], ids=label)
def test_the_template_is_the_one_of_transformers(tmp_path, files, chosen, tools):
    ours = load_tokenizer(write_files(tmp_path, files))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours is not None
    options = {"tools": tools, "chat_template": chosen, "tokenize": False}
    try:
        expected = theirs.apply_chat_template(MESSAGES, **options)
    except ValueError as error:
        words = ("several", "rag") if "multiple" in str(error) else ("no chat template",)
        refusal(lambda: ours.apply_chat_template(MESSAGES, **options), *words)
        return
    if expected == chosen == "default" and ours.template:  # the name of the only one
        expected = ours.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
    if expected == chosen:  # a name that is none of its templates, rendered as a text
        refusal(lambda: ours.apply_chat_template(MESSAGES, **options), f"'{chosen}'", "has:")
    else:
        assert ours.apply_chat_template(MESSAGES, **options) == expected


FAILING = [(None, True), ("rag", True), ("{{ 1 / 0 }} ", False)]


@pytest.mark.parametrize("chosen, is_own", FAILING)
def test_a_template_that_fails_is_named(tmp_path, chosen, is_own):
    """The checkpoint is named only for a template of its own."""
    files = {"chat_template.jinja": "{{ 1 / 0 }}", "additional_chat_templates/rag.jinja": "{{"}
    ours = load_tokenizer(write_files(tmp_path, files))
    assert ours is not None
    message = refusal(lambda: ours.apply_chat_template(MESSAGES, chat_template=chosen), "failed")
    assert (str(tmp_path) in message) == is_own != ("given as chat_template" in message)


@pytest.mark.parametrize("name", ["special_tokens_map.json", "tokenizer_config.json"])
def test_special_tokens_are_rendered_whichever_file_has_them(tmp_path, name):
    files = {name: {"bos_token": "<s>", "eos_token": "</s>"}}
    ours = load_tokenizer(write_files(tmp_path, files))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    options = {"chat_template": "{{ bos_token }}a{{ eos_token }}", "tokenize": False}
    theirs = theirs.apply_chat_template(MESSAGES[:1], **options)
    assert ours.apply_chat_template(MESSAGES[:1], **options) == theirs == "<s>a</s>"


def test_the_template_of_a_processor(tmp_path):
    for files, expected in (
        ({"chat_template.json": {"chat_template": DEFAULT}}, DEFAULT),
        ({"tokenizer_config.json": {"chat_template": TOOLS}}, TOOLS),
    ):
        tokenizer = load_tokenizer(write_files(tmp_path, files))
        assert tokenizer is not None and tokenizer.template == expected


ROLES = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
TOLD = [
    ([("developer", "a"), ("user", "b")], "system:a;user:b;"),
    ([("system", "s"), ("user", "b"), ("developer", "x\ny")], "system:s\n\nx\ny;user:b;"),
    ([("system", "s"), ("user", "b"), ("system", "x")], "system:s;user:b;system:x;"),
]


@pytest.mark.parametrize("messages, expected", TOLD, ids=label)
def test_developers_are_the_system_where_templates_do_not_know_them(tmp_path, messages, expected):
    tokenizer = load_tokenizer(write_files(tmp_path, {}))
    chat = [{"role": role, "content": content} for role, content in messages]
    as_given = "".join(f"{role}:{content};" for role, content in messages)
    knowing = ROLES + "{% if messages[0].role == 'developer' %}{% endif %}"
    for template, wanted in (ROLES, expected), (knowing, as_given):
        options = {"chat_template": template, "content_format": "string", "variables": {}}
        (prompt,) = render_conversations(tokenizer, chat, **options)
        assert prompt.get("prompt") == wanted


ARGUMENTS = [
    *(('{"a": [1, "é"]}', {"a": [1, "é"]}), ({"a": 1}, {"a": 1})),
    *((other, {}) for other in ("", None, "[1]", "3", "{a: 1}", [1])),
]


@pytest.mark.parametrize("given, expected", ARGUMENTS, ids=label)
def test_arguments_of_tool_calls_are_parsed_as_in_vllm(given, expected, caplog):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    (checked,) = check_conversation(messages, "messages")
    assert checked["tool_calls"] == [call | {"function": {"name": "f", "arguments": expected}}]
    assert call["function"]["arguments"] == given  # the user's own
    assert ("tool_calls[0]" in caplog.text) == (bool(given) and expected == {})


def test_conversations_as_vllm_passes_them_on():
    messages = [
        {"role": "assistant", "content": "a", "tool_calls": []},
        {"role": "tool", "content": [{"type": "text", "text": "b"}, "c"], "tool_call_id": "1"},
        {"role": "user", "content": ["d"]},
    ]
    assistant, tool, user = check_conversation(messages, "messages", "openai")
    assert "tool_calls" not in assistant and tool["content"] == "b\nc"
    assert user["content"] == [{"type": "text", "text": "d"}]


ENDLESS = [
    "{% for a in messages %}" * 9 + "{% endfor %}" * 9,
    "{% for a in range(9999) %}{% for b in range(9999) %}{{ loop.last }}{% endfor %}{% endfor %}",
    "{% for a in messages recursive %}{{ loop(messages) if loop.depth < 9 }}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(40) }}",
]


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_that_takes_too_long_ends(template):
    messages = [{"role": "user", "content": "x"}] * 50
    begin = time.monotonic()
    with pytest.raises(jinja2.TemplateError, match="it takes too long"):
        render(template, messages, max_seconds=0.1)
    assert time.monotonic() - begin < 5
