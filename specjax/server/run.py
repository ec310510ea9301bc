"""Runs the server until a signal ends it."""

import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from specjax.server.connection import Connection
from specjax.server.settings import ServerSettings

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BACKLOG = 2048
_LOG = logging.getLogger("specjax")


def bind(settings: ServerSettings) -> socket.socket:
    """Return a socket that listens on the address in the settings.

    Clients can connect before the server runs. Their requests then wait.

    Raises:
        ValueError: the address is in use or not available.
    """
    if settings.uds is not None:
        if _is_served(settings.uds):
            raise ValueError(f"--uds {settings.uds} is in use; choose another path")
        family, address, where = socket.AF_UNIX, settings.uds, f"--uds {settings.uds}"
    else:
        where = f"--host {settings.host} --port {settings.port}"
        try:
            found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ValueError(f"{where} cannot be used: {error.strerror}") from error
        family, _, _, _, address = found[0]
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise ValueError(f"{where} cannot be used: {error.strerror}; choose another") from error
    return made


def _is_served(path: str) -> bool:
    """Return whether a server listens on the Unix socket at `path`.

    If no server listens any more, remove the socket.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            if Path(path).is_socket():
                Path(path).unlink()
            return False
    return True


def describe(settings: ServerSettings, bound: socket.socket) -> str:
    """Return the URL, or the path, of a bound socket."""
    if settings.uds is not None:
        return settings.uds
    scheme = "http" if settings.ssl_certfile is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{bound.getsockname()[1]}"


def make_server(app: Starlette, settings: ServerSettings) -> "Server":
    """Return a server for an app. Its method `run` takes sockets, and returns after a signal."""
    seconds = app.state.service.limits.max_stall_seconds
    config = uvicorn.Config(
        app,
        http=partial(Connection, max_stall_seconds=seconds),  # type: ignore[arg-type]
        ws="none",
        log_level=settings.uvicorn_log_level,
        access_log=not settings.disable_uvicorn_access_log,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=settings.ssl_cert_reqs,
        ssl_ciphers=settings.ssl_ciphers or "TLSv1",
        root_path=settings.root_path,
        backlog=BACKLOG,
        lifespan="off",
        server_header=False,
    )
    return Server(config)


class Server(uvicorn.Server):
    """A server that is stopped by signals.

    After the first signal, it finishes the running requests and accepts no new ones. The second
    signal ends it at once.

    Attributes:
        is_signalled: whether a signal has stopped it.
    """

    is_signalled = False

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See `uvicorn.Server`. Here, signals are not raised again when the server has ended."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread gets signals
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See `uvicorn.Server`."""
        self.is_signalled = True
        if self.should_exit:
            self.force_exit = True
        else:
            _LOG.info("no new requests are accepted; a second signal ends running ones")
            self.should_exit = True
