"""`LLM.chat` returns messages, and refuses what cannot be read before any work; simulated."""

import json
from dataclasses import dataclass

import pytest
from support.refusals import label, refusal
from support.scripts import TextScript
from support.texts import VOCAB, letters_folder, simulated_llm

from specjax import RequestOutputKind, SamplingParams
from specjax.messages.chat import Chat, ChatOptions
from specjax.messages.deltas import add_up
from specjax.outputs import ChatMessage, ToolCall

pytest.importorskip("llguidance")

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{{ tools | tojson if tools }}{{ reasoning_effort }}<|im_start|>assistant\n"
    "{{ '<think>' if enable_thinking }}{# <tool_call> #}"
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
CALLS = '<tool_call>\n{"name": "f", "arguments": {"a": 12}}\n</tool_call>'
SAY = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Recital(TextScript):
    """After the template's end, the model says a text, and then the end of sequence."""

    text: str = ""
    start: str = "assistant "

    def following(self, tokens, digest, seed):
        """See `Script`."""
        said = "".join(chr(32 + token) for token in tokens)
        number = len(said) - said.rfind("ant" + self.start) - len("ant" + self.start)
        return ord(self.text[number]) - 32 if number < len(self.text) else VOCAB - 1


@pytest.fixture(scope="module")
def folder(checkpoints):
    folder = checkpoints.copy(letters_folder(checkpoints))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder
