"""Sends requests to an endpoint when they are due, and records the responses."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp

from specjax.bench.datasets.queries import Query
from specjax.bench.traffic.arrivals import Arrivals
from specjax.bench.traffic.endpoint import Endpoint, EndpointGone, ask, open_session
from specjax.bench.traffic.record import Record
from specjax.bench.traffic.scrape import Counters, scrape

SAMPLING_SECONDS = 1.0  # between two readings of a server's metrics


@dataclass(kw_only=True)
class Traffic:
    """The requests of a run and their responses so far.

    Attributes:
        records: the requests that arrived, in order.
        duration: seconds from the start to the end of the last response.
        is_gone: whether a connection was refused; later requests were then not sent.
        is_interrupted: whether the user interrupted the run.
        before, after: the server's metrics before and after the run; None if the server reports
            no metrics.
        samples: pairs of a time in seconds and the server's metrics at this time.
    """

    records: list[Record] = field(default_factory=list)
    duration: float = 0.0
    is_gone: bool = False
    is_interrupted: bool = False
    before: Counters | None = None
    after: Counters | None = None
    samples: list[tuple[float, Counters]] = field(default_factory=list)

    @property
    def complete(self) -> list[Record]:
        """The requests that ended without an error."""
        return [record for record in self.records if record.is_complete]

    @property
    def growth(self) -> Counters | None:
        """The growth of the server's counters during the run; None if the server reports none."""
        last = self.after or (self.samples[-1][1] if self.samples else None)
        return None if self.before is None or last is None else last.since(self.before)


def drive(
    endpoint: Endpoint,
    queries: Sequence[Query],
    arrivals: Arrivals,
    *,
    max_concurrency: int | None = None,
    seed: int = 0,
    on_end: Callable[[Record], None] = lambda record: None,
) -> Traffic:
    """Send all queries, and return when the last response has ended.

    Return early if the endpoint refuses a connection or the user interrupts; see `Traffic`.
    `max_concurrency` limits the requests that run at a time; None: no limit. `seed` is the seed of
    random arrivals. `on_end` is called with the record of each request that has ended.
    """
    traffic = Traffic()
    with suppress(asyncio.CancelledError):
        try:
            asyncio.run(_drive(traffic, endpoint, queries, arrivals, max_concurrency, seed, on_end))
        except KeyboardInterrupt:
            traffic.is_interrupted = True
    for record in traffic.records:
        if record.latency is None and record.error is None:
            record.error = "interrupted"
    return traffic


async def _drive(
    traffic: Traffic,
    endpoint: Endpoint,
    queries: Sequence[Query],
    arrivals: Arrivals,
    max_concurrency: int | None,
    seed: int,
    on_end: Callable[[Record], None],
) -> None:
    gate = asyncio.Semaphore(max_concurrency or max(1, len(queries)))
    async with open_session(endpoint.headers) as session:
        traffic.before = await scrape(session, endpoint.root)
        start = time.perf_counter()

        async def send(query: Query, record: Record) -> None:
            async with gate:
                record.sent = time.perf_counter() - start
                if traffic.is_gone:
                    record.error = "not sent: the endpoint is gone"
                    return
                try:
                    await ask(session, endpoint, query, record)
                except EndpointGone:
                    traffic.is_gone = True
                traffic.duration = time.perf_counter() - start
                on_end(record)

        sampler = asyncio.create_task(_sample(traffic, session, endpoint.root, start))
        try:
            async with asyncio.TaskGroup() as group:
                for query, due in zip(queries, arrivals.times(len(queries), seed), strict=True):
                    await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
                    if traffic.is_gone:
                        break
                    arrived = time.perf_counter() - start
                    record = Record(
                        index=query.index,
                        group=query.group,
                        prompt_len=len(query.token_ids or ()),
                        arrived=arrived,
                        late=max(0.0, arrived - due),
                    )
                    traffic.records.append(record)
                    group.create_task(send(query, record))
        finally:
            traffic.duration = traffic.duration or time.perf_counter() - start
            sampler.cancel()
        traffic.after = await scrape(session, endpoint.root)


async def _sample(
    traffic: Traffic, session: aiohttp.ClientSession, root: str, start: float
) -> None:
    """Read the server's metrics every `SAMPLING_SECONDS`, if it has any."""
    while traffic.before is not None:
        await asyncio.sleep(SAMPLING_SECONDS)
        if (found := await scrape(session, root)) is not None:
            traffic.samples.append((time.perf_counter() - start, found))
