"""The logits processors of requests: the users' functions, in separate programs.

They run between the target and `begin` or `settle`, so that a new processor compiles nothing else.
"""

import jax
from jaxtyping import Float32

from specjax.device.edits import History, Processors, apply_processors
from specjax.device.inputs import DecodeInputs, PrefillInputs
from specjax.device.state import EngineState
from specjax.device.verification import Draft


def process_first(
    state: EngineState,
    inputs: PrefillInputs,
    logits: Float32[jax.Array, "B 1 V"],
    *,
    processors: Processors,
) -> Float32[jax.Array, "B 1 V"]:
    """Apply the processors to the logits of the token after each chunk."""
    history = History(state.tokens[inputs.slots], inputs.starts + inputs.counts)
    return apply_processors(logits, state.requests.at(inputs.slots), history, processors)


def process_round(
    state: EngineState,
    inputs: DecodeInputs,
    draft: Draft,
    logits: Float32[jax.Array, "B R V"],
    *,
    processors: Processors,
) -> Float32[jax.Array, "B R V"]:
    """Apply the processors to the logits of a round; row t is after the first t drafts."""
    history = History(state.tokens[inputs.slots], state.lengths[inputs.slots] + 1)
    requests = state.requests.at(inputs.slots)
    return apply_processors(logits, requests, history.then(draft.tokens), processors)
