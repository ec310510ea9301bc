"""Messages between the processes, usually one per host, that run an engine's programs together.

Process 0 leads: it has the scheduler and the public interface. The other processes follow: they run
the same programs in the same order. `jax.distributed` connects the devices. Process 0 also has a
socket to each other process, through which it sends calls and their packed arrays.
"""

import atexit
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import jax

from specjax.host.leaving import is_leaving

LEADER = 0
POLL_SECONDS = 50e-6  # pause between two looks at results; a step takes milliseconds
PAUSE_SECONDS = 0.01  # pause between two looks at anything that takes longer
ANSWER_SECONDS = 2.0  # how long a process may take to answer before it counts as missing
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, and a number


class HostsError(RuntimeError):
    """The engine has failed, for example because a process has ended or does not answer.

    If another process is the cause, the message names this process.
    """


class Hosts:
    """The connections between process 0 and the other processes.

    While an engine is built, all processes call `gather` in the same order. Later, process 0 sends
    messages to the other processes. In process 0, threads receive the other processes' messages,
    and pass them to the function given to `listen`. If a process is lost, the engine ends in all
    processes. The argument `seconds` is the time limit for a step.

    Attributes:
        rank: the number of this process.
        peers: the connections of this process, by rank. Process 0 is connected to all others, and
            every other process only to process 0.
        error: why the engine has ended; None while it works. Once set, it stays.
        runs: whether the engine has begun to run programs. From then on, this process's devices may
            wait for a lost process forever.
    """

    def __init__(self, rank: int, peers: Mapping[int, Connection], seconds: int):
        self.rank, self.peers, self._seconds = rank, peers, seconds
        self._threads: list[threading.Thread] = []
        self.error: HostsError | None = None
        self.runs = False
        self._sending, self._leaving = threading.Lock(), threading.Lock()
        self._hosts = {peer: "" for peer in peers}
        self._answers: set[int] = set()
        self._is_closed = False
        atexit.register(self._leave)
        for connection in peers.values():
            _set_options(connection, seconds)
        self._hosts = dict(enumerate(self.gather(socket.gethostname())))

    @property
    def count(self) -> int:
        """The number of processes."""
        return len(self._hosts)

    @property
    def leads(self) -> bool:
        """Whether this is process 0."""
        return self.rank == LEADER

    def name(self, rank: int) -> str:
        """Return the name of process `rank` for error messages."""
        host = self._hosts.get(rank)
        return f"process {rank} ({host})" if host else f"process {rank}"

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.fail(f"{type(error).__name__}: {error}")

    def gather(self, value: Any) -> list[Any]:
        """Return the values that all processes pass, by rank. Each process waits for the others.

        Raises:
            HostsError: a process has ended or failed.
        """
        if not self.leads:
            self.send("value", value)
            return self._value(LEADER)
        values = [value, *(self._value(rank) for rank in sorted(self.peers))]
        self.send("value", values)
        return values

    def _value(self, rank: int) -> Any:
        name, content = self.receive(rank)
        assert name == "value", f"{self.name(rank)} is out of step: {name}"
        return content

    def send(self, *message: Any) -> None:
        """Send a message to all peers.

        Raises:
            HostsError: a process is lost, or takes no messages.
        """
        self.check()
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            for rank, connection in self.peers.items():
                try:
                    connection.send_bytes(content)
                except OSError as error:  # also a timeout
                    self.lose(rank, str(error))
        self.check()

    def receive(self, rank: int = LEADER) -> tuple[Any, ...]:
        """Wait for the next message of the process `rank`, and return the message.

        Raises:
            HostsError: the process has ended or failed, or this engine was closed.
        """
        try:
            message = pickle.loads(self.peers[rank].recv_bytes())
        except (EOFError, OSError) as error:
            self.lose(rank, "its connection broke" if isinstance(error, EOFError) else str(error))
        else:
            if message[0] != "failed":
                return message
            self.lose(rank, message[1])
        raise self.error or HostsError("this LLM is closed")

    def listen(self, hear: Callable[..., None]) -> None:
        """Start a thread per peer, which calls `hear(rank, *message)` for each later message.

        Answers to a ping are not passed to `hear`.
        """

        def read(rank: int) -> None:
            try:
                while True:
                    name, *content = self.receive(rank)
                    if name == "alive":
                        self._answers.add(rank)
                    else:
                        hear(rank, name, *content)
            except HostsError:
                return  # `check` raises it

        self.runs = True
        self._threads = [_started(read, rank) for rank in self.peers]

    def lose(self, rank: int, why: str) -> None:
        """Set `error` to say that the process `rank` is lost. Process 0 also tells its peers.

        Do nothing if the engine has failed or was closed.
        """
        if self.error is None and not self._is_closed:
            self.error = HostsError(
                f"{self.name(rank)} of the {self.count} processes of this LLM has ended "
                f"or failed: {why}; look at its output, and start all processes again"
            )
            if self.leads:
                self.fail(str(self.error))

    def fail(self, why: str) -> None:
        """Set `error`, and tell the peers that this process has failed."""
        if self.error is None:
            self.error = HostsError(f"this LLM has failed: {why}; start all processes again")
        self._say_last("failed", why)
        self._await_exit()

    def close(self) -> None:
        """Tell the peers that the engine has been closed, and whether this process is ending.

        If process 0 is ending, it lets the peers disconnect now, and not in `_leave`. Process 0
        would not run `_leave` if it ended while threads compile programs.
        """
        if not self._is_closed:
            self._is_closed = True
            self._say_last("end", is_leaving())
            self._await_exit()
            if is_leaving() and self.leads:
                self._release_peers()

    def _say_last(self, *message: Any) -> None:
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for connection in self.peers.values():
            with suppress(OSError):  # it has ended already
                connection.send_bytes(content)

    def check(self) -> None:
        """Raise the error that has ended the engine, if any."""
        if self.error is not None:
            raise self.error

    def wait(self, is_done: Callable[[], bool], *, has_limit: bool = True) -> None:
        """Wait until `is_done()` is true.

        If `has_limit`, the time limit is `distributed_timeout_seconds`. After this time, all peers
        are pinged. They get up to `ANSWER_SECONDS` to answer before the error is raised.

        Raises:
            HostsError: the engine has failed, for example because a process is lost; or the wait
                has exceeded the time limit.
        """
        end = time.monotonic() + self._seconds
        while not is_done():
            self.check()
            if has_limit and time.monotonic() > end:
                self._find_missing()
            time.sleep(POLL_SECONDS if has_limit else PAUSE_SECONDS)

    def _find_missing(self) -> None:
        """Ping all peers after the time limit, wait for their answers, and set `error`.

        After `ANSWER_SECONDS`, the error's message names a peer that has not answered, if any.
        """
        self._answers.clear()
        self.send("ping")
        end = time.monotonic() + ANSWER_SECONDS
        while len(self._answers) < len(self.peers) and time.monotonic() < end:
            time.sleep(PAUSE_SECONDS)
        limit = f"{self._seconds} s (distributed_timeout_seconds)"
        missing = [rank for rank in self.peers if rank not in self._answers]
        if missing:
            self.lose(missing[0], f"a step has not ended within {limit}, and it does not answer")
        self.fail(f"a step has not ended within {limit}, although all processes answer")

    def explain(self, error: Exception) -> Exception:
        """Return the error to raise when a device has raised `error`.

        If a process is lost, return the `HostsError` that names the process. Otherwise, tell the
        peers that this process has failed, and return `error` itself.
        """
        end = time.monotonic() + ANSWER_SECONDS
        while self.error is None and time.monotonic() < end:  # a thread may be about to notice it
            time.sleep(PAUSE_SECONDS)
        if self.error is None:
            self.fail(f"{type(error).__name__}: {error}")
            return error
        self.error.__cause__ = error
        return self.error

    def _await_exit(self) -> None:
        """Start a thread that disconnects this process when process 0 exits.

        Process 0 itself starts no thread.
        """
        if self.leads or self._threads:
            return

        def wait() -> None:
            with suppress(EOFError, OSError):
                while pickle.loads(self.peers[LEADER].recv_bytes())[0] != "leave":
                    pass
                self._disconnect()

        self._threads = [_started(wait)]

    def _disconnect(self) -> None:
        """Shut down `jax.distributed` in this process, and close the socket to process 0.

        Process 0 exits only after all other processes have disconnected, because JAX would end
        this process if process 0 exited first. Without `jax_enable_recoverability`, only the
        socket is closed: JAX itself then makes all processes wait for each other at exit.
        """
        with self._leaving:
            config: Any = jax.config
            if config.jax_enable_recoverability and jax.distributed.is_initialized():
                jax.distributed.shutdown()
            with suppress(OSError), _socket_of(self.peers[LEADER]) as one:
                one.shutdown(socket.SHUT_RDWR)  # this wakes a thread that waits for messages

    def _leave(self) -> None:
        """Disconnect when this process exits. Process 0 first lets the other processes disconnect.

        If the engine has failed, a program may wait for a lost process forever. In this case, the
        process ends at once.
        """
        if self.error is not None and self.runs:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(1)
        self.close()
        if self.leads:
            self._release_peers()
        else:
            self._disconnect()

    def _release_peers(self) -> None:
        """Let the other processes disconnect. Wait up to `ANSWER_SECONDS` for each of them."""
        self._say_last("leave")
        peers = self.peers.values()
        for thread in self._threads or [_started(_read_all, one) for one in peers]:
            thread.join(ANSWER_SECONDS)


def _started(do: Callable[..., None], *arguments: Any) -> threading.Thread:
    """Start a daemon thread that runs `do`, and return the thread."""
    thread = threading.Thread(target=do, args=arguments, name="specjax-hosts", daemon=True)
    thread.start()
    return thread


def _read_all(connection: Connection) -> None:
    """Read and drop messages until the peer disconnects."""
    with suppress(EOFError, OSError):
        while True:
            connection.recv_bytes()


def _socket_of(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))


def _set_options(connection: Connection, seconds: int) -> None:
    """Set socket options: no delay for small messages, keepalive, and a time limit for sending."""
    with _socket_of(connection) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # not on every platform
                one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if hasattr(socket, "SO_SNDTIMEO"):
            limit = seconds.to_bytes(8, sys.byteorder) + bytes(8)  # a struct timeval
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
