"""The formats in which known models write tool calls and reasoning.

The `response_template` of a format says how to read responses. Its `CallForm` has the texts for
grammars that force calls. The first format in `FORMATS` whose signs (texts) all occur in the
model's chat template is chosen. To support another format, add one `ResponseFormat` and one entry
in `FORMATS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specjax.messages.template import ResponseTemplate

_THINK: Mapping[str, Any] = {"open": "<think>", "close": "</think>"}
_FUNCTION = {"type": "function", "function": "{content}"}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


@dataclass(frozen=True)
class CallForm:
    """The texts that a model writes around the names and arguments of calls.

    Attributes:
        name: the texts before and after a function's name.
        end: the text after the arguments.
        parameter: the text before an argument's key, the text between key and value, and the text
            after the value; None if the arguments are a JSON object.
        first: the text before all calls.
        between: the text between two calls; None if there can be only one call.
        last: the text after all calls.
        reasoning: the texts before and after reasoning.
        is_free: whether a grammar can allow any text around calls and reasoning. It cannot if the
            format puts special tokens around such text.
    """

    name: tuple[str, str]
    end: str
    parameter: tuple[str, str, str] | None = None
    first: str = ""
    between: str | None = ""
    last: str = ""
    reasoning: tuple[str, str] = ("<think>", "</think>")
    is_free: bool = True


@dataclass(frozen=True)
class ResponseFormat:
    """A format of responses.

    Attributes:
        signs: texts. A model has this format if its chat template contains all of them.
        template: the `response_template`, which says how to read responses.
        form: the form of calls, to make grammars that force them; None if there is no such grammar.
    """

    signs: tuple[str, ...]
    template: Mapping[str, Any]
    form: CallForm | None

    def fits(self, chat_template: str) -> bool:
        """Return whether a chat template contains all texts in `signs`."""
        return all(sign in chat_template for sign in self.signs)

    @cached_property
    def parsed(self) -> ResponseTemplate:
        """The template, ready for a parser."""
        return ResponseTemplate.of(self.template)


QWEN3 = ResponseFormat(
    signs=("<|im_start|>", "<tool_call>"),
    template={
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning": _THINK,
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": _FUNCTION,
            },
            "content": {"close": ["<|im_end|>", "<|endoftext|>"]},
        },
    },
    form=CallForm(('<tool_call>\n{"name": "', '", "arguments": '), "}\n</tool_call>", between="\n"),
)
QWEN3_CODER = ResponseFormat(
    signs=("<|im_start|>", "<function=", "<parameter="),
    template={
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning": _THINK,
            "tool_calls": {
                # Models sometimes leave out <tool_call>.
                "open_pattern": r"\s*(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>(?:\s*</tool_call>)?",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
                },
                "transform": _NAMED,
            },
            "content": {"close": ["<|im_end|>", "<|endoftext|>"]},
        },
    },
    form=CallForm(
        ("<tool_call>\n<function=", ">\n"),
        "</function>\n</tool_call>",
        parameter=("<parameter=", ">\n", "\n</parameter>\n"),
        between="\n",
    ),
)
GLM47 = ResponseFormat(
    signs=("<arg_key>", "<arg_value>"),
    template={
        "start_anchor": "<|assistant|>",
        "fields": {
            "reasoning": _THINK,
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*(?P<name>[^<\s]+)\s*(?=<)",
                "close": "</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<arg_key>\s*(?P<key>[^<]*?)\s*</arg_key>\s*"
                    r"<arg_value>(?P<value>.*?)</arg_value>"
                },
                "transform": _NAMED,
            },
            # A prompt without thinking ends with </think>.
            "content": {"close": ["</think>", "<|user|>", "<|observation|>"]},
        },
    },
    form=CallForm(
        ("<tool_call>", ""),
        "</tool_call>",
        parameter=("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
    ),
)
_TURN = r"(?:<\|start\|>assistant)?"
_KIND = r"\s*(?:<\|constrain\|>)?\s*(?:json|code)?\s*<\|message\|>"
_RECIPIENT = r"\s*to=functions\.(?P<name>[^\s<]+)\s*"
HARMONY = ResponseFormat(
    signs=("<|start|>", "<|channel|>", "functions"),
    template={
        "start_anchor": "<|start|>assistant",
        "fields": {
            "reasoning": {
                "open_pattern": _TURN + r"<\|channel\|>analysis<\|message\|>",
                "close": ["<|end|>", "<|return|>"],
                "repeats": True,
                "join": "\n",
            },
            "tool_calls": {
                # The recipient is before or after the channel.
                "open_pattern": _TURN
                + rf"(?:{_RECIPIENT}<\|channel\|>\w+|<\|channel\|>\w+{_RECIPIENT})"
                + _KIND,
                "close": ["<|call|>", "<|end|>", "<|return|>"],
                "repeats": True,
                "content": "json",
                "transform": _NAMED,
            },
            "content": {
                "close_pattern": _TURN
                + r"<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>\s*\w+)?\s*<\|message\|>"
                r"|<\|end\|>|<\|return\|>"
            },
        },
    },
    form=CallForm(
        ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
        "",
        between=None,
        reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        is_free=False,
    ),
)
MISTRAL = ResponseFormat(
    signs=("[TOOL_CALLS]", "[ARGS]"),
    template={
        "start_anchor": ["[/INST]", "[/TOOL_RESULTS]"],
        "fields": {
            "reasoning": {"open": "[THINK]", "close": "[/THINK]"},
            "tool_calls": {
                "open_pattern": r"\s*\[TOOL_CALLS\]\s*(?P<name>[^\[\s]+)\s*"
                r"(?:\[CALL_ID\][^\[]*)?\[ARGS\]",
                "close_pattern": r"(?=\[TOOL_CALLS\])|</s>",
                "repeats": True,
                "content": "json",
                "transform": _NAMED,
            },
            "content": {"close": "</s>"},
        },
    },
    form=CallForm(("[TOOL_CALLS]", "[ARGS]"), "", reasoning=("[THINK]", "[/THINK]")),
)
MISTRAL_LIST = ResponseFormat(
    signs=("[TOOL_CALLS]",),
    template={
        "start_anchor": ["[/INST]", "[/TOOL_RESULTS]"],
        "fields": {
            "tool_calls": {
                "open_pattern": r"\s*\[TOOL_CALLS\]\s*",
                "close": "</s>",
                "content": "json",
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{arguments}"},
                },
                "transform_each": True,
            },
            "content": {"close": "</s>"},
        },
    },
    form=CallForm(
        ('{"name": "', '", "arguments": '), "}", first="[TOOL_CALLS] [", between=", ", last="]"
    ),
)
LLAMA3 = ResponseFormat(
    signs=("<|start_header_id|>", '"parameters": '),
    template={
        "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"\s*(?:<\|python_tag\|>)?\s*"
                r'(?=\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:)',
                "close": ["<|eot_id|>", "<|eom_id|>"],
                "content": "json",
                "transform": {
                    "type": "function",
                    "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
                },
            },
            "content": {"close": ["<|eot_id|>", "<|eom_id|>"]},
        },
    },
    form=CallForm(('{"name": "', '", "parameters": '), "}", between=None),
)
DEEPSEEK_V3 = ResponseFormat(
    signs=("<｜tool▁sep｜>", "```json"),
    template={
        "start_anchor": ["<｜Assistant｜>", "<｜tool▁outputs▁end｜>"],
        "fields": {
            "reasoning": _THINK,
            "tool_calls": {
                "open_pattern": r"\s*(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>function"
                r"<｜tool▁sep｜>(?P<name>[^\s<]+)\s+```json\n",
                "close_pattern": r"\n```\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
                "repeats": True,
                "content": "json",
                "transform": _NAMED,
            },
            "content": {"close": ["</think>", "<｜end▁of▁sentence｜>"]},
        },
    },
    form=CallForm(
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n"),
        "\n```<｜tool▁call▁end｜>",
        first="<｜tool▁calls▁begin｜>",
        between="\n",
        last="<｜tool▁calls▁end｜>",
    ),
)
DEEPSEEK_V31 = ResponseFormat(
    signs=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
    template={
        "start_anchor": ["<｜Assistant｜>", "<｜tool▁output▁end｜>"],
        "fields": {
            "reasoning": _THINK,
            "tool_calls": {
                "open_pattern": r"\s*(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"
                r"(?P<name>[^<\s]+)\s*<｜tool▁sep｜>",
                "close_pattern": r"<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
                "repeats": True,
                "content": "json",
                "transform": _NAMED,
            },
            # A prompt without thinking ends with </think>.
            "content": {"close": ["</think>", "<｜end▁of▁sentence｜>"]},
        },
    },
    form=CallForm(
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        "<｜tool▁call▁end｜>",
        first="<｜tool▁calls▁begin｜>",
        last="<｜tool▁calls▁end｜>",
    ),
)
GEMMA4 = ResponseFormat(
    signs=("<|tool_call>", '<|"|>'),
    template={
        "start_anchor": ["<|turn>model\n", "<tool_response|>"],
        "fields": {
            "reasoning": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": {
                "open_pattern": r"\s*<\|tool_call>call:(?P<name>[^\s{]+)(?=\{)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": _NAMED,
            },
            "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
        },
    },
    form=None,  # arguments are not JSON
)

# The first format whose signs a chat template has is the model's.
FORMATS: Mapping[str, ResponseFormat] = {
    "qwen3_coder": QWEN3_CODER,
    "glm47": GLM47,
    "qwen3": QWEN3,
    "harmony": HARMONY,
    "mistral": MISTRAL,
    "mistral_list": MISTRAL_LIST,
    "llama3": LLAMA3,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "gemma4": GEMMA4,
}
