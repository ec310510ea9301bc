"""The routes of the server."""

import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from specjax.server import doors
from specjax.server.chat import create_chat
from specjax.server.completions import create_completion
from specjax.server.errors import INTERNAL, TYPES, APIError
from specjax.server.openapi import DescribedRoute, show_openapi
from specjax.server.page import show_page
from specjax.server.request_ids import RequestIdHeader
from specjax.server.rl_doors import RL_ROUTES
from specjax.server.security import KeyCheck
from specjax.server.service import Service
from specjax.server.wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

POST = ("POST",)
ROUTES = [
    DescribedRoute("/", show_page),
    DescribedRoute("/v1/completions", create_completion, POST, body=CompletionRequest),
    DescribedRoute("/v1/chat/completions", create_chat, POST, body=ChatRequest),
    DescribedRoute("/v1/models", doors.list_models),
    DescribedRoute("/v1/models/{name:path}", doors.show_model),
    DescribedRoute("/tokenize", doors.tokenize, POST, body=TokenizeRequest),
    DescribedRoute("/detokenize", doors.detokenize, POST, body=DetokenizeRequest),
    DescribedRoute("/health", doors.health),
    DescribedRoute("/ping", doors.health, ("GET", "POST")),
    DescribedRoute("/version", doors.version),
    DescribedRoute("/load", doors.load),
    DescribedRoute("/metrics", doors.metrics),
    DescribedRoute("/openapi.json", show_openapi),
]
_LOG = logging.getLogger("specjax")


def build_app(service: Service) -> Starlette:
    """Return the server as an ASGI app."""
    middleware = []
    if service.settings.enable_request_id_headers:
        middleware.append(Middleware(RequestIdHeader))
    if origins := service.settings.allowed_origins:
        every = ["*"]
        middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=origins, allow_methods=every, allow_headers=every
            )
        )
    if keys := service.settings.read_keys():
        middleware.append(Middleware(KeyCheck, keys=keys))
    app = Starlette(
        routes=[*ROUTES, *(RL_ROUTES if service.settings.rl else [])],
        middleware=middleware,
        exception_handlers={APIError: _refuse, HTTPException: _refuse_http, Exception: _fail},
    )
    app.state.service = service
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error.response()


async def _refuse_http(request: Request, error: Exception) -> Response:
    """Answer requests to unknown paths, or with a wrong method."""
    assert isinstance(error, HTTPException)
    status = error.status_code if error.status_code in TYPES else 400
    text = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return APIError(status, text, headers=error.headers).response()


async def _fail(request: Request, error: Exception) -> Response:
    return APIError(500, INTERNAL).response()
