"""Divides the growing text of a response into content, reasoning and tool calls.

The text may arrive in pieces of any size: the deltas always add up to the same message. No
generated text is lost: text that cannot be read as a tool call becomes content.
"""

from collections.abc import Mapping
from typing import Any

from specjax.messages.anchors import Found
from specjax.messages.deltas import Calls, MessageDelta, add_up
from specjax.messages.readers import CallReader
from specjax.messages.stripped import Stripped
from specjax.messages.template import Field, ResponseTemplate
from specjax.outputs import ChatMessage


class ResponseParser:
    """Reads one response.

    Args:
        template: how responses are written.
        prompt: the rendered prompt. If it ends with the beginning of a response, like "<think>",
            this beginning determines the part in which the generated text starts. Text of the
            prompt is not added to the message, except the beginning of a tool call that the output
            continues.
        schemas: the JSON schema of each argument, by function and argument. They are used in
            formats that write all values as plain text.
        max_calls: the maximum number of tool calls; None for no limit.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        *,
        prompt: str = "",
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        max_calls: int | None = None,
    ):
        self._fields, self._schemas = template.fields, schemas or {}
        self._rest = next((field for field in template.fields if field.open is None), None)
        self._calls = Calls(max_calls)
        self._texts = {
            field.part: Stripped(strips=field.strips, join=field.join)
            for field in template.fields
            if field.reader is None
        }
        self._texts.setdefault("content", Stripped())
        self._new = {part: "" for part in self._texts}
        self._field: Field | None = self._rest
        self._reader: CallReader | None = None  # of the current region, if it has calls
        self._num_before = 0  # number of calls before the current region
        self._region_start = 0  # index of the current region's opening anchor
        self._text_start = 0  # index of the current region's text
        self._reasoning: list[tuple[int, int]] = []  # regions of reasoning, in `_text`
        begun = template.start.last_end(prompt)
        self._text = "" if begun is None else prompt[begun:]
        self._position = 0  # index of the first character that has not been read
        self._num_given = len(self._text)  # characters of the prompt, which are not shown
        self._read(is_whole=False)
        for text in self._texts.values():
            text.forget_held()
        self._new = {part: "" for part in self._texts}
        if self._reader is None:  # a call that the prompt leaves open belongs to the message
            self._calls = Calls(max_calls)

    @property
    def part(self) -> str | None:
        """The part of the message to which the next text belongs; None if this is not known yet."""
        return None if self._field is None else self._field.part

    @property
    def has_prefix(self) -> bool:
        """Whether the prompt ends with the beginning of a response."""
        return self._num_given > 0

    @property
    def has_reasoning(self) -> bool:
        """Whether this format has a part for reasoning."""
        return "reasoning" in self._texts

    @property
    def reasoning_spans(self) -> list[tuple[int, int]]:
        """The start and end character index of each finished reasoning passage in the output.

        The texts that mark the beginning and the end, like "<think>", are outside of the passage.
        """
        given = self._num_given
        return [(max(0, start - given), max(0, end - given)) for start, end in self._reasoning]

    def feed(self, text: str) -> MessageDelta:
        """Read more text of the response; return what it adds to the message."""
        self._text += text
        self._read(is_whole=False)
        return self._take()

    def finish(self) -> MessageDelta:
        """End the response; return what its end adds to the message."""
        self._read(is_whole=True)
        self._leave(self._position, is_complete=False)
        return self._take()

    def parse(self, text: str) -> ChatMessage:
        """Return the message of a whole response."""
        return add_up([self.feed(text), self.finish()])

    def _take(self) -> MessageDelta:
        new, self._new = self._new, {part: "" for part in self._texts}
        return MessageDelta(new["content"], new.get("reasoning", ""), self._calls.take())

    def _read(self, *, is_whole: bool) -> None:
        while True:
            found, field, end = self._find(is_whole=is_whole)
            if found is None:
                self._add(end)
                return
            self._add(found.start)
            self._leave(found.end, is_complete=True)
            self._position = found.end
            if field is not None:
                self._enter(field, found)

    def _find(self, *, is_whole: bool) -> tuple[Found | None, Field | None, int]:
        """Find the next anchor: a text that opens a part of the message or closes the current part.

        Return (occurrence, field, end). `occurrence` is where the anchor is, or None if no complete
        anchor was found. `field` describes the part that the anchor opens; None if it opens no
        part. Text before `end` can be read now. An incomplete anchor may begin at `end`.
        """
        opened = [] if self._field is not self._rest else self._fields
        anchors = [(field.open, field) for field in opened if field.open is not None]
        if self._field is not None and self._field.close is not None:
            anchors.append((self._field.close, None))
        end = len(self._text)
        best: tuple[tuple[int, int, bool], Found, Field | None] | None = None
        for anchor, field in anchors:
            found = anchor.find(self._text, self._position, is_whole=is_whole)
            if found is None or (field is None and found.end == self._region_start):
                continue  # an empty region does not end, or it would forever
            if found.is_pending:
                end = min(end, found.start)
                continue
            # The first occurrence counts; at one place, the longest; of equal length, an opening.
            order = found.start, found.start - found.end, field is None
            if best is None or order < best[0]:
                best = order, found, field
        if best is None or best[1].start >= end:
            return None, None, end
        return best[1], best[2], end

    def _add(self, end: int) -> None:
        """Add the text up to the index `end` to the current part of the message."""
        if self._reader is not None:
            self._reader.feed(self._text[self._position : end])
        elif self._field is not None:
            text = self._texts[self._field.part]
            text.feed(self._text[self._position : min(end, self._num_given)])  # of the prompt
            self._new[self._field.part] += text.feed(
                self._text[max(self._position, self._num_given) : end]
            )
        self._position = max(self._position, end)

    def _enter(self, field: Field, found: Found) -> None:
        self._field, self._region_start, self._text_start = field, found.start, found.end
        if field.reader is not None:
            self._num_before = self._calls.num_begun
            self._reader = field.reader(self._calls, found.names, self._schemas)

    def _leave(self, end: int, *, is_complete: bool) -> None:
        """End the current part of the message.

        `end` is the index after the text that ends the part, such as "</think>". `is_complete` is
        false if the response ended without such a text.
        """
        if self._reader is not None:
            unread = self._reader.close(is_complete=is_complete)
            if self._calls.num_begun == self._num_before:
                unread = self._text[max(self._region_start, self._num_given) : end]
            self._new["content"] += self._texts["content"].feed(unread)
            self._reader = None
        elif self._field is not None:
            self._texts[self._field.part].next_region()
            if self._field.part == "reasoning":
                self._reasoning.append((self._text_start, self._position))
        self._field, self._region_start = self._rest, end
