"""The programs of a step.

Each program is a hashable value. Its method `run` is compiled with the program's fields as
constants. Prefill chunks run as the programs `Admit`, `Prefill` and `Begin`. A decode round runs as
the program `Decode`, or as the three programs `Propose`, `Extend` and `Settle`. Other programs copy
recurrent states, let the drafter observe rounds without drafts, and run logits processors.
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
from specjax.device.joined import joined_step, split_round
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
from specjax.host.speculation.rounds import SplitShape


@dataclass(frozen=True, slots=True)
class Admit(Program):
    """Writes new requests to their slots (rows of the state). Takes packed `AdmitInputs`."""

    batch: int
    inputs = AdmitInputs

    def run(
        self, params: Params, state: EngineState, inputs: AdmitInputs, *, model: StepModel
    ) -> tuple[EngineState, None]:
        return admit(state, inputs), None


@dataclass(frozen=True, slots=True)
class Restore(Program):
    """Copies cached snapshots to requests' recurrent states. Takes packed `SnapshotInputs`."""

    batch: int
    inputs = SnapshotInputs

    def run(
        self, params: Params, state: EngineState, inputs: SnapshotInputs, *, model: StepModel
    ) -> tuple[EngineState, None]:
        return restore(state, inputs, model=model), None


@dataclass(frozen=True, slots=True)
class Take(Program):
    """Copies requests' recurrent states to snapshots for the prefix cache.

    Takes packed `SnapshotInputs`.
    """

    batch: int
    inputs = SnapshotInputs

    def run(
        self, params: Params, state: EngineState, inputs: SnapshotInputs, *, model: StepModel
    ) -> tuple[EngineState, None]:
        return take(state, inputs, model=model), None


@dataclass(frozen=True, slots=True)
class Prefill(Program):
    """Runs the target over a chunk of each prompt.

    Takes the inputs of the chunks, and returns an `Extension`.
    """

    batch: int
    width: int
    inputs = PrefillInputs

    def run(
        self, params: Params, state: EngineState, inputs: PrefillInputs, *, model: StepModel
    ) -> tuple[EngineState, Extension]:
        return prefill(params, state, inputs, model=model, width=self.width)


@dataclass(frozen=True, slots=True)
class ProcessFirst(Program):
    """Runs logits processors between `Prefill` and `Begin`.

    Takes the inputs and the logits of the chunks, and returns the processed logits.
    """

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
        options = {"processors": self.processors, "vocabulary": model.vocabulary}
        return state, process_first(state, inputs, logits, **options)


@dataclass(frozen=True, slots=True)
class Begin(Program):
    """Updates the drafter's cache with the chunks, and samples first tokens.

    Takes the inputs, the `Extension`, the logits and the masks of the chunks, and returns the
    step's outputs. `logits` are the extension's logits or the result of `ProcessFirst`. `masks` is
    None if no request has a grammar.
    """

    batch: int
    width: int
    variant: Variant
    inputs = PrefillInputs
    is_last = True

    @property
    def masked_rows(self) -> tuple[int, int]:
        """The sizes of the first two axes of `masks`: requests, and rows of logits per request."""
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
    """Runs a whole round. Takes the round's inputs, and returns its outputs."""

    batch: int
    k: int
    variant: Variant
    inputs = DecodeInputs
    is_last = True

    def run(
        self, params: Params, state: EngineState, inputs: DecodeInputs, *, model: StepModel
    ) -> tuple[EngineState, StepOutputs]:
        return decode_step(params, state, inputs, model=model, variant=self.variant, k=self.k)


@dataclass(frozen=True, slots=True)
class Observe(Program):
    """Lets the drafter read the hidden states of several deferred rounds at once.

    A deferred round is a round without drafts that the drafter has not observed yet. All deferred
    rounds have the same requests. Takes the inputs of the last deferred round.
    """

    batch: int
    inputs = DecodeInputs

    def run(
        self, params: Params, state: EngineState, inputs: DecodeInputs, *, model: StepModel
    ) -> tuple[EngineState, None]:
        return observe_deferred(params, state, inputs, model=model), None


@dataclass(frozen=True, slots=True)
class Joined(Program):
    """Runs prefill chunks and a round as one program.

    The fields `begin` and `decode` are programs. `Joined` does the work of the chunks' `Prefill`,
    then of `begin`, then of `decode`.

    Takes the inputs of the chunks and of the round, and returns their outputs as a pair.
    """

    begin: Begin
    decode: Decode
    is_last = True

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
class SplitRound(Program):
    """Runs both parts of a split round, in which only some requests draft.

    Takes the inputs of the requests that draft, and the inputs of the other requests. Returns a
    pair of outputs in the same order.
    """

    shape: SplitShape
    variant: Variant
    is_last = True

    @property
    def packed(self) -> tuple[Packed, ...]:
        """See `Program`."""
        return (DecodeInputs, self.shape.drafting), (DecodeInputs, self.shape.others)

    def run(
        self,
        params: Params,
        state: EngineState,
        drafting: DecodeInputs,
        others: DecodeInputs,
        *,
        model: StepModel,
    ) -> tuple[EngineState, tuple[StepOutputs, StepOutputs]]:
        parts, k = (drafting, others), self.shape.k
        return split_round(params, state, *parts, model=model, variant=self.variant, k=k)


@dataclass(frozen=True, slots=True)
class Propose(Program):
    """Runs the drafter, the first part of a round.

    Takes the round's inputs, and returns a `Draft`. Rounds run as `Propose`, `Extend` and `Settle`
    before `Decode` is compiled, or if their variant is never compiled as one program (see
    `variants.is_in_pieces`).
    """

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
    """Runs the target, the second part of a round. Meanwhile the host makes the grammar masks.

    Takes the round's inputs and the `Draft`, and returns an `Extension`.
    """

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
    """Runs logits processors between `Extend` and `Settle`.

    Takes the round's inputs, the `Draft` and the extension's logits, and returns processed logits.
    """

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
        options = {"processors": self.processors, "vocabulary": model.vocabulary}
        return state, process_round(state, inputs, draft, logits, **options)


@dataclass(frozen=True, slots=True)
class Settle(Program):
    """Runs the third part of a round, which verifies the drafts.

    Takes the round's inputs, the `Draft`, the `Extension`, the logits and the masks, and returns
    the round's outputs. `logits` are the extension's logits or the result of `ProcessRound`.
    `masks` is None if no request has a grammar.
    """

    batch: int
    k: int
    variant: Variant
    inputs = DecodeInputs
    is_last = True

    @property
    def masked_rows(self) -> tuple[int, int]:
        """The sizes of the first two axes of `masks`: requests, and rows of logits per request."""
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
