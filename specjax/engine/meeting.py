"""Connects the processes of an engine.

First, all processes wait until every process has started. Then `jax.distributed` connects their
devices. Last, each other process connects to process 0 with a socket. Messages on these sockets are
pickled, and reading a pickle can run arbitrary code. So both ends of a connection first prove that
they know a random key. Process 0 has broadcast this key through the devices.
"""

import secrets
import socket
import struct
import threading
import time
from contextlib import ExitStack
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from specjax.checks import check_positive
from specjax.engine.hosts import ANSWER_SECONDS, LEADER, Hosts, HostsError

TIMEOUT_SECONDS = 120  # the default of distributed_timeout_seconds
PORT_BYTES, KEY_BYTES = 4, 32
HELLO, NAME = struct.Struct("!7sII"), b"specjax"  # `NAME`, and a process's rank and nnodes


class Meeting(NamedTuple):
    """The options of an LLM that say how many processes share it, and how they connect."""

    nnodes: int
    node_rank: int | None
    master_addr: str
    master_port: int
    distributed_timeout_seconds: int | None

    @property
    def seconds(self) -> int:
        """The time limit in seconds, for connecting all processes and later for each step."""
        given = self.distributed_timeout_seconds
        return TIMEOUT_SECONDS if given is None else given

    @classmethod
    def take(cls, options: dict[str, Any]) -> "Meeting":
        """Remove the options of a `Meeting` from `options`, check them, and return the `Meeting`.

        Raises:
            ValueError: an option is invalid.
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


def join(meeting: Meeting) -> Hosts:
    """Connect this process with the other processes, and wait until all are connected.

    Raises:
        ValueError: `jax.distributed` was initialised with another number of processes or another
            rank; it was not initialised, and `node_rank` is None; processes have different values
            of `nnodes`; or process 0 cannot listen at `master_addr` and `master_port`.
        RuntimeError: JAX has already used its devices, or a process does not connect in time.
    """
    if not jax.distributed.is_initialized():
        if meeting.node_rank is None:
            raise ValueError(
                f"node_rank=None with nnodes={meeting.nnodes} needs an initialised jax.distributed;"
                f" give the number of this process, 0 to {meeting.nnodes - 1}"
            )
        _await_all(meeting.node_rank, meeting)
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
    return Hosts(rank, _connect(rank, meeting), meeting.seconds)


def _await_all(rank: int, meeting: Meeting) -> None:
    """Wait until every process has connected to process 0.

    Call this before `jax.distributed.initialize`, which raises no error if a process is missing:
    after its time limit, it ends this process.

    Raises:
        ValueError: process 0 cannot listen at the address and port, or the processes have different
            values of `nnodes`.
        HostsError: a process has not connected within the time limit.
    """
    place, end = (meeting.master_addr, meeting.master_port), time.monotonic() + meeting.seconds
    if rank != LEADER:
        with _reach(place, meeting.seconds) as connection:
            connection.sendall(HELLO.pack(NAME, rank, meeting.nnodes))
            connection.settimeout(meeting.seconds)
            if not connection.recv(1):
                raise HostsError("process 0 waits no longer for other processes; see its output")
        return
    came: dict[int, socket.socket] = {}
    with ExitStack() as stack, _server(place) as server:
        while missing := sorted({*range(1, meeting.nnodes)} - came.keys()):
            server.settimeout(max(end - time.monotonic(), 0.01))
            try:
                connection = stack.enter_context(server.accept()[0])
                connection.settimeout(ANSWER_SECONDS)
                name, other, count = HELLO.unpack(connection.recv(HELLO.size, socket.MSG_WAITALL))
                if name != NAME:
                    continue
                if count != meeting.nnodes:
                    raise ValueError(
                        f"process {other} has nnodes={count}, process 0 has {meeting.nnodes}; give "
                        "all processes the same"
                    )
                came[other] = connection
            except (ConnectionError, struct.error):
                continue  # another program
            except TimeoutError:
                if time.monotonic() > end:
                    raise HostsError(
                        f"processes {missing} have not come within {meeting.seconds} s "
                        "(distributed_timeout_seconds); call specjax.follow in them, with "
                        f"master_addr={place[0]!r} and master_port={place[1]}"
                    ) from None
        for connection in came.values():
            connection.sendall(b"1")


def _server(place: tuple[str, int]) -> socket.socket:
    try:
        return socket.create_server(place)
    except OSError as error:
        raise ValueError(
            "master_addr={!r}, master_port={}: process 0 cannot listen there ({}); give an "
            "address of its host, and a free port".format(*place, error)
        ) from error


def _reach(place: tuple[str, int], seconds: int) -> socket.socket:
    end = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(place, ANSWER_SECONDS)
        except OSError as error:
            if time.monotonic() > end:
                raise HostsError(
                    "process 0 does not listen at master_addr={!r}, master_port={} after {} s "
                    "({}); start its LLM, and check firewalls".format(*place, seconds, error)
                ) from error
            time.sleep(0.2)


def _connect(rank: int, meeting: Meeting) -> dict[int, Connection]:
    """Return the connections to the peers of process `rank`, by their ranks."""
    address, listener, packed = (
        meeting.master_addr,
        None,
        np.zeros(PORT_BYTES + KEY_BYTES, np.uint8),
    )
    if rank == LEADER:
        key = secrets.token_bytes(KEY_BYTES)
        try:
            listener = Listener((address, 0), backlog=meeting.nnodes, authkey=key)
        except OSError as error:
            raise ValueError(
                f"master_addr={address!r} must be an address of process 0's host ({error})"
            ) from error
        bound: Any = listener.address
        port = bound[1].to_bytes(PORT_BYTES, "big")
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
