"""Packs the host's plans into arrays for the device, and unpacks its results into lists.

One int32 array goes in per program and one comes back; newly admitted requests and the masks of
grammars are further inputs. Every array handed over is freshly made, for JAX reads host buffers
after the call returns.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.device.deferral import observe_deferred
from specjax.device.drafters.drafter import Params, Variant
from specjax.device.edits import Processors
from specjax.device.inputs import DecodeInputs, PrefillInputs, SnapshotInputs, StepModel
from specjax.device.joined import joined_step
from specjax.device.models.model import Features
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
from specjax.device.wanted import Wants
from specjax.engine.admissions import unpack_admissions
from specjax.engine.layout import Layout
from specjax.host.plans import Chunk, DecodePlan, PrefillPlan
from specjax.host.residency import slot_of
from specjax.host.sequence import RowOutput
from specjax.outputs import Logprob, TokenLogprobs

Part = PrefillPlan | DecodePlan


def pack(plan: Part, page_tables: np.ndarray, layout: Layout, wants: Wants) -> np.ndarray:
    """A plan as i32[B, ...], a column for each input. Rows without a request are padding.

    Padding rows have slot `num_slots`, past the last. `page_tables` are those of `Residents`;
    `wants` is what any of the requests wants.
    """
    is_round = isinstance(plan, DecodePlan)
    count = len(plan.sequences)
    shape = layout.decode_shape(plan.batch) if is_round else layout.prefill_shape(plan.batch)
    packed = np.full(shape, -1, np.int32)
    packed[:, 0] = layout.num_slots
    packed[:, -layout.table_width - 1] = wants
    if is_round:
        packed[:, 1] = plan.num_drafts
        packed[:count, 1] = [min(s.draft_limit, plan.num_drafts) for s in plan.sequences]
    else:
        packed[:, 2:5] = 0
        for row, chunk in enumerate(plan.chunks):
            packed[row, 1:5] = chunk.start, chunk.count, chunk.is_last, chunk.is_resumed
    slots = list(map(slot_of, plan.sequences))
    packed[:count, 0] = slots
    tables = packed[:, -layout.table_width :].reshape(len(packed), -1, layout.pages_per_seq)
    tables[:count, :, : page_tables.shape[2]] = page_tables[slots]  # a view
    return packed


def pack_snapshots(
    chunks: Iterable[Chunk], batch: int, num_snapshots: int, layout: Layout, *, is_taken: bool
) -> np.ndarray:
    """Snapshots to take after chunks, or restore before them: i32[batch, 3], slot, id, tokens."""
    packed = np.full((batch, 3), 0, np.int32)
    packed[:, :2] = layout.num_slots, num_snapshots
    for row, chunk in enumerate(chunks):
        snapshot = chunk.taken if is_taken else chunk.restored
        assert snapshot is not None
        end = chunk.start + chunk.count if is_taken else chunk.start
        packed[row] = slot_of(chunk.sequence), snapshot, end
    return packed


def pack_masks(plan: Part, drafts: np.ndarray | None, layout: Layout) -> np.ndarray:
    """The masks of a step's grammars i32[mask_shape]; all ones for a request without.

    Where a drafter found fewer than K drafts, the rest of `drafts` i32[B, K] are zeros.
    """
    masks = np.full(layout.mask_shape(plan), -1, np.int32)
    for row, sequence in enumerate(plan.sequences):
        if sequence.matcher is not None and not sequence.is_finished:
            tokens = [] if drafts is None else drafts[row].tolist()
            try:
                masks[row] = sequence.matcher.masks(tokens)
            except Exception as error:  # only this sequence ends, when the step's tokens are read
                sequence.error = error
    return masks


def unpack_outputs(
    packed: np.ndarray, plan: Part, variant: Variant, *, has_raw: bool = False
) -> list[RowOutput]:
    """The output of each row of `plan`.

    `has_raw`: raw log-probabilities are reported beside processed ones.
    """
    decoding = isinstance(plan, DecodePlan)
    sequences = plan.sequences
    num_rows = plan.k + 1 if decoding else 1
    reader = _Reader(packed)
    counts, drafts = reader.take(2).T.tolist()
    tokens = reader.take(num_rows).tolist()
    each = zip(sequences, tokens, counts, drafts, strict=False)  # padding rows come last
    outputs = [RowOutput(row[:count], num_drafts) for _, row, count, num_drafts in each]
    width = 0 if decoding else plan.width
    logprobs = reader.logprobs(
        num_rows,
        variant.num_logprobs,
        has_raw,
        is_wanted=any(demands.logprobs is not None for demands in plan.demands),
    )
    prompts = reader.logprobs(
        width,
        variant.num_prompt_logprobs,
        has_raw,
        is_wanted=any(demands.prompt_logprobs is not None for demands in plan.demands),
    )
    if logprobs is None and prompts is None:
        return outputs
    for row, (sequence, output) in enumerate(zip(sequences, outputs, strict=True)):
        wanted, wanted_of_prompt = sequence.request.demands[-2:]
        if logprobs is not None and wanted is not None:
            output.logprobs = _by_token(logprobs, row, output.tokens, wanted)
        if prompts is not None and wanted_of_prompt is not None:
            assert isinstance(plan, PrefillPlan)
            chunk = plan.chunks[row]
            following = sequence.reported[chunk.start + 1 :][: chunk.count]
            output.prompt_logprobs = _by_token(prompts, row, following, wanted_of_prompt)
            output.start = chunk.start
    return outputs


def export_features(plan: Part, features: Features) -> None:
    """Hand the features of a chunk's rows, on the host, to the sequences that export them."""
    assert isinstance(plan, PrefillPlan), "rounds export nothing"
    for row, chunk in enumerate(plan.chunks):
        if chunk.sequence.request.exports_features:
            rows = row * plan.width + np.arange(chunk.count)
            own = jax.tree.map(lambda x, rows=rows: x[rows], features)
            chunk.sequence.features.append((chunk.start, own))


# Programs take the parameters and the state, and return the next state and a result. Static
# arguments are keywords.


def jitted(run: Callable[..., Any], trees: tuple[Any, Any] | None = None) -> Any:
    """`jax.jit` of one of these functions, with a cache that is freed together with the result.

    With the `trees` of parameters and state, it takes and returns lists of their leaves, as JAX
    walks through nested dataclasses in every call.
    """

    @wraps(run)
    def own(*arguments: Any, **static: Any) -> Any:
        if trees is None:
            return run(*arguments, **static)
        params, state = map(jax.tree.unflatten, trees, arguments[:2])
        state, result = run(params, state, *arguments[2:], **static)
        return jax.tree.leaves(state), result

    parameters = inspect.signature(run).parameters.values()
    static = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    return jax.jit(own, static_argnames=static, donate_argnames="state")


def run_admit(
    params: Params, state: EngineState, packed: jax.Array, *, layout: Layout
) -> tuple[EngineState, None]:
    """`admit` from a packed array."""
    return admit(state, unpack_admissions(packed, layout)), None


def run_restore(
    params: Params, state: EngineState, packed: jax.Array, *, model: StepModel
) -> tuple[EngineState, None]:
    """`restore` from a packed array."""
    return restore(state, SnapshotInputs(*packed.T), model=model), None


def run_take(
    params: Params, state: EngineState, packed: jax.Array, *, model: StepModel
) -> tuple[EngineState, None]:
    """`take` from a packed array."""
    return take(state, SnapshotInputs(*packed.T), model=model), None


def run_prefill(
    params: Params, state: EngineState, packed: jax.Array, *, model: StepModel, width: int
) -> tuple[EngineState, Extension]:
    """`prefill` from a packed array."""
    inputs = PrefillInputs(*_columns(packed, PrefillInputs))
    return prefill(params, state, inputs, model=model, width=width)


def run_begin(
    params: Params,
    state: EngineState,
    packed: jax.Array,
    extension: Extension,
    processed: jax.Array,
    masks: jax.Array,
    *,
    model: StepModel,
    variant: Variant,
) -> tuple[EngineState, jax.Array]:
    """`begin` between packed arrays; `processed` and `masks` are those of `settle`, for R = 1."""
    inputs = PrefillInputs(*_columns(packed, PrefillInputs))
    state, outputs = begin(
        params, state, inputs, extension, processed, masks, model=model, variant=variant
    )
    return state, pack_outputs(outputs)


def run_decode(
    params: Params,
    state: EngineState,
    packed: jax.Array,
    *,
    model: StepModel,
    variant: Variant,
    k: int,
) -> tuple[EngineState, jax.Array]:
    """`decode_step` between packed arrays."""
    inputs = DecodeInputs(*_columns(packed, DecodeInputs))
    state, outputs = decode_step(params, state, inputs, model=model, variant=variant, k=k)
    return state, pack_outputs(outputs)


def run_observe(
    params: Params, state: EngineState, packed: jax.Array, *, model: StepModel
) -> tuple[EngineState, None]:
    """`observe_deferred` from a packed array."""
    inputs = DecodeInputs(*_columns(packed, DecodeInputs))
    return observe_deferred(params, state, inputs, model=model), None


def run_joined(
    params: Params,
    state: EngineState,
    packed_chunks: jax.Array,
    packed_round: jax.Array,
    *,
    model: StepModel,
    width: int,
    chunk_variant: Variant,
    variant: Variant,
    k: int,
) -> tuple[EngineState, tuple[jax.Array, jax.Array]]:
    """`joined_step` between packed arrays."""
    state, outputs = joined_step(
        params,
        state,
        PrefillInputs(*_columns(packed_chunks, PrefillInputs)),
        DecodeInputs(*_columns(packed_round, DecodeInputs)),
        model=model,
        width=width,
        chunk_variant=chunk_variant,
        variant=variant,
        k=k,
    )
    of_chunks, of_round = map(pack_outputs, outputs)
    return state, (of_chunks, of_round)


def run_propose(
    params: Params,
    state: EngineState,
    packed: jax.Array,
    *,
    model: StepModel,
    variant: Variant,
    k: int,
) -> tuple[EngineState, Draft]:
    """`propose` from a packed array: the first part of `decode_step`."""
    inputs = DecodeInputs(*_columns(packed, DecodeInputs))
    return propose(params, state, inputs, model=model, variant=variant, k=k)


def run_extend(
    params: Params, state: EngineState, packed: jax.Array, draft: Draft, *, model: StepModel
) -> tuple[EngineState, Extension]:
    """`extend` from a packed array: the second part, during which the host makes masks."""
    inputs = DecodeInputs(*_columns(packed, DecodeInputs))
    return extend(params, state, inputs, draft, model=model)


def run_settle(
    params: Params,
    state: EngineState,
    packed: jax.Array,
    draft: Draft,
    extension: Extension,
    processed: jax.Array,
    masks: jax.Array,
    *,
    model: StepModel,
    variant: Variant,
) -> tuple[EngineState, jax.Array]:
    """`settle` between packed arrays: the third part.

    `processed` f32[B, R, V] are the extension's logits after logits processors, if there are any;
    `masks` are i32[B, R, ceil(V/32)].
    """
    inputs = DecodeInputs(*_columns(packed, DecodeInputs))
    arguments = inputs, draft, extension, processed, masks
    state, outputs = settle(params, state, *arguments, model=model, variant=variant)
    return state, pack_outputs(outputs)


def run_process_first(
    params: Params,
    state: EngineState,
    packed: jax.Array,
    logits: jax.Array,
    *,
    processors: Processors,
) -> tuple[EngineState, jax.Array]:
    """`process_first` from a packed array."""
    inputs = PrefillInputs(*_columns(packed, PrefillInputs))
    return state, process_first(state, inputs, logits, processors=processors)


def run_process_round(
    params: Params,
    state: EngineState,
    packed: jax.Array,
    draft: Draft,
    logits: jax.Array,
    *,
    processors: Processors,
) -> tuple[EngineState, jax.Array]:
    """`process_round` from a packed array."""
    inputs = DecodeInputs(*_columns(packed, DecodeInputs))
    return state, process_round(state, inputs, draft, logits, processors=processors)


def pack_outputs(outputs: StepOutputs) -> jax.Array:
    """Results as i32[B, ...]: number of tokens, number of drafts, tokens, log-probabilities."""
    counts = outputs.num_tokens[:, None], outputs.num_drafts[:, None]
    parts = [*counts, outputs.tokens, outputs.logprobs]
    if outputs.prompt_logprobs is not None:
        parts.append(outputs.prompt_logprobs)
    return jnp.concatenate(parts, axis=1)


def _columns(packed: jax.Array, inputs: Any) -> tuple[jax.Array, ...]:
    num_scalars = len(inputs._fields) - 1
    return (*packed[:, :num_scalars].T, packed[:, num_scalars:])


class _Reader:
    """Reads a packed array of results column by column, from the left."""

    def __init__(self, packed: np.ndarray):
        self._packed = packed
        self._start = 0

    def take(self, count: int) -> np.ndarray:
        self._start += count
        return self._packed[:, self._start - count : self._start]

    def logprobs(
        self, num_rows: int, num_top: int | None, has_raw: bool, *, is_wanted: bool
    ) -> tuple[Any, ...] | None:
        """The fields of `Logprobs` as lists; None if they are not there, or not wanted."""
        if num_top is None or not num_rows:
            return None
        if not is_wanted:
            self.take(num_rows * (2 + 2 * num_top + has_raw))
            return None
        batch = self._packed.shape[0]

        def floats(count):
            return np.ascontiguousarray(self.take(count)).view(np.float32)

        logprobs, ranks = floats(num_rows), self.take(num_rows)
        ids = self.take(num_rows * num_top).reshape(batch, num_rows, num_top)
        top = floats(num_rows * num_top).reshape(batch, num_rows, num_top)
        raw = floats(num_rows) if has_raw else None
        # Lists are several times as fast to index as arrays.
        parts = [None if x is None else x.tolist() for x in (logprobs, ranks, ids, top, raw)]
        return tuple(parts)


def _by_token(
    logprobs: tuple[Any, ...], row: int, tokens: Any, num_top: int
) -> list[TokenLogprobs]:
    own, ranks, top_ids, top_logprobs = (field[row] for field in logprobs[:4])
    raw = None if logprobs[4] is None else logprobs[4][row]
    found = []
    for i, token in enumerate(tokens):
        entry = {token: Logprob(own[i], ranks[i], None, None if raw is None else raw[i])}
        for rank in range(num_top):
            entry.setdefault(top_ids[i][rank], Logprob(top_logprobs[i][rank], rank + 1))
        found.append(entry)
    return found
