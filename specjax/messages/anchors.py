"""Anchors: texts and patterns at which a part of a response begins or ends.

The third-party module `regex` is used because it reports partial matches: the end of a growing text
may be the beginning of an anchor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import regex


class Found(NamedTuple):
    """An occurrence of an anchor (a text or a pattern) in a growing text.

    The occurrence is pending if text that is added later may extend or cancel it.
    """

    start: int
    end: int
    names: Mapping[str, str]  # the pattern's named groups
    is_pending: bool


@dataclass(frozen=True)
class Anchor:
    """A text or pattern that begins or ends a part of a response.

    `is_fixed` is true if text that follows an occurrence can never change the occurrence.
    """

    pattern: Any
    is_fixed: bool

    @classmethod
    def of(cls, given: Mapping[str, Any], name: str, where: str) -> "Anchor | None":
        """Return the anchor under the key `name` or `name`_pattern of `given`; None without one.

        The mapping `given` is a part of a template. Error messages show its path, `where`.

        Raises:
            ValueError: the mapping has both keys, or the value is not a text, a list of texts or a
                pattern.
        """
        texts, pattern = given.get(name), given.get(f"{name}_pattern")
        if texts is not None and pattern is not None:
            raise ValueError(f"{where} has both {name} and {name}_pattern; leave one out")
        if pattern is not None:
            try:
                return cls(regex.compile(pattern, regex.DOTALL), is_fixed=False)
            except (regex.error, TypeError) as error:
                raise ValueError(
                    f"{where}.{name}_pattern={pattern!r} is not a pattern of the module regex: "
                    f"{error}"
                ) from error
        if texts is None:
            return None
        listed = [texts] if isinstance(texts, str) else texts
        if not _are_texts(listed):
            raise ValueError(f"{where}.{name}={texts!r} must be a text or a list of texts")
        listed = sorted(set(listed), key=lambda text: (-len(text), text))
        can_grow = any(one != other and one.startswith(other) for one in listed for other in listed)
        return cls(regex.compile("|".join(map(regex.escape, listed))), is_fixed=not can_grow)

    def find(self, text: str, start: int, *, is_whole: bool) -> Found | None:
        """Return the first occurrence that begins at index `start` or later, or None.

        If `is_whole` is true, no more text will follow. Otherwise, the occurrence may be pending:
        text that follows may extend or cancel it.
        """
        match = self.pattern.search(text, start, partial=not is_whole)
        if match is None:
            return None
        names = {name: value for name, value in match.groupdict().items() if value is not None}
        is_pending = not is_whole and (match.partial or self._may_change(match, text))
        return Found(match.start(), match.end(), names, is_pending)

    def _may_change(self, match: Any, text: str) -> bool:
        if self.is_fixed:
            return False
        if self.pattern.fullmatch(text, match.start(), partial=True) is not None:
            return True  # the whole text after the start may belong to a longer match
        # A look-ahead may have matched the end of the text.
        longer = self.pattern.match(text + "\0", match.start())
        return longer is None or longer.span() != match.span()

    def last_end(self, text: str) -> int | None:
        """Return the index at which the anchor's last occurrence in a text ends, or None."""
        ends = [match.end() for match in self.pattern.finditer(text)]
        return ends[-1] if ends else None


def _are_texts(listed: Any) -> bool:
    is_list = isinstance(listed, Sequence) and bool(listed)
    return is_list and all(isinstance(text, str) and text for text in listed)
