"""Writes grammars, in llguidance's Lark, that make a model's function calls fit their schemas."""

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.host.lark import LarkWriter
from specjax.messages.contents import schema_types
from specjax.messages.formats import CallForm
from specjax.messages.tools import Function

_SPACE = r"/\n{0,2}/"  # models write line breaks before calls


class CallGrammar:
    """Writes grammars for responses that call functions, in the call form of a model.

    Args:
        form: the texts around the parts of a call.
        special_ids: see `LarkWriter`.
    """

    def __init__(self, form: CallForm, special_ids: Mapping[str, int]):
        self._form, self._writer = form, LarkWriter(special_ids)

    def write(
        self,
        functions: Sequence[Function],
        *,
        is_parallel: bool,
        is_reasoning: bool | None,
        is_forced: bool = True,
    ) -> str:
        """Return a grammar of responses, in which the arguments of calls fit their JSON schemas.

        Args:
            functions: the functions to choose from.
            is_parallel: whether a response may have several calls.
            is_reasoning: True if the prompt ends within reasoning, which the response continues;
                None if the response may begin with reasoning; False if it must not.
            is_forced: True if a response must consist of calls. False if it may be any text; but
                wherever the text begins a call, it must complete the call.
        """
        form, text = self._form, self._writer.text
        opening, closing = form.reasoning
        thought = f"{self._writer.until(closing)} {_SPACE}"
        before = {True: thought, False: "", None: f"({text(opening)} {thought})?"}
        calls = "call"
        if is_parallel and form.between is not None:
            calls = f"call ({text(form.between)} call)*"
        if is_forced:
            start = before[is_reasoning], _SPACE, text(form.first), calls, text(form.last)
        else:
            opening = form.first + form.name[0]
            trigger = opening.split()[0]
            first = self._any_of(functions, opening[len(trigger) :])
            # Without `form.first`, each further call begins with the trigger again.
            more = calls.removeprefix("call") if form.first else ""
            found = f"({self._writer.until(trigger)} ({first}) {more} {text(form.last)})"
            start = before[is_reasoning], found + ("*" if is_parallel else "?"), "/(?s:.*)/"
        named = self._any_of(functions, form.name[0])
        return "\n".join((f"start: {' '.join(start)}", f"call: {named}", *self._writer.rules))

    def _any_of(self, functions: Sequence[Function], before: str) -> str:
        """Return an expression that matches a call of any of the functions.

        A call begins with the text `before`, followed by the function's name.
        """
        rule = self._writer.rule
        return " | ".join(rule("function", self._call(one, before)) for one in functions)

    def _call(self, function: Function, before: str) -> str:
        opening = self._writer.text(before + function.name + self._form.name[1])
        arguments = self._tags if self._form.parameter else self._writer.json
        return f"{opening} {arguments(function.parameters)} {self._writer.text(self._form.end)}"

    def _tags(self, schema: Mapping[str, Any]) -> str:
        """Return the grammar of arguments that are written as tags, in the order of the schema."""
        assert self._form.parameter is not None
        before, middle, after = self._form.parameter
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        required, parts = schema.get("required", ()), []
        for key, value in schema.get("properties", {}).items():
            value = {} if isinstance(value, bool) else value
            part = f"{self._writer.text(before + key + middle)} {self._value(value, shared, after)}"
            parts.append(part if key in required else f"({part})?")
        return " ".join(parts)

    def _value(self, schema: Mapping[str, Any], shared: Mapping[str, Any], after: str) -> str:
        types, choices, text = schema_types(schema), schema.get("enum"), self._writer.text
        if choices and all(isinstance(choice, str) for choice in choices):
            return f"({' | '.join(map(text, choices))}) {text(after)}"
        if types and "string" not in types:
            return f"{self._writer.json({**schema, **shared})} {text(after)}"
        return self._writer.until(after)
