"""Limits the number of samples that the server runs or queues at a time."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from specjax.engine.log import Pace
from specjax.server.errors import APIError

RETRY_SECONDS = 1
_LOG = logging.getLogger("specjax")


class Admission:
    """Counts the samples that run or wait, over all requests.

    Attributes:
        closed: the reasons to refuse all requests, like "paused"; empty if requests are accepted.

    Args:
        limit: the maximum number of samples; see `check`.
    """

    def __init__(self, limit: int):
        self.num_samples = self.num_refused = 0
        self.closed: set[str] = set()
        self._limit, self._pace = limit, Pace()

    @contextmanager
    def admit(self, num_samples: int) -> Iterator[None]:
        """Count a request's samples while the `with` block runs.

        Raises:
            APIError: see `check`.
        """
        self.check(num_samples)
        self.num_samples += num_samples
        try:
            yield
        finally:
            self.num_samples -= num_samples

    def check(self, num_samples: int) -> None:
        """Refuse a request of `num_samples` samples if the total would exceed the limit.

        All requests are refused while `closed` has reasons. Otherwise, an idle server accepts any
        request, even if its samples alone exceed the limit.

        Raises:
            APIError: the request is refused, with status 503 if `closed` has reasons, else 429.
        """
        if self.closed:
            text = f"the engine is {' and '.join(sorted(self.closed))}"
            raise APIError(503, text, retry_after=RETRY_SECONDS)
        if self.num_samples and self.num_samples + num_samples > self._limit:
            self.num_refused += 1
            if self._pace.is_due():
                _LOG.warning("the queue is full; %d requests were refused", self.num_refused)
            text = f"the queue is full: {self.num_samples} samples are running or waiting"
            raise APIError(429, f"{text}; try again later", retry_after=RETRY_SECONDS)
