"""Counts and times what a trainer does with the server: weight updates and pauses."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from specjax.server.histogram import Histogram

BOUNDS = (0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
WEIGHTS = ("target", "drafter")


class Operations:
    """Counts of weight updates and pauses. Change it only on the event loop.

    Attributes:
        durations: a histogram of the seconds that a weight-update request takes, for each endpoint
            by name. Failed requests are left out.
        num_in_flight: number of weight-update requests that have not been answered.
        num_updates: number of completed updates of the target's and of the drafter's weights.
        num_pauses: number of times that the engine was paused.
    """

    def __init__(self):
        self.durations: dict[str, Histogram] = {}
        self.num_in_flight = self.num_pauses = 0
        self.num_updates = Counter(dict.fromkeys(WEIGHTS, 0))
        self._paused_seconds, self._paused_at = 0.0, 0.0  # 0: it is not paused

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time a request to the endpoint `name`. The time is kept if the block raises no error."""
        self.num_in_flight += 1
        begun = time.monotonic()
        try:
            yield
        finally:
            self.num_in_flight -= 1
        self.durations.setdefault(name, Histogram(BOUNDS)).observe(time.monotonic() - begun)

    def pause(self) -> None:
        """Record the start of a pause, unless the engine is already paused."""
        if not self._paused_at:
            self._paused_at, self.num_pauses = time.monotonic(), self.num_pauses + 1

    def resume(self) -> None:
        """Record the end of the pause, if the engine is paused."""
        self._paused_seconds, self._paused_at = self.paused_seconds, 0.0

    @property
    def paused_seconds(self) -> float:
        """The total time of all pauses, including the current one."""
        now = time.monotonic() - self._paused_at if self._paused_at else 0.0
        return self._paused_seconds + now
