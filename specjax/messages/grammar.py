"""Writes grammars, in llguidance's Lark, that force a model to call functions."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.host.grammar import styled_schema
from specjax.messages.contents import schema_types
from specjax.messages.formats import CallForm
from specjax.messages.tools import Function

_SPACE = r"/\n{0,2}/"  # models write line breaks before calls


class CallGrammar:
    """The grammar of a response that calls functions, in a form.

    Args:
        special_ids: the ids of the tokenizer's special tokens, which llguidance does not treat as
            text.
    """

    def __init__(self, form: CallForm, special_ids: Mapping[str, int]):
        self._form, self._special_ids = form, special_ids
        names = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self._rules: list[str] = []

    def write(
        self, functions: Sequence[Function], *, is_parallel: bool, is_reasoning: bool | None
    ) -> str:
        """Return the grammar.

        Args:
            functions: the functions to choose from.
            is_parallel: whether there may be several calls.
            is_reasoning: True if the response begins within reasoning, False if it may have none,
                None if it may begin with reasoning.
        """
        form = self._form
        self._rules = []
        opening, closing = form.reasoning
        thought = f"{self._until(closing)} {_SPACE}"
        before = {True: thought, False: "", None: f"({self._text(opening)} {thought})?"}
        calls = "call"
        if is_parallel and form.between is not None:
            calls = f"call ({self._text(form.between)} call)*"
        parts = _SPACE, self._text(form.first), calls, self._text(form.last)
        named = [self._rule("function", self._call(function)) for function in functions]
        return "\n".join(
            (
                f"start: {before[is_reasoning]} {' '.join(parts)}",
                f"call: {' | '.join(named)}",
                *self._rules,
            )
        )

    def _rule(self, kind: str, body: str, options: str = "") -> str:
        """Add a rule, and return its name."""
        name = f"{kind}_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _call(self, function: Function) -> str:
        before, after = self._form.name
        opening = self._text(before + function.name + after)
        arguments = self._tags if self._form.parameter else self._json
        return f"{opening} {arguments(function.parameters)} {self._text(self._form.end)}"

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self._rule("json", f"%json {styled_schema(schema)}")

    def _tags(self, schema: Mapping[str, Any]) -> str:
        """Return the arguments as texts around keys and values, in the order of the schema."""
        assert self._form.parameter is not None
        before, middle, after = self._form.parameter
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        required, parts = schema.get("required", ()), []
        for key, value in schema.get("properties", {}).items():
            value = {} if isinstance(value, bool) else value
            part = f"{self._text(before + key + middle)} {self._value(value, shared, after)}"
            parts.append(part if key in required else f"({part})?")
        return " ".join(parts)

    def _value(self, schema: Mapping[str, Any], shared: Mapping[str, Any], after: str) -> str:
        types, choices = schema_types(schema), schema.get("enum")
        if choices and all(isinstance(choice, str) for choice in choices):
            return f"({' | '.join(map(self._text, choices))}) {self._text(after)}"
        if types and "string" not in types:
            return f"{self._json({**schema, **shared})} {self._text(after)}"
        return self._until(after)

    def _text(self, text: str) -> str:
        """Return a text that the response has, with special tokens by their ids."""
        return " ".join(self._pieces(text))

    def _pieces(self, text: str) -> list[str]:
        split = [text] if self._special is None else self._special.split(text)
        return [
            f"<[{self._special_ids[piece]}]>" if piece in self._special_ids else json.dumps(piece)
            for piece in split
            if piece
        ]

    def _until(self, end: str) -> str:
        """Return any text up to the first occurrence of `end`, including it."""
        first = next(iter(self._pieces(end)))
        if not first.startswith('"'):  # a special token ends any text
            return f"/(?s:.*)/ {self._text(end)}"
        text = json.loads(first)
        pattern = "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{ord(c):02x}" for c in text)
        return (
            f"{self._rule('until', f'/(?s:.*){pattern}/', '[lazy]')} {self._text(end[len(text) :])}"
        )
