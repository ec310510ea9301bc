"""Runs several engines of one model, each on separate devices, in place of one engine.

Each replica is an engine with a thread, which runs its steps. The threads take turns on the host. A
thread gives its turn away while its step waits for the device, so that all devices work at the same
time. Between two calls of `ReplicatedEngine.step`, the caller has the turn. So requests change only
while `step` runs, as they do with one engine.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from functools import partial
from queue import SimpleQueue

from specjax.device.drafters.drafter import Params
from specjax.engine.engine import Engine
from specjax.engine.metrics import Metrics, sum_of
from specjax.engine.turn import CALLER, Turn
from specjax.host.prefix_cache import PageKey, PromptIndex, extend_keys
from specjax.host.request import Request
from specjax.host.sequence import Sequence
from specjax.sampling_params import LogitsProcessor

log = logging.getLogger(__name__)

# A replica is much busier than another replica if its number of unfinished samples is larger than
# twice the other replica's number plus this number.
MANY_SAMPLES = 4

_Work = SimpleQueue[Callable[[], None] | None]


class ReplicatedEngine:
    """Routes each request to one of several engines. Has the methods of `Engine` that LLMs use.

    A request goes to the replica that has seen the longest prefix of its prompt, unless this
    replica is much busier than another. If several replicas have seen an equally long prefix,
    the request goes to the replica with the fewest unfinished samples.

    If a step of a replica fails, the replica's requests continue on other replicas. The replica
    gets no new requests until the moved requests have ended, because one of them may have caused
    the failure.
    """

    def __init__(self, engines: SequenceOf[Engine]):
        self._turn = Turn()
        self._replicas = [_Replica(i, engine, self._turn) for i, engine in enumerate(engines)]
        for replica in self._replicas:
            replica.engine.rescue = partial(_rescue_by, weakref.WeakMethod(self._rescue), replica)
        self.config, self.drafter = engines[0].config, engines[0].drafter
        # The caller never takes its turn back if it drops the replicas in the middle of steps.
        queues = [replica.work for replica in self._replicas]
        self._end = weakref.finalize(self, _end, self._turn, queues)
        self._end.atexit = False

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines of all replicas, except engines that failed and could not be restarted."""
        return tuple(replica.engine for replica in self._replicas if not replica.is_dead)

    @property
    def params(self) -> Params:
        """The weights of one replica. All replicas have the same weights."""
        return self.engines[0].params

    @property
    def has_work(self) -> bool:
        """See `Engine`."""
        return any(one.is_stepping or one.engine.has_work for one in self._replicas)

    @property
    def unfinished_ids(self) -> Collection[Hashable]:
        """See `Engine`."""
        return frozenset().union(*(engine.unfinished_ids for engine in self.engines))

    def number_of(self, processors: tuple[LogitsProcessor, ...]) -> int:
        """See `Engine`. A tuple of processors has the same number in all engines."""
        (number,) = {engine.number_of(processors) for engine in self.engines}
        return number

    def prepare(self, requests: Iterable[Request], *, show_progress: bool = False) -> None:
        """See `Engine`. All engines are prepared, because any of them may get a request."""
        requests = list(requests)
        for engine in self.engines:
            engine.prepare(requests, show_progress=show_progress)

    def add(self, request: Request) -> list[Sequence]:
        """See `Engine`."""
        for engine in self.engines:
            if request.request_id in engine.unfinished_ids:
                return engine.add(request)  # which refuses it
        return self._route(request, self._healthy()).engine.add(request)

    def abort(self, request_id: Hashable) -> list[Sequence]:
        """See `Engine`."""
        found = (engine.abort(request_id) for engine in self.engines)
        return next(filter(None, found), [])

    def step(self) -> list[Sequence]:
        """Run steps of all replicas until one step ends.

        Return the samples that gained tokens or ended. Several steps may have ended meanwhile.

        Raises:
            Exception: a step failed, and no other replica can take its requests; all requests are
                dropped.
        """
        for replica in self._replicas:
            replica.begin()
        stepping = [replica for replica in self._replicas if replica.is_stepping]
        self._turn.await_others(lambda: not stepping or not all(x.is_stepping for x in stepping))
        return self._touched()

    def land(self) -> list[Sequence]:
        """See `Engine`."""
        self._settle()
        touched = self._touched()
        try:
            for engine in self.engines:
                touched += engine.land()
        except Exception:
            self.reset()
            raise
        return list(dict.fromkeys(touched))

    def _touched(self) -> list[Sequence]:
        """Return the samples that were changed by the steps that have ended.

        Raises:
            Exception: a step has failed, and no other replica can take its requests.
        """
        if errors := [one.error for one in self._replicas if one.error is not None]:
            self.reset()
            raise errors[0]
        touched = dict.fromkeys(s for replica in self._replicas for s in replica.take_touched())
        return list(touched)

    def clear_prefixes(self) -> None:
        """See `Engine`."""
        for engine in self.engines:
            engine.clear_prefixes()
        for replica in self._replicas:
            replica.prompts.clear()

    def drain(self) -> None:
        """See `Engine`."""
        if not any(engine.scheduler.has_work for engine in self.engines):
            while self.has_work:
                self.step()

    def reset(self) -> None:
        """See `Engine`."""
        self._settle()
        for replica in self._replicas:
            replica.error = None
            replica.take_touched()
            replica.prompts.clear()
        for engine in self.engines:
            engine.reset()

    def metrics(self) -> Metrics:
        """Return the sums and means of the replicas' counters."""
        return sum_of([replica.engine.metrics() for replica in self._replicas])

    def close(self) -> None:
        """See `Engine`."""
        self._settle()
        self._end()
        for replica in self._replicas:
            replica.engine.close()

    def _settle(self) -> None:
        """Wait until no replica runs a step."""
        self._turn.await_others(lambda: not any(one.is_stepping for one in self._replicas))

    def _healthy(self) -> list["_Replica"]:
        """Return the replicas that may get requests."""
        return [replica for replica in self._replicas if replica.is_healthy]

    def _route(self, request: Request, replicas: list["_Replica"]) -> "_Replica":
        """Choose a replica for a request, and remember that it has seen the request's prompt."""
        keys: list[PageKey] = []
        if self.config.enable_prefix_caching:
            extend_keys(keys, request.prompt_token_ids, self.config.page_size, b"")
        most = 2 * min(replica.num_samples for replica in replicas) + MANY_SAMPLES
        chosen = max(
            (replica for replica in replicas if replica.num_samples <= most),
            key=lambda one: (one.prompts.longest(keys), -one.num_samples, -one.number),
        )
        chosen.prompts.points(keys)
        return chosen

    def _rescue(self, failed: "_Replica", error: Exception) -> None:
        """Move the requests of the replica `failed` to other replicas.

        Raises:
            Exception: `error`, because no other replica may get requests.
        """
        others = [replica for replica in self._healthy() if replica is not failed]
        if not others:
            raise error
        requests = failed.begin_again()
        for request, samples in requests:
            self._route(request, others).engine.adopt(request, samples)
        log.warning(
            "replica %d failed, and its %d requests continue on others: %s",
            *(failed.number, len(requests), error),
        )


class _Replica:
    """An engine, and the thread that runs its steps.

    Attributes:
        prompts: an index of the prompts that were routed to this engine. The index forgets old
            prompts that the engine's prefix cache cannot hold any more.
        is_stepping: whether a step has begun and has not ended.
        error: the error of a failed step, if no other replica could take over its requests.
        lost: samples that other replicas took over after failures. Finished samples are removed.
        is_dead: whether the engine could not be restarted after a failure.
    """

    def __init__(self, number: int, engine: Engine, turn: Turn):
        self.number, self.engine = number, engine
        self.prompts = PromptIndex(engine.config.num_pages)
        self.work: _Work = SimpleQueue()
        self.is_stepping = self.is_dead = False
        self.error: BaseException | None = None
        self.lost: list[Sequence] = []
        self._touched: list[Sequence] = []
        self._turn = turn
        engine.away = partial(turn.given, number)
        name = f"specjax-replica-{number}"
        threading.Thread(target=_serve, args=[self.work], name=name, daemon=True).start()

    @property
    def num_samples(self) -> int:
        """The number of unfinished samples."""
        return self.engine.scheduler.num_unfinished

    @property
    def is_healthy(self) -> bool:
        """Whether the engine may get requests."""
        self.lost = [sample for sample in self.lost if not sample.is_finished]
        return not self.is_dead and not self.lost

    def begin(self) -> None:
        """Ask the thread to run a step, if requests are unfinished and no step is running."""
        if self.engine.has_work and not self.is_stepping:
            self.work.put(self._step)
            self.is_stepping = True

    def _step(self) -> None:
        self._turn.take(self.number)
        try:
            self._run()
        except BaseException as error:  # the caller's thread raises it
            self.error = error
        finally:
            self.is_stepping = False
            self._turn.give(self.number)

    def _run(self) -> None:
        try:
            touched = self.engine.step()
            self._touched += [sample for sample in touched if sample not in self.lost]
        except Exception as error:
            assert self.engine.rescue is not None
            self.engine.rescue(error)

    def take_touched(self) -> list[Sequence]:
        """Return the samples that steps have changed since the last call.

        Samples that were aborted in the middle of a step are left out.
        """
        touched, self._touched = self._touched, []
        return [sample for sample in touched if sample.finish_reason != "abort"]

    def begin_again(self) -> list[tuple[Request, list[Sequence]]]:
        """Remove and return the engine's unfinished requests after a failure.

        Their samples are added to `lost`. The engine gets an empty state; if that fails, `is_dead`
        is set.
        """
        requests = self.engine.hand_over()
        self.lost += [sample for _, samples in requests for sample in samples]
        self.prompts.clear()
        try:
            self.engine.release()
            self.engine.renew()
        except Exception as error:
            log.warning("replica %d cannot run again: %s", self.number, error)
            self.is_dead = True
        return requests


def _rescue_by(method: weakref.WeakMethod, failed: _Replica, error: Exception) -> None:
    """Call `ReplicatedEngine._rescue`. Raise `error` if the `ReplicatedEngine` was freed."""
    if (rescue := method()) is None:
        raise error
    rescue(failed, error)


def _serve(work: _Work) -> None:
    """Run the functions in the queue `work`, until the queue gives None.

    While the thread waits for work, it keeps no engine in memory.
    """
    while (run := work.get()) is not None:
        run()
        del run


def _end(turn: Turn, queues: Iterable[_Work]) -> None:
    """End the threads of replicas whose `ReplicatedEngine` was closed or freed."""
    turn.give(CALLER)
    for work in queues:
        work.put(None)
