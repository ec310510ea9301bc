"""Strips whitespace from a text that arrives in pieces."""


class Stripped:
    """A text without leading and trailing whitespace, which arrives in pieces.

    Whitespace at the end is held back until other text follows. The text may consist of several
    passages, such as passages of reasoning, which are joined.

    Args:
        strips: whether to strip whitespace. If False, the text stays unchanged.
        join: the text to put between two passages, each of which is stripped. If None, the
            whitespace between two passages is kept.
    """

    def __init__(self, *, strips: bool = True, join: str | None = None):
        self._strips, self._join = strips, join
        self._held, self._has_begun, self._before = "", False, ""

    def feed(self, text: str) -> str:
        """Add a piece of text; return the text that is final now."""
        if self._strips:
            text = self._held + text
            if not self._has_begun:
                text = text.lstrip()
            kept = text.rstrip()
            self._held, text = text[len(kept) :], kept
        if not text:
            return ""
        self._has_begun = True
        before, self._before = self._before, ""
        return before + text

    def next_region(self) -> None:
        """Begin another passage, which is joined to the text so far."""
        if self._join is not None:
            if self._has_begun:
                self._before = self._join
            self._held, self._has_begun = "", False

    def forget_held(self) -> None:
        """Drop the whitespace that is held back."""
        self._held = ""
