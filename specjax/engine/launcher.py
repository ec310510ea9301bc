"""Launches the parts of a step: packs their inputs, and runs the programs of their shape."""

import time
from collections.abc import Collection
from dataclasses import dataclass

import jax
import numpy as np

from specjax.config import EngineConfig
from specjax.device.drafters.drafter import Variant
from specjax.device.models.model import Features
from specjax.device.step import Extension
from specjax.device.verification import Draft
from specjax.device.wanted import Wants
from specjax.engine.admissions import pack_admissions
from specjax.engine.batch import Part, pack, pack_masks, pack_snapshots
from specjax.engine.layout import Layout
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
)
from specjax.engine.repertoire import Repertoire
from specjax.host.plans import DecodePlan, PrefillPlan
from specjax.host.request import Demands


@dataclass
class InFlight:
    """A part of a step that was launched and not read yet."""

    plan: Part
    variant: Variant
    outputs: jax.Array
    start: float  # seconds, when planning of the step began
    done: float | None = None  # when its outputs were first seen to be ready
    features: Features | None = None  # of a chunk's rows, if one of its requests exports them

    def look(self) -> None:
        """Note the time if the outputs are ready."""
        is_ready = self.outputs.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
        if self.done is None and is_ready:
            self.done = time.perf_counter()


@dataclass
class Extended:
    """A round whose masks are still to be made."""

    plan: DecodePlan
    variant: Variant
    packed: np.ndarray
    draft: Draft
    extension: Extension
    start: float  # seconds, as of `InFlight`
    done: float | None = None


class Launcher:
    """Runs plans on a device; never waits for it, except for drafts that a grammar must see."""

    def __init__(
        self, config: EngineConfig, layout: Layout, programs: Programs, repertoire: Repertoire
    ):
        self._config, self._layout = config, layout
        self._programs, self._repertoire = programs, repertoire

    def launch(self, plan: Part, page_tables: np.ndarray, start: float) -> InFlight | Extended:
        """Launch a part of a step whose planning began at `start`, in seconds.

        A round with grammars is not complete before `settle`.
        """
        variant = self._repertoire.variant_for(plan, plan.demands)
        packed = pack(plan, page_tables, self._layout, self.wants(plan.demands))
        if isinstance(plan, PrefillPlan):
            return self._prefill(plan, variant, packed, start)
        run, batch, k = self._programs.run, plan.batch, plan.k
        whole = Decode(batch, k, variant)
        if whole in self._programs.ready:
            return self._in_flight(plan, variant, run(whole, packed), start)
        propose = Propose(batch, k, of_drafts(variant))
        if propose not in self._programs.ready:
            propose = Propose(batch, k, Variant())
        draft = run(propose, packed)
        if variant.masks:
            draft.tokens.copy_to_host_async()
        extension = run(Extend(batch, k), packed, draft)
        extended = Extended(plan, variant, packed, draft, extension, start)
        if any(sequence.matcher for sequence in plan.sequences):
            return extended
        return self.settle(extended)

    def settle(self, step: Extended) -> InFlight:
        """Launch the last piece of a round; waits for the drafts if a grammar has to see them."""
        plan, variant, masks = step.plan, step.variant, None
        if variant.masks:
            has_grammar = any(sequence.matcher for sequence in plan.sequences)
            drafts = np.asarray(step.draft.tokens) if has_grammar else None
            masks = pack_masks(plan, drafts, self._layout)
        arguments = step.packed, step.draft, step.extension, masks
        outputs = self._programs.run(Settle(plan.batch, plan.k, variant), *arguments)
        return self._in_flight(plan, variant, outputs, step.start)

    def wants(self, all_demands: Collection[Demands]) -> Wants:
        """What any request of a step wants; in exact mode everything: all steps are alike."""
        if self._config.exact:
            return Wants.EDITS | Wants.LOGPROBS
        wants = Wants(0)
        if any(demands.edits for demands in all_demands):
            wants |= Wants.EDITS
        if any(demands.logprobs is not None for demands in all_demands):
            wants |= Wants.LOGPROBS
        return wants

    def _prefill(
        self, plan: PrefillPlan, variant: Variant, packed: np.ndarray, start: float
    ) -> InFlight:
        run, batch, width = self._programs.run, plan.batch, plan.width
        self._admit(plan)
        self._move(Restore(batch), plan, is_taken=False)
        # Nothing comes before a first token, so its grammar's masks can be made now.
        masks = pack_masks(plan, None, self._layout) if variant.masks else None
        extension = run(Prefill(batch, width), packed)
        outputs = run(Begin(batch, width, variant), packed, extension, masks)
        self._move(Take(batch), plan, is_taken=True)
        launched = self._in_flight(plan, variant, outputs, start)
        if any(chunk.sequence.request.exports_features for chunk in plan.chunks):
            launched.features = extension.features
        return launched

    def _admit(self, plan: PrefillPlan) -> None:
        new = [chunk.sequence for chunk in plan.chunks if chunk.is_first]
        if new:
            packed = pack_admissions(new, plan.batch, self._layout)
            self._programs.run(Admit(plan.batch), packed)

    def _move(self, key: Restore | Take, plan: PrefillPlan, *, is_taken: bool) -> None:
        """Copy recurrent states to snapshots, or restore them from snapshots."""
        chunks = [c for c in plan.chunks if (c.taken if is_taken else c.restored) is not None]
        if chunks:
            sizes = plan.batch, self._config.num_snapshots, self._layout
            packed = pack_snapshots(chunks, *sizes, is_taken=is_taken)
            self._programs.run(key, packed)

    def _in_flight(
        self, plan: Part, variant: Variant, outputs: jax.Array, start: float
    ) -> InFlight:
        outputs.copy_to_host_async()
        launched = InFlight(plan, variant, outputs, start)
        launched.look()  # a backend may run a program as it is launched
        return launched
