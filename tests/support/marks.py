"""Chooses when the cases of a parametrized test run."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def marked(
    names: Iterable[str], *, fast: Collection[str] = (), slow: Collection[str] = ()
) -> list[Any]:
    """Return a parameter per name: of a fast test, of a slow test, or of one that runs by night.

    A name in neither `fast` nor `slow` runs by night: its case is of a kind that others have, too.
    """
    marks = {name: [] for name in fast} | {name: [pytest.mark.slow] for name in slow}
    names = list(names)
    assert marks.keys() <= set(names), marks.keys() - set(names)
    return [pytest.param(name, marks=marks.get(name, [pytest.mark.nightly])) for name in names]
