"""Checks of errors that users see."""

import re
from collections.abc import Callable
from typing import Any

import pytest


def label(value: Any) -> str:
    """Return a short name for a test case. It is the same in every process."""
    return re.sub(r" at 0x\w+", "", str(value))[:60]


def refusal(do: Callable[[], Any], *words: Any) -> str:
    """Check that `do` raises a ValueError whose message has all `words`. Return the message."""
    with pytest.raises(ValueError) as error:
        do()
    text = str(error.value)
    assert all(str(word) in text for word in words), text
    return text
