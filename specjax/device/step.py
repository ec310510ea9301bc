"""The two things the device does: prefill a chunk of prompts, and one round of speculation.

Read this file first. Both steps extend the target by some rows, choose tokens with the same
sampler, let the drafter observe the same rows, and commit the outcome to the slots they ran for.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.device.cache.paged import PagedRows, padded_width
from specjax.device.drafters.drafter import DraftContext, Drafter, Params
from specjax.device.models.model import Model
from specjax.device.sampling import Sampling, sample
from specjax.device.state import EngineState
from specjax.device.verification import Verdict, verify_seed_exact


class PrefillInputs(NamedTuple):
    """One chunk of each of B prompts; T tokens wide."""

    slots: jax.Array  # i32[B]; past the last slot for a padding row
    starts: jax.Array  # i32[B], tokens already in the caches
    counts: jax.Array  # i32[B], tokens of this chunk
    tokens: jax.Array  # i32[B, T]
    next_tokens: jax.Array  # i32[B], the prompt's token after the chunk; -1 after its last
    page_table: jax.Array  # i32[B, P]
    limits: jax.Array  # i32[B]
    stop_ids: jax.Array  # i32[B, MAX_STOP_IDS]
    sampling: Sampling  # [B]


class DecodeInputs(NamedTuple):
    """Who takes part in a round of speculation."""

    slots: jax.Array  # i32[B]; past the last slot for a padding row
    page_table: jax.Array  # i32[B, P]


class StepOutputs(NamedTuple):
    """What a step made known: the first num_tokens[b] of tokens[b] are new output of request b."""

    tokens: jax.Array  # i32[B, K+1]
    num_tokens: jax.Array  # i32[B]


class StepModel(NamedTuple):
    """The static half of a step: what is compiled in. Hashable."""

    target: Model
    drafter: Drafter
    kernels: str
    row_multiple: int  # rows of a matmul come in multiples of this


def prefill_step(
    params: Params, state: EngineState, inputs: PrefillInputs, *, model: StepModel
) -> tuple[EngineState, StepOutputs]:
    """Run a chunk of each prompt; after its last chunk, sample the first token of the output."""
    batch, width = inputs.tokens.shape
    rows = PagedRows.starting_at(
        inputs.starts, inputs.counts, width, inputs.page_table, model.kernels
    )
    features, kv = model.target.extend(
        params.target, inputs.tokens.reshape(-1), rows, state.kv, model.drafter.aux_layers
    )
    last = inputs.counts - 1
    hidden = features.hidden.reshape(batch, width, -1)[jnp.arange(batch), last]
    ends = inputs.starts + inputs.counts
    sampled = sample(model.target.logits(params.target, hidden), inputs.sampling, ends)
    is_last = (inputs.next_tokens < 0) & (inputs.counts > 0)
    next_tokens = jnp.where(is_last, sampled, inputs.next_tokens)

    following = jnp.concatenate([inputs.tokens[:, 1:], next_tokens[:, None]], axis=1)
    following = following.at[jnp.arange(batch), last].set(next_tokens)
    drafter = model.drafter.observe(
        model.target, params, state.drafter, inputs.slots, rows, following, features, last
    )

    emitted = _emit(
        Verdict(next_tokens[:, None], jnp.zeros(batch, jnp.int32)),
        inputs.limits - ends,
        inputs.stop_ids,
    )

    def put(values, new):
        return values.at[inputs.slots].set(new, mode="drop")

    state = replace(
        state,
        kv=kv,
        drafter=drafter,
        lengths=put(state.lengths, ends),
        last_tokens=put(state.last_tokens, next_tokens),
        limits=put(state.limits, inputs.limits),
        stop_ids=put(state.stop_ids, inputs.stop_ids),
        is_active=put(state.is_active, is_last & ~emitted.is_finished),
        sampling=jax.tree.map(put, state.sampling, inputs.sampling),
    )
    return state, StepOutputs(next_tokens[:, None], is_last.astype(jnp.int32))


def decode_step(
    params: Params, state: EngineState, inputs: DecodeInputs, *, model: StepModel, k: int
) -> tuple[EngineState, StepOutputs]:
    """One round for every request: draft k tokens, verify them, commit what stands plus one.

    The drafter then runs over the same k + 1 rows, so that its cache holds the truth and the next
    round can start. With k = 0 this is plain decoding.
    """
    slots = inputs.slots
    batch = slots.shape[0]
    is_active = state.is_active.at[slots].get(mode="fill", fill_value=False)
    sampling = state.sampling.at(slots)
    starts, last_tokens = state.lengths[slots], state.last_tokens[slots]

    context = DraftContext(
        slots, starts, is_active, inputs.page_table, sampling, model.kernels, model.row_multiple
    )
    drafts, drafter = model.drafter.draft(model.target, params, state.drafter, context, k)

    width = padded_width(batch, k + 1, model.row_multiple)
    tokens = jnp.concatenate([last_tokens[:, None], drafts], axis=1)
    tokens = jnp.pad(tokens, ((0, 0), (0, width - (k + 1))))
    counts = jnp.where(is_active, k + 1, 0)
    rows = PagedRows.starting_at(starts, counts, width, inputs.page_table, model.kernels)
    features, kv = model.target.extend(
        params.target, tokens.reshape(-1), rows, state.kv, model.drafter.aux_layers
    )

    hidden = features.hidden.reshape(batch, width, -1)[:, : k + 1].reshape(batch * (k + 1), -1)
    positions = (starts[:, None] + 1 + jnp.arange(k + 1)).reshape(-1)
    chosen = sample(model.target.logits(params.target, hidden), sampling.repeat(k + 1), positions)
    verdict = verify_seed_exact(drafts, chosen.reshape(batch, k + 1))

    following = jnp.pad(verdict.tokens, ((0, 0), (0, width - (k + 1))))
    drafter = model.drafter.observe(
        model.target, params, drafter, slots, rows, following, features, verdict.num_accepted
    )

    total = starts + 1
    emitted = _emit(verdict, state.limits[slots] - total, state.stop_ids[slots])
    num_tokens = jnp.where(is_active, emitted.num_tokens, 0)
    last = jnp.take_along_axis(verdict.tokens, verdict.num_accepted[:, None], axis=1)[:, 0]

    def put(values, new):
        return values.at[slots].set(jnp.where(is_active, new, values[slots]), mode="drop")

    state = replace(
        state,
        kv=kv,
        drafter=drafter,
        lengths=put(state.lengths, starts + verdict.num_accepted + 1),
        last_tokens=put(state.last_tokens, last),
        is_active=put(state.is_active, ~emitted.is_finished),
    )
    return state, StepOutputs(verdict.tokens, num_tokens)


class _Emitted(NamedTuple):
    num_tokens: jax.Array  # i32[B]
    is_finished: jax.Array  # bool[B]


def _emit(verdict: Verdict, remaining: jax.Array, stop_ids: jax.Array) -> _Emitted:
    """How many of the verdict's tokens are output: none past a stop id (kept) or the limit."""
    column = jnp.arange(verdict.tokens.shape[1])
    num_tokens = jnp.minimum(verdict.num_accepted + 1, remaining)
    is_stop = (verdict.tokens[:, :, None] == stop_ids[:, None, :]).any(-1)
    is_stop &= column < num_tokens[:, None]
    has_stop = is_stop.any(axis=1)
    num_tokens = jnp.where(has_stop, jnp.argmax(is_stop, axis=1) + 1, num_tokens)
    return _Emitted(num_tokens, has_stop | (num_tokens >= remaining))
