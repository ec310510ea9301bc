"""Connects the processes, usually one per host, whose devices run an engine's programs together.

Process 0 leads: it has the scheduler and the public interface. The other processes follow: they run
the same programs in the same order. `jax.distributed` connects the devices. Beside it, process 0
has a socket to each other process, for the calls and the packed arrays that it mirrors. Messages
are pickled, so each connection begins with a proof by both ends that they know a random key. The
devices have exchanged this key before.
"""

import atexit
import os
import pickle
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from specjax.checks import check_positive

LEADER = 0
TIMEOUT_SECONDS = 120  # the default of distributed_timeout_seconds
POLL_SECONDS = 50e-6  # pause between two looks at results; a step takes milliseconds
ANSWER_SECONDS = 2.0  # how long a process may take to answer before it counts as missing
PORT_BYTES, KEY_BYTES = 4, 32
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, and a number


class HostsError(RuntimeError):
    """A process of the engine has ended, failed or does not answer. The message names it."""


class Meeting(NamedTuple):
    """The options of an LLM that say which processes share it, and where they meet."""

    nnodes: int
    node_rank: int | None
    master_addr: str
    master_port: int
    distributed_timeout_seconds: int | None

    @property
    def seconds(self) -> int:
        """The time limit for the start, and for a step."""
        return self.distributed_timeout_seconds or TIMEOUT_SECONDS

    @classmethod
    def take(cls, options: dict[str, Any]) -> "Meeting":
        """Remove the fields from `options`, check them, and return them.

        Raises:
            ValueError: a field is invalid.
        """
        found = cls(**{name: options.pop(name) for name in cls._fields})
        rank, address = found.node_rank, found.master_addr
        check_positive(
            nnodes=found.nnodes,
            master_port=found.master_port,
            distributed_timeout_seconds=found.seconds,
        )
        if rank is not None and (type(rank) is not int or not 0 <= rank < found.nnodes):
            raise ValueError(
                f"node_rank={rank!r} must be an integer from 0 to {found.nnodes - 1} (nnodes - 1)"
            )
        if not isinstance(address, str) or not address:
            raise ValueError(f"master_addr={address!r} must be the address of process 0's host")
        return found


class Hosts:
    """The connections between process 0 and the other processes.

    While an engine is built, all processes call `gather` in the same order. Later, process 0 sends
    messages, and threads pass the other processes' messages to the function given to `listen`. A
    process that is lost ends the engine in all processes: `error` is set, and stays set.

    Attributes:
        rank: the number of this process.
        peers: the connected processes: all others for process 0, and process 0 for all others.
        error: why the engine has ended; None while it works.
    """

    def __init__(self, rank: int, peers: Mapping[int, Connection], meeting: Meeting):
        self.rank, self.peers, self.meeting = rank, peers, meeting
        self.error: HostsError | None = None
        self._sending = threading.Lock()
        self._hosts = {peer: "" for peer in peers}
        self._answers: set[int] = set()
        self._is_closed = False
        atexit.register(self._leave)
        for connection in peers.values():
            _set_options(connection, meeting.seconds)
        self._hosts = dict(enumerate(self.gather(socket.gethostname())))

    @property
    def leads(self) -> bool:
        """Whether this is process 0."""
        return self.rank == LEADER

    def name(self, rank: int) -> str:
        """Return a process's name in errors."""
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
        """Return the next message of a peer. Wait for it.

        Raises:
            HostsError: the process has ended or failed.
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
        """Call `hear(rank, *message)` for each further message of a peer, in a thread per peer."""

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

        for rank in self.peers:
            threading.Thread(target=read, args=[rank], name="specjax-hosts", daemon=True).start()

    def lose(self, rank: int, why: str) -> None:
        """Set `error`: the process `rank` is lost."""
        if self.error is None and not self._is_closed:
            self.error = HostsError(
                f"{self.name(rank)} of the {self.meeting.nnodes} processes of this LLM has ended "
                f"or failed: {why}; look at its output, and start all processes again"
            )
            if self.leads:
                self.fail(str(self.error))

    def fail(self, why: str) -> None:
        """Tell the peers that this process has failed, and disconnect. Nothing can run any more."""
        if self.error is None:
            self.error = HostsError(f"this LLM has failed before: {why}; start all processes again")
        self._say_last("failed", why)

    def close(self) -> None:
        """End the other processes' loops, and disconnect."""
        if not self._is_closed:
            self._is_closed = True
            self._say_last("end")

    def _say_last(self, *message: Any) -> None:
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for connection in self.peers.values():
            try:
                connection.send_bytes(content)
            except OSError:
                pass  # it has ended already

    def check(self) -> None:
        """Raise the error that has ended the engine, if any."""
        if self.error is not None:
            raise self.error

    def wait(self, is_done: Callable[[], bool], *, has_limit: bool = True) -> None:
        """Wait until `is_done()`.

        Raises:
            HostsError: a process is lost, or, if `has_limit`, it takes longer than
                `distributed_timeout_seconds`.
        """
        end = time.monotonic() + self.meeting.seconds
        while not is_done():
            self.check()
            if has_limit and time.monotonic() > end:
                self._find_missing()
            time.sleep(POLL_SECONDS)

    def _find_missing(self) -> None:
        """Set `error` after a time limit. It names the processes that do not answer."""
        self._answers.clear()
        self.send("ping")
        end = time.monotonic() + ANSWER_SECONDS
        while len(self._answers) < len(self.peers) and time.monotonic() < end:
            time.sleep(0.01)
        limit = f"{self.meeting.seconds} s (distributed_timeout_seconds)"
        missing = [rank for rank in self.peers if rank not in self._answers]
        if missing:
            self.lose(missing[0], f"a step has not ended within {limit}, and it does not answer")
        self.fail(f"a step has not ended within {limit}, although all processes answer")

    def explain(self, error: Exception) -> Exception:
        """Return the reason for an error of the device: a lost process, if any is lost."""
        end = time.monotonic() + ANSWER_SECONDS
        while self.error is None and time.monotonic() < end:  # a thread may be about to notice it
            time.sleep(0.01)
        if self.error is None:
            self.fail(f"{type(error).__name__}: {error}")
            return error
        self.error.__cause__ = error
        return self.error

    def _leave(self) -> None:
        """End the process at its exit, if a program may wait for a lost process forever."""
        if self.error is not None:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(1)


def join(meeting: Meeting) -> Hosts:
    """Connect this process with the others, and wait for them.

    Raises:
        ValueError: `jax.distributed` is initialised with other numbers, or `master_addr` is not an
            address of process 0's host.
        RuntimeError: JAX has used its devices before, or a process does not come in time.
    """
    if not jax.distributed.is_initialized():
        if meeting.node_rank is None:
            raise ValueError(
                f"node_rank=None with nnodes={meeting.nnodes} needs an initialised jax.distributed;"
                f" give the number of this process, 0 to {meeting.nnodes - 1}"
            )
        if meeting.node_rank != LEADER:
            _await_leader(meeting)
        # Otherwise JAX ends all processes if one ends.
        jax.config.update("jax_enable_recoverability", True)
        jax.distributed.initialize(
            f"{meeting.master_addr}:{meeting.master_port}",
            meeting.nnodes,
            meeting.node_rank,
            initialization_timeout=meeting.seconds,
        )
    rank, count = jax.process_index(), jax.process_count()
    if count != meeting.nnodes or meeting.node_rank not in (None, rank):
        raise ValueError(
            f"nnodes={meeting.nnodes}, node_rank={meeting.node_rank}: jax.distributed has {count} "
            f"processes, and this is process {rank}; use these numbers"
        )
    return Hosts(rank, _connect(rank, meeting), meeting)


def _await_leader(meeting: Meeting) -> None:
    """Wait until process 0 listens. JAX would end this process if it waited in vain.

    Raises:
        HostsError: process 0 does not listen within the time limit.
    """
    end = time.monotonic() + meeting.seconds
    while True:
        try:
            socket.create_connection((meeting.master_addr, meeting.master_port), 5.0).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise HostsError(
                    f"process 0 does not listen at {meeting.master_addr}:{meeting.master_port} "
                    f"after {meeting.seconds} s ({error}); start its LLM, and check master_addr, "
                    "master_port and firewalls"
                ) from error
            time.sleep(0.2)


def _connect(rank: int, meeting: Meeting) -> dict[int, Connection]:
    """Return the connections to the peers of process `rank`, by their ranks."""
    address, listener, packed = meeting.master_addr, None, np.zeros(PORT_BYTES + KEY_BYTES, np.uint8)
    if rank == LEADER:
        key = secrets.token_bytes(KEY_BYTES)
        try:
            listener = Listener((address, 0), backlog=meeting.nnodes, authkey=key)
        except OSError as error:
            raise ValueError(
                f"master_addr={address!r} must be an address of process 0's host ({error})"
            ) from error
        port = listener.address[1].to_bytes(PORT_BYTES, "big")
        packed = np.frombuffer(port + key, np.uint8)
    content = np.asarray(multihost_utils.broadcast_one_to_all(packed)).astype(np.uint8).tobytes()
    if listener is not None:
        return _accept(listener, meeting)
    port, key = int.from_bytes(content[:PORT_BYTES], "big"), content[PORT_BYTES:]
    connection = Client((address, port), authkey=key)
    connection.send_bytes(rank.to_bytes(PORT_BYTES, "big"))
    return {LEADER: connection}


def _accept(listener: Listener, meeting: Meeting) -> dict[int, Connection]:
    """Return a connection to each other process.

    Raises:
        HostsError: processes do not connect within the time limit.
    """
    found: dict[int, Connection] = {}

    def accept() -> None:
        while len(found) < meeting.nnodes - 1:
            try:
                connection = listener.accept()
                found[int.from_bytes(connection.recv_bytes(PORT_BYTES), "big")] = connection
            except AuthenticationError:
                continue  # a stranger
            except (EOFError, OSError):
                return

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    thread.join(meeting.seconds)
    listener.close()
    if missing := sorted({*range(1, meeting.nnodes)} - found.keys()):
        raise HostsError(
            f"processes {missing} do not reach process 0 at {meeting.master_addr}, any port; open "
            "the ports between the hosts, and start all processes again"
        )
    return found


def _set_options(connection: Connection, seconds: int) -> None:
    """Send small messages at once, notice hosts that vanish, and limit the time of a send."""
    with socket.socket(fileno=os.dup(connection.fileno())) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # not on every platform
                one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if hasattr(socket, "SO_SNDTIMEO"):
            limit = seconds.to_bytes(8, sys.byteorder) + bytes(8)  # a struct timeval
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
