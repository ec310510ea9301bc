"""The syntaxes in which tool calls are written, and how to make a reader for each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import regex

from specjax.messages import contents
from specjax.messages.contents import Read
from specjax.messages.deltas import Calls
from specjax.messages.readers import CallReader, JsonArguments, JsonObjects, Tags, WholeCalls

_PLACEHOLDER = regex.compile(r"\{(\w+(?:\.\w+)*)\}")
_CONTENT = ("content",)

Schemas = Mapping[str, Mapping[str, Any]]  # by function and argument
# Makes the reader of a passage of calls, from the named groups in the passage's opening anchor.
MakeReader = Callable[[Calls, Mapping[str, str], Schemas], CallReader]


@dataclass(frozen=True)
class CallShape:
    """Says where the text of a call has the call's name and arguments.

    The text of a call, such as JSON between "<tool_call>" and "</tool_call>", is parsed to a value.
    `name` and `arguments` are paths: the keys that lead to the name and to the arguments. The first
    key is "content" for the parsed value, or the name of a group in the pattern that matches the
    opening text. If `is_list` is true, the parsed value is a list of calls, and a path starts with
    a key of a call instead of "content".
    """

    name: tuple[str, ...]
    arguments: tuple[str, ...]
    is_list: bool

    @classmethod
    def of(cls, transform: Any, *, is_list: bool, where: str) -> "CallShape":
        """Return the shape that the `transform` of a template describes.

        `where` is the path of the transform in the template, for error messages.

        Raises:
            ValueError: the transform has no placeholder for the name or the arguments.
        """
        if transform is None:
            return cls((*_CONTENT, "name"), (*_CONTENT, "arguments"), is_list)
        is_mapping = isinstance(transform, Mapping)
        function = transform.get("function", transform) if is_mapping else transform
        if isinstance(function, Mapping):
            name, arguments = function.get("name"), function.get("arguments")
            return cls(_path(name, where, "name"), _path(arguments, where, "arguments"), is_list)
        whole = _path(function, where, "function")
        return cls((*whole, "name"), (*whole, "arguments"), is_list)

    @property
    def is_named(self) -> bool:
        """Whether the opening text of a call, like "<function=f>", contains the name."""
        return not self.is_list and self.name[0] != "content"

    @property
    def is_direct(self) -> bool:
        """Whether the opening text contains the name, and the parsed value is the arguments."""
        return self.is_named and self.arguments == _CONTENT

    @property
    def keys(self) -> tuple[str, str] | None:
        """The keys of the name and of the arguments, if each call is an object; else None."""
        own = () if self.is_list else _CONTENT
        paths = self.name, self.arguments
        if any(len(path) != len(own) + 1 or path[: len(own)] != own for path in paths):
            return None
        return self.name[-1], self.arguments[-1]

    def find(self, value: Any, groups: Mapping[str, str]) -> list[tuple[str, Any]]:
        """Return the pair (name, arguments) of each call in a parsed value.

        `groups` maps the named groups of the opening pattern to the texts that they matched.

        Raises:
            ValueError: the value does not have this shape.
        """
        items = value if self.is_list else [{"content": value}]
        if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
            raise ValueError("it is not a list of objects")
        scopes = [{**groups, **item} for item in items]
        found = [(_get(scope, self.name), _get(scope, self.arguments)) for scope in scopes]
        if not all(isinstance(name, str) for name, _ in found):
            raise ValueError("a name is not a text")
        return found


def _path(placeholder: Any, where: str, key: str) -> tuple[str, ...]:
    match = _PLACEHOLDER.fullmatch(placeholder) if isinstance(placeholder, str) else None
    if match is None:
        raise ValueError(
            f"{where}: {key}={placeholder!r} must be a placeholder, like '{{content.{key}}}'"
        )
    return tuple(match[1].split("."))


def _get(scope: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        if not isinstance(scope, Mapping) or key not in scope:
            raise ValueError(f"it has no {key!r}")
        scope = scope[key]
    return scope


def _whole(shape: CallShape, read: Read, *, is_typed: bool) -> MakeReader:
    """Return a function that makes a reader of calls. The reader waits for the whole text.

    `read` parses the text to a value. If `is_typed` is false, arguments are texts, which the reader
    casts to the types in the functions' schemas.
    """

    def make(calls: Calls, groups: Mapping[str, str], schemas: Schemas) -> CallReader:
        def find(text: str) -> list[tuple[str, Any]]:
            found = shape.find(read(text), groups)
            return found if is_typed else [(name, cast(name, given)) for name, given in found]

        def cast(name: str, given: Any) -> Any:
            known = schemas.get(name, {})
            if not isinstance(given, Mapping):
                return given
            return {key: contents.cast(value, known.get(key)) for key, value in given.items()}

        return WholeCalls(calls, groups[shape.name[0]] if shape.is_named else None, find)

    return make


def _json(args: Mapping[str, Any], shape: CallShape) -> MakeReader:
    if args:  # a dialect
        return _whole(shape, lambda text: contents.read_json(text, **args), is_typed=True)
    if shape.is_direct:
        return lambda calls, groups, _: JsonArguments(calls, groups[shape.name[0]])
    if (keys := shape.keys) is not None:
        return lambda calls, *_: JsonObjects(calls, *keys)
    return _whole(shape, contents.read_json, is_typed=True)


def _tags(args: Mapping[str, Any], shape: CallShape) -> MakeReader:
    pattern = contents.tag_pattern(args["tag_pattern"])
    read_value = contents.value_reader(args.get("value_parser"))
    merges = args.get("merge_duplicates", False)
    if merges or not shape.is_direct:

        def read(text: str) -> Any:
            return contents.read_tags(text, pattern, read_value, merges=merges)

        return _whole(shape, read, is_typed=False)

    def make(calls: Calls, groups: Mapping[str, str], schemas: Schemas) -> CallReader:
        name = groups[shape.name[0]]
        return Tags(calls, name, pattern, read_value, schemas.get(name, {}))

    return make


def _lines(args: Mapping[str, Any], shape: CallShape) -> MakeReader:
    read_value = contents.value_reader(args.get("value_parser"))
    options = {name: value for name, value in args.items() if name != "value_parser"}
    return _whole(
        shape, lambda text: contents.read_lines(text, read_value, **options), is_typed=False
    )


def _python(args: Mapping[str, Any], shape: CallShape) -> MakeReader:
    return _whole(shape, contents.read_python_calls, is_typed=True)


KINDS: Mapping[str, Callable[[Mapping[str, Any], CallShape], MakeReader]] = {
    "json": _json,
    "xml-inline": _tags,
    "kv-lines": _lines,
    "python-call-list": _python,
}
ARGS: Mapping[str, set[str]] = {  # the known content_args of each kind
    "json": {"string_delims", "unquoted_keys", "allow_non_json"},
    "xml-inline": {"tag_pattern", "value_parser", "merge_duplicates"},
    "kv-lines": {"line_sep", "kv_sep", "value_parser", "strip"},
    "python-call-list": set(),
}
