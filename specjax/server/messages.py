"""Parses the text of a chat's sample into the fields of a message.

The chat door makes one parser per sample, gives it the text as it grows, and sends what the parser
returns. It knows nothing about the formats of tool calls or reasoning.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from specjax.server.errors import APIError
from specjax.server.wire import ChatRequest, Delta, Message


class MessageParser(Protocol):
    """Parses one sample. The deltas of a sample add up to its message."""

    def feed(self, text: str, token_ids: Sequence[int]) -> Delta:
        """Return what the message gains by new tokens and the text that they add."""
        ...

    def finish(self, reason: str | None) -> tuple[Delta, str | None]:
        """Return what the message gains at its end, and the finish_reason for the client."""
        ...

    def parse(
        self, text: str, token_ids: Sequence[int], reason: str | None
    ) -> tuple[Message, str | None]:
        """Return the message of a whole output, and the finish_reason for the client."""
        ...


# Makes the parsers of a request. The arguments are the request and its rendered prompt.
ParserMaker = Callable[[ChatRequest, str], Callable[[], MessageParser]]


class PlainMessage:
    """All text is the message's content."""

    def feed(self, text: str, token_ids: Sequence[int]) -> Delta:
        """See `MessageParser`."""
        return Delta(content=text)

    def finish(self, reason: str | None) -> tuple[Delta, str | None]:
        """See `MessageParser`."""
        return Delta(), reason

    def parse(
        self, text: str, token_ids: Sequence[int], reason: str | None
    ) -> tuple[Message, str | None]:
        """See `MessageParser`."""
        return Message("assistant", text), reason


def plain_messages(request: ChatRequest, prompt: str) -> Callable[[], MessageParser]:
    """Return the maker of parsers without tool calls and reasoning.

    Raises:
        APIError: the request has tools, and wants the model to call them.
    """
    if request.tools and request.tool_choice != "none":
        raise APIError(
            400, 'tools: calls are not parsed by this server; send tool_choice="none"', "tools"
        )
    return PlainMessage
