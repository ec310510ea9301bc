"""Reads the body of a tool call: JSON and its dialects, tags, lines, or Python calls."""

import ast
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import regex

_BARE_KEY = regex.compile(r'"(?:\\.|[^"\\])*"|(?<=[{,])(\s*)([\w-]+)(\s*):', regex.DOTALL)

Read = Callable[[str], Any]  # raises ValueError if the text cannot be read


def load_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(
    text: str,
    *,
    string_delims: Sequence[Sequence[str]] = (),
    unquoted_keys: bool = False,
    allow_non_json: bool = False,
) -> Any:
    """Return the value of a text in JSON or in a dialect of JSON.

    Args:
        string_delims: pairs of opening and closing delimiters. The text between them is a string in
            which nothing is escaped.
        unquoted_keys: whether keys may be written without quotation marks.
        allow_non_json: whether to return a text that is not JSON unchanged (but stripped), instead
            of raising an error.

    Raises:
        ValueError: the text cannot be read.
    """
    try:
        pieces = list(_pieces(text, string_delims))
        if unquoted_keys:
            # Strings are excluded first: what looks like a key in a string is not one.
            pieces = [piece if is_string else _quoted(piece) for piece, is_string in pieces]
        else:
            pieces = [piece for piece, _ in pieces]
        return load_json("".join(pieces))
    except ValueError:
        if allow_non_json:
            return text.strip()
        raise


def _pieces(text: str, delims: Sequence[Sequence[str]]) -> Iterator[tuple[str, bool]]:
    """Split a text at its delimited strings. Yield each piece, and whether it was delimited.

    Delimited strings are converted to JSON strings.
    """
    if not delims:
        yield text, False
        return
    spans = "|".join(f"{regex.escape(a)}(.*?){regex.escape(b)}" for a, b in delims)
    end = 0
    for match in regex.finditer(spans, text, regex.DOTALL):
        yield text[end : match.start()], False
        yield json.dumps(next(one for one in match.groups() if one is not None)), True
        end = match.end()
    yield text[end:], False


def _quoted(text: str) -> str:
    def quote(match: Any) -> str:
        before, key, after = match.groups()
        return match[0] if key is None else f'{before}"{key}"{after}:'

    return _BARE_KEY.sub(quote, text)


def tag_pattern(pattern: str) -> Any:
    """Compile a pattern that matches a tag with the key and the value of one argument.

    Raises:
        ValueError: `pattern` is not a valid pattern, or lacks the groups "key" and "value".
    """
    try:
        compiled = regex.compile(pattern, regex.DOTALL)
    except (regex.error, TypeError) as error:
        raise ValueError(f"tag_pattern={pattern!r} is not a pattern: {error}") from error
    if not {"key", "value"} <= set(compiled.groupindex):
        raise ValueError(f"tag_pattern={pattern!r} must have the groups key and value")
    return compiled


def value_reader(given: Any) -> Read:
    """Return the function that converts a value's text. `given` is a template's `value_parser`.

    Raises:
        ValueError: the parser's name is neither "text" nor "json".
    """
    if given is None:
        return str
    name = given.get("name", "text") if isinstance(given, Mapping) else given
    options = given.get("args", {}) if isinstance(given, Mapping) else {}
    if name == "text":
        return str.strip if options.get("strip", True) else str
    if name == "json":
        return partial(read_json, **options)
    raise ValueError(f"value_parser={given!r} must have the name text or json")


def read_tags(text: str, pattern: Any, read_value: Read, *, merges: bool) -> dict[str, Any]:
    """Return the keys and values of all tags in a text.

    If a key occurs several times, its value is the list of all values if `merges`, else the last
    value.
    """
    found: dict[str, list[Any]] = {}
    for match in pattern.finditer(text):
        found.setdefault(match["key"], []).append(read_value(match["value"] or ""))
    return {
        key: values if merges and len(values) > 1 else values[-1] for key, values in found.items()
    }


def read_lines(
    text: str, read_value: Read, *, line_sep: str = "\n", kv_sep: str = ":", strip: bool = True
) -> dict[str, Any]:
    """Return the keys and values of lines like "key: value". Other lines are ignored."""
    found = {}
    for line in text.split(line_sep):
        pair = (line.strip() if strip else line).partition(kv_sep)
        if pair[1]:
            key, _, value = map(str.strip, pair) if strip else pair
            found[key] = read_value(value)
    return found


def read_python_calls(text: str) -> list[dict[str, Any]]:
    """Return the calls in a Python list like [f(x=1)], each with the keys "name" and "arguments".

    A single call without a list is accepted, too.

    Raises:
        ValueError: the text has another form.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_read_call(call) for call in calls]
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"it is not a list of Python calls: {error}") from error


def _read_call(call: ast.AST) -> dict[str, Any]:
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise ValueError("it is not a call with named arguments")
    arguments = {str(one.arg): _literal(one.value) for one in call.keywords}
    return {"name": ast.unparse(call.func), "arguments": arguments}


def _literal(node: ast.expr) -> Any:
    constants = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    return ast.literal_eval(node)


def cast(text: Any, schema: Any) -> Any:
    """Convert a text to a type that a JSON schema allows: the first type that can represent it.

    The text is returned unchanged if the schema has no type, or if no conversion succeeds. A value
    that is not a text is returned unchanged, too.
    """
    if not isinstance(text, str):
        return text
    for name in schema_types(schema):
        try:
            return _CASTS[name](text)
        except (KeyError, ValueError):
            continue
    return text


def schema_types(schema: Any) -> list[str]:
    """Return the types that a JSON schema allows for a value, in the schema's order."""
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else list(declared or ())
    for name in "anyOf", "oneOf":
        types += [one for choice in schema.get(name) or () for one in schema_types(choice)]
    return [*types, *(["null"] if schema.get("nullable") else [])]


def _as_integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _as_number(text: str) -> int | float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("JSON has no such number")
    return int(number) if number.is_integer() and "." not in text else number


def _one_of(values: Mapping[str, Any], *, ignores_case: bool = False) -> Read:
    def read(text: str) -> Any:
        word = text.strip()
        return values[word.lower() if ignores_case else word]

    return read


def _as_json(kind: type) -> Read:
    def read(text: str) -> Any:
        value = load_json(text)
        if not isinstance(value, kind):
            raise ValueError("it has another type")
        return value

    return read


_CASTS: Mapping[str, Read] = {
    "integer": _as_integer,
    "number": _as_number,
    "boolean": _one_of({"true": True, "1": True, "false": False, "0": False}, ignores_case=True),
    "null": _one_of({"null": None, "None": None}),
    "object": _as_json(dict),
    "array": _as_json(list),
}
