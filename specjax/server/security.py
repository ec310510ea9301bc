"""Refuses requests without a valid key."""

import hmac
from collections.abc import Collection
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specjax.server.errors import APIError

# Endpoints that neither generate nor change anything, for probes and scrapers.
OPEN = {"/", "/health", "/ping", "/version", "/metrics", "/load"}


class KeyCheck:
    """Middleware that refuses HTTP requests without a valid key.

    Requests to the paths in `OPEN` need no key. ASGI scopes other than HTTP are passed on without a
    check. The digest of the request's key is compared with the digests of all valid keys, each in
    constant time. So the response time depends on the number of valid keys, but reveals nothing
    about their characters.
    """

    def __init__(self, app: ASGIApp, keys: Collection[str]):
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            is_open = scope["path"].removeprefix(scope.get("root_path", "")) in OPEN
            if not is_open and not self._knows(Headers(scope=scope)):
                error = APIError(401, "the key is missing or wrong; send Authorization: Bearer KEY")
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = sha256(key.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)
