"""Errors that clients see, in the format of OpenAI's API."""

import re
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

MAX_MESSAGE = 600  # characters; longer messages lose their middle, often a value
TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
INTERNAL = "the server failed; its log has the reason"
_INDEX = re.compile(r"\[(\d+)\]")


class ErrorBody(msgspec.Struct):
    """The fields of an error. `param` is the dotted path of a request's field, or null."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorReply(msgspec.Struct):
    """An error as a response's body, or as an event of a stream."""

    error: ErrorBody


class APIError(Exception):
    """An error that is sent to the client, with an HTTP status.

    Args:
        param: the path of the field that caused the error, like "messages[0].role".
        retry_after: the seconds after which the client may try again.
        headers: additional headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    def encode(self) -> bytes:
        """Return the error as JSON."""
        message, param = self.message, self.param
        if len(message) > MAX_MESSAGE:
            half = MAX_MESSAGE // 2
            message = f"{message[:half]} ... {message[-half:]}"
        if param is not None:
            param = _INDEX.sub(r".\1", param).lstrip(".")[:MAX_MESSAGE]
        body = ErrorBody(message, TYPES[self.status], param, self.status)
        return msgspec.json.encode(ErrorReply(body))

    def response(self) -> Response:
        """Return the error as a response."""
        return Response(self.encode(), self.status, self.headers, "application/json")


def of_validation(error: msgspec.ValidationError) -> APIError:
    """Return the error to send for a body in which a field has the wrong type."""
    message, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    return APIError(400, f"{path}: {message}" if path else message, path or None)
