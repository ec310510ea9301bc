"""Servers that are started for a benchmark, each in a separate process."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

_ENDING_SECONDS, _POLLING_SECONDS = 30.0, 0.1


@dataclass(frozen=True, kw_only=True)
class ServedPeer:
    """Another engine, which can be started as a server with OpenAI's API.

    Args:
        program: the executable that must be installed.
        remedy: how to install it.
        command: the words of the command that starts the server, with the placeholders {model},
            {port} and {dtype}.
    """

    program: str
    remedy: str
    command: Sequence[str]

    def check(self, name: str) -> None:
        """Raise a ValueError if the program is missing."""
        if shutil.which(self.program) is None:
            raise ValueError(
                f"--against {name} needs the program {self.program}, which is not installed; "
                f"{self.remedy}"
            )

    def words(self, *, model: str, port: int, dtype: str) -> list[str]:
        """Return the command, with its placeholders replaced."""
        return [word.format(model=model, port=port, dtype=dtype) for word in self.command]


def free_port() -> int:
    """Return a free port. Another process could take it before it is used."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


@contextmanager
def serving(command: Sequence[str], port: int, patience: float) -> Iterator[str]:
    """Start a server, wait until it is ready, and yield its URL. At the end, stop it.

    Args:
        patience: seconds to wait for the server.

    Raises:
        ValueError: the server ended, or took too long; the message has the last line it wrote.
    """
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        # In a separate session, so that Ctrl-C interrupts only the client, which then reports.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        try:
            _wait(process, url, patience, log, command[0])
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(
    process: subprocess.Popen[str], url: str, patience: float, log: Any, program: str
) -> None:
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ValueError(f"{program} ended before it was ready: {_last_line(log)}")
        if is_ready(url):
            return
        time.sleep(_POLLING_SECONDS)
    raise ValueError(
        f"{program} was not ready after {patience:g} s (--ready-check-timeout-sec): "
        f"{_last_line(log)}"
    )


def is_ready(url: str) -> bool:
    """Return whether the server at `url` is healthy."""
    try:
        with urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False


def _last_line(log: Any) -> str:
    log.seek(0)
    lines = [line for line in log.read().splitlines() if line.strip()]
    return (lines or ["it wrote nothing"])[-1]
