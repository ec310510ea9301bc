"""The programs of a step. Each is a value: its fields are compiled in, and `run` is its function.

Chunks run `Admit`, `Prefill` and `Begin`. A round runs `Decode`, or its three pieces `Propose`,
`Extend` and `Settle`. Other programs copy recurrent states, let the drafter catch up, and run
logits processors.
"""

from dataclasses import dataclass
from typing import Any

import jax

from specjax.device.deferral import observe_deferred
from specjax.device.drafters.drafter import Params, Variant
from specjax.device.edits import Processors
from specjax.device.inputs import (
    AdmitInputs,
    DecodeInputs,
    PrefillInputs,
    SnapshotInputs,
    StepModel,
)
from specjax.device.joined import joined_step
from specjax.device.processors import process_first, process_round
from specjax.device.state import EngineState
from specjax.device.step import (
    Extension,
    StepOutputs,
    admit,
    begin,
    decode_step,
    extend,
    prefill,
    propose,
    restore,
    settle,
    take,
)
from specjax.device.verification import Draft
from specjax.engine.tracing import Packed, Program, Traces


@dataclass(frozen=True, slots=True)
class Admit(Program):
    """Write newly admitted requests to their slots: (admissions) -> None."""

    batch: int
    inputs = AdmitInputs

    def run(
        self, params: Params, state: EngineState, inputs: AdmitInputs, *, model: StepModel
    ) -> tuple[EngineState, None]:
        return admit(state, inputs), None


@dataclass(frozen=True, slots=True)
class Restore(Program):
    """Copy snapshots to recurrent states of slots: (moves) -> None."""

    batch: int
    inputs = SnapshotInputs

    def run(
        self, params: Params, state: EngineState, inputs: SnapshotInputs, *, model: StepModel
    ) -> tuple[EngineState, None]:
        return restore(state, inputs, model=model), None


@dataclass(frozen=True, slots=True)
class Take(Program):
    """Copy recurrent states of slots to snapshots: (moves) -> None."""

    batch: int
    inputs = SnapshotInputs

    def run(
        self, params: Params, state: EngineState, inputs: SnapshotInputs, *, model: StepModel
    ) -> tuple[EngineState, None]:
        return take(state, inputs, model=model), None


@dataclass(frozen=True, slots=True)
class Prefill(Program):
    """Run the target over a chunk of each prompt: (chunks) -> Extension."""

    batch: int
    width: int
    inputs = PrefillInputs

    def run(
        self, params: Params, state: EngineState, inputs: PrefillInputs, *, model: StepModel
    ) -> tuple[EngineState, Extension]:
        return prefill(params, state, inputs, model=model, width=self.width)


@dataclass(frozen=True, slots=True)
class ProcessFirst(Program):
    """Run logits processors between `Prefill` and `Begin`: (chunks, logits) -> logits."""

    batch: int
    processors: Processors
    inputs = PrefillInputs

    def handed(self, traces: Traces) -> tuple[Any, ...]:
        return (traces.logits(self.batch, 1),)

    def run(
        self,
        params: Params,
        state: EngineState,
        inputs: PrefillInputs,
        logits: jax.Array,
        *,
        model: StepModel,
    ) -> tuple[EngineState, jax.Array]:
        return state, process_first(state, inputs, logits, processors=self.processors)


@dataclass(frozen=True, slots=True)
class Begin(Program):
    """Let the drafter observe the chunks, and sample first tokens.

    (chunks, extension, logits, masks) -> outputs, where `logits` are the extension's or the result
    of `ProcessFirst`; `masks` is None if no request has a grammar.
    """

    batch: int
    width: int
    variant: Variant
    inputs = PrefillInputs

    @property
    def masked_rows(self) -> tuple[int, int]:
        """The first two axes of `masks`: requests, and rows of logits per request."""
        return self.batch, 1

    def handed(self, traces: Traces) -> tuple[Any, ...]:
        extension = traces.result(Prefill(self.batch, self.width))
        return extension, extension.logits, traces.masks(*self.masked_rows)

    def run(
        self,
        params: Params,
        state: EngineState,
        inputs: PrefillInputs,
        extension: Extension,
        logits: jax.Array,
        masks: jax.Array,
        *,
        model: StepModel,
    ) -> tuple[EngineState, StepOutputs]:
        arguments = inputs, extension, logits, masks
        return begin(params, state, *arguments, model=model, variant=self.variant)


@dataclass(frozen=True, slots=True)
class Decode(Program):
    """Run a whole round: (round) -> outputs."""

    batch: int
    k: int
    variant: Variant
    inputs = DecodeInputs

    def run(
        self, params: Params, state: EngineState, inputs: DecodeInputs, *, model: StepModel
    ) -> tuple[EngineState, StepOutputs]:
        return decode_step(params, state, inputs, model=model, variant=self.variant, k=self.k)


@dataclass(frozen=True, slots=True)
class Observe(Program):
    """Let the drafter observe deferred rounds, which had no drafts: (round) -> None.

    The argument is the last of these rounds, which all have the same requests.
    """

    batch: int
    inputs = DecodeInputs

    def run(
        self, params: Params, state: EngineState, inputs: DecodeInputs, *, model: StepModel
    ) -> tuple[EngineState, None]:
        return observe_deferred(params, state, inputs, model=model), None


@dataclass(frozen=True, slots=True)
class Joined(Program):
    """Run `Prefill`, `begin` and `decode` as one: (chunks, round) -> (outputs, outputs)."""

    begin: Begin
    decode: Decode

    @property
    def packed(self) -> tuple[Packed, ...]:
        """See `Program`."""
        return *self.begin.packed, *self.decode.packed

    def run(
        self,
        params: Params,
        state: EngineState,
        chunks: PrefillInputs,
        round_: DecodeInputs,
        *,
        model: StepModel,
    ) -> tuple[EngineState, tuple[StepOutputs, StepOutputs]]:
        return joined_step(
            params,
            state,
            chunks,
            round_,
            model=model,
            width=self.begin.width,
            chunk_variant=self.begin.variant,
            variant=self.decode.variant,
            k=self.decode.k,
        )


@dataclass(frozen=True, slots=True)
class Propose(Program):
    """First piece of a round: (round) -> Draft. Pieces are compiled only where needed."""

    batch: int
    k: int
    variant: Variant
    inputs = DecodeInputs

    def run(
        self, params: Params, state: EngineState, inputs: DecodeInputs, *, model: StepModel
    ) -> tuple[EngineState, Draft]:
        return propose(params, state, inputs, model=model, variant=self.variant, k=self.k)


@dataclass(frozen=True, slots=True)
class Extend(Program):
    """Second piece of a round; the host makes masks meanwhile: (round, draft) -> Extension."""

    batch: int
    k: int
    inputs = DecodeInputs

    def handed(self, traces: Traces) -> tuple[Any, ...]:
        return (traces.result(Propose(self.batch, self.k, Variant())),)

    def run(
        self,
        params: Params,
        state: EngineState,
        inputs: DecodeInputs,
        draft: Draft,
        *,
        model: StepModel,
    ) -> tuple[EngineState, Extension]:
        return extend(params, state, inputs, draft, model=model)


@dataclass(frozen=True, slots=True)
class ProcessRound(Program):
    """Run logits processors between `Extend` and `Settle`: (round, draft, logits) -> logits."""

    batch: int
    k: int
    processors: Processors
    inputs = DecodeInputs

    def handed(self, traces: Traces) -> tuple[Any, ...]:
        draft = traces.result(Propose(self.batch, self.k, Variant()))
        return draft, traces.logits(self.batch, self.k + 1)

    def run(
        self,
        params: Params,
        state: EngineState,
        inputs: DecodeInputs,
        draft: Draft,
        logits: jax.Array,
        *,
        model: StepModel,
    ) -> tuple[EngineState, jax.Array]:
        return state, process_round(state, inputs, draft, logits, processors=self.processors)


@dataclass(frozen=True, slots=True)
class Settle(Program):
    """Third piece of a round: (round, draft, extension, logits, masks) -> outputs, see `Begin`."""

    batch: int
    k: int
    variant: Variant
    inputs = DecodeInputs

    @property
    def masked_rows(self) -> tuple[int, int]:
        """The first two axes of `masks`: requests, and rows of logits per request."""
        return self.batch, self.k + 1

    def handed(self, traces: Traces) -> tuple[Any, ...]:
        draft = traces.result(Propose(self.batch, self.k, Variant()))
        extension = traces.result(Extend(self.batch, self.k))
        return draft, extension, extension.logits, traces.masks(*self.masked_rows)

    def run(
        self,
        params: Params,
        state: EngineState,
        inputs: DecodeInputs,
        draft: Draft,
        extension: Extension,
        logits: jax.Array,
        masks: jax.Array,
        *,
        model: StepModel,
    ) -> tuple[EngineState, StepOutputs]:
        arguments = inputs, draft, extension, logits, masks
        return settle(params, state, *arguments, model=model, variant=self.variant)
