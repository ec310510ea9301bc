"""Deltas: the text and the tool calls that more generated text adds to a message.

The deltas of a response add up to its message.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from specjax.outputs import ChatMessage, ToolCall, new_call_id

_LOG = logging.getLogger("specjax")


@dataclass(frozen=True)
class CallDelta:
    """An addition to one tool call. The first delta of a call has its id and name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class MessageDelta:
    """An addition to some parts of a message. It has at most one delta per tool call."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[CallDelta, ...] = ()


def add_up(deltas: Iterable[MessageDelta]) -> ChatMessage:
    """Return the message that results from all deltas of a response."""
    content, reasoning, calls = "", "", list[ToolCall]()
    for delta in deltas:
        content += delta.content
        reasoning += delta.reasoning
        for call in delta.tool_calls:
            if call.name is not None and call.id is not None:
                calls.append(ToolCall(call.name, call.arguments, call.id))
            else:
                known = calls[call.index]
                arguments = known.arguments + call.arguments
                calls[call.index] = ToolCall(known.name, arguments, known.id)
    return ChatMessage(content or (None if calls else ""), reasoning or None, tuple(calls))


class Calls:
    """Collects the tool calls of a message while they are read.

    Args:
        limit: the maximum number of calls; None for no limit. Further calls are dropped with a
            warning.
    """

    def __init__(self, limit: int | None = None):
        self.num_begun = 0
        self._limit = limit
        self._new: list[CallDelta] = []

    def begin(self, name: str) -> None:
        """Begin the next call."""
        self.num_begun += 1
        if self._is_over_limit:
            _LOG.warning("parallel_tool_calls=False: a further call, of %s, is left out", name)
        else:
            self._new.append(CallDelta(self.num_begun - 1, "", new_call_id(), name))

    def write(self, text: str) -> None:
        """Add text to the arguments of the call that began last."""
        if self._is_over_limit or not text:
            return
        index = self.num_begun - 1
        if self._new and self._new[-1].index == index:
            last = self._new[-1]
            self._new[-1] = CallDelta(index, last.arguments + text, last.id, last.name)
        else:
            self._new.append(CallDelta(index, text))

    def take(self) -> tuple[CallDelta, ...]:
        """Return the deltas of all calls to which text was added since the previous `take`."""
        new, self._new = tuple(self._new), []
        return new

    @property
    def _is_over_limit(self) -> bool:
        return self._limit is not None and self.num_begun > self._limit
