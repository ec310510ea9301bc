"""The loop that runs an engine's steps.

It locks the engine for one step at a time, so that other calls can run between steps.

There is no background thread: a thread that waits for rollouts runs the engine's steps itself. If
several threads wait, each step advances the rollouts of all of them.
"""

import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from specjax.engine.engine import Engine
from specjax.host.request import Request
from specjax.host.sequence import Sequence as Sample
from specjax.rl.history import RolloutHistory
from specjax.rl.quantising import kinds_of
from specjax.rl.rollouts import Rollout, RolloutBatch, RolloutError
from specjax.rl.running import Running
from specjax.rl.starts import Start
from specjax.rl.turns import Turns
from specjax.text.completions import Completion
from specjax.text.tokenizer import ChatTokenizer

PAUSES = ("abort", "wait", "keep")  # how `Loop.hold` may handle rollouts in flight
PAUSED, ASLEEP = "paused", "asleep"  # reasons to stop a loop

T = TypeVar("T")


class Loop:
    """A loop that generates and scores rollouts on an engine, and that can be stopped.

    Attributes:
        turns: the engine's lock. A method's docstring says if its caller must hold the lock.
        version: the version of the target's weights.
        is_torn: whether the weights mix two versions, because an update failed half-way.
        is_closed: whether `close` was called.
    """

    def __init__(self, engine: Engine, tokenizer: ChatTokenizer | None, *, has_raw: bool):
        self.engine = engine
        self.turns = Turns()
        self.version = 0
        self.is_torn = False
        self.is_closed = False
        self._tokenizer = tokenizer
        self._has_raw = has_raw
        # Kinds of numbers in the target's weights. Updates keep them.
        self.quantization = kinds_of(engine.params.target)
        self._stops: dict[str, threading.Thread] = {}  # thread that called `stop`, by reason
        self._running: set[Running] = set()
        self._failures: dict[Hashable, Exception] = {}  # by request id, until the call ends
        self._left: list[Request] = []  # requests to abort at the next step; see `_queued`

    def run(
        self, starts: list[Start], label: Hashable = None, history: RolloutHistory | None = None
    ) -> Iterator[tuple[Running, Rollout]]:
        """Queue requests, and yield each rollout when it finishes.

        `label` identifies the call for `abort`. A finished rollout is added to `history`, so that
        other rollouts can be drafted from it.

        Raises:
            RolloutError: the device failed, a weight update failed half-way, or the calling thread
                has stopped the loop itself. The error is raised after all rollouts were yielded;
                unfinished rollouts have their tokens so far.
            RuntimeError: the engine was closed, or its weights mixed two versions before the call.
        """
        failure: Exception | None = None
        requests = [start.request for start in starts]
        with self._queued(requests, partial(self._track, starts, label)) as remaining:
            while remaining:
                try:
                    self._step_until(lambda: any(one.sequence.is_finished for one in remaining))
                except Exception as error:
                    if self.is_closed:
                        raise
                    failure = error
                    with self.turns:
                        self._end(remaining)
                for running in [one for one in remaining if one.sequence.is_finished]:
                    remaining.remove(running)
                    rollout = self._hand_out(running, history)
                    failure = failure or self._failure_of([running.sequence])
                    yield running, rollout
        if failure is not None:
            raise RolloutError(f"{failure}", RolloutBatch(())) from failure

    def complete(self, requests: list[Request]) -> list[Sample]:
        """Run requests to completion and return their samples.

        Raises:
            RuntimeError: the device failed, a weight update failed half-way, the calling thread has
                stopped the loop itself, or the engine was closed.
        """
        with self._queued(requests, list) as samples:
            while not all(sample.is_finished for sample in samples):
                self._step_until(lambda: all(sample.is_finished for sample in samples))
            with self.turns:  # another thread may be recording a failure
                failure = self._failure_of(samples)
        failure = failure or next((sample.error for sample in samples if sample.error), None)
        if failure is not None:
            raise RuntimeError(f"ended early: {failure}") from failure
        return samples

    def stop(self, why: str) -> None:
        """Run no steps until `go` is called with the same reason `why`.

        The caller must hold the lock `turns`.
        """
        self._stops[why] = threading.current_thread()

    def go(self, why: str) -> None:
        """Cancel the `stop` that was called with the reason `why`, if any.

        Stops for other reasons remain. The caller must hold the lock `turns`.
        """
        self._stops.pop(why, None)

    def is_stopped(self, why: str) -> bool:
        """Return whether the loop is stopped for the reason `why`."""
        return why in self._stops

    def hold(self, pause: str) -> None:
        """Wait for the steps in flight, and handle unfinished rollouts as `pause` says.

        The caller must hold the lock `turns`.

        Args:
            pause: how unfinished rollouts are handled; see `RolloutEngine.update_weights`.

        Raises:
            ValueError: `pause` is "wait", and no steps can run.
            Exception: the device failed.
        """
        if pause == "wait":
            self._check_may_wait()
            while self.engine.has_work:
                self._advance(self.engine.step)
        self._advance(self.engine.land)
        if pause == "abort":
            self._end(self._running)

    def abort(self, label: Hashable = None) -> None:
        """Abort the rollouts of calls with this label, or all rollouts if it is None.

        The caller must hold the lock `turns`.
        """
        self._advance(self.engine.land)
        self._end(one for one in self._running if label is None or one.label == label)

    def close_spans(self) -> None:
        """Record that all tokens since the last update come from the current weights version.

        The caller must hold the lock `turns`.
        """
        for running in self._running:
            running.close_span(self.version)

    def close(self) -> None:
        """Drop the engine. Calls that wait for steps then raise a RuntimeError.

        The caller must hold the lock `turns`.
        """
        self.is_closed = True
        del self.engine

    def check_open(self) -> None:
        """Raise a RuntimeError if the engine is closed."""
        if self.is_closed:
            raise RuntimeError("this RolloutEngine is closed; build a new one")

    def check_ready(self) -> None:
        """Raise a RuntimeError if the engine is closed, or if its weights mix two versions."""
        self.check_open()
        if self.is_torn:
            raise RuntimeError(
                "an update of the weights failed half-way, so that they mix two versions; "
                "call update_weights again"
            )

    @contextmanager
    def _queued(
        self, requests: list[Request], track: Callable[[list[Sample]], list[T]]
    ) -> Iterator[list[T]]:
        """Queue requests for a `with` block; abort unfinished requests when the block ends.

        `track` is called with the requests' samples before any step can run them. The `with`
        statement yields the result of `track`.
        """
        try:
            with self.turns:
                self.check_ready()
                self.engine.prepare(requests)
                tracked = track([sample for one in requests for sample in self.engine.add(one)])
            yield tracked
        finally:
            if self.turns.is_mine:  # the garbage collector closed this generator during a step
                self._left += requests
            else:
                with self.turns:
                    self._leave(requests)

    def _leave(self, requests: Collection[Request]) -> None:
        ids = {request.request_id for request in requests}
        self._running = {one for one in self._running if one.request_id not in ids}
        for request_id in ids:
            self._failures.pop(request_id, None)
            if not self.is_closed:
                self.engine.abort(request_id)
        if not self.is_closed:
            with suppress(Exception):  # no caller waits for these steps
                self._advance(self.engine.drain)

    def _track(self, starts: list[Start], label: Hashable, samples: list[Sample]) -> list[Running]:
        """Record samples as running, to track which weights versions generate their tokens."""
        owner = {start.request.request_id: start for start in starts}
        tracked = []
        for sequence in samples:
            start = owner[sequence.request.request_id]
            before = start.before
            tracked.append(
                Running(
                    sequence,
                    Completion(sequence, self._tokenizer),
                    start.params,
                    start.place,
                    start.prompt_index,
                    sequence.index if before is None else before.sample_index,
                    label,
                    before,
                    [] if before is None else list(before.versions),
                )
            )
        self._running.update(tracked)
        return tracked

    def _hand_out(self, running: Running, history: RolloutHistory | None) -> Rollout:
        with self.turns:
            self._running.discard(running)
            made = running.rollout(self.version, has_raw=self._has_raw)
            if history is not None:
                history.add(made)
            return replace(made, quantization=self.quantization)

    def _step_until(self, is_done: Callable[[], bool]) -> None:
        """Wait until the lock is free and the loop is not stopped, then run one step.

        If `is_done()` becomes true before the step, return without running it. If the step fails,
        no error is raised here, but the error is recorded for all unfinished requests.

        Raises:
            RuntimeError: see `check_ready`, or the calling thread has stopped the loop itself.
        """
        me = threading.current_thread()
        with self.turns:
            self.turns.wait_for(
                lambda: is_done() or self.is_closed or not self._stops or me in self._stops.values()
            )
            if is_done():
                return
            self.check_ready()
            if self._stops:
                raise RuntimeError(
                    "the engine was paused, or sent to sleep, by the thread that generates; call "
                    "resume or wake_up before"
                )
            if self._left:
                left, self._left = self._left, []
                self._leave(left)
            with suppress(Exception):
                self._advance(self.engine.step)

    def _advance(self, move: Callable[[], Any]) -> None:
        """Call `move`, a method of the engine that runs steps or reads their results.

        If `move` raises an error, all unfinished requests are dropped, and the error is recorded
        for each of them. The error is then raised again.
        """
        before = list(self.engine.unfinished_ids)
        try:
            move()
        except BaseException as error:
            # The engine drops all requests after an error, but an interrupt may leave any state.
            if not isinstance(error, Exception) or self.engine.has_work:
                self.engine.reset()
            cause = error if isinstance(error, Exception) else RuntimeError("it was interrupted")
            self._failures |= dict.fromkeys(before, cause)
            raise

    def _failure_of(self, samples: Iterable[Sample]) -> Exception | None:
        """Return the failure that ended one of these samples, or None."""
        found = (self._failures.get(one.request.request_id) for one in samples)
        return next((failure for failure in found if failure is not None), None)

    def _end(self, rollouts: Iterable[Running]) -> None:
        """Abort rollouts. Call this only while no step is in flight."""
        for running in list(rollouts):
            self.engine.abort(running.request_id)

    def _check_may_wait(self) -> None:
        if self._stops:
            raise ValueError(
                "pause='wait': the engine is paused already, so that no rollout would finish; use "
                "'keep' or 'abort', or resume before"
            )
        if self.is_torn:
            raise ValueError(
                "pause='wait': an update failed half-way, and nothing may be generated by weights "
                "of two versions; use 'keep' or 'abort'"
            )
