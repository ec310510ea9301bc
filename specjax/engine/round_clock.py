"""Computes how long chunks and rounds took, although the host reads their results late.

With async scheduling, the host reads the results of a step after it has launched the next step.
"""

import time

from specjax.engine.in_flight import InFlight


class RoundClock:
    """Computes how long the chunks and the round of each step took.

    `time` must be called just after the host has read the results of chunks or of a round.

    Attributes:
        start: when planning of the current step began, in seconds.
        chunk_ms: total milliseconds of the chunks that were read since a round was last read.
    """

    def __init__(self) -> None:
        self.start = self.chunk_ms = 0.0
        self._done = 0.0  # when the results read last became ready
        self._read: float | None = None  # when the host read them; None once a step is launched
        self._compile_seconds = 0.0, 0.0  # total compile time until the last two reads
        self._timed_from = 0.0  # steps planned before this time overlapped a measurement

    def restart(self) -> None:
        """Let `time` return None for all steps that were planned before this call.

        Call this after running artificial rounds, because they delay the steps in flight.
        """
        self._timed_from = self.start = time.perf_counter()

    def gap(self) -> float | None:
        """Return the seconds since results were last read. Call this just before each launch.

        Return None if no results were read since the previous call.
        """
        read, self._read = self._read, None
        return None if read is None else time.perf_counter() - read

    def time(self, step: InFlight, compile_seconds: float) -> float | None:
        """Return the milliseconds of the chunks or round that were just read; None if unknown.

        The device runs one program at a time. So the time begins at the later of two events: the
        device finished the previous program, or the host began to plan the step. Host time
        therefore counts only while the device waited for the host.

        `compile_seconds` is the total time of compiling so far. The result is None if this total
        has grown since the call before the previous call, because compiling may have slowed the
        device down. The result is also None for a step that was planned before `restart`. If one
        program ran two parts of a step, the first part has the program's time, and the result for
        the second part is None.
        """
        self._read = time.perf_counter()
        done = self._read if step.done is None else step.done
        milliseconds = 1e3 * (done - max(self._done, step.start))
        self._done = done
        # The device began when it was done with the previous work, perhaps long before that work
        # was read. So compiling since the read before last may have disturbed it.
        earlier, before = self._compile_seconds
        self._compile_seconds = before, compile_seconds
        is_disturbed = compile_seconds != earlier or step.start < self._timed_from
        # A tiny program may end before the previous one has been read.
        is_unknown = is_disturbed or step.shares_program or milliseconds <= 0
        return None if is_unknown else milliseconds
