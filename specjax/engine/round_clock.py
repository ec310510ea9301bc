"""Times of chunks and rounds, as a host sees them that reads each while the next one runs."""

import time

from specjax.engine.in_flight import InFlight


class RoundClock:
    """Tells how long the parts of steps took, in the order in which they are read.

    Attributes:
        start: when planning of the current step began, in seconds.
        chunk_ms: milliseconds spent on chunks since the last round.
    """

    def __init__(self) -> None:
        self.start = self.chunk_ms = 0.0
        self._done = 0.0  # when the results that were read last were ready
        self._read: float | None = None  # when they were read; None once another step is launched
        self._compile_seconds = 0.0, 0.0  # until the last two reads
        self._timed_from = 0.0  # what was launched before ran beside a measurement

    def start_anew(self) -> None:
        """Do not time what was launched before now: it ran beside a measurement."""
        self._timed_from = self.start = time.perf_counter()

    def gap(self) -> float | None:
        """Seconds from the last read until now, the first launch after it; None for later ones."""
        read, self._read = self._read, None
        return None if read is None else time.perf_counter() - read

    def time(self, step: InFlight, compile_seconds: float) -> float | None:
        """Milliseconds of a part of a step that has just been read; None if they are not known.

        The device began when it had finished the part before, or when planning of the step began if
        that was later: host time counts as far as the device waited for it. `compile_seconds` is
        how long programs have been compiled so far, which disturbs what runs meanwhile.
        """
        self._read = time.perf_counter()
        done = self._read if step.done is None else step.done
        milliseconds = 1e3 * (done - max(self._done, step.start))
        self._done = done
        # The part began when the one before it was done, which may have been read much later.
        earlier, before = self._compile_seconds
        self._compile_seconds = before, compile_seconds
        is_disturbed = compile_seconds != earlier or step.start < self._timed_from
        # A tiny program may be done before the one before it has been read.
        return None if is_disturbed or milliseconds <= 0 else milliseconds
