"""Launches the parts of a step: packs their inputs, and runs the programs of their shape."""

import time
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import jax
import numpy as np

from specjax.config import EngineConfig
from specjax.device.drafters.drafter import Variant
from specjax.device.extras import Extras
from specjax.device.inputs import DecodeInputs
from specjax.device.layout import Layout
from specjax.device.models.model import Features
from specjax.device.step import Extension
from specjax.device.verification import Draft
from specjax.engine.admissions import pack_admissions
from specjax.engine.batch import Part, pack, pack_masks, pack_snapshots
from specjax.engine.port import Programs
from specjax.engine.programs import (
    Admit,
    Begin,
    Decode,
    Extend,
    Joined,
    Observe,
    Prefill,
    ProcessFirst,
    ProcessRound,
    Propose,
    Restore,
    Settle,
    Take,
)
from specjax.engine.repertoire import Repertoire
from specjax.engine.variants import of_begin, of_drafts, of_settle
from specjax.host.plans import DecodePlan, PrefillPlan
from specjax.host.request import Demands


@dataclass
class InFlight:
    """A part of a step that was launched and not read yet."""

    plan: Part
    variant: Variant
    outputs: jax.Array
    start: float  # seconds, when planning of the step began
    launched: float  # when its program was about to be launched
    done: float | None = None  # when its outputs were first seen to be ready
    features: Features | None = None  # of a chunk's rows, if one of its requests exports them
    is_joined: bool = False  # whether chunks and a round were one program
    joins: Joined | None = None  # of a round: the program that could have run the chunks, too

    def look(self) -> None:
        """Note the time if the outputs are ready."""
        is_ready = self.outputs.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
        if self.done is None and is_ready:
            self.done = time.perf_counter()


@dataclass(frozen=True)
class Extended:
    """A round whose masks are still to be made."""

    plan: DecodePlan
    variant: Variant
    packed: np.ndarray
    draft: Draft
    extension: Extension
    logits: jax.Array  # the extension's, after logits processors
    start: float  # seconds, as of `InFlight`
    launched: float


@dataclass(frozen=True)
class Deferred:
    """Rounds without drafts, of the same requests, that the drafter has not observed."""

    packed: np.ndarray  # of the last of them
    count: int


def note_ends(previous: Iterable[InFlight], launched: list[InFlight | Extended]) -> None:
    """Note when earlier programs ended if later ones ran while they were launched, as on a CPU."""
    programs = [step for step in launched if isinstance(step, InFlight)]
    for step in programs:
        if step.done is None:
            continue
        for earlier in (*previous, *programs):
            if earlier.launched < step.launched:
                earlier.done = min(step.launched, earlier.done or step.launched)


class Launcher:
    """Runs plans on a device; never waits for it, except for drafts that a grammar must see."""

    def __init__(
        self, config: EngineConfig, layout: Layout, programs: Programs, repertoire: Repertoire
    ):
        self._config, self._layout = config, layout
        self._programs, self._repertoire = programs, repertoire
        self._deferred: Deferred | None = None

    def launch_all(
        self, parts: SequenceOf[Part], page_tables: np.ndarray, start: float
    ) -> list[InFlight | Extended]:
        """Launch the parts of a step, in one program if there is one, as `launch` does."""
        joined = self._joined_of(parts)
        if joined is not None and joined in self._programs.ready:
            return self._launch_joined(joined, parts, page_tables, start)
        launched = [self.launch(part, page_tables, start) for part in parts]
        if joined is not None and isinstance(launched[-1], InFlight):
            launched[-1].joins = joined
        return launched

    def launch(self, plan: Part, page_tables: np.ndarray, start: float) -> InFlight | Extended:
        """Launch a part of a step whose planning began at `start`, in seconds.

        A round with grammars is not complete before `settle`.
        """
        launched = time.perf_counter()
        variant = self._repertoire.variant_for(plan, plan.demands)
        packed = self._pack(plan, page_tables)
        self._defer(plan, packed)
        if isinstance(plan, PrefillPlan):
            outputs, extension = self._prefill(plan, variant, packed)
            step = self._in_flight(plan, variant, outputs, start, launched)
            if exports_features(plan):
                step.features = extension.features
            return step
        run, batch, k = self._programs.run, plan.batch, plan.k
        whole = Decode(batch, k, variant)
        if whole in self._programs.ready:
            return self._in_flight(plan, variant, run(whole, packed), start, launched)
        propose = Propose(batch, k, of_drafts(variant))
        if propose not in self._programs.ready:
            propose = Propose(batch, k, Variant())
        draft = run(propose, packed)
        if variant.masks:
            draft.tokens.copy_to_host_async()
        extension = run(Extend(batch, k), packed, draft)
        logits = extension.logits
        if variant.processors:
            logits = run(ProcessRound(batch, k, variant.processors), packed, draft, logits)
        extended = Extended(plan, variant, packed, draft, extension, logits, start, launched)
        if any(sequence.matcher for sequence in plan.sequences):
            return extended
        return self.settle(extended)

    def _defer(self, plan: Part, packed: np.ndarray) -> None:
        """Leave it to a later program to observe a round, if the drafter may. Before any other step
        all must have been observed: it may draft, or use pages that requests have given back."""
        has_drafts = isinstance(plan, PrefillPlan) or plan.k > 0
        most = 0 if has_drafts else self._programs.max_deferred(plan.batch)
        before, count = self._deferred, 0
        if before is not None and before.count < most and self._has_rows_of(packed, before.packed):
            count = before.count
        else:
            self._observe_deferred()
        if most:
            self._deferred = Deferred(packed, count + 1)

    def _has_rows_of(self, packed: np.ndarray, before: np.ndarray) -> bool:
        """Whether two packed rounds have the same requests in the same rows."""
        views = self._layout.packing(DecodeInputs).views
        return np.array_equal(views(packed).slots, views(before).slots)

    def _observe_deferred(self) -> None:
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self._programs.run(Observe(len(deferred.packed)), deferred.packed)

    def settle(self, step: Extended) -> InFlight:
        """Launch the last piece of a round; waits for the drafts if a grammar has to see them."""
        plan, variant, masks = step.plan, step.variant, None
        if variant.masks:
            has_grammar = any(sequence.matcher for sequence in plan.sequences)
            drafts = np.asarray(step.draft.tokens) if has_grammar else None
            masks = pack_masks(plan, drafts, self._layout)
        arguments = step.packed, step.draft, step.extension, step.logits, masks
        settle = Settle(plan.batch, plan.k, of_settle(variant))
        outputs = self._programs.run(settle, *arguments)
        return self._in_flight(plan, variant, outputs, step.start, step.launched)

    def extras(self, all_demands: Collection[Demands]) -> Extras:
        """What any request of a step asks for; in exact mode everything: all steps are alike."""
        if self._config.exact:
            return Extras.EDITS | Extras.MASKS | Extras.LOGPROBS
        extras = Extras(0)
        if any(demands.edits for demands in all_demands):
            extras |= Extras.EDITS
        if any(demands.masks for demands in all_demands):
            extras |= Extras.MASKS
        if any(demands.logprobs is not None for demands in all_demands):
            extras |= Extras.LOGPROBS
        return extras

    def _pack(self, plan: Part, page_tables: np.ndarray) -> np.ndarray:
        return pack(plan, page_tables, self._layout, self.extras(plan.demands))

    def _joined_of(self, parts: SequenceOf[Part]) -> Joined | None:
        """The program that runs chunks and a round; None if they must be apart, or there is one.

        They are apart in exact mode, as all steps must be alike there, and if the host acts between
        the pieces of a round, or needs more of a chunk than its outputs.
        """
        if len(parts) < 2 or self._config.exact:
            return None
        chunks, round_ = parts
        assert isinstance(chunks, PrefillPlan) and isinstance(round_, DecodePlan)
        variant, others = (self._repertoire.variant_for(part, part.demands) for part in parts)
        whole = Decode(round_.batch, round_.k, others)
        is_plain = not variant.masks and not variant.processors
        if not is_plain or whole not in self._programs.ready or exports_features(chunks):
            return None
        return Joined(Begin(chunks.batch, chunks.width, variant), whole)

    def _launch_joined(
        self, joined: Joined, parts: SequenceOf[Part], page_tables: np.ndarray, start: float
    ) -> list[InFlight | Extended]:
        launched, (chunks, _) = time.perf_counter(), parts
        assert isinstance(chunks, PrefillPlan)
        packed = [self._pack(part, page_tables) for part in parts]
        self._observe_deferred()
        self._admit(chunks)
        self._move(Restore(chunks.batch), chunks, is_taken=False)
        outputs = self._programs.run(joined, *packed)
        self._move(Take(chunks.batch), chunks, is_taken=True)
        variants = joined.begin.variant, joined.decode.variant
        steps = [
            self._in_flight(*each, start, launched)
            for each in zip(parts, variants, outputs, strict=True)
        ]
        for step in steps:
            step.is_joined = True
        return [*steps]

    def _prefill(
        self, plan: PrefillPlan, variant: Variant, packed: np.ndarray
    ) -> tuple[jax.Array, Extension]:
        run, batch, width = self._programs.run, plan.batch, plan.width
        self._admit(plan)
        self._move(Restore(batch), plan, is_taken=False)
        # Nothing comes before a first token, so its grammar's masks can be made now.
        masks = pack_masks(plan, None, self._layout) if variant.masks else None
        extension = run(Prefill(batch, width), packed)
        logits = extension.logits
        if variant.processors:
            logits = run(ProcessFirst(batch, variant.processors), packed, logits)
        begin = Begin(batch, width, of_begin(variant))
        outputs = run(begin, packed, extension, logits, masks)
        self._move(Take(batch), plan, is_taken=True)
        return outputs, extension

    def _admit(self, plan: PrefillPlan) -> None:
        new = [chunk.sequence for chunk in plan.chunks if chunk.is_first]
        if new:
            packed = pack_admissions(new, plan.batch, self._layout)
            self._programs.run(Admit(plan.batch), packed)

    def _move(self, program: Restore | Take, plan: PrefillPlan, *, is_taken: bool) -> None:
        """Copy recurrent states to snapshots, or restore them from snapshots."""
        chunks = [c for c in plan.chunks if (c.taken if is_taken else c.restored) is not None]
        if chunks:
            packed = pack_snapshots(chunks, plan.batch, self._layout, is_taken=is_taken)
            self._programs.run(program, packed)

    def _in_flight(
        self, plan: Part, variant: Variant, outputs: jax.Array, start: float, launched: float
    ) -> InFlight:
        outputs.copy_to_host_async()
        step = InFlight(plan, variant, outputs, start, launched)
        step.look()  # a backend may run a program as it is launched
        return step


def exports_features(plan: PrefillPlan) -> bool:
    """Whether any of its requests wants the features of its prompt."""
    return any(chunk.sequence.request.exports_features for chunk in plan.chunks)
