"""Reads a `response_template`, transformers' declarative description of a model's responses.

A template is a mapping, as in tokenizer_config.json. Its `start_anchor` is the text that begins an
assistant's turn. Its `fields` describe the parts of a message: how the text of each part begins,
how it ends, and how it is read. At most one field has no beginning; it gets all text outside of the
other fields.

Only the parts "content", "reasoning" and "tool_calls" are supported. Other fields are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specjax.messages.anchors import Anchor
from specjax.messages.kinds import ARGS, KINDS, CallShape, MakeReader

CALLS = "tool_calls"
PARTS = {
    "content": "content",
    **dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "reasoning"),
    CALLS: CALLS,
}
TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
FIELD_KEYS = {
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args"),
    *("repeats", "join", "optional", "transform", "transform_each"),
}


@dataclass(frozen=True)
class Field:
    """The description of one part of a message.

    Attributes:
        part: "content", "reasoning" or "tool_calls".
        open: the anchor that begins the part; None for the field of all text outside other fields.
        close: the anchor that ends the part; None if the part ends only with the response.
        strips: whether leading and trailing whitespace is removed.
        join: the text to put between two passages of the part, if a response has several; None to
            keep the whitespace between them.
        reader: the function that makes a reader of tool calls; None for parts that are text.
    """

    part: str
    open: Anchor | None
    close: Anchor | None
    strips: bool = True
    join: str | None = None
    reader: MakeReader | None = None


@dataclass(frozen=True)
class ResponseTemplate:
    """A description of the responses of a model."""

    start: Anchor
    fields: tuple[Field, ...]

    @classmethod
    def of(cls, given: Any) -> "ResponseTemplate":
        """Return the template that a mapping describes.

        Raises:
            ValueError: a key is unknown, or a value is malformed or not supported.
        """
        where = "response_template"
        if not isinstance(given, Mapping):
            raise ValueError(f"{where}={given!r} must be a mapping, as in tokenizer_config.json")
        _check_keys(given, TEMPLATE_KEYS, where)
        if given.get("version", 1) != 1:
            raise ValueError(f"{where}.version={given['version']!r} must be 1")
        start = Anchor.of(given, "start_anchor", where)
        if start is None:
            raise ValueError(f"{where} needs start_anchor, the text that begins a response")
        fields = given.get("fields")
        if not isinstance(fields, Mapping) or not fields:
            raise ValueError(f"{where}.fields={fields!r} must be a mapping of names to fields")
        read = [_read_field(name, one, f"{where}.fields.{name}") for name, one in fields.items()]
        if sum(field.open is None for field in read) > 1:
            raise ValueError(
                f"{where}.fields: only one field may have neither open nor open_pattern"
            )
        parts = [field.part for field in read]
        if len(set(parts)) < len(parts):
            raise ValueError(f"{where}.fields: a part has two fields, under several names: {parts}")
        return cls(start, tuple(read))

    def without_calls(self) -> "ResponseTemplate":
        """Return a template that reads tool calls as content."""
        kept = (field for field in self.fields if field.part != CALLS)
        return replace(self, fields=tuple(kept))

    def has_part(self, part: str) -> bool:
        """Return whether the template describes this part of a message."""
        return any(field.part == part for field in self.fields)


def _check_keys(given: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(map(str, set(given) - known)):
        raise ValueError(
            f"{where} has the unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}"
        )


def _read_field(name: str, given: Any, where: str) -> Field:
    if name not in PARTS:
        raise ValueError(
            f"{where} is not a part of a message here; the parts are {', '.join(PARTS)}; pass "
            "response_template with only these"
        )
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}={given!r} must be a mapping")
    _check_keys(given, FIELD_KEYS, where)
    join, repeats = given.get("join"), given.get("repeats", False)
    if join is not None and not (isinstance(join, str) and repeats):
        raise ValueError(f"{where}.join={join!r} must be a text, and needs repeats=true")
    ends = Anchor.of(given, "open", where), Anchor.of(given, "close", where)
    kind, args = given.get("content", "text"), given.get("content_args", {})
    if not isinstance(args, Mapping):
        raise ValueError(f"{where}.content_args={args!r} must be a mapping")
    if PARTS[name] == CALLS:
        reader = _read_calls(given, kind, args, where)
        return Field(CALLS, *ends, reader=reader)
    if kind != "text" or given.get("transform") is not None:
        raise ValueError(f"{where} must be a text: content='text', and no transform")
    _check_keys(args, {"strip"}, f"{where}.content_args")
    return Field(PARTS[name], *ends, args.get("strip", True), join)


def _read_calls(given: Mapping[str, Any], kind: Any, args: Any, where: str) -> MakeReader:
    if kind not in KINDS:
        raise ValueError(f"{where}.content={kind!r} must be one of {', '.join(KINDS)}")
    _check_keys(args, ARGS[kind], f"{where}.content_args")
    is_list = given.get("transform_each", False)
    shape = CallShape.of(given.get("transform"), is_list=is_list, where=f"{where}.transform")
    try:
        return KINDS[kind](args, shape)
    except KeyError as error:
        raise ValueError(f"{where}.content_args needs {error}") from error
    except ValueError as error:
        raise ValueError(f"{where}.content_args: {error}") from error
