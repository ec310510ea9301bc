"""Reads a chat's sample as a message in the format of OpenAI's API."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from specjax.messages.deltas import MessageDelta
from specjax.messages.parser import ResponseParser
from specjax.server.wire import Delta, Message


class SampleMessage:
    """Reads the message of one sample, as a whole (`parse`) or as a stream of deltas (`feed`).

    Args:
        parser: the parser of the sample's text.
        decode: a function that returns the text of token ids.
        has_reasoning: whether the message includes the reasoning.

    Attributes:
        num_reasoning_tokens: the number of reasoning tokens, known after `finish` or `parse`; None
            if the format has no reasoning.
    """

    def __init__(
        self,
        parser: ResponseParser,
        decode: Callable[[Sequence[int]], str],
        *,
        has_reasoning: bool = True,
    ):
        self._parser, self._decode, self._has_reasoning = parser, decode, has_reasoning
        self._has_calls, self._token_ids = False, list[int]()
        self.num_reasoning_tokens = 0 if parser.has_reasoning else None

    def feed(self, text: str, token_ids: Sequence[int]) -> Delta:
        """Read more text; return what it adds to the message. If it adds nothing, content is ""."""
        self._token_ids += token_ids
        delta = self._delta(self._parser.feed(text))
        return Delta(content="") if delta == Delta() else delta

    def finish(self, reason: str | None) -> tuple[Delta, str | None]:
        """End the message; return what its end adds to it, and the finish_reason for the client."""
        delta = self._delta(self._parser.finish())
        self._count_reasoning()
        return delta, _finish_reason(reason, has_calls=self._has_calls)

    def parse(
        self, text: str, token_ids: Sequence[int], reason: str | None
    ) -> tuple[Message, str | None]:
        """Return the message of a whole output, and the finish_reason for the client."""
        found = self._parser.parse(text).as_dict()
        self._token_ids += token_ids
        self._count_reasoning()
        if not self._has_reasoning:
            found.pop("reasoning", None)
        return Message(**found), _finish_reason(reason, has_calls="tool_calls" in found)

    def _count_reasoning(self) -> None:
        if spans := self._parser.reasoning_spans:
            self.num_reasoning_tokens = sum(
                self._num_tokens(end) - self._num_tokens(start) for start, end in spans
            )

    def _num_tokens(self, end: int) -> int:
        """Return the smallest number of first tokens whose text has at least `end` characters."""
        tokens = self._token_ids
        counts = range(len(tokens) + 1)
        return bisect_left(counts, end, key=lambda count: len(self._decode(tokens[:count])))

    def _delta(self, gained: MessageDelta) -> Delta:
        delta = Delta()
        if gained.content:
            delta.content = gained.content
        if gained.reasoning and self._has_reasoning:
            delta.reasoning = gained.reasoning
        if gained.tool_calls:
            self._has_calls = True
            calls: list[dict[str, Any]] = []
            for one in gained.tool_calls:
                function = {"arguments": one.arguments}
                if one.name is None:
                    calls.append({"index": one.index, "function": function})
                else:
                    function = {"name": one.name, **function}
                    begun = {"index": one.index, "id": one.id, "type": "function"}
                    calls.append({**begun, "function": function})
            delta.tool_calls = calls
        return delta


def _finish_reason(reason: str | None, *, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and reason == "stop" else reason
