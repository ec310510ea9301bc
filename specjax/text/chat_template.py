"""Reads a checkpoint's chat templates, and renders them with Jinja as transformers does."""

import datetime
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from specjax.checkpoint.config_json import read_json
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.tokenizer_files import CONFIG

PROCESSORS = "chat_template.json"
DEFAULT, TOOL_USE = "default", "tool_use"  # names of the templates that are used by default
_DEADLINE = "the time at which rendering ends"  # no variable of a template can have this name
REASONING = "reasoning_content", "thinking", "reasoning"  # keys of a message's reasoning


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return a checkpoint's chat templates, by name.

    They come from the .jinja files in `folder`. If there are none, they come from `config`, the
    content of tokenizer_config.json, or else from chat_template.json.

    Raises:
        CheckpointError: a file cannot be read.
    """
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").exists():
        files[DEFAULT] = folder / "chat_template.jinja"
    if files:
        return {name: _read(path) for name, path in files.items()}
    if "chat_template" not in config and (folder / PROCESSORS).exists():
        config = read_json(folder, PROCESSORS)
    match config.get("chat_template"):
        case None:
            return {}
        case str() as template:
            return {DEFAULT: template}
        case list() as several if all(_is_named(one) for one in several):
            return {one["name"]: one["template"] for one in several}
        case other:
            raise CheckpointError(
                f"{folder / CONFIG}: chat_template={other!r} must be a text, or a list of "
                '{"name", "template"}; mend the file'
            )


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    max_seconds: float = math.inf,
    **variables: Any,
) -> str:
    """Render messages with a template, and return the text.

    As in transformers, fields of a message that are None are left out.

    Raises:
        jinja2.TemplateError: the template is malformed, refuses the messages, or has not ended
            after `max_seconds`.
    """
    chat = [_with_reasoning(message) for message in messages]
    given = {"documents": None, **variables, _DEADLINE: time.monotonic() + max_seconds}
    return _compiled(template).render(messages=chat, **given)


def cut_after_last(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a rendered conversation without the text that follows the last message's content.

    The model can then continue this message.

    Raises:
        ValueError: the template did not write that content.
    """
    content = messages[-1]["content"]
    last = content if isinstance(content, str) else content[-1]["text"]
    start = text.rfind(last.strip())
    if not last.strip() or start < 0:
        raise ValueError(
            "continue_final_message: the chat template does not write the last message's content "
            "as it is; pass the prompt to generate instead"
        )
    # Templates may strip the content; keep its end as rendered.
    written = last.lstrip()
    return text[: start + len(written if text.startswith(written, start) else last.strip())]


class _Generation(Extension):
    """The template tag that marks generated text for training masks.

    Here, it only renders the text.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope, as in transformers: variables set inside are not visible outside.
        return [nodes.Scope(body).set_lineno(line)]


class _TimedLoops(CodeGenerator):
    """Compiles templates in which each iteration of a loop checks the time."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802
        for loop in [*node.find_all(nodes.For)]:
            timed = nodes.Filter(loop.iter, "until_deadline", [], [], None, None)
            loop.iter = timed.set_environment(self.environment).set_lineno(loop.lineno)
        super().visit_Template(node, frame)


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox that limits the time of templates: each iteration and call checks the time."""

    code_generator_class = _TimedLoops

    def call(*args: Any, **kwargs: Any) -> Any:
        """See `SandboxedEnvironment`."""
        _, context, *_ = args
        _check_time(context)
        return ImmutableSandboxedEnvironment.call(*args, **kwargs)


@jinja2.pass_context
def _until_deadline(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check_time(context)
        yield item


def _check_time(context: Context) -> None:
    if time.monotonic() > context[_DEADLINE]:
        _refuse("it takes too long")


class _Dict:
    """A replacement for `dict` in templates, without most attributes of Python's `dict`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A replacement for `namespace` in templates. It refuses names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any):
        self, *rest = args  # "self" may be a name in the namespace
        names = dict(*rest, **kwargs)
        for name in names:
            _check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace of a chat template has the name {name!r}; names may not begin with _"
        )


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda format: datetime.datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    environment.filters["until_deadline"] = _until_deadline
    environment.filters["tojson"] = _as_json  # jinja's own escapes for HTML
    return environment.from_string(template)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _as_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under the keys that templates read."""
    given = {key: value for key, value in message.items() if value is not None}
    found = next((given[key] for key in REASONING if key in given), None)
    if found is None:
        return given
    return {"thinking": found, **given, "reasoning_content": found}


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); restore the file") from error


def _is_named(template: Any) -> bool:
    return isinstance(template, Mapping) and all(
        isinstance(template.get(key), str) for key in ("name", "template")
    )
