"""The endpoints that generate nothing: models, tokenization, health, version, load and metrics."""

import asyncio
import time
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from specjax.server.bodies import read_body
from specjax.server.chat import render
from specjax.server.errors import APIError
from specjax.server.service import Service
from specjax.server.wire import (
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeReply,
    TokenizeRequest,
)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STARTED = int(time.time())
_PERMISSION = {
    **dict.fromkeys(("allow_sampling", "allow_logprobs", "allow_view"), True),
    **dict.fromkeys(("allow_create_engine", "allow_search_indices", "allow_fine_tuning"), False),
    **{"object": "model_permission", "organization": "*", "group": None, "is_blocking": False},
}


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


async def list_models(request: Request) -> Response:
    """Answer /v1/models."""
    service: Service = request.app.state.service
    models = [_model(service, name) for name in service.names]
    return _json({"object": "list", "data": models})


async def show_model(request: Request) -> Response:
    """Answer GET /v1/models/NAME.

    Raises:
        APIError: there is no such model.
    """
    service: Service = request.app.state.service
    return _json(_model(service, service.check_model(request.path_params["name"])))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "specjax",
        "root": service.names[0],
        "parent": None,
        "max_model_len": service.max_model_len,
        "permission": [{"id": f"modelperm-{name}", "created": _STARTED} | _PERMISSION],
    }


async def tokenize(request: Request) -> Response:
    """Answer /tokenize: the token ids of a prompt, or of a conversation.

    Raises:
        APIError: the request is refused.
    """
    service: Service = request.app.state.service
    body = await read_body(request, TokenizeRequest)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "give a prompt or messages, and not both", "prompt")
    tokenizer, prompt = service.tokenizer, body.prompt
    if prompt is None:
        rendered = await service.in_thread(lambda: render(service, body), request, body, "messages")
        tokens = list(rendered["prompt_token_ids"])
    else:
        adds = body.add_special_tokens is not False
        tokens = await service.in_thread(
            lambda: tokenizer.encode(prompt, add_special_tokens=adds), request, body, "prompt"
        )
    reply = TokenizeReply(len(tokens), service.max_model_len, tokens)
    if body.return_token_strs:
        reply.token_strs = [tokenizer.tokenizer.id_to_token(token) or "" for token in tokens]
    return _json(reply)


async def detokenize(request: Request) -> Response:
    """Answer /detokenize: the text of token ids.

    Raises:
        APIError: the request is refused.
    """
    service: Service = request.app.state.service
    body = await read_body(request, DetokenizeRequest)
    service.check_model(body.model)
    tokenizer = service.tokenizer
    if bad := [token for token in body.tokens if not 0 <= token < len(tokenizer)]:
        raise APIError(400, f"tokens has {bad[0]}, which is not a token id", "tokens")
    decode = tokenizer.decode
    text = await service.in_thread(
        lambda: decode(body.tokens, skip_special_tokens=False), request, body, "tokens"
    )
    return _json(DetokenizeReply(text))


async def health(request: Request) -> Response:
    """Answer /health and /ping with 200, or with 503 if the engine has ended."""
    service: Service = request.app.state.service
    if service.llm.is_alive():
        return Response()
    return APIError(503, "the engine has ended").response()


async def version(request: Request) -> Response:
    """Answer /version with the version of the installed package."""
    try:
        found = installed_version("specjax")
    except PackageNotFoundError:  # it runs from a folder of sources
        found = "unknown"
    return _json({"version": found})


async def load(request: Request) -> Response:
    """Answer /load: the number of completion and chat requests that run or wait."""
    service: Service = request.app.state.service
    return _json({"server_load": service.monitor.num_open})


async def metrics(request: Request) -> Response:
    """Answer /metrics with all metrics in Prometheus' text format."""
    service: Service = request.app.state.service
    # It may wait for the engine.
    body = await asyncio.to_thread(service.monitor.expose)
    return Response(body, media_type=METRICS_TYPE)
