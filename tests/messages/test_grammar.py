"""Everything that a grammar for forced calls allows is parsed as calls that fit the tools."""

import json
import random

import jsonschema
import numpy as np
import pytest
from support.responses import RESPONSES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specjax.messages.formats import FORMATS
from specjax.messages.grammar import CallGrammar
from specjax.messages.parser import ResponseParser
from specjax.messages.tools import read_tool_choice
from specjax.sampling_params import StructuredOutputs

pytest.importorskip("llguidance")
from specjax.host.grammar import GrammarCompiler  # noqa: E402

SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {
            "unit": {"enum": ["C", "F </x"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 12},
            "list": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 2},
        },
        "required": ["unit", "days"],
        "additionalProperties": False,
        "$defs": {"flag": {"type": "boolean"}},
    },
    "g": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [{"function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]
FORMS = [name for name, one in FORMATS.items() if one.form is not None]
SPECIAL = "<|channel|>", "<|message|>", "<|end|>", "[TOOL_CALLS]", "[ARGS]", "<｜tool▁sep｜>"


@pytest.fixture(scope="module")
def tokenizer():
    letters = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("</s>", *SPECIAL)])
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer.to_str(), tokenizer.get_vocab_size(), (256,))


def matcher(tokenizer, compiler, name, choice, *, is_reasoning=False):
    special = {text: tokenizer.token_to_id(text) for text in SPECIAL}
    grammar = CallGrammar(FORMATS[name].form, special).write(
        choice.functions, is_parallel=choice.is_parallel, is_reasoning=is_reasoning
    )
    return compiler.compile(StructuredOutputs(grammar=grammar)).matcher()


def walk(state, rng):
    """Return random allowed tokens, up to the end."""
    tokens = []
    while not state.is_finished:
        (mask,) = state.masks(())
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = 256 if 256 in allowed and rng.random() < 0.3 else rng.choice(list(allowed))
        state.accept([int(token)])
        tokens.append(int(token))
    return tokens[:-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_what_a_grammar_allows_is_read_as_calls(tokenizer, compiler, name):
    rng = random.Random(name)
    named = {"type": "function", "function": {"name": "f"}}
    for tool_choice, is_parallel in [("required", True), ("required", False), (named, True)] * 2:
        choice = read_tool_choice(TOOLS, tool_choice, is_parallel)
        state = matcher(tokenizer, compiler, name, choice)
        text = tokenizer.decode(walk(state, rng), skip_special_tokens=False)
        message = ResponseParser(FORMATS[name].parsed, schemas=choice.schemas).parse(text)
        assert not message.content and message.reasoning is None and message.tool_calls, text
        for call in message.tool_calls:
            assert tool_choice == "required" or call.name == "f"
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        assert is_parallel or len(message.tool_calls) == 1


def test_models_own_writing_is_allowed(tokenizer, compiler):
    """Published responses pass the grammar, with any reasoning before the calls."""
    tools = [{"name": n, "parameters": {"type": "object"}} for n in ("f", "g")]
    choice = read_tool_choice(tools, "required", True)
    passed = set()
    for name, text, message in ((n, *case) for n in FORMS for case in RESPONSES[n]):
        if len(message.tool_calls) > 0 and not message.content:
            body = text.removesuffix("</s>").removesuffix("<|eom_id|>").removesuffix("<|call|>")
            state = matcher(
                tokenizer, compiler, name, choice, is_reasoning=None if message.reasoning else False
            )
            try:
                state.accept(tokenizer.encode(body, add_special_tokens=False).ids)
            except ValueError:
                continue
            passed.add(name)
            state.accept([256])
            assert state.is_finished
    assert passed >= {"harmony", "llama3"}


@pytest.mark.parametrize("name, text", [("qwen3", "hm </thin>\n"), ("harmony", "a<|end|")])
def test_reasoning_ends_before_calls(tokenizer, compiler, name, text):
    choice = read_tool_choice(TOOLS, "required", True)
    closing, form = FORMATS[name].form.reasoning[1], FORMATS[name].form
    for is_reasoning in (True, None):
        state = matcher(tokenizer, compiler, name, choice, is_reasoning=is_reasoning)
        opening = "" if is_reasoning else form.reasoning[0]
        whole = f"{opening}{text}{closing}{form.name[0]}g{form.name[1]}"
        state.accept(tokenizer.encode(whole, add_special_tokens=False).ids)
    state = matcher(tokenizer, compiler, name, choice, is_reasoning=True)
    with pytest.raises(ValueError, match="not allowed"):
        state.accept(tokenizer.encode(f"{closing}no call", add_special_tokens=False).ids)


@pytest.mark.parametrize("name", [name for name in FORMS if FORMATS[name].form.is_free])
def test_strict_calls_amid_text(tokenizer, compiler, name):
    """Any text is allowed; but where a call begins, only calls that fit the tools may follow."""
    rng, form = random.Random(name), FORMATS[name].form
    choice = read_tool_choice(
        [{"function": tool["function"] | {"strict": True}} for tool in TOOLS], "auto", True
    )
    assert choice.is_strict and not choice.is_forced
    special = {text: tokenizer.token_to_id(text) for text in SPECIAL}
    opening = form.first + form.name[0]
    for function in choice.functions:
        grammar = CallGrammar(form, special).write(
            choice.functions, is_parallel=True, is_reasoning=False, is_forced=False
        )
        state = compiler.compile(StructuredOutputs(grammar=grammar)).matcher()
        said = tokenizer.encode(
            f"So {opening}{function.name}{form.name[1]}", add_special_tokens=False
        )
        state.accept(said.ids)
        (mask,) = state.masks(())
        assert not np.unpackbits(mask.view(np.uint8), bitorder="little")[256]  # not the end
        text = tokenizer.decode([*said.ids, *until_end(state, rng)], skip_special_tokens=False)
        (call, *_) = (
            ResponseParser(FORMATS[name].parsed, schemas=choice.schemas).parse(text).tool_calls
        )
        assert call.name == function.name
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def until_end(state, rng):
    """Return random allowed tokens, until the output may end."""
    tokens = []
    while True:
        (mask,) = state.masks(())
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if 256 in allowed:
            return tokens
        tokens.append(int(rng.choice(list(allowed))))
        state.accept(tokens[-1:])
