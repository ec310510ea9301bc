"""Launches a step's chunks and round: packs their inputs, and runs the programs for them."""

import time
from collections.abc import Sequence as SequenceOf

import jax
import numpy as np

from specjax.config import EngineConfig
from specjax.device.drafters.drafter import Variant
from specjax.device.layout import Layout
from specjax.device.placement import on_one
from specjax.device.step import Extension
from specjax.engine.admissions import pack_admissions
from specjax.engine.batch import EVERY, Part, extras_of, pack, pack_masks, pack_snapshots
from specjax.engine.deferred_rounds import DeferredRounds
from specjax.engine.in_flight import Extended, InFlight
from specjax.engine.port import Programs
from specjax.engine.programs import (
    Admit,
    Begin,
    Decode,
    Extend,
    Joined,
    Prefill,
    ProcessFirst,
    ProcessRound,
    Propose,
    Restore,
    Settle,
    SplitRound,
    Take,
)
from specjax.engine.repertoire import Repertoire
from specjax.engine.round_clock import RoundClock
from specjax.engine.variants import of_begin, of_drafts, of_settle
from specjax.host.plans import DecodePlan, PrefillPlan
from specjax.host.speculation.rounds import SplitShape


class Launcher:
    """Launches plans on a device. It waits for the device only if a grammar must see the drafts."""

    def __init__(
        self,
        config: EngineConfig,
        layout: Layout,
        programs: Programs,
        repertoire: Repertoire,
        clock: RoundClock,
    ):
        self._config, self._layout = config, layout
        self._programs, self._repertoire, self._clock = programs, repertoire, clock
        self._deferred = DeferredRounds(programs, layout)

    def launch(self, parts: SequenceOf[Part], page_tables: np.ndarray) -> list[InFlight | Extended]:
        """Launch a step's parts: chunks, and a round or the two parts of a split round.

        One part of a split round has the requests that draft, and the other part has the requests
        that do not. Both run as one program if this program is compiled. The same holds for chunks
        and a round that is not split. `page_tables` is `Residents.page_tables`. A round with
        grammars is returned as an `Extended`, which `settle` completes.
        """
        *before, last = parts
        if isinstance(last, DecodePlan) and last.is_rest and (split := self._split_of(parts)):
            chunks = [self._launch(part, page_tables) for part in before[:-1]]
            return [*chunks, *self._launch_split(split, parts[-2:], page_tables)]
        is_pair = len(parts) == 2 and isinstance(parts[0], PrefillPlan)
        joined = self._joined_of(parts) if is_pair else None
        if joined is not None and joined in self._programs.ready:
            return self._launch_joined(joined, parts, page_tables)
        launched = [self._launch(part, page_tables) for part in parts]
        if joined is not None and isinstance(launched[-1], InFlight):
            launched[-1].joins = joined
        return launched

    def _launch(self, plan: Part, page_tables: np.ndarray) -> InFlight | Extended:
        launched = time.perf_counter()
        variant = self._repertoire.variant_for(plan, plan.demands)
        packed = self._pack(plan, page_tables)
        self._deferred.prepare_for(plan, packed)
        if isinstance(plan, DecodePlan):
            return self._decode(plan, variant, packed, launched)
        self._admit(plan)
        outputs, extension = self._prefill(plan, variant, packed)
        step = self._in_flight(plan, variant, outputs, launched)
        if exports_features(plan):
            step.features = jax.tree.map(on_one, extension.features)
        return step

    def _launch_joined(
        self, joined: Joined, parts: SequenceOf[Part], page_tables: np.ndarray
    ) -> list[InFlight | Extended]:
        launched, (chunks, _) = time.perf_counter(), parts
        assert isinstance(chunks, PrefillPlan)
        packed = [self._pack(part, page_tables) for part in parts]
        self._deferred.observe()
        self._admit(chunks)
        outputs = self._programs.run(joined, *packed)
        self._take(chunks)
        variants = joined.begin.variant, joined.decode.variant
        one, other = (
            self._in_flight(*each, launched) for each in zip(parts, variants, outputs, strict=True)
        )
        other.shares_program = True
        return [one, other]

    def _launch_split(
        self, split: SplitRound, parts: SequenceOf[Part], page_tables: np.ndarray
    ) -> list[InFlight | Extended]:
        launched, (_, rest) = time.perf_counter(), parts
        assert isinstance(rest, DecodePlan)
        packed = [self._pack(part, page_tables) for part in parts]
        self._deferred.observe()
        outputs = self._programs.run(split, *packed)
        one, other = (
            self._in_flight(part, split.variant, out, launched)
            for part, out in zip(parts, outputs, strict=True)
        )
        one.rest, other.shares_program = rest, True
        return [one, other]

    def _split_of(self, parts: SequenceOf[Part]) -> SplitRound | None:
        """Return the program of a round in which only some requests draft; None if not compiled."""
        *_, drafting, rest = parts
        assert isinstance(drafting, DecodePlan)
        ready = self._repertoire.ready_for(drafting.demands | rest.demands)
        return ready.splits.get(SplitShape(drafting.batch, drafting.k, rest.batch))

    def _joined_of(self, parts: SequenceOf[Part]) -> Joined | None:
        """Return the program that runs chunks and a round together; None if they must be separate.

        They are separate with the option `exact`, with which all steps run the same programs. They
        are also separate if the chunks need grammar masks or logits processors, if a request of
        the chunks exports hidden states, or if the round's program `Decode` is not compiled.
        """
        if self._config.exact:
            return None
        chunks, round_ = parts
        assert isinstance(chunks, PrefillPlan) and isinstance(round_, DecodePlan)
        variant, others = (self._repertoire.variant_for(part, part.demands) for part in parts)
        whole = Decode(round_.batch, round_.k, others)
        is_plain = not variant.masks and not variant.processors
        if not is_plain or whole not in self._programs.ready or exports_features(chunks):
            return None
        return Joined(Begin(chunks.batch, chunks.width, variant), whole)

    def _decode(
        self, plan: DecodePlan, variant: Variant, packed: np.ndarray, launched: float
    ) -> InFlight | Extended:
        """Launch a round as one program, or as several programs."""
        run, batch, k = self._programs.run, plan.batch, plan.k
        whole = Decode(batch, k, variant)
        if whole in self._programs.ready:
            return self._in_flight(plan, variant, run(whole, packed), launched)
        propose = Propose(batch, k, of_drafts(variant))
        if propose not in self._programs.ready:
            propose = Propose(batch, k, Variant())
        draft = run(propose, packed)
        if variant.masks:
            on_one(draft.tokens).copy_to_host_async()
        extension = run(Extend(batch, k), packed, draft)
        logits = extension.logits
        if variant.processors:
            logits = run(ProcessRound(batch, k, variant.processors), packed, draft, logits)
        extended = Extended(plan, variant, packed, draft, extension, logits, launched)
        return extended if extended.has_grammar else self.settle(extended)

    def settle(self, step: Extended) -> InFlight:
        """Launch `Settle`, the last program of a round.

        Wait for the drafts if a grammar needs them.
        """
        plan, variant, masks = step.plan, step.variant, None
        if variant.masks:
            drafts = np.asarray(on_one(step.draft.tokens)) if step.has_grammar else None
            masks = pack_masks(plan, drafts, self._layout)
        program = Settle(plan.batch, plan.k, of_settle(variant))
        arguments = step.packed, step.draft, step.extension, step.logits, masks
        outputs = self._programs.run(program, *arguments)
        return self._in_flight(plan, variant, outputs, step.launched)

    def _prefill(
        self, plan: PrefillPlan, variant: Variant, packed: np.ndarray
    ) -> tuple[jax.Array, Extension]:
        run, batch, width = self._programs.run, plan.batch, plan.width
        # A first token depends on no drafts, so its masks can be made now.
        masks = pack_masks(plan, None, self._layout) if variant.masks else None
        extension = run(Prefill(batch, width), packed)
        logits = extension.logits
        if variant.processors:
            logits = run(ProcessFirst(batch, variant.processors), packed, logits)
        begin = Begin(batch, width, of_begin(variant))
        outputs = run(begin, packed, extension, logits, masks)
        self._take(plan)
        return outputs, extension

    def _admit(self, plan: PrefillPlan) -> None:
        """Write new requests to the state, and restore the snapshots from which chunks resume."""
        new = [chunk.sequence for chunk in plan.chunks if chunk.is_first]
        if new:
            packed = pack_admissions(new, plan.batch, self._layout)
            self._programs.run(Admit(plan.batch), packed)
        restored = [chunk for chunk in plan.chunks if chunk.restored is not None]
        if restored:
            packed = pack_snapshots(restored, plan.batch, self._layout, is_taken=False)
            self._programs.run(Restore(plan.batch), packed)

    def _take(self, plan: PrefillPlan) -> None:
        """Take the snapshots of recurrent states that chunks of the plan ask for."""
        taken = [chunk for chunk in plan.chunks if chunk.taken is not None]
        if taken:
            packed = pack_snapshots(taken, plan.batch, self._layout, is_taken=True)
            self._programs.run(Take(plan.batch), packed)

    def _pack(self, plan: Part, page_tables: np.ndarray) -> np.ndarray:
        extras = EVERY if self._config.exact else extras_of(plan.demands)  # exact: all the same
        return pack(plan, page_tables, self._layout, extras)

    def _in_flight(
        self, plan: Part, variant: Variant, outputs: jax.Array, launched: float
    ) -> InFlight:
        outputs.copy_to_host_async()
        step = InFlight(plan, variant, outputs, self._clock.start, launched)
        step.look()  # some backends run a program while launching it
        return step


def exports_features(plan: PrefillPlan) -> bool:
    """Return whether any request of the plan exports the hidden states of its chunks."""
    return any(chunk.sequence.request.exports_features for chunk in plan.chunks)
