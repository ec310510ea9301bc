"""Checks the functions that a model may call, and which of them it must call."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CHOICES = ("auto", "none", "required")
_NAME = re.compile(r"[\w./:-]+")
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_MAX_DEPTH = 64
# Keywords of JSON schemas by the form of their values.
_OF_SCHEMA = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then")
_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_NAMED = ("properties", "patternProperties", "$defs", "definitions")


@dataclass(frozen=True)
class Function:
    """A function that a model may call.

    Attributes:
        parameters: a JSON schema of the arguments.
        is_strict: OpenAI's `strict`: whether the arguments of calls must fit the schema.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False


@dataclass(frozen=True)
class ToolChoice:
    """The functions that a model may call.

    Attributes:
        functions: the functions; empty if the model must not call any function.
        is_forced: whether the model has to call one of the functions.
        is_parallel: whether one response can have several calls.
    """

    functions: tuple[Function, ...]
    is_forced: bool
    is_parallel: bool

    @property
    def is_strict(self) -> bool:
        """Whether any of the functions is strict."""
        return any(one.is_strict for one in self.functions)

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The JSON schema of each argument, by function."""
        return {one.name: one.parameters.get("properties", {}) for one in self.functions}


def read_tool_choice(tools: Any, tool_choice: Any, parallel_tool_calls: Any) -> ToolChoice:
    """Return the functions that the model may call, and whether it must call one.

    Args:
        tools: a list of functions in OpenAI's form, or None.
        tool_choice: "auto", "none", "required", or the one function that the model must call, in
            OpenAI's form.
        parallel_tool_calls: whether a response may have several calls.

    Raises:
        ValueError: an argument is malformed, or names a function that is not in `tools`.
    """
    functions = _read_functions(tools)
    if not isinstance(parallel_tool_calls, bool):
        raise ValueError(f"parallel_tool_calls={parallel_tool_calls!r} must be True or False")
    if isinstance(tool_choice, Mapping):
        return ToolChoice((_chosen(tool_choice, functions),), True, parallel_tool_calls)
    if tool_choice not in CHOICES:
        raise ValueError(
            f"tool_choice={tool_choice!r} must be one of {', '.join(CHOICES)}, or "
            '{"type": "function", "function": {"name": ...}}'
        )
    if tool_choice == "required" and not functions:
        raise ValueError("tool_choice='required' needs tools, the functions to choose from")
    allowed = () if tool_choice == "none" else functions
    return ToolChoice(allowed, tool_choice == "required", parallel_tool_calls)


def _chosen(choice: Mapping[str, Any], functions: Sequence[Function]) -> Function:
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    for one in functions:
        if one.name == name:
            return one
    known = ", ".join(one.name for one in functions) or "none"
    raise ValueError(
        f"tool_choice={dict(choice)!r} names no function of tools, which has: {known}; choose one "
        "of them"
    )


def _read_functions(tools: Any) -> tuple[Function, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"tools={tools!r} must be a list of JSON schemas, each a mapping")
    functions = [_read_function(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    counts = Counter(one.name for one in functions)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise ValueError(f"tools has the function {twice[0]!r} twice; rename one")
    return tuple(functions)


def _read_function(tool: Mapping[str, Any], where: str) -> Function:
    if tool.get("type", "function") != "function":
        raise ValueError(f"{where}.type={tool['type']!r} must be 'function'")
    is_nested = "function" in tool
    function = tool["function"] if is_nested else tool
    where = f"{where}.function" if is_nested else where
    if not isinstance(function, Mapping):
        raise ValueError(f"{where}={function!r} must be a mapping with name and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{where}.name={name!r} must be a text of letters, digits and any of _./:-"
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    fault = next(_faults(parameters, f"{where}.parameters", 0), None)
    if fault is None and parameters.get("type", "object") != "object":
        fault = f"{where}.parameters.type={parameters['type']!r} must be 'object'"
    if fault is not None:
        raise ValueError(f"{fault}; parameters are a JSON schema of an object")
    strict = function.get("strict")
    if strict not in (None, True, False):
        raise ValueError(f"{where}.strict={strict!r} must be True or False")
    return Function(name, parameters, is_strict=strict is True)


def _faults(schema: Any, where: str, depth: int) -> Iterator[str]:
    """Yield a message for each fault in the form of a JSON schema."""
    if isinstance(schema, bool) and depth:
        return
    if not isinstance(schema, Mapping):
        yield f"{where}={schema!r} must be a mapping"
        return
    if depth > _MAX_DEPTH:
        yield f"{where} is nested more than {_MAX_DEPTH} levels deep"
        return
    types = schema.get("type", [])
    listed = [types] if isinstance(types, str) else types
    if not isinstance(listed, list) or not all(one in _TYPES for one in map(str, listed)):
        yield f"{where}.type={types!r} must be of {', '.join(sorted(_TYPES))}"
    for name, kind in ("required", str), ("enum", object):
        values = schema.get(name, [])
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            yield f"{where}.{name}={values!r} must be a list" + " of texts" * (kind is str)
    for name in _OF_SCHEMAS:
        listed = schema.get(name, [])
        if not isinstance(listed, list):
            yield f"{where}.{name}={listed!r} must be a list of schemas"
            return
        for i, one in enumerate(listed):
            yield from _faults(one, f"{where}.{name}[{i}]", depth + 1)
    for name in _OF_NAMED:
        named = schema.get(name, {})
        if not isinstance(named, Mapping):
            yield f"{where}.{name}={named!r} must be a mapping of names to schemas"
            return
        for key, one in named.items():
            yield from _faults(one, f"{where}.{name}.{key}", depth + 1)
    for name in _OF_SCHEMA:
        if name in schema:
            yield from _faults(schema[name], f"{where}.{name}", depth + 1)
