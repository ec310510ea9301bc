"""Deferred observation: one program lets the drafter observe several rounds that had no drafts.

After a round, a drafter observes the target's features (hidden states) for the round's rows, and
updates its cache. While rounds have no drafts, nothing reads this cache, so updates can wait. One
update with the rows of several rounds is faster than several updates, because the drafter's weights
are read only once. So `defer` only keeps the features. Later another program, `observe_deferred`,
updates the drafter with the features of several rounds. The host runs that program before any other
use of the drafter's cache, and before the buffer of kept rows is full.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from specjax.device.cache.rows import CachedRows
from specjax.device.drafters.drafter import Observation, Params
from specjax.device.inputs import DecodeInputs, StepModel, page_tables
from specjax.device.models.model import Features
from specjax.device.state import EngineState


def defer(
    state: EngineState,
    slots: jax.Array,
    is_active: jax.Array,
    features: Features,
    *,
    model: StepModel,
) -> EngineState:
    """Store a round's features for `observe_deferred`; return the new state of the engine.

    The round must have no drafts. Call this function before `EngineState.lengths` includes the
    round's tokens.

    Args:
        slots: i32[B], the slot of each request in the round.
        is_active: bool[B], whether each request is active.
        features: the features of the round's N rows. The first row of a request has the features of
            its latest token.
    """
    assert state.deferred is not None, "the engine has no buffer for deferred rows"
    batch, width = len(slots), model.max_deferred(len(slots))
    count = _num_deferred(state, slots)
    is_kept = is_active & (count < width)
    places = jnp.where(is_kept, jnp.arange(batch) * width + count, len(state.deferred))
    step = len(features.hidden) // batch
    parts = [x[::step] for x in (features.hidden, features.auxiliary) if x is not None]
    rows = jnp.concatenate(parts, axis=1).astype(state.deferred.dtype)
    return replace(state, deferred=state.deferred.at[places].set(rows, mode="drop"))


def observe_deferred(
    params: Params, state: EngineState, inputs: DecodeInputs, *, model: StepModel
) -> EngineState:
    """Let the drafter observe the rounds that `defer` has stored; return the new state.

    All these rounds must have had the same requests, in the same order. `inputs` are the inputs of
    the last of these rounds.
    """
    assert state.deferred is not None, "the engine has no buffer for deferred rows"
    slots, width = inputs.slots, model.max_deferred(len(inputs.slots))
    starts = state.observed[slots]
    counts = jnp.minimum(_num_deferred(state, slots), width)
    rows = CachedRows.starting_at(
        starts,
        counts,
        width,
        page_tables(inputs, model)[0],
        slots=slots,
        kernels=model.kernels,
    )
    known, places = state.tokens[slots], starts[:, None] + jnp.arange(width)[None]
    held, following = (jnp.take_along_axis(known, places + i, axis=1, mode="clip") for i in (0, 1))
    kept, dim = state.deferred[: len(slots) * width], model.target.hidden_size
    features = Features(kept[:, :dim], kept[:, dim:] if model.drafter.aux_layers else None)
    # Requests without deferred rows keep their drafter state.
    own = jnp.where(counts > 0, slots, len(state.observed))
    seen = Observation(own, rows, held, following, features, jnp.maximum(counts - 1, 0), None)
    drafter = model.drafter.observe(model.target, params, state.drafter, seen)
    return replace(state, drafter=drafter).all_observed(slots)


def _num_deferred(state: EngineState, slots: jax.Array) -> jax.Array:
    behind = state.lengths - state.observed
    return behind.at[slots].get(mode="fill", fill_value=0)
