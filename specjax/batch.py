"""Where the host's plans become the device's arrays, and the device's results the host's lists.

One packed int32 array goes in per step and one comes back. Every array handed over is freshly
made: JAX reads host buffers after the call returns.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specjax.device.drafters.drafter import Params
from specjax.device.sampling import Sampling
from specjax.device.state import EngineState
from specjax.device.step import (
    DecodeInputs,
    PrefillInputs,
    StepModel,
    StepOutputs,
    decode_step,
    prefill_step,
)
from specjax.host.scheduler import DecodePlan, StepPlan
from specjax.request import MAX_STOP_IDS

# A prefill row: slot, start, count, next token, limit, temperature bits, seed bits, stop ids,
# chunk tokens, pages. A decode row: slot, pages.
PREFILL_SCALARS = 7


def packed_shape(plan: StepPlan, pages_per_seq: int) -> tuple[int, int]:
    """Shape of the array that `pack` makes of a plan."""
    if isinstance(plan, DecodePlan):
        return plan.batch, 1 + pages_per_seq
    return plan.batch, PREFILL_SCALARS + MAX_STOP_IDS + plan.width + pages_per_seq


def pack(plan: StepPlan, num_slots: int, pages_per_seq: int) -> np.ndarray:
    """A plan as i32[packed_shape]; rows past its own are padding, at slot `num_slots`."""
    packed = np.full(packed_shape(plan, pages_per_seq), -1, np.int32)
    packed[:, 0] = num_slots
    table = packed[:, -pages_per_seq:]
    if isinstance(plan, DecodePlan):
        for row, sequence in enumerate(plan.sequences):
            packed[row, 0] = sequence.slot
            table[row, : len(sequence.pages)] = sequence.pages
        return packed
    packed[:, 2] = 0
    for row, chunk in enumerate(plan.chunks):
        sequence = chunk.sequence
        request, end = sequence.request, chunk.start + chunk.count
        following = -1 if chunk.is_last else request.prompt_token_ids[end]
        packed[row, :5] = sequence.slot, chunk.start, chunk.count, following, request.max_length
        packed[row, 5] = np.float32(request.temperature).view(np.int32)
        packed[row, 6] = np.uint32(request.seed).view(np.int32)
        stops = PREFILL_SCALARS
        packed[row, stops : stops + len(request.stop_ids)] = request.stop_ids
        first = stops + MAX_STOP_IDS
        packed[row, first : first + chunk.count] = request.prompt_token_ids[chunk.start : end]
        table[row, : len(sequence.pages)] = sequence.pages
    return packed


def unpack_prefill(packed: jax.Array, width: int) -> PrefillInputs:
    """The device's side of `pack` for a prefill step of `width` tokens."""
    scalars, stop_ids, tokens, page_table = jnp.split(
        packed, np.cumsum([PREFILL_SCALARS, MAX_STOP_IDS, width]), axis=1
    )
    slots, starts, counts, following, limits, temperature, seeds = scalars.T
    return PrefillInputs(
        slots=slots,
        starts=starts,
        counts=counts,
        tokens=jnp.maximum(tokens, 0),
        next_tokens=following,
        page_table=page_table,
        limits=limits,
        stop_ids=stop_ids,
        sampling=Sampling(
            jax.lax.bitcast_convert_type(temperature, jnp.float32),
            jax.lax.bitcast_convert_type(seeds, jnp.uint32),
        ),
    )


def pack_outputs(outputs: StepOutputs) -> jax.Array:
    """Results as i32[B, 1 + K + 1]: the number of tokens, then the tokens."""
    return jnp.concatenate([outputs.num_tokens[:, None], outputs.tokens], axis=1)


def unpack_outputs(packed: np.ndarray, plan: StepPlan) -> list[list[int]]:
    """The new tokens of each row of `plan`."""
    rows = len(plan.sequences) if isinstance(plan, DecodePlan) else len(plan.chunks)
    return [row[1 : 1 + row[0]] for row in packed[:rows].tolist()]


@partial(jax.jit, static_argnames=("model", "width"), donate_argnames="state")
def run_prefill(
    params: Params, state: EngineState, packed: jax.Array, *, model: StepModel, width: int
) -> tuple[EngineState, jax.Array]:
    """`prefill_step` between packed arrays."""
    state, outputs = prefill_step(params, state, unpack_prefill(packed, width), model=model)
    return state, pack_outputs(outputs)


@partial(jax.jit, static_argnames=("model", "k"), donate_argnames="state")
def run_decode(
    params: Params, state: EngineState, packed: jax.Array, *, model: StepModel, k: int
) -> tuple[EngineState, jax.Array]:
    """`decode_step` between packed arrays."""
    inputs = DecodeInputs(slots=packed[:, 0], page_table=packed[:, 1:])
    state, outputs = decode_step(params, state, inputs, model=model, k=k)
    return state, pack_outputs(outputs)
