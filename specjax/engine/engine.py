"""Runs the loop of an engine: launch the next step, then read the step before it.

    schedule -> pack -> step on the device -> copy back, one step late -> commit

While the device runs step N, the host plans step N + 1. The state never leaves the device. Programs
take packed arrays from the host, and return their results as packed arrays. A step may have two
parts, prefill chunks and a decode round. Both are launched before either is read. If steps with
both parts are frequent, the parts run as one program. A round with grammars is several programs:
the host computes masks while the target runs over the drafts.
"""

import os
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np

from specjax.checks import warn
from specjax.config import EngineConfig
from specjax.device.drafters.drafter import Drafter, Params
from specjax.device.layout import Layout
from specjax.device.models.model import Model, is_recurrent, page_windows
from specjax.device.placement import Placement
from specjax.device.verification import SeedExact, Verification
from specjax.engine.batch import Part, export_features, unpack_outputs
from specjax.engine.compiled import CompiledPrograms
from specjax.engine.in_flight import Extended, InFlight, note_ends
from specjax.engine.launcher import Launcher
from specjax.engine.metrics import Metrics, Recorder
from specjax.engine.port import Programs
from specjax.engine.process import refuse_fork
from specjax.engine.repertoire import Repertoire
from specjax.engine.replay import time_padding
from specjax.engine.round_clock import RoundClock
from specjax.engine.variants import of_rounds
from specjax.host.budgets import explain_waiting
from specjax.host.drafts.suggester import Suggester
from specjax.host.plans import DecodePlan, PrefillPlan
from specjax.host.request import Request
from specjax.host.scheduler import Scheduler
from specjax.host.sequence import RowOutput, Sequence
from specjax.host.shapes import Shape, Shapes
from specjax.host.speculation.policy import Policy
from specjax.host.speculation.step_cost import StepCost
from specjax.sampling_params import LogitsProcessor

WAIT_SECONDS = 0.1  # maximum time that `step` waits for programs


class Engine:
    """Runs requests to completion on a device. Prompts and outputs are token ids.

    Attributes:
        away: function that returns a context manager. A step enters this context while it waits for
            the device or for a program. Meanwhile, other threads can call methods that run no step.
        rescue: function called with the error of a failed step without logits processors. It moves
            the requests to another engine or raises the error. If None, all requests are dropped
            and the error is raised.
    """

    # Returns the engine's `Programs`. Any callable with the same arguments can replace it.
    make_programs: ClassVar[Callable[..., Programs]] = CompiledPrograms

    def __init__(
        self,
        config: EngineConfig,
        target: Model,
        drafter: Drafter,
        params: Params,
        policy: Policy,
        verification: Verification | None = None,
        suggester: Suggester | None = None,
        *,
        placement: Placement | None = None,
        make_programs: Callable[..., Programs] | None = None,
        show_progress: bool = False,
    ):
        self.config = config
        self.target = target
        self.drafter = drafter
        self._max_drafts = max(policy.choices)
        self._is_recurrent = is_recurrent(target) or drafter.is_recurrent
        draft_slots = drafter.draft_slots(self._max_drafts)
        config.check_budgets(self._max_drafts, draft_slots)
        if waiting := explain_waiting(config, self._max_drafts, draft_slots):
            warn(waiting)
        windows, suggester = page_windows(target, config), suggester or Suggester()
        num_snapshots = config.num_snapshots if self._is_recurrent else None
        sizes: Any = {"draft_slots": draft_slots, "num_snapshots": num_snapshots}
        self.scheduler = Scheduler(config, policy, windows=windows, suggester=suggester, **sizes)
        self.layout = Layout.of(config, target.vocab_size, windows, suggester.width)
        self.programs = (make_programs or self.make_programs)(
            config,
            target,
            drafter,
            verification or SeedExact(),
            params,
            self.layout,
            self._max_drafts,
            placement=placement,
        )
        self.repertoire = Repertoire(
            self.programs, config, target.vocab_size, is_recurrent=self._is_recurrent
        )
        self.clock = RoundClock()
        self.launcher = Launcher(config, self.layout, self.programs, self.repertoire, self.clock)
        self._timed: set[Shape] = set()  # shapes of rounds whose times the policy knows
        self._recorder = Recorder(is_trained=drafter.weights is not None)
        self._in_flight: list[InFlight] = []
        self._num_steps = 0
        self._is_stepping = threading.Lock()
        self._pid = os.getpid()
        self.away: Callable[[], AbstractContextManager[None]] = nullcontext
        self.rescue: Callable[[Exception], None] | None = None
        self.set_policy(policy, show_progress=show_progress)

    @property
    def engines(self) -> tuple["Engine", ...]:
        """The engines that share the requests: only this one. See `ReplicatedEngine`."""
        return (self,)

    @property
    def params(self) -> Params:
        """The weights in use."""
        return self.programs.params

    @params.setter
    def params(self, params: Params) -> None:
        self.programs.params = params

    def set_policy(self, policy: Policy, *, show_progress: bool = False) -> None:
        """Let `policy` choose K from the next step on, and compile the shapes that it may choose.

        Raises:
            ValueError: the policy may choose more drafts than the token budgets or the recurrent
                cache allow; or all shapes must be timed, but requests are unfinished.
        """
        self.config.check_budgets(k := max(policy.choices), self.drafter.draft_slots(k))
        if self._is_recurrent and k > self._max_drafts:
            raise ValueError(
                f"policy: K={k} does not fit the recurrent cache, whose ring was "
                f"sized for the {self._max_drafts} drafts of num_speculative_tokens when the "
                "engine was built; build it with a larger one"
            )
        shapes = self.scheduler.all_shapes
        if not self.config.exact:
            shapes = Shapes.all_of(self.config, policy.choices)
        has_all = self.repertoire.compile_first(shapes, show_progress=show_progress)
        ((batch, max_k),) = shapes.first.decode
        # If some shapes are not compiled yet, time the first shape now, and the others later.
        self._timed = set(shapes.decode if has_all else [(batch, max_k)])
        policy.begin(partial(self._replay, policy.choices, has_all=has_all))
        if policy.is_learning and not has_all:  # so that it can measure how times grow with K
            self.repertoire.ask_for((batch, min(policy.choices)))
        self.repertoire.use(shapes)
        self.scheduler.policy, self.scheduler.all_shapes = policy, shapes
        self._look()

    def number_of(self, processors: tuple[LogitsProcessor, ...]) -> int:
        """See `Repertoire.number_of`."""
        return self.repertoire.number_of(processors)

    def prepare(self, requests: Iterable[Request], *, show_progress: bool = False) -> None:
        """Compile missing programs for `requests`; with the option `compile_ahead`, wait."""
        refuse_fork(self._pid)
        requests = list(requests)
        # A step whose requests have no grammars runs without masks.
        others = [r for r in requests if r.params.structured_outputs is None]
        for group in filter(None, (requests, others)):
            asked = self.repertoire.asked_by({request.demands for request in group})
            self.repertoire.prepare(asked, show_progress=show_progress)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or any step is in flight."""
        return self.scheduler.has_work or bool(self._in_flight)

    @property
    def unfinished_ids(self) -> Collection[Hashable]:
        """The ids of unfinished requests."""
        return self.scheduler.unfinished_ids

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request. Return its samples, to which later calls of `step` add tokens.

        Raises:
            ValueError: an unfinished request has the same id.
        """
        return self.scheduler.add(request, is_held=True)

    def adopt(self, request: Request, samples: list[Sequence]) -> None:
        """Queue a request of another engine. Its `samples` continue after their present tokens."""
        self.scheduler.add(request, samples, is_held=True)

    def hand_over(self) -> list[tuple[Request, list[Sequence]]]:
        """Remove all requests after a failure, and return them with their unfinished samples."""
        self._in_flight = []
        return self.scheduler.hand_over()

    def abort(self, request_id: Hashable) -> list[Sequence]:
        """End a request now. Return its unfinished samples, or an empty list for an unknown id."""
        aborted = self.scheduler.abort(request_id)
        self._recorder.record_finished(aborted)
        return aborted

    def step(self) -> list[Sequence]:
        """Launch a step, read the step before it, and return samples that gained tokens or ended.

        If a step with logits processors fails, the processors are taken as the cause, because they
        are user code: their requests end with the error, and all other requests recompute their
        tokens.

        Raises:
            Exception: a step without logits processors failed, and `rescue` did not move the
                requests; all requests are dropped.
            RuntimeError: another thread is in the middle of a step, or this process is a fork of
                the process that built the engine. Nothing has changed.
        """
        if os.getpid() != self._pid:  # checked here, because a call would cost time in each step
            refuse_fork(self._pid)
        if not self._is_stepping.acquire(blocking=False):
            raise RuntimeError(
                "this engine runs a step for another thread; share its LLM or AsyncLLM, whose "
                "methods take turns"
            )
        try:
            return self._step()
        finally:
            self._is_stepping.release()

    def _step(self) -> list[Sequence]:
        self._num_steps += 1
        self.clock.start = time.perf_counter()
        previous, self._in_flight = self._in_flight, []
        for step in previous:
            step.look()
        launched: list[InFlight | Extended] = []
        touched = self._look()
        parts = [step.plan for step in previous]
        with jax.profiler.StepTraceAnnotation("specjax", step_num=self._num_steps):
            with self._recorder.host:
                plan = self.scheduler.schedule()
            if not plan and not previous and self.scheduler.held:
                with self.away():
                    self.programs.wait(WAIT_SECONDS)
            try:
                if plan:
                    self._recorder.record_launch(plan, len(previous) > 0)
                    parts += (new := plan.parts)
                    with self._recorder.host:
                        launched = self._launch(new)
                    note_ends(previous, launched)
                for step in previous:
                    touched += self._read(step)
                for step in launched:
                    if isinstance(step, Extended):
                        with self.away():
                            step.wait(self.programs)
                        step = self.launcher.settle(step)
                    if self.config.async_scheduling:
                        self._in_flight.append(step)
                    else:
                        touched += self._read(step)
            except Exception as error:
                touched += self._recover(parts, error)
        return touched

    def _look(self) -> list[Sequence]:
        """Queue requests whose missing programs are ready now. Let steps use all compiled shapes.

        Return the samples that have ended because one of their programs failed to compile.
        """
        scheduler, repertoire, failed = self.scheduler, self.repertoire, []
        for request in list(scheduler.held.values()):
            try:
                if repertoire.admits({*scheduler.demands, request.demands}):
                    scheduler.let_in(request)
            except Exception as error:  # the request's own program failed, e.g. logits processors
                failed += (ended := scheduler.fail_all(request, error))
                self._recorder.record_finished(ended)
        scheduler.shapes, scheduler.splits = repertoire.ready_for(scheduler.demands)
        if scheduler.policy.is_learning and not self.programs.is_compiling:
            for shape in scheduler.shapes.decode:
                if shape not in self._timed:
                    self._timed.add(shape)
                    measure = partial(time_padding, self._launch, *shape)
                    scheduler.policy.shape_ready(*shape, measure)
                    self.clock.restart()
        return failed

    def _launch(self, parts: SequenceOf[Part]) -> list[InFlight | Extended]:
        if (gap := self.clock.gap()) is not None:
            self._recorder.record_gap(gap)
        return self.launcher.launch(parts, self.scheduler.residents.page_tables)

    def _read(self, step: InFlight) -> list[Sequence]:
        with self._recorder.wait, self.away():
            packed = np.asarray(step.outputs)
            step.look()
        milliseconds = self.clock.time(step, self.programs.compilations.seconds)
        with self._recorder.host:
            has_raw = self.config.logprobs_mode == "both"
            rows = unpack_outputs(packed, step.plan, step.variant, has_raw=has_raw)
            if step.features is not None:
                export_features(step.plan, jax.device_get(step.features))
            num_kept, touched = self.scheduler.commit(step.plan, rows)
            self._recorder.record_part(step.plan, rows, num_kept)
            self._learn(step, rows, num_kept, milliseconds)
        self._recorder.record_finished(touched)
        return touched

    def _learn(
        self, step: InFlight, rows: list[RowOutput], num_kept: list[int], milliseconds: float | None
    ) -> None:
        """Record the time of chunks or of a round, and let the policy learn from a round.

        For each sequence, `rows` holds the device's result, and `num_kept` the number of tokens
        that the sequence gained. `milliseconds` is None if the time is unknown.
        """
        clock, policy, plan = self.clock, self.scheduler.policy, step.plan
        chunk_ms, clock.chunk_ms = clock.chunk_ms, 0.0
        if isinstance(plan, PrefillPlan):
            clock.chunk_ms = chunk_ms = chunk_ms + (milliseconds or 0.0)
        if milliseconds is not None:
            self.repertoire.note(plan, step.variant, milliseconds)
            if step.joins is not None:
                self.repertoire.note_apart(step.joins, min(chunk_ms, milliseconds))
        if policy.is_learning and isinstance(plan, DecodePlan) and any(num_kept):
            if plan.num_drafts in policy.choices:  # an earlier policy may have chosen this K
                own_ms = None if self.config.exact else milliseconds  # every K takes the same time
                policy.observe(step.outcome(rows, num_kept, own_ms))

    def _recover(self, parts: list[Part], error: Exception) -> list[Sequence]:
        """End requests that may have caused a failure, and restart all other requests.

        If no request may have caused the failure, move all requests to another engine or drop them.
        """
        suspects = {
            sequence: None
            for part in parts
            for sequence in part.sequences
            if sequence.request.processor >= 0 and not sequence.is_finished
        }
        if not suspects:
            if self.rescue is not None:
                self.rescue(error)
                return []
            self.reset()
            raise error
        for sequence in suspects:
            self.scheduler.fail(sequence, error)
        self._recorder.record_finished(suspects)
        self._in_flight = []
        self.scheduler.restart()
        self._replace_state()
        return list(suspects)

    def _replace_state(self) -> None:
        """Replace the state with an empty state."""
        self.programs.release()
        self.programs.renew()

    def drain(self) -> None:
        """Read the results of the steps in flight if there is nothing to launch."""
        if not self.scheduler.has_work:
            while self._in_flight:
                self.step()

    def land(self) -> list[Sequence]:
        """Read all steps in flight without launching another. Return samples that have changed."""
        launched, self._in_flight = self._in_flight, []
        try:
            return [sequence for step in launched for sequence in self._read(step)]
        except Exception as error:
            return self._recover([step.plan for step in launched], error)

    def use(self, params: Params, *, has_new_target: bool, has_new_drafter: bool) -> None:
        """Use the weights `params`, which have the same shapes as before, from the next step on.

        Call this only while no step is in flight. The caches were computed with the old weights, so
        they are dropped, and running requests recompute their tokens. `has_new_target` and
        `has_new_drafter` tell the policy which weights have changed.
        """
        assert not self._in_flight, "land first"
        self.scheduler.restart()
        self.programs.params = params
        if has_new_target:
            self.scheduler.policy.target_changed()
        if has_new_drafter:
            self.scheduler.policy.drafter_changed()

    def release(self) -> None:
        """Free the state's memory until `renew`. Call this only while no step is in flight.

        Running requests recompute their tokens after `renew`.
        """
        assert not self._in_flight, "land first"
        self.scheduler.restart()
        self.programs.release()

    def renew(self) -> None:
        """Create an empty state after `release`."""
        self.programs.renew()

    def close(self) -> None:
        """Free the device's memory and all programs. The engine cannot run afterwards."""
        self._in_flight = []
        self.programs.close()

    def reset(self) -> None:
        """Drop all requests and create an empty state, for example after an interrupt."""
        self._in_flight = []
        self._recorder.record_finished(self.scheduler.drop_all())
        self._replace_state()

    def clear_prefixes(self) -> None:
        """Clear the prefix cache. Call this only while no request is running."""
        self.scheduler.prefixes.clear()

    def metrics(self) -> Metrics:
        """Return the current counters."""
        return self._recorder.snapshot(self.scheduler, self.programs.compilations)

    def _replay(self, ks: tuple[int, ...], *, has_all: bool) -> StepCost:
        """Return the times of rounds for each K in `ks`.

        If `has_all`, clear the prefix cache and time all shapes. Otherwise, time only the largest
        shape. With the option `exact`, there is one shape: time nothing, and return 1 ms per K.
        """
        batches, exact = self.config.decode_batches, self.config.exact
        if exact:  # one shape
            return StepCost({batches[0]: {k: 1.0 for k in ks}})
        if not has_all:
            max_k = max(ks)
            cost = StepCost({batches[-1]: {max_k: time_padding(self._launch, batches[-1], max_k)}})
            return cost.widened(ks, batches)
        if self.has_work:
            raise ValueError(
                "policy: it has rounds timed before it begins, but requests are running; let them "
                "finish, or abort them, before set_policy"
            )
        self.scheduler.prefixes.clear()
        plain = of_rounds(self.repertoire.variants[0])
        return self.programs.time_rounds(plain, ks, batches)
