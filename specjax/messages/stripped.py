"""Strips text that grows."""


class Stripped:
    """Text without whitespace at its ends. Whitespace at the end is held back until text follows.

    Args:
        strips: whether to strip; otherwise the text stays as it is.
        join: the text between two regions; None for the whitespace that they have.
    """

    def __init__(self, *, strips: bool = True, join: str | None = None):
        self._strips, self._join = strips, join
        self._held, self._has_begun, self._before = "", False, ""

    def feed(self, text: str) -> str:
        """Return the text that can be shown now."""
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
        """Begin another region, whose text is joined to the text so far."""
        if self._join is not None:
            if self._has_begun:
                self._before = self._join
            self._held, self._has_begun = "", False

    def forget_held(self) -> None:
        """Drop the whitespace that is held back."""
        self._held = ""
