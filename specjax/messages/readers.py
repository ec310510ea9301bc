"""Readers of tool calls.

A reader gets the text of calls, such as the text between "<tool_call>" and "</tool_call>", in
pieces. It adds names and arguments to a `Calls`. Its method `close` returns the text that belongs
to no call. This text becomes content, so that no text is lost.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import regex

from specjax.messages.contents import Read, cast, load_json
from specjax.messages.deltas import Calls
from specjax.messages.stripped import Stripped

_PIECES = regex.compile(r'[^"\\{}\[\]:,]+|.', regex.DOTALL)
_BETWEEN = " \t\r\n[],;}"  # may occur between calls; the last is a bracket too many
_OPENING, _CLOSING = frozenset("{["), frozenset("}]")


class CallReader(Protocol):
    """Reads the tool calls in one part of a response, like the text after "<tool_call>"."""

    def feed(self, text: str) -> None:
        """Read more of the text that holds the tool calls."""
        ...

    def close(self, *, is_complete: bool) -> str:
        """End the text that holds the tool calls, and return the text that belongs to no call.

        `is_complete` is true if a closing text followed, such as "</tool_call>", and false if the
        response ended first.
        """
        ...


class JsonArguments:
    """Reads a text that is the JSON arguments of one call of the function `name`."""

    def __init__(self, calls: Calls, name: str):
        self._calls, self._text, self._is_empty = calls, Stripped(), True
        calls.begin(name)

    def feed(self, text: str) -> None:
        """See `CallReader`."""
        shown = self._text.feed(text)
        self._is_empty = self._is_empty and not shown
        self._calls.write(shown)

    def close(self, *, is_complete: bool) -> str:
        """See `CallReader`."""
        if self._is_empty and is_complete:
            self._calls.write("{}")
        return ""


class JsonObjects:
    """Reads tool calls that are written as JSON objects, one object per call.

    The name and the arguments of a call are the values of two keys. The objects may be items of a
    list, or follow each other. Arguments are not parsed, but passed on as text. If they are a JSON
    text inside a string, the string's content is passed on.
    """

    def __init__(self, calls: Calls, name_key: str, arguments_key: str):
        self._calls, self._name_key, self._arguments_key = calls, name_key, arguments_key
        self._depth = 0  # number of open brackets within the object; 0 outside of objects
        self._in_string = self._is_escaped = False
        self._unread, self._outside = "", ""
        self._begin_object()

    def _begin_object(self) -> None:
        self._text = ""  # the object's text, until it has a name
        self._key: str | None = None  # None while a key is read
        self._part = ""  # the text of the current key or value
        self._has_name, self._has_arguments, self._early = False, False, ""
        self._value = Stripped()

    def feed(self, text: str) -> None:
        """See `CallReader`."""
        for piece in _PIECES.findall(text):
            self._read(piece)

    def _read(self, piece: str) -> None:
        if not self._depth:
            if piece == "{":
                self._begin_object()
                self._depth, self._text = 1, piece
            else:
                self._outside += piece
            return
        if not self._has_name:
            self._text += piece
        if self._in_string:
            is_end = piece == '"' and not self._is_escaped
            self._is_escaped = piece == "\\" and not self._is_escaped
            self._in_string = not is_end
        elif piece == '"':
            self._in_string = True
        elif piece in _OPENING:
            self._depth += 1
        elif piece in _CLOSING:
            self._depth -= 1
            if not self._depth:
                self._end_object()
                return
        elif self._depth == 1 and piece == ":" and self._key is None:
            self._key, self._part = _read_string(self._part) or "", ""
            return
        elif self._depth == 1 and piece == ",":
            self._end_value()
            return
        self._add(piece)

    def _add(self, piece: str) -> None:
        """Add text to the current key or value.

        Text of arguments is added to the call at once. But if the arguments are a JSON string, they
        are added to the call at the end of the string, decoded.
        """
        if self._key != self._arguments_key or self._part.startswith('"'):
            self._part += piece
            return
        shown = self._value.feed(piece)
        if shown.startswith('"') and not self._has_arguments:
            self._part = shown
        else:
            self._write(shown)

    def _write(self, text: str) -> None:
        self._has_arguments = self._has_arguments or bool(text)
        if self._has_name:
            self._calls.write(text)
        else:
            self._early += text

    def _end_value(self) -> None:
        if self._key == self._name_key and not self._has_name:
            name = _read_string(self._part)
            if name:
                self._has_name, self._text = True, ""
                self._calls.begin(name)
                self._calls.write(self._early)
        elif self._key == self._arguments_key and self._part:
            inner = _read_string(self._part)
            self._write(self._part if inner is None else inner)
        self._key, self._part = None, ""

    def _end_object(self) -> None:
        self._end_value()
        if not self._has_name:
            self._unread += self._text
        elif not self._has_arguments:
            self._calls.write("{}")

    def close(self, *, is_complete: bool) -> str:
        """See `CallReader`."""
        if self._depth:
            if not self._has_name:
                self._unread += self._text
            elif self._key == self._arguments_key:
                self._write(self._part)  # an incomplete string
        has_more = self._outside.strip(_BETWEEN)
        return self._unread + (self._outside.strip() if has_more else "")


class Tags:
    """Reads a text of tags, each of which is one argument of a call of the function `name`.

    Args:
        pattern: a compiled pattern that matches a tag, with the groups "key" and "value".
        read_value: a function that converts a value's text. If the result is still a text, it is
            cast to the type in the argument's schema.
        schemas: the JSON schema of each known argument.
    """

    def __init__(
        self,
        calls: Calls,
        name: str,
        pattern: Any,
        read_value: Read,
        schemas: Mapping[str, Any],
    ):
        self._calls, self._pattern, self._read_value = calls, pattern, read_value
        self._schemas = schemas
        self._text, self._end, self._next_search, self._unread = "", 0, 0, ""
        self._before = "{"
        calls.begin(name)

    def feed(self, text: str) -> None:
        """See `CallReader`."""
        self._text += text
        # A long value is searched only after it has grown by an eighth: the total work is linear.
        if len(self._text) >= self._next_search:
            self._take(is_complete=False)
            self._next_search = len(self._text) + (len(self._text) - self._end) // 8

    def _take(self, *, is_complete: bool) -> None:
        for match in self._pattern.finditer(self._text, self._end):
            if match.end() == len(self._text) and not is_complete:
                return  # more text may change it
            self._unread += self._text[self._end : match.start()].strip()
            self._end = match.end()
            try:
                value = self._read_value(match["value"] or "")
            except ValueError:
                value = match["value"]
            value = cast(value, self._schemas.get(match["key"]))
            self._calls.write(f"{self._before}{_as_json(match['key'])}: {_as_json(value)}")
            self._before = ", "

    def close(self, *, is_complete: bool) -> str:
        """See `CallReader`."""
        self._take(is_complete=True)
        rest = self._text[self._end :].strip()
        if is_complete:
            self._calls.write("{}" if self._before == "{" else "}")
            return self._unread + rest
        if rest:
            self._calls.write(self._before + rest)
        return self._unread


class WholeCalls:
    """Reads the tool calls in a text once the text is complete.

    Args:
        name: the function's name if an opening text like "<function=f>" contained it, else None.
        find: a function that takes the text, and returns each call's name and arguments.
    """

    def __init__(
        self, calls: Calls, name: str | None, find: Callable[[str], list[tuple[str, Any]]]
    ):
        self._calls, self._find, self._text, self._has_name = calls, find, "", name is not None
        if name is not None:
            calls.begin(name)

    def feed(self, text: str) -> None:
        """See `CallReader`."""
        self._text += text

    def close(self, *, is_complete: bool) -> str:
        """See `CallReader`."""
        try:
            found = self._find(self._text)
        except ValueError:
            if not self._has_name:
                return self._text
            self._calls.write(self._text.strip())
            return ""
        for name, arguments in found:
            if not self._has_name:
                self._calls.begin(name)
            self._calls.write(arguments if isinstance(arguments, str) else _as_json(arguments))
        return ""


def _read_string(text: str) -> str | None:
    try:
        value = load_json(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
