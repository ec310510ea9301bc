"""Errors that users see, and names for the cases that raise them."""

import re
from collections.abc import Callable
from typing import Any

import pytest


def label(value: Any) -> str:
    """The name of a case: the same in every process, so without addresses."""
    return re.sub(r" at 0x\w+", "", str(value))[:60]


def refusal(do: Callable[[], Any], *words: Any) -> str:
    """The message of the ValueError that `do` must raise; it holds all `words`."""
    with pytest.raises(ValueError) as error:
        do()
    text = str(error.value)
    assert all(str(word) in text for word in words), text
    return text
