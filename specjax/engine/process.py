"""Refuses to run an engine in a forked process, or with settings of JAX that break the engine."""

import os
import threading

import jax

_GUARDS = (
    "jax_transfer_guard",
    "jax_transfer_guard_host_to_device",
    "jax_transfer_guard_device_to_host",
)


class OwnLock:
    """A reentrant lock for the process that creates it. Taking it in a fork raises a RuntimeError.

    A fork does not have its parent's other threads. If one of them held the lock, the fork would
    wait forever.
    """

    def __init__(self):
        self._lock, self._pid = threading.RLock(), os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the process that made the lock."""
        return os.getpid() != self._pid

    def __enter__(self) -> None:
        refuse_fork(self._pid)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def refuse_fork(pid: int) -> None:
    """Check that this process is the process that built the engine, and not a fork of it.

    `pid` is the id of the process that built the engine. A fork has none of its parent's threads,
    so JAX and the compiler of steps would wait for them forever.

    Raises:
        RuntimeError: this process was forked from the process that built the engine.
    """
    if os.getpid() != pid:
        raise RuntimeError(
            f"this engine was built in process {pid} and cannot run in process {os.getpid()}, "
            "which was forked from it; build an engine in the new process, and start it with "
            "multiprocessing's 'spawn'"
        )


def check_jax() -> None:
    """Refuse settings of JAX under which no engine works.

    Raises:
        ValueError: a setting is refused. The message names a value that works.
    """
    name = "jax_disable_jit"
    if getattr(jax.config, name):
        raise ValueError(
            "jax_disable_jit=True: steps run only as compiled programs; set it to False "
            "(the environment variable JAX_DISABLE_JIT, or jax.disable_jit) before LLM is built"
        )
    for name in _GUARDS:
        if (level := getattr(jax.config, name)) in ("disallow", "disallow_explicit"):
            raise ValueError(
                f"{name}={level!r}: every step takes an array from the host and returns one; set "
                "it to 'allow', or build and run the engine within jax.transfer_guard('allow')"
            )
