"""Without configured logging, log lines are shown once, and only on stderr."""

import importlib.util
import io
import logging

import pytest
from rich.console import Console

from specjax.engine.log import can_draw, get_log


@pytest.fixture
def unconfigure(monkeypatch):
    """Return a function that removes pytest's log handlers, so that logging is as in a script."""
    log = logging.getLogger("specjax")

    def forget():
        monkeypatch.setattr(logging.root, "handlers", [])
        monkeypatch.setattr(log, "handlers", [logging.NullHandler()])

    yield forget
    log.setLevel(logging.NOTSET)


def test_lines_go_to_stderr_where_nobody_has_configured_logging(capsys, unconfigure):
    unconfigure()
    for line in "one", "two":
        get_log(verbose=True).info(line)
        get_log(verbose=False).error("nothing")
    shown = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in shown] == ["specjax: one", "specjax: two"]


@pytest.mark.parametrize("name", ["root", "specjax"])
def test_who_has_configured_logging_decides(name, capsys, unconfigure):
    unconfigure()
    seen = []
    handler = logging.Handler()
    handler.emit = seen.append  # pyright: ignore[reportAttributeAccessIssue]
    (logging.root if name == "root" else logging.getLogger("specjax")).addHandler(handler)
    get_log(verbose=True).warning("heard")
    get_log(verbose=True).info("below its level")
    assert [record.getMessage() for record in seen] == ["heard"]
    assert capsys.readouterr().err == ""


def test_configuring_logging_later_doubles_no_line(capsys, unconfigure):
    unconfigure()
    get_log(verbose=True).info("before")
    logging.basicConfig(format="root %(message)s")
    get_log(verbose=True).info("after")
    before, after = capsys.readouterr().err.splitlines()
    assert before.endswith("specjax: before") and after == "root after"


@pytest.mark.parametrize("has_widgets", [True, False])
def test_a_notebook_without_widgets_gets_lines(has_widgets, monkeypatch):
    """In such a notebook, rich would draw nothing, and warn for each bar."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if has_widgets else None)
    assert can_draw(Console(file=io.StringIO(), force_jupyter=True)) == has_widgets
    assert can_draw(Console(file=io.StringIO(), force_terminal=True))
    assert not can_draw(Console(file=io.StringIO()))
