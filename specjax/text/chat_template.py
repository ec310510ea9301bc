"""What chat templates make of messages: Jinja, as transformers runs it."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """What a template makes of messages.

    Raises:
        jinja2.TemplateError: the template is malformed or refuses them.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = _as_json  # jinja's own escapes what HTML would misread
    return environment.from_string(template).render(messages=messages, **variables)


def cut_after_last(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """A rendered conversation cut after the content of its last message, to continue it.

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
    # Templates may strip the content; its end is kept as they left it.
    written = last.lstrip()
    return text[: start + len(written if text.startswith(written, start) else last.strip())]


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _as_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
