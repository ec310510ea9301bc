"""Responses of models with reasoning and tool calls, by format, and the parsed messages."""

import json
from typing import Any

from specjax.outputs import ChatMessage, ToolCall

HARD = {"text": 'a "b" }</x> \\ é 日本', "list": [1, {"none": None}, []], "": -1.5e3}
HARD_JSON = json.dumps(HARD, ensure_ascii=False)


def call(name: str, arguments: Any) -> ToolCall:
    """Return a tool call whose arguments are formatted as by `json.dumps`."""
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


F, G = call("f", HARD), call("g", {})
# Format: pairs of a text and its message.
RESPONSES: dict[str, list[tuple[str, ChatMessage]]] = {
    "qwen3": [
        (
            "<think>\nFirst <tool_call, then.\n</think>\n\nSee:\n<tool_call>\n"
            f'{{"name": "f", "arguments": {HARD_JSON}}}\n</tool_call>\n<tool_call>\n'
            '{"arguments": {}, "name": "g"}\n</tool_call>',
            ChatMessage("See:", "First <tool_call, then.", (F, G)),
        ),
        ("1 < 2, <tool_ and </think> <thin", ChatMessage("1 < 2, <tool_ and </think> <thin")),
        ("<think>\nso on and", ChatMessage("", "so on and")),
    ],
    "qwen3_coder": [
        (
            "Right.\n\n<tool_call>\n<function=write>\n<parameter=path>\na.py\n</parameter>\n"
            '<parameter=text>\n  def f():\n    return "<b>"\n\n</parameter>\n</function>\n'
            "</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
            ChatMessage(
                "Right.",
                None,
                (call("write", {"path": "a.py", "text": '  def f():\n    return "<b>"\n'}), G),
            ),
        ),
        (
            "<think>\nhm\n</think>\n\n<function=g>\n</function>",
            ChatMessage(None, "hm", (G,)),
        ),
    ],
    "glm47": [
        (
            "<think>Well.</think>Yes<tool_call>f<arg_key>a</arg_key><arg_value>x y</arg_value>"
            "<arg_key>é</arg_key><arg_value>[1, 2]</arg_value></tool_call>"
            "<tool_call>g\n</tool_call>",
            ChatMessage("Yes", "Well.", (call("f", {"a": "x y", "é": "[1, 2]"}), G)),
        )
    ],
    "harmony": [
        (
            "<|channel|>analysis<|message|>Ask <|start| it.<|end|><|start|>assistant<|channel|>"
            f"commentary to=functions.f <|constrain|>json<|message|>{HARD_JSON}",
            ChatMessage(None, "Ask <|start| it.", (F,)),
        ),
        (
            "<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant to=functions.g"
            "<|channel|>commentary json<|message|>{}<|call|>",
            ChatMessage("I ask.", None, (G,)),
        ),
        (
            "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis"
            "<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>**Hi** <|chan",
            ChatMessage("**Hi** <|chan", "One.\nTwo."),
        ),
    ],
    "mistral": [
        (
            f"[THINK]hm[/THINK]So: [TOOL_CALLS]f[ARGS]{HARD_JSON}[TOOL_CALLS]g[ARGS]{{}}",
            ChatMessage("So:", "hm", (F, G)),
        ),
        ("[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}</s>", ChatMessage(None, None, (G,))),
    ],
    "mistral_list": [
        (
            f'[TOOL_CALLS] [{{"name": "f", "arguments": {HARD_JSON}}}, '
            '{"name": "g", "arguments": {}, "id": "abcdefghi"}]',
            ChatMessage(None, None, (F, G)),
        )
    ],
    "llama3": [
        (
            f'<|python_tag|>{{"type": "function", "name": "f", "parameters": {HARD_JSON}}}',
            ChatMessage(None, None, (F,)),
        ),
        ('{"name": "g", "parameters": {}}<|eom_id|>', ChatMessage(None, None, (G,))),
        ('As JSON: {"no name": {}}', ChatMessage('As JSON: {"no name": {}}')),
    ],
    "deepseek_v3": [
        (
            "<think>\nhm\n</think>\n\nSo.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
            f"<｜tool▁sep｜>f\n```json\n{HARD_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>"
            "function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ChatMessage("So.", "hm", (F, G)),
        )
    ],
    "deepseek_v31": [
        (
            "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
            f"{HARD_JSON}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{{}}"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ChatMessage("Sure.", None, (F, G)),
        )
    ],
    "gemma4": [
        (
            '<|channel>thought\nhm\n<channel|><|tool_call>call:f{a:<|"|>b: "c", {d:1}<|"|>,'
            'n:-3,l:[<|"|>x<|"|>,{k:true}]}<tool_call|><|tool_call>call:g{}<tool_call|>',
            ChatMessage(
                None,
                "hm",
                (call("f", {"a": 'b: "c", {d:1}', "n": -3, "l": ["x", {"k": True}]}), G),
            ),
        )
    ],
}
