"""Reads the bodies of requests, and checks their types and sizes."""

import asyncio
import gc
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from specjax.server.admission import RETRY_SECONDS
from specjax.server.errors import APIError, of_validation
from specjax.server.service import Service

JSON_TYPES = ("application/json",)
# Fields of OpenAI's API that change no output.
PASSED_OVER = {
    *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "session_id", "verbosity", "return_weight_versions"),
}
_CONSTRAINED = "its name is structured_outputs"
# Fields that would change outputs and are not supported, with the reason or the alternative.
REFUSED: Mapping[str, str] = {
    "suffix": "models here only continue prompts",
    "prompt_embeds": "prompts are texts or token ids",
    "cache_salt": "all requests share the prefix cache; disable it for the whole server",
    "kv_transfer_params": "caches are not sent to other engines",
    "functions": "its name is tools",
    "function_call": "its name is tool_choice",
    "modalities": "models here write only text",
    "audio": "models here write only text",
    "web_search_options": "the server searches nothing",
    "vllm_xargs": "there are no plugins to read it",
    "logits_processors": "functions cannot be sent; use logit_bias or structured_outputs",
    "guided_json": _CONSTRAINED,
    "guided_regex": _CONSTRAINED,
    "guided_choice": _CONSTRAINED,
    "guided_grammar": _CONSTRAINED,
}
_LOG = logging.getLogger("specjax")
_MISSING = re.compile(r"missing required field `(\w+)`")
_MAX_NAMED = 10  # unknown fields that a log line names
Body = TypeVar("Body")


async def read_body(request: Request, kind: type[Body]) -> Body:
    """Return the request's body as an instance of `kind`, a msgspec class.

    Unknown fields are ignored, and a log line names them. `request.state.num_bytes` is set to the
    size of the body.

    Raises:
        APIError: the body is too large, arrives too slowly, is not a JSON object, or has a field
            with a wrong type or a field that is not supported. Or the bodies that the server is
            receiving have too many bytes in total.
    """
    service: Service = request.app.state.service
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in JSON_TYPES:
        raise APIError(415, f"the content type is {content_type!r}; send application/json")
    try:
        async with asyncio.timeout(service.limits.max_stall_seconds):
            body = await _read(request, service)
    except TimeoutError:
        raise APIError(408, "the body did not arrive in time") from None
    except ClientDisconnect:
        raise APIError(400, "the body ended early") from None
    request.state.num_bytes = len(body)
    with _uncollected():
        return _parse(body, kind)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause garbage collection within the `with` block.

    The collector would visit the objects of a large body again and again while they are made. This
    takes three times as long as making the objects.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def _parse(body: bytes, kind: type[Body]) -> Body:
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise APIError(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise APIError(400, "the body must be a JSON object")
    return _convert(fields, kind)


def _convert(fields: dict[str, Any], kind: type[Body]) -> Body:
    for name in fields.keys() & REFUSED.keys():
        if fields[name] not in (None, "", [], {}):
            raise APIError(400, f"{name} is not supported: {REFUSED[name]}", name)
    try:
        body = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        if missing := _MISSING.search(str(error)):
            raise APIError(400, f"{missing[1]} is missing", missing[1]) from None
        raise of_validation(error) from None
    if unknown := fields.keys() - _known(kind):
        _LOG.warning("a request has unknown fields, ignored: %s", shown_names(unknown))
    return body


def shown_names(names: Iterable[str]) -> str:
    """Return a text that lists `names`, which a client has sent, and that is safe to log.

    The text has at most ten names. Long names are cut, and line breaks are escaped.
    """
    return ", ".join(repr(name[:40]) for name in sorted(names)[:_MAX_NAMED])


@cache
def _known(kind: Any) -> frozenset[str]:
    return frozenset({*kind.__struct_fields__, *PASSED_OVER, *REFUSED})


async def _read(request: Request, service: Service) -> bytes:
    limit, most = service.limits.max_body_bytes, service.limits.max_pending_bytes
    length = request.headers.get("content-length", "")
    is_too_long = length.isdecimal() and int(length) > limit
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            service.num_pending_bytes += len(part)
            if is_too_long or size > limit:
                raise APIError(413, f"the body has more than {limit} bytes (--max-body-bytes)")
            if service.num_pending_bytes > most and service.num_pending_bytes > size:
                text = f"more than {most} bytes of bodies are being received (--max-pending-bytes)"
                raise APIError(429, text, retry_after=RETRY_SECONDS)
            parts.append(part)
        return b"".join(parts)
    finally:
        service.num_pending_bytes -= size
