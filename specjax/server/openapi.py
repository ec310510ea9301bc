"""Serves /openapi.json: an OpenAPI description of the endpoints, made from the request classes."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specjax.server.errors import ErrorReply

JSON_TYPE = "application/json"
_REF = "#/components/schemas/{name}"


class DescribedRoute(Route):
    """A route, and the classes of its requests.

    Args:
        body: the class of a JSON body; None if there is no body.
        query: the class of the parameters in the URL; None if there are none.
        file_type: the content type of a file that may be sent instead of JSON.
        needs_body: whether a request without a body is refused.
    """

    def __init__(
        self,
        path: str,
        answer: Callable[[Request], Awaitable[Any]],
        methods: Sequence[str] = ("GET",),
        *,
        body: Any = None,
        query: Any = None,
        file_type: str | None = None,
        needs_body: bool = True,
    ):
        super().__init__(path, answer, methods=list(methods))
        self.body, self.query, self.file_type = body, query, file_type
        self.needs_body = needs_body


async def show_openapi(request: Request) -> Response:
    """Answer /openapi.json."""
    return Response(msgspec.json.encode(describe(request.app.routes)), media_type=JSON_TYPE)


def describe(endpoints: Sequence[DescribedRoute]) -> dict[str, Any]:
    """Return the OpenAPI description of endpoints."""
    classes = [ErrorReply, *(kind for one in endpoints for kind in (one.body, one.query) if kind)]
    _, schemas = msgspec.json.schema_components(classes, ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "specjax", "version": "1"},
        "paths": {
            one.path_format: {
                method.lower(): _operation(one, method, schemas)
                for method in sorted(one.methods or ())
                if method != "HEAD"
            }
            for one in endpoints
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(endpoint: DescribedRoute, method: str, schemas: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "parameters": [*_parameters(endpoint, schemas)],
        "responses": {
            "200": {"description": "the answer"},
            "default": {
                "description": "an error",
                "content": {JSON_TYPE: {"schema": _reference(ErrorReply)}},
            },
        },
    }
    if endpoint.body is not None:
        content: dict[str, Any] = {JSON_TYPE: {"schema": _reference(endpoint.body)}}
        if endpoint.file_type is not None:
            content[endpoint.file_type] = {}
        made["requestBody"] = {"required": endpoint.needs_body, "content": content}
    return made


def _parameters(endpoint: DescribedRoute, schemas: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in endpoint.param_convertors:
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    if endpoint.query is not None:
        for name, schema in schemas[endpoint.query.__name__]["properties"].items():
            yield {"name": name, "in": "query", "schema": schema}


def _reference(kind: Any) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}
