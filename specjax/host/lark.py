"""Writes grammars in llguidance's Lark syntax for texts that may contain special tokens."""

import json
import re
from collections.abc import Mapping
from typing import Any

# The format of json.dumps; a schema may change it in its "x-guidance".
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def styled_schema(schema: Any) -> str:
    """Return a JSON schema as text, with a default style for outputs.

    The default is the style of `json.dumps`: one space after each comma and colon, and no other
    whitespace. The schema's key "x-guidance" overrides it.

    Raises:
        ValueError: `schema` is a text that is not JSON, is neither an object nor a boolean, is
            nested too deeply, or has a number that is not finite.
        TypeError: `schema` has a value that JSON does not have.
    """
    if isinstance(schema, str):
        schema = json.loads(schema)
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, Mapping):
        raise ValueError(f"{schema!r} is neither an object nor a boolean")
    schema = dict(schema)
    style = schema.get("x-guidance", {})
    if isinstance(style, dict):
        schema["x-guidance"] = JSON_STYLE | style
    try:
        # The order of keys is kept: it is the order in which properties are generated.
        return json.dumps(schema, allow_nan=False)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


class LarkWriter:
    """Writes expressions of a grammar. The rules that the expressions use are collected in `rules`.

    Args:
        special_ids: the ids of the tokenizer's special tokens, which llguidance does not treat as
            text.
    """

    def __init__(self, special_ids: Mapping[str, int]):
        self.rules: list[str] = []
        self._special_ids = special_ids
        names = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def rule(self, kind: str, body: str, options: str = "") -> str:
        """Add the rule "NAME OPTIONS: BODY", and return NAME, a new name that contains `kind`."""
        name = f"{kind}_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def json(self, schema: Any) -> str:
        """Return an expression that matches JSON texts that conform to a schema."""
        return self.rule("json", f"%json {styled_schema(schema)}")

    def text(self, text: str) -> str:
        """Return an expression that matches `text`.

        Special tokens in `text` are matched by their ids.
        """
        return " ".join(self._pieces(text))

    def until(self, end: str) -> str:
        """Return an expression that matches any text up to and including the first `end`."""
        first = next(iter(self._pieces(end)))
        if not first.startswith('"'):  # a special token ends any text
            return f"/(?s:.*)/ {self.text(end)}"
        text = json.loads(first)
        pattern = "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{ord(c):02x}" for c in text)
        rule = self.rule("until", f"/(?s:.*){pattern}/", "[lazy]")
        return f"{rule} {self.text(end[len(text) :])}"

    def _pieces(self, text: str) -> list[str]:
        split = [text] if self._special is None else self._special.split(text)
        return [
            f"<[{self._special_ids[piece]}]>" if piece in self._special_ids else json.dumps(piece)
            for piece in split
            if piece
        ]


def structural_tags(given: Mapping[str, Any], special_ids: Mapping[str, int]) -> str:
    """Return a grammar of free text with structures, as in vLLM's option `structural_tag`.

    A structure consists of a beginning, JSON that conforms to a schema, and an end. A trigger is
    the first part of one or more beginnings. Wherever the text has a trigger, a structure must
    start.

    Args:
        given: a checked `StructuredOutputs.structural_tag`.
        special_ids: see `LarkWriter`.
    """
    writer, parts = LarkWriter(special_ids), []
    for trigger in given["triggers"]:
        tags = [
            f"{writer.text(one['begin'][len(trigger) :])} {writer.json(one['schema'])} "
            f"{writer.text(one['end'])}"
            for one in given["structures"]
            if one["begin"].startswith(trigger)
        ]
        parts.append(f"{writer.until(trigger)} ({' | '.join(tags)})")
    return "\n".join((f"start: ({' | '.join(parts)})* /(?s:.*)/", *writer.rules))
