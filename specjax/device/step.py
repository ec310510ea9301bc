"""The steps of the device: admit requests, prefill their prompts, and run speculation rounds.

Read this file first. Each prefill chunk goes through

    prefill -> begin

which run the target and, after the last chunk, sample the first output token. A preempted request
reruns its prompt and output in the same way, without sampling: its next token is already known. A
round drafts tokens, runs the target on the drafts, and commits the accepted drafts:

    propose -> extend -> settle

These three run in one program, once it is compiled. They always run in separate programs if
requests need grammar masks, users' logits processors or many log-probabilities. Logits processors
run before `settle` or `begin` (see `processors.py`). The parts that run the target do not depend on
the requests' options for logits. Chunks and a round can run in one program, see `joined.py`.

The inputs of a step contain neither the number of accepted tokens nor the length of a request: the
host plans with upper bounds, and the device keeps the exact numbers in its state.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int32

from specjax.device.cache.rows import CachedRows, padded_width
from specjax.device.deferral import defer
from specjax.device.drafters.drafter import DraftContext, Observation, Params, Variant
from specjax.device.edits import History
from specjax.device.extras import Extras, ExtraWork, extras_of_step
from specjax.device.inputs import (
    AdmitInputs,
    DecodeInputs,
    PrefillInputs,
    SnapshotInputs,
    StepModel,
    page_tables,
)
from specjax.device.models.model import Features, restore_snapshots, take_snapshots
from specjax.device.sampling import choose, through_edits
from specjax.device.state import EngineState
from specjax.device.suggestions import replace_drafts
from specjax.device.verification import Draft, Target, Verdict


class Extension(NamedTuple):
    """The target's outputs for T rows of each of B requests.

    A request's rows are a chunk of its prompt or, in a round, its last token, drafts and padding.
    """

    features: Features  # of all N = B T rows
    logits: Float32[jax.Array, "B R V"]  # for a chunk only the logits of its last row


class StepOutputs(NamedTuple):
    """The results of a step.

    The first `num_tokens[b]` of `tokens[b]` are new output tokens of request b. If a request's
    logits leave no possible token, the token is -1 and the request ends.
    """

    tokens: Int32[jax.Array, "B R"]
    num_tokens: Int32[jax.Array, "B"]
    num_drafts: Int32[jax.Array, "B"]  # number of drafts that could have been accepted
    # Packed for B R rows, see `logprobs.pack_logprobs`; zeros if no request needs them.
    logprobs: Int32[jax.Array, "B ..."]
    prompt_logprobs: jax.Array | None  # packed for the tokens after the N rows of the chunks


def admit(state: EngineState, inputs: AdmitInputs) -> EngineState:
    """Return the state with new requests added to it."""
    return replace(
        state,
        tokens=state.tokens.at[inputs.slots].set(jnp.maximum(inputs.tokens, 0), mode="drop"),
        progress=state.progress.at[inputs.slots].set(0, mode="drop"),
        requests=state.requests.put(inputs.slots, inputs.requests),
    )


def restore(state: EngineState, inputs: SnapshotInputs, *, model: StepModel) -> EngineState:
    """Copy snapshots to the recurrent states of requests, for the target and the drafter."""
    moves = inputs.slots, inputs.ids, inputs.ends
    caches = restore_snapshots(model.target, state.snapshots, state.caches, moves)
    return replace(state, caches=caches, drafter=model.drafter.restore(state.drafter, *moves))


def take(state: EngineState, inputs: SnapshotInputs, *, model: StepModel) -> EngineState:
    """Copy the recurrent states of requests to snapshots, for the target and the drafter.

    The states must include all tokens in the caches (`pending` is 0), as after a prefill chunk. Run
    this after the chunk's `begin`, which updates the drafter's states.
    """
    moves = inputs.slots, inputs.ids, inputs.ends
    kept = take_snapshots(model.target, state.snapshots, state.caches, moves)
    return replace(state, snapshots=kept, drafter=model.drafter.take(state.drafter, *moves))


def prefill(
    params: Params, state: EngineState, inputs: PrefillInputs, *, model: StepModel, width: int
) -> tuple[EngineState, Extension]:
    """Run the target on a chunk of each prompt, padded to `width` tokens; return its outputs."""
    batch = inputs.slots.shape[0]
    rows, tokens = chunk_rows(state, inputs, width, model), chunk_tokens(state, inputs, width)
    features, caches = model.target.extend(
        params.target, tokens, rows, state.caches, model.drafter.aux_layers
    )
    padding = -batch % model.row_multiple
    padded = jnp.pad(last_of_chunks(features.hidden, inputs), ((0, padding), (0, 0)))
    logits = model.target.logits(params.target, padded)[:batch, None]
    return replace(state, caches=caches).nothing_pending(inputs.slots), Extension(features, logits)


def begin(
    params: Params,
    state: EngineState,
    inputs: PrefillInputs,
    extension: Extension,
    processed: jax.Array | None = None,
    masks: jax.Array | None = None,
    *,
    model: StepModel,
    variant: Variant,
) -> tuple[EngineState, StepOutputs]:
    """Update the drafter's cache with a chunk; after a prompt's last chunk, sample the first token.

    No token is sampled for a request that resumes after preemption: its next token is known.
    `processed` f32[B, 1, V] are the logits after logits processors, or None if no request has any.
    `masks` i32[B, 1, ceil(V/32)] are the grammar masks, or None if no request has a grammar.
    """
    slots, starts = inputs.slots, inputs.starts
    batch = slots.shape[0]
    width = extension.features.hidden.shape[0] // batch
    known, requests = state.tokens[slots], state.requests.at(slots)
    last, ends = inputs.counts - 1, starts + inputs.counts
    is_last, is_resumed = inputs.is_last > 0, inputs.is_resumed > 0
    samples = is_last & ~is_resumed

    logits = extension.logits if processed is None else processed
    extra = _extra_work(state, inputs, partial(History, known, ends), masks, model, variant)

    def draw(rows):
        return choose(
            rows[:, 0],
            requests.sampling,
            ends,
            vocabulary=model.vocabulary,
            kernels=model.kernels,
        )

    sampled = through_edits(draw, logits, extra.edit, extra.edits)
    put_at = jnp.where(samples, ends, known.shape[1])
    known = known.at[jnp.arange(batch), put_at].set(jnp.maximum(sampled, 0), mode="drop")

    places = _chunk_places(inputs, width)
    held, following = (jnp.take_along_axis(known, places + i, axis=1, mode="clip") for i in (0, 1))
    rows = chunk_rows(state, inputs, width, model).without_windows()
    seen = Observation(slots, rows, held, following, extension.features, last, None)
    drafter = model.drafter.observe(model.target, params, state.drafter, seen)
    verdict = Verdict(sampled[:, None], jnp.zeros(batch, jnp.int32))
    emitted = _emit(verdict, requests.limits - ends, requests.stop_ids)
    logprobs = extra.logprobs(extension.logits, logits, sampled[:, None])
    prompt_logprobs = None
    if variant.num_prompt_logprobs is not None:
        prompt_logprobs = extra.prompt_logprobs(
            lambda hidden: model.target.logits(params.target, hidden),
            extension.features.hidden.reshape(batch, width, -1),
            known,
            starts,
        )

    tokens = state.tokens.at[slots].set(known, mode="drop")
    goes_on = is_last & (is_resumed | ~emitted.is_finished)
    state = replace(state, drafter=drafter, tokens=tokens)
    state = state.with_progress(slots, ends, jnp.zeros_like(ends), goes_on, is_observed=True)
    num_tokens = samples.astype(jnp.int32)
    return state, StepOutputs(
        sampled[:, None], num_tokens, jnp.zeros_like(num_tokens), logprobs, prompt_logprobs
    )


def decode_step(
    params: Params,
    state: EngineState,
    inputs: DecodeInputs,
    *,
    model: StepModel,
    variant: Variant,
    k: int,
) -> tuple[EngineState, StepOutputs]:
    """Draft k tokens per request, verify them, and commit the accepted drafts and one more token.

    With k = 0 this is plain decoding.
    """
    with jax.named_scope("draft"):
        state, draft = propose(params, state, inputs, model=model, variant=variant, k=k)
    with jax.named_scope("verify"):
        state, extension = extend(params, state, inputs, draft, model=model)
    with jax.named_scope("settle"):
        return settle(params, state, inputs, draft, extension, model=model, variant=variant)


def propose(
    params: Params,
    state: EngineState,
    inputs: DecodeInputs,
    *,
    model: StepModel,
    variant: Variant,
    k: int,
) -> tuple[EngineState, Draft]:
    """Draft k tokens for every request. Drafts from the host can replace the drafter's drafts."""
    slots, starts = inputs.slots, state.lengths[inputs.slots]
    context = DraftContext(
        slots,
        starts,
        _is_active(state, slots),
        page_tables(inputs, model)[0],
        state.requests,
        History(state.tokens[slots], starts + 1),
        extras_of_step(inputs.extras, variant) & Extras.EDITS > 0,
        model.kernels,
        model.row_multiple,
        model.verification.shares_noise,
        variant,
        model.vocabulary,
    )
    own = model.drafter.with_head(params)
    draft, drafter = model.drafter.draft(model.target, own, state.drafter, context, k)
    if inputs.suggestions is not None:
        draft = replace_drafts(draft, inputs.suggestions, context.history, model.vocabulary)
    return replace(state, drafter=drafter), draft


def extend(
    params: Params, state: EngineState, inputs: DecodeInputs, draft: Draft, *, model: StepModel
) -> tuple[EngineState, Extension]:
    """Run the target on the last token and the drafts of every request."""
    batch, k = draft.tokens.shape
    rows = round_rows(state, inputs, k, model)
    tokens = round_tokens(state, inputs.slots, draft, rows.width).reshape(-1)
    features, caches = model.target.extend(
        params.target, tokens, rows, state.caches, model.drafter.aux_layers
    )
    logits = model.target.logits(params.target, features.hidden).reshape(batch, rows.width, -1)
    return replace(state, caches=caches), Extension(features, logits[:, : k + 1])


def settle(
    params: Params,
    state: EngineState,
    inputs: DecodeInputs,
    draft: Draft,
    extension: Extension,
    processed: jax.Array | None = None,
    masks: jax.Array | None = None,
    *,
    model: StepModel,
    variant: Variant,
    may_defer: bool = True,
) -> tuple[EngineState, StepOutputs]:
    """Verify the drafts, commit the accepted drafts and one more token, and update the drafter.

    The drafter observes the same rows as the target, so that its cache matches the output when the
    next round starts. If `may_defer` is true, a round without drafts can postpone the drafter's
    update (see `deferral`). `begin` explains `processed` and `masks`; their shapes here are
    f32[B, K+1, V] and i32[B, K+1, ceil(V/32)].
    """
    slots, starts = inputs.slots, state.lengths[inputs.slots]
    is_active, requests = _is_active(state, slots), state.requests.at(slots)
    k = draft.tokens.shape[1]
    remaining = requests.limits - (starts + 1)
    # A round commits one token in addition to drafts, so drafts leave room for one.
    num_drafts = jnp.clip(remaining - 1, 0, jnp.minimum(inputs.num_drafts, k))
    if draft.counts is not None:
        num_drafts = jnp.minimum(num_drafts, draft.counts)

    def history():
        return History(state.tokens[slots], starts + 1).then(draft.tokens)

    extra = _extra_work(state, inputs, history, masks, model, variant)
    logits = extension.logits if processed is None else processed
    target = Target(
        logits,
        requests.sampling,
        starts + 1,
        num_drafts,
        extra.edits,
        extra.edit,
        model.vocabulary,
        model.kernels,
    )
    verdict = model.verification.verify(draft, target)
    new = jnp.maximum(verdict.tokens, 0)

    num_committed = verdict.num_accepted + 1
    is_deferred = may_defer and not k and model.max_deferred(len(slots)) > 0
    if is_deferred:
        state = defer(state, slots, is_active, extension.features, model=model)
    else:
        rows = round_rows(state, inputs, k, model).without_windows()
        following = jnp.pad(new, ((0, 0), (0, rows.width - (k + 1))))
        held, last = round_tokens(state, slots, draft, rows.width), verdict.num_accepted
        seen = Observation(slots, rows, held, following, extension.features, last, k)
        with jax.named_scope("observe"):
            drafter = model.drafter.observe(model.target, params, state.drafter, seen)
        state = replace(state, drafter=drafter)
    emitted = _emit(verdict, remaining, requests.stop_ids)
    num_tokens = jnp.where(is_active, emitted.num_tokens, 0)
    num_drafts = jnp.where(is_active, num_drafts, 0)

    column = jnp.arange(k + 1)[None]
    is_committed = is_active[:, None] & (column <= verdict.num_accepted[:, None])
    places = jnp.where(is_committed, starts[:, None] + 1 + column, state.tokens.shape[1])

    tokens = state.tokens.at[slots[:, None], places].set(new, mode="drop")
    state = replace(state, tokens=tokens).with_progress(
        jnp.where(is_active, slots, state.tokens.shape[0]),
        starts + num_committed,
        num_committed,
        ~emitted.is_finished,
        is_observed=not is_deferred,
    )
    logprobs = extra.logprobs(extension.logits, logits, verdict.tokens)
    return state, StepOutputs(verdict.tokens, num_tokens, num_drafts, logprobs, None)


class _Emitted(NamedTuple):
    num_tokens: Int32[jax.Array, "B"]
    is_finished: Bool[jax.Array, "B"]


def _emit(verdict: Verdict, remaining: jax.Array, stop_ids: jax.Array) -> _Emitted:
    """Return how many of the verdict's tokens to output, and whether the output ends.

    At most `remaining` tokens are output. The output also ends with a stop id, or with -1 where no
    token is possible. The token that ends the output is counted.
    """
    num_tokens = jnp.minimum(verdict.num_accepted + 1, remaining)
    is_finished = num_tokens >= remaining
    # Column by column, because XLA launches a kernel for every reduction, even a small one.
    for column in reversed(range(verdict.tokens.shape[1])):
        token = verdict.tokens[:, column]
        is_stop = token < 0
        for i in range(stop_ids.shape[1]):
            is_stop |= token == stop_ids[:, i]
        is_stop &= column < num_tokens
        num_tokens = jnp.where(is_stop, column + 1, num_tokens)
        is_finished |= is_stop
    return _Emitted(num_tokens, is_finished)


def _is_active(state: EngineState, slots: jax.Array) -> jax.Array:
    return state.is_active.at[slots].get(mode="fill", fill_value=False)


def _pending(state: EngineState, slots: jax.Array) -> jax.Array:
    return state.pending.at[slots].get(mode="fill", fill_value=0)


def round_tokens(state: EngineState, slots: jax.Array, draft: Draft, width: int) -> jax.Array:
    """Return the tokens i32[B, width] of a round's rows: last token, drafts and padding."""
    last = state.tokens[slots, state.lengths[slots]]
    tokens = jnp.concatenate([last[:, None], draft.tokens], axis=1)
    return jnp.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))


def _chunk_places(inputs: PrefillInputs, width: int) -> jax.Array:
    return inputs.starts[:, None] + jnp.arange(width)[None]


def chunk_tokens(state: EngineState, inputs: PrefillInputs, width: int) -> jax.Array:
    """Return the tokens i32[B * width] of the chunks' rows."""
    known, places = state.tokens[inputs.slots], _chunk_places(inputs, width)
    return jnp.take_along_axis(known, places, axis=1, mode="clip").reshape(-1)


def last_of_chunks(hidden: jax.Array, inputs: PrefillInputs) -> jax.Array:
    """Return the hidden state [B, D] of each chunk's last token, from `hidden` [B * width, D]."""
    batch = inputs.slots.shape[0]
    return hidden.reshape(batch, -1, hidden.shape[1])[jnp.arange(batch), inputs.counts - 1]


def chunk_rows(
    state: EngineState, inputs: PrefillInputs, width: int, model: StepModel
) -> CachedRows:
    """Return the rows of the chunks, `width` rows per request."""
    page_table, *others = page_tables(inputs, model)
    return CachedRows.starting_at(
        inputs.starts,
        inputs.counts,
        width,
        page_table,
        window_tables=tuple(others),
        windows=model.windows,
        slots=inputs.slots,
        pending=_pending(state, inputs.slots),
        folds=True,
        kernels=model.kernels,
    )


def round_rows(state: EngineState, inputs: DecodeInputs, k: int, model: StepModel) -> CachedRows:
    """Return the rows of a round: each request's last token, drafts and padding."""
    batch = inputs.slots.shape[0]
    width = padded_width(batch, model.width(k), model.row_multiple)
    counts = jnp.where(_is_active(state, inputs.slots), k + 1, 0)
    starts = state.lengths[inputs.slots]
    page_table, *others = page_tables(inputs, model)
    return CachedRows.starting_at(
        starts,
        counts,
        width,
        page_table,
        window_tables=tuple(others),
        windows=model.windows,
        slots=inputs.slots,
        pending=_pending(state, inputs.slots),
        kernels=model.kernels,
    )


def _extra_work(
    state: EngineState,
    inputs: PrefillInputs | DecodeInputs,
    history: Callable[[], History],
    masks: jax.Array | None,
    model: StepModel,
    variant: Variant,
) -> ExtraWork:
    requests = partial(state.requests.at, inputs.slots)
    return ExtraWork(
        extras_of_step(inputs.extras, variant),
        requests,
        history,
        masks,
        variant,
        model.logprobs_mode,
        model.vocabulary,
        model.kernels,
    )
