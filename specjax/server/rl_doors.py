"""Endpoints for RL trainers, with vLLM's names: pause, sleep, new weights. They need `--rl`."""

from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from specjax.server.bodies import JSON_TYPES, read_body
from specjax.server.control import Control, Gathering
from specjax.server.errors import APIError, of_validation
from specjax.server.openapi import DescribedRoute
from specjax.server.service import Service

FILE_TYPE = "application/octet-stream"


class NoQuery(msgspec.Struct, forbid_unknown_fields=True):
    """No parameters in the URL."""


class PauseQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The parameters of /pause."""

    mode: str = "abort"


class SleepQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The parameters of /sleep."""

    level: int = 1
    mode: str = "abort"


class UpdateQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The parameters of /update_weights with a safetensors file."""

    weight_version: int | None = None


class AbortRequests(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /abort_requests: ids of responses. An empty list aborts all requests."""

    request_ids: list[str] = []


class UpdateInfo(msgspec.Struct, forbid_unknown_fields=True):
    """Where new weights are: a folder below `--rl-weights-root`."""

    path: str


class UpdateWeights(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /update_weights, unless it is a safetensors file."""

    update_info: UpdateInfo
    weight_version: int | None = None


class FinishWeightUpdate(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /finish_weight_update."""

    weight_version: int | None = None


class UpdateWeightVersion(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /update_weight_version."""

    new_version: int


Door = Callable[[Service, Control, Request], Awaitable[Any]]


def _route(
    path: str, door: Door, method: str = "POST", *, is_update: bool = False, **classes: Any
) -> DescribedRoute:
    """Return an endpoint whose responses are JSON.

    The function `door` handles a request, and returns the body of the response. If `door` raises a
    ValueError or ImportError, the response has status 400. If `is_update` is true, requests are
    timed as weight updates. `classes` are passed to `DescribedRoute`.
    """

    async def answer(request: Request) -> Response:
        service: Service = request.app.state.service
        assert (control := service.control) is not None
        if "origin" in request.headers:  # a web page must not reach a server without a key
            raise APIError(400, "this endpoint is not for web pages; leave out the header Origin")
        try:
            with control.operations.timed(path[1:]) if is_update else nullcontext():
                body = await door(service, control, request)
        except (ValueError, ImportError) as error:
            raise APIError(400, service.public(control.public(str(error)))) from None
        except ClientDisconnect:
            raise APIError(400, "the body ended early") from None
        return Response(msgspec.json.encode(body), media_type="application/json")

    return DescribedRoute(path, answer, (method,), **classes)


def _query(request: Request, kind: Any) -> Any:
    """Return the parameters in the request's URL.

    Raises:
        APIError: a parameter is unknown, or of the wrong type.
    """
    try:
        return msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        raise of_validation(error) from None


async def _body(request: Request, kind: Any) -> Any:
    """Return the request's body as an instance of `kind`; without a body, one with defaults."""
    headers = request.headers
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return kind()
    return await read_body(request, kind)


async def _pause(service: Service, control: Control, request: Request) -> Any:
    query = _query(request, PauseQuery)
    async with control.turn:
        await control.pause(query.mode)
    return {"status": "paused"}


async def _resume(service: Service, control: Control, request: Request) -> Any:
    _query(request, NoQuery)
    async with control.turn:
        await control.resume()
    return {"status": "resumed"}


async def _is_paused(service: Service, control: Control, request: Request) -> Any:
    return {"is_paused": control.is_paused}


async def _abort(service: Service, control: Control, request: Request) -> Any:
    body = await _body(request, AbortRequests)
    return {"status": "aborted", "aborted": await control.abort(body.request_ids)}


async def _sleep(service: Service, control: Control, request: Request) -> Any:
    query = _query(request, SleepQuery)
    async with control.turn:
        await control.sleep(query.level, query.mode)
    return {"status": "sleeping", "level": query.level}


async def _wake_up(service: Service, control: Control, request: Request) -> Any:
    tags = request.query_params.getlist("tags")
    if tags and set(tags) != {"weights", "kv_cache"}:
        text = "tags: weights and kv_cache wake up together; weights can be updated before"
        raise APIError(400, text, "tags")
    async with control.turn:
        await control.wake_up()
    return {"status": "awake"}


async def _is_sleeping(service: Service, control: Control, request: Request) -> Any:
    return {"is_sleeping": await service.llm.is_sleeping()}


async def _reset_prefix_cache(service: Service, control: Control, request: Request) -> Any:
    _query(request, NoQuery)
    return {"success": await service.llm.reset_prefix_cache()}


async def _start(control: Control, *, is_drafter: bool) -> Any:
    async with control.turn:
        if control.gathering is not None:
            raise ValueError("an update has started already; finish it")
        control.gathering = Gathering(is_drafter)
    return {"status": "started"}


async def _start_target(service: Service, control: Control, request: Request) -> Any:
    return await _start(control, is_drafter=False)


async def _start_drafter(service: Service, control: Control, request: Request) -> Any:
    return await _start(control, is_drafter=True)


async def _update(service: Service, control: Control, request: Request) -> Any:
    """Add weights to the update in parts. If none has started, replace the target's weights."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    weights: Any
    if content_type in JSON_TYPES:
        _query(request, NoQuery)
        body = await read_body(request, UpdateWeights)
        version, weights = body.weight_version, control.folder(body.update_info.path)
    elif content_type == FILE_TYPE:
        version = _query(request, UpdateQuery).weight_version
        parts, seconds = aiter(request.stream()), service.limits.max_stall_seconds
        weights = await control.read_stream(parts, seconds)
    else:
        types = f"{JSON_TYPES[0]} or {FILE_TYPE}"
        raise APIError(415, f"the content type is {content_type!r}; send {types}")
    async with control.turn:
        if control.gathering is None:
            update = await control.update(weights, version)
            return {"status": "updated", "weight_version": update.version}
        if version is not None:
            raise ValueError("weight_version goes with /finish_weight_update")
        await control.gather(weights)
    return {"status": "gathered"}


async def _finish(service: Service, control: Control, request: Request) -> Any:
    body = await _body(request, FinishWeightUpdate)
    async with control.turn:
        if (gathering := control.gathering) is None:
            raise ValueError("no update has started; call /start_weight_update")
        control.gathering = None
        is_drafter = gathering.is_drafter
        await control.update(gathering.arrays, body.weight_version, is_drafter=is_drafter)
    return {"status": "updated"} | _versions(control)


async def _update_version(service: Service, control: Control, request: Request) -> Any:
    body = await read_body(request, UpdateWeightVersion)
    async with control.turn:
        control.relabel(body.new_version)
    return {"success": True, "new_version": control.weights.version}


async def _weight_info(service: Service, control: Control, request: Request) -> Any:
    return {**_versions(control), "quantization": await control.quantization()}


def _versions(control: Control) -> dict[str, int]:
    weights = control.weights
    return {"weight_version": weights.version, "draft_weight_version": weights.drafter_version}


RL_ROUTES = [
    _route("/pause", _pause, query=PauseQuery),
    _route("/resume", _resume, query=NoQuery),
    _route("/is_paused", _is_paused, "GET"),
    _route("/abort_requests", _abort, body=AbortRequests, needs_body=False),
    _route("/sleep", _sleep, query=SleepQuery),
    _route("/wake_up", _wake_up),
    _route("/is_sleeping", _is_sleeping, "GET"),
    _route("/reset_prefix_cache", _reset_prefix_cache, query=NoQuery),
    _route("/start_weight_update", _start_target, is_update=True),
    _route("/start_draft_weight_update", _start_drafter, is_update=True),
    _route(
        "/update_weights",
        _update,
        is_update=True,
        body=UpdateWeights,
        query=UpdateQuery,
        file_type=FILE_TYPE,
    ),
    _route(
        "/finish_weight_update", _finish, is_update=True, body=FinishWeightUpdate, needs_body=False
    ),
    _route("/update_weight_version", _update_version, body=UpdateWeightVersion),
    _route("/weight_info", _weight_info, "GET"),
]
