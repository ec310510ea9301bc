"""Runs logits processors, which are functions that users write, in separate programs.

The programs run after the target and before `begin` or `settle`. So no other program is compiled
again when a request has a new logits processor.
"""

import jax
from jaxtyping import Float32

from specjax.device.edits import History, Processors, apply_processors
from specjax.device.inputs import DecodeInputs, PrefillInputs
from specjax.device.state import EngineState
from specjax.device.verification import Draft
from specjax.device.vocabulary import Vocabulary


def process_first(
    state: EngineState,
    inputs: PrefillInputs,
    logits: Float32[jax.Array, "B 1 V"],
    *,
    processors: Processors,
    vocabulary: Vocabulary,
) -> Float32[jax.Array, "B 1 V"]:
    """Return the logits [B, 1, V] of each chunk's next token, edited by logits processors."""
    history = History(state.tokens[inputs.slots], inputs.starts + inputs.counts)
    requests = state.requests.at(inputs.slots)
    return apply_processors(logits, requests, history, processors, vocabulary)


def process_round(
    state: EngineState,
    inputs: DecodeInputs,
    draft: Draft,
    logits: Float32[jax.Array, "B R V"],
    *,
    processors: Processors,
    vocabulary: Vocabulary,
) -> Float32[jax.Array, "B R V"]:
    """Return a round's logits [B, R, V], edited by the logits processors.

    Row t of a request follows its first t drafts.
    """
    history = History(state.tokens[inputs.slots], state.lengths[inputs.slots] + 1)
    requests = state.requests.at(inputs.slots)
    return apply_processors(logits, requests, history.then(draft.tokens), processors, vocabulary)
