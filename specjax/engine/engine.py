"""The loop: launch the next step, then read the one before it.

    schedule -> pack -> step on the device -> copy back, one step late -> commit

While the device runs step N the host plans N + 1. The state never leaves the device: what goes
in is one packed array for each program, what comes back is one. A step may have two parts, chunks
of prompts and a round of decoding; both are launched before either is read. A round with grammars
is launched in pieces, for the masks of its drafts are made while the target runs over them.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import jax
import numpy as np

from specjax.config import EngineConfig
from specjax.device.drafters.drafter import Drafter, Params, Variant
from specjax.device.models.model import Features, Model, is_recurrent
from specjax.device.placement import Placement
from specjax.device.step import Extension
from specjax.device.verification import Draft, SeedExact, Verification
from specjax.device.wanted import Wants
from specjax.engine.admissions import pack_admissions
from specjax.engine.batch import (
    Part,
    export_features,
    pack,
    pack_masks,
    pack_snapshots,
    unpack_outputs,
)
from specjax.engine.layout import Layout
from specjax.engine.metrics import Metrics, Recorder
from specjax.engine.precompile import CompiledPrograms
from specjax.engine.programs import (
    Admit,
    Begin,
    Decode,
    Extend,
    Prefill,
    Programs,
    Propose,
    Restore,
    Settle,
    Take,
    of_drafts,
    of_rounds,
)
from specjax.engine.repertoire import Repertoire
from specjax.host.request import Demands, Request
from specjax.host.scheduler import DecodePlan, PrefillPlan, Scheduler
from specjax.host.sequence import Sequence
from specjax.host.shapes import Shape, Shapes
from specjax.host.speculation.policy import Policy, Round
from specjax.host.speculation.step_cost import StepCost

TIMED_RUNS = 5
WAIT_SECONDS = 0.1  # for programs, before who asked for a step is heard again


@dataclass
class _InFlight:
    """A part of a step whose outputs are on their way."""

    plan: Part
    variant: Variant
    outputs: jax.Array
    start: float  # seconds, when the step began to be planned
    done: float | None = None  # and when its outputs were seen to be there
    features: Features | None = None  # of a chunk's rows, if one of its requests exports them

    def look(self) -> None:
        """Note the time if the outputs are there."""
        is_ready = self.outputs.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
        if self.done is None and is_ready:
            self.done = time.perf_counter()


@dataclass(frozen=True)
class _Extended:
    """A round that waits for the masks of its drafts."""

    plan: DecodePlan
    variant: Variant
    packed: jax.Array
    draft: Draft
    extension: Extension


class Engine:
    """Runs requests, given as token ids, to completion on a device, by its programs.

    `make_programs` is what makes the device's side of it: `CompiledPrograms`, or what takes the
    same arguments.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: Model,
        drafter: Drafter,
        params: Params,
        policy: Policy,
        verification: Verification | None = None,
        *,
        placement: Placement | None = None,
        make_programs: Callable[..., Programs] = CompiledPrograms,
        show_progress: bool = False,
    ):
        self.config = config
        self.target = target
        self.drafter = drafter
        self._max_drafts = max(policy.choices)
        draft_slots = drafter.draft_slots(self._max_drafts)
        config.check_budgets(self._max_drafts, draft_slots)
        self.scheduler = Scheduler(
            config,
            policy,
            draft_slots=draft_slots,
            num_snapshots=config.num_snapshots if is_recurrent(target) else None,
        )
        self.layout = Layout(
            config.max_num_seqs, config.max_model_len, config.pages_per_seq, target.vocab_size
        )
        self.programs = make_programs(
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
            self.programs, config, target.vocab_size, is_recurrent=is_recurrent(target)
        )
        self._timed: set[Shape] = set()  # rounds whose times the policy knows
        self._recorder = Recorder()
        self._in_flight: list[_InFlight] = []
        self._start_time = 0.0  # of the step, in seconds
        self._done_time = 0.0  # of the last results that were read
        self._read_time: float | None = None  # and when that was, unless more has been launched
        self._compile_seconds = 0.0  # as of then
        self._other_ms = 0.0  # of chunks, since the last round that was read
        self._num_steps = 0
        self._is_stepping = threading.Lock()
        self.set_policy(policy, show_progress=show_progress)

    @property
    def params(self) -> Params:
        """The weights in use."""
        return self.programs.params

    @params.setter
    def params(self, params: Params) -> None:
        self.programs.params = params

    def set_policy(self, policy: Policy, *, show_progress: bool = False) -> None:
        """Choose K by `policy` from the next step on, after compiling what it may ask for.

        Raises:
            ValueError: the policy may choose more drafts than the budgets hold, or than recurrent
                states were sized for.
        """
        num_drafts = max(policy.choices)
        self.config.check_budgets(num_drafts, self.drafter.draft_slots(num_drafts))
        if is_recurrent(self.target) and num_drafts > self._max_drafts:
            raise ValueError(
                f"policy: K={num_drafts} does not fit the recurrent cache, whose ring was "
                f"sized for the {self._max_drafts} drafts of num_speculative_tokens when the "
                "engine was built; build it with a larger one"
            )
        shapes = self.scheduler.all_shapes
        if not self.config.exact:
            shapes = Shapes.all_of(self.config, policy.choices)
        has_all = self.repertoire.compile_first(shapes, show_progress=show_progress)
        ((batch, max_k),) = shapes.first.decode
        # Without all of them, the first is timed, and others when they are there.
        self._timed = set(shapes.decode if has_all else [(batch, max_k)])
        policy.begin(partial(self._replay, policy.choices, has_all=has_all))
        if policy.is_learning and not has_all:  # how times grow with K is not to be guessed
            self.repertoire.ask_for((batch, min(policy.choices)))
        self.repertoire.use(shapes)
        self.scheduler.policy, self.scheduler.all_shapes = policy, shapes
        self._look()

    def prepare(self, requests: Iterable[Request], *, show_progress: bool = False) -> None:
        """Have compiled what these requests need of a step that has not been needed before."""
        requests = list(requests)
        # Without those with a grammar, the others go on without its masks.
        others = [r for r in requests if r.params.structured_outputs is None]
        for group in filter(None, (requests, others)):
            needed = self.repertoire.needed({request.demands for request in group})
            self.repertoire.prepare(needed, show_progress=show_progress)

    @property
    def has_work(self) -> bool:
        """Whether any request has not finished."""
        return self.scheduler.has_work or bool(self._in_flight)

    @property
    def unfinished_ids(self) -> Collection[Hashable]:
        """The ids of unfinished requests."""
        return self.scheduler.unfinished_ids

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request; its samples, which fill up as steps are read.

        Raises:
            ValueError: an unfinished request has the same id.
        """
        return self.scheduler.add(request, is_held=True)

    def abort(self, request_id: Hashable) -> list[Sequence]:
        """End a request where it is; its unfinished samples, none if there is no such request."""
        aborted = self.scheduler.abort(request_id)
        self._recorder.record_finished(aborted)
        return aborted

    def step(self) -> list[Sequence]:
        """Launch a step, then read the one before it; the samples that gained tokens or ended.

        If the device fails in a step, those of its requests that brought code of their own (logits
        processors) end with the error, and all others run their tokens again.

        Raises:
            Exception: the step failed, and no request could have been the cause; all are dropped.
            RuntimeError: another thread is in the middle of a step; nothing has changed.
        """
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
        self._start_time = time.perf_counter()
        previous, self._in_flight = self._in_flight, []
        for step in previous:
            step.look()
        launched: list[_InFlight | _Extended] = []
        touched = self._look()
        parts = [step.plan for step in previous]
        with jax.profiler.StepTraceAnnotation("specjax", step_num=self._num_steps):
            with self._recorder.time("host"):
                plan = self.scheduler.schedule()
            if not plan and not previous and self.scheduler.held:
                self.programs.wait(WAIT_SECONDS)
            try:
                if plan:
                    self._recorder.record_launch(plan, len(previous) > 0)
                    parts += plan.parts
                    with self._recorder.time("host"):
                        for part in plan.parts:
                            launched.append(self._launch(part))
                for step in previous:
                    touched += self._read(step)
                for step in launched:
                    if isinstance(step, _Extended):
                        step = self._settle(step)
                    if self.config.async_scheduling:
                        self._in_flight.append(step)
                    else:
                        touched += self._read(step)
            except Exception as error:
                touched += self._recover(parts, error)
        return touched

    def drain(self) -> None:
        """Read what is in flight, if nothing else is to be launched."""
        if not self.scheduler.has_work:
            while self._in_flight:
                self.step()

    def land(self) -> list[Sequence]:
        """Read what is in flight and launch nothing; the samples that gained tokens or ended."""
        launched, self._in_flight = self._in_flight, []
        try:
            return [sequence for step in launched for sequence in self._read(step)]
        except Exception as error:
            return self._recover([step.plan for step in launched], error)

    def use(self, params: Params, *, has_new_target: bool, has_new_drafter: bool) -> None:
        """Run with other weights, of the same shapes, from the next step on.

        Nothing may be in flight. What the caches hold is of the weights before, so that it is
        forgotten: requests in residence run their tokens again.
        """
        assert not self._in_flight, "land first"
        self.scheduler.restart()
        self.programs.params = params
        if has_new_target:
            self.scheduler.policy.target_changed()
        if has_new_drafter:
            self.scheduler.policy.drafter_changed()

    def release(self) -> None:
        """Give up the state's memory until `renew`; nothing may be in flight.

        Requests in residence run their tokens again afterwards.
        """
        assert not self._in_flight, "land first"
        self.scheduler.restart()
        self.programs.release()

    def renew(self) -> None:
        """Begin with an empty state after `release`."""
        self.programs.renew()

    def close(self) -> None:
        """Free the device's memory and all programs; nothing runs afterwards."""
        self._in_flight = []
        self.programs.close()

    def reset(self) -> None:
        """Drop all requests and begin anew, as after an interrupt."""
        self._in_flight = []
        self._recorder.record_finished(self.scheduler.drop_all())
        self._forget_state()

    def metrics(self) -> Metrics:
        """The counters now."""
        return self._recorder.snapshot(self.scheduler, self.programs.compilations)

    def _look(self) -> list[Sequence]:
        """Take notice of programs that are ready; the samples whose programs never will be."""
        scheduler, repertoire, failed = self.scheduler, self.repertoire, []
        for request in list(scheduler.held.values()):
            try:
                if repertoire.admits({*scheduler.demands, request.demands}):
                    scheduler.let_in(request)
            except Exception as error:  # of its own, as of a logits processor
                failed += scheduler.fail_all(request, error)
        self._recorder.record_finished(failed)
        scheduler.shapes = repertoire.shapes(repertoire.needed(scheduler.demands))
        if scheduler.policy.is_learning and not self.programs.is_compiling:
            self._time_new_rounds()
        return failed

    def _time_new_rounds(self) -> None:
        """Let the policy know what rounds take that it has not had before."""
        for shape in self.scheduler.shapes.decode:
            if shape not in self._timed:
                self._timed.add(shape)
                self.scheduler.policy.shape_ready(*shape, partial(self._time_padding, *shape))

    def _time_padding(self, batch: int, k: int) -> float:
        """Milliseconds of a round of nobody's requests, which changes nothing."""
        times = []
        for _ in range(TIMED_RUNS + 1):
            start = time.perf_counter()
            launched = self._launch(DecodePlan((), batch, k, k))
            if isinstance(launched, _InFlight):
                jax.block_until_ready(launched.outputs)
            times.append(time.perf_counter() - start)
        return 1e3 * median(times[1:])  # the first also waits for what was launched before

    def _launch(self, plan: Part) -> "_InFlight | _Extended":
        if self._read_time is not None:
            self._recorder.record_gap(time.perf_counter() - self._read_time)
            self._read_time = None
        all_demands = frozenset(sequence.request.demands for sequence in plan.sequences)
        variant = self.repertoire.variant_for(plan, all_demands)
        packed = self.programs.put(pack(plan, self.layout, self._wants(all_demands)))
        if isinstance(plan, PrefillPlan):
            return self._prefill(plan, variant, packed)
        run, batch, k = self.programs.run, plan.batch, plan.k
        whole = Decode(batch, k, variant)
        if whole in self.programs.ready:
            return self._in(plan, variant, run(whole, packed))
        propose = Propose(batch, k, of_drafts(variant))
        if propose not in self.programs.ready:
            propose = Propose(batch, k, Variant())
        draft = run(propose, packed)
        if variant.masks:
            draft.tokens.copy_to_host_async()
        extension = run(Extend(batch, k), packed, draft)
        extended = _Extended(plan, variant, packed, draft, extension)
        if any(sequence.matcher for sequence in plan.sequences):
            return extended
        return self._settle(extended)

    def _prefill(self, plan: PrefillPlan, variant: Variant, packed: jax.Array) -> _InFlight:
        run, batch, width = self.programs.run, plan.batch, plan.width
        self._admit(plan)
        self._move(Restore(batch), plan, is_taken=False)
        # What stands before a first token is known: nothing.
        masks = self._masks(plan, None) if variant.masks else None
        extension = run(Prefill(batch, width), packed)
        self._move(Take(batch), plan, is_taken=True)
        outputs = run(Begin(batch, width, variant), packed, extension, masks)
        launched = self._in(plan, variant, outputs)
        if any(chunk.sequence.request.exports_features for chunk in plan.chunks):
            launched.features = extension.features
        return launched

    def _admit(self, plan: PrefillPlan) -> None:
        new = [chunk.sequence for chunk in plan.chunks if chunk.is_first]
        if new:
            packed = pack_admissions(new, plan.batch, self.layout)
            self.programs.run(Admit(plan.batch), self.programs.put(packed))

    def _move(self, key: Restore | Take, plan: PrefillPlan, *, is_taken: bool) -> None:
        """Copy recurrent states to snapshots that are taken, or from those to go on from."""
        chunks = [c for c in plan.chunks if (c.taken if is_taken else c.restored) is not None]
        if chunks:
            sizes = plan.batch, self.config.num_snapshots, self.layout
            packed = pack_snapshots(chunks, *sizes, is_taken=is_taken)
            self.programs.run(key, self.programs.put(packed))

    def _settle(self, step: _Extended) -> _InFlight:
        plan, variant, masks = step.plan, step.variant, None
        if variant.masks:
            has_grammar = any(sequence.matcher for sequence in plan.sequences)
            masks = self._masks(plan, np.asarray(step.draft.tokens) if has_grammar else None)
        arguments = step.packed, step.draft, step.extension, masks
        outputs = self.programs.run(Settle(plan.batch, plan.k, variant), *arguments)
        return self._in(plan, variant, outputs)

    def _masks(self, plan: Part, drafts: np.ndarray | None) -> Any:
        return self.programs.put(pack_masks(plan, drafts, self.layout))

    def _read(self, step: _InFlight) -> list[Sequence]:
        with self._recorder.time("wait"):
            packed = jax.device_get(step.outputs)
        milliseconds = self._time(step)
        if isinstance(step.plan, PrefillPlan):
            self._other_ms += milliseconds or 0.0
        with self._recorder.time("host"):
            has_raw = self.config.logprobs_mode == "both"
            rows = unpack_outputs(packed, step.plan, step.variant, has_raw=has_raw)
            if step.features is not None:
                export_features(step.plan, jax.device_get(step.features))
            num_kept, touched = self.scheduler.commit(step.plan, rows)
            self._recorder.record_part(step.plan, rows, num_kept)
            if milliseconds is not None:
                self.repertoire.note(step.plan, step.variant, milliseconds)
            if isinstance(step.plan, DecodePlan) and any(num_kept):
                self._teach(step.plan, num_kept, milliseconds)
        self._recorder.record_finished(touched)
        return touched

    def _replay(self, ks: tuple[int, ...], *, has_all: bool) -> StepCost:
        """What rounds cost, by running them. Forgets all cached prefixes if all can be run."""
        batches, exact = self.config.decode_batches, self.config.exact
        if exact:  # one shape
            return StepCost({batches[0]: {k: 1.0 for k in ks}})
        if not has_all:
            max_k = max(ks)
            cost = StepCost({batches[-1]: {max_k: self._time_padding(batches[-1], max_k)}})
            return cost.widened(ks, batches)
        if self.has_work:
            raise ValueError(
                "policy: it has rounds timed before it begins, but requests are running; let them "
                "finish, or abort them, before set_policy"
            )
        self.scheduler.prefixes.clear()
        plain = of_rounds(self.repertoire.variants[0])
        return self.programs.time_rounds(plain, ks, batches)

    def _time(self, step: _InFlight) -> float | None:
        """Milliseconds of a part of a step that has just been read; None if they mean nothing.

        The device began when it had finished what was launched before, or later, when the step was
        planned. What the host did meanwhile counts as far as the device had to wait for it.
        """
        self._read_time = time.perf_counter()
        done = self._read_time if step.done is None else step.done
        milliseconds = 1e3 * (done - max(self._done_time, step.start))
        self._done_time = done
        before, self._compile_seconds = self._compile_seconds, self.programs.compilations.seconds
        has_compiled = self._compile_seconds != before
        # A tiny program may be done at once, before the one it came after has been read.
        return None if has_compiled or milliseconds <= 0 else milliseconds

    def _teach(self, plan: DecodePlan, num_kept: list[int], milliseconds: float | None) -> None:
        """Let the policy see what came of a round."""
        policy, k = self.scheduler.policy, plan.num_drafts
        if not policy.is_learning or k not in policy.choices:  # of the policy before
            return
        if self.config.exact or plan.k != k:
            milliseconds = None  # they are those of another K
        pairs = [(s, n) for s, n in zip(plan.sequences, num_kept, strict=True) if n]
        verdicts = Counter(sequence.verdict(k, n) for sequence, n in pairs)
        num_context = sum(len(sequence.token_ids) - n for sequence, n in pairs)
        other_ms, self._other_ms = self._other_ms, 0.0
        policy.observe(Round(plan.batch, k, num_context, verdicts, milliseconds, other_ms))

    def _recover(self, parts: list[Part], error: Exception) -> list[Sequence]:
        """Go on without the requests that may have made the device fail, whose state is lost."""
        suspects = {
            sequence: None
            for part in parts
            for sequence in part.sequences
            if sequence.request.processor >= 0 and not sequence.is_finished
        }
        if not suspects:
            self.reset()
            raise error
        for sequence in suspects:
            self.scheduler.fail(sequence, error)
        self._recorder.record_finished(suspects)
        self._in_flight = []
        self.scheduler.restart()
        self._forget_state()
        return list(suspects)

    def _forget_state(self) -> None:
        """Begin with a new state, for which the old one makes room."""
        self.programs.release()
        self.programs.renew()

    def _in(self, plan: Part, variant: Variant, outputs: jax.Array) -> _InFlight:
        outputs.copy_to_host_async()
        launched = _InFlight(plan, variant, outputs, self._start_time)
        launched.look()  # a backend may run a program as it is launched
        return launched

    def _wants(self, all_demands: Collection[Demands]) -> Wants:
        """What a step has to do for any of its requests; everything where all run the same."""
        if self.config.exact:
            return Wants.EDITS | Wants.LOGPROBS
        wants = Wants(0)
        if any(demands.edits for demands in all_demands):
            wants |= Wants.EDITS
        if any(demands.logprobs is not None for demands in all_demands):
            wants |= Wants.LOGPROBS
        return wants
