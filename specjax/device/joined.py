"""Runs two parts of a step in one pass of the target.

The parts are prefill chunks and a decode round; or the two parts of a split round, in which some
requests draft and the other requests do not. One pass reads the target's weights once instead of
twice. This matters because a short chunk and a small round each take about as long as reading the
weights. If requests arrive continuously, most steps have both chunks and a round.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from specjax.device.cache.rows import JoinedRows
from specjax.device.drafters.drafter import Params, Variant
from specjax.device.inputs import DecodeInputs, PrefillInputs, StepModel
from specjax.device.state import EngineState
from specjax.device.step import (
    Extension,
    StepOutputs,
    begin,
    chunk_rows,
    chunk_tokens,
    last_of_chunks,
    propose,
    round_rows,
    round_tokens,
    settle,
)


def joined_step(
    params: Params,
    state: EngineState,
    chunks: PrefillInputs,
    round_: DecodeInputs,
    *,
    model: StepModel,
    width: int,
    chunk_variant: Variant,
    variant: Variant,
    k: int,
) -> tuple[EngineState, tuple[StepOutputs, StepOutputs]]:
    """Run `prefill` and `begin` for chunks, and `decode_step` for other requests, in one program.

    Args:
        chunks: the inputs of the chunks, which are padded to `width` tokens per prompt.
        round_: the inputs of the round, whose requests have no chunk and draft `k` tokens each.
        chunk_variant: the request options that are compiled for the chunks.
        variant: the request options that are compiled for the round.

    Returns:
        The state, and a pair: the outputs of the chunks, and the outputs of the round.
    """
    target, aux_layers = model.target, model.drafter.aux_layers
    with jax.named_scope("draft"):
        state, draft = propose(params, state, round_, model=model, variant=variant, k=k)
    with jax.named_scope("verify"):
        drafted = round_rows(state, round_, k, model)
        rows = JoinedRows((chunk_rows(state, chunks, width, model), drafted))
        held = round_tokens(state, round_.slots, draft, drafted.width)
        tokens = jnp.concatenate([chunk_tokens(state, chunks, width), held.reshape(-1)])
        features, caches = target.extend(params.target, tokens, rows, state.caches, aux_layers)
        of_chunks, of_round = (
            jax.tree.map(lambda x, part=part: x[part], features) for part in rows.slices
        )
        # The output head also takes all rows at once, so that its weights are read once.
        hidden = [of_round.hidden, last_of_chunks(of_chunks.hidden, chunks)]
        padding = -sum(map(len, hidden)) % model.row_multiple
        padded = jnp.pad(jnp.concatenate(hidden), ((0, padding), (0, 0)))
        logits = target.logits(params.target, padded)
        num_round, batch = len(of_round.hidden), chunks.slots.shape[0]
        for_round = logits[:num_round].reshape(-1, drafted.width, logits.shape[1])[:, : k + 1]
        for_chunks = logits[num_round : num_round + batch, None]
    state = replace(state, caches=caches).nothing_pending(chunks.slots)
    with jax.named_scope("settle"):
        extension = Extension(of_round, for_round)
        # The next round has different requests, so all rows must be observed before it.
        arguments = round_, draft, extension
        state, outputs = settle(
            params, state, *arguments, model=model, variant=variant, may_defer=False
        )
    with jax.named_scope("begin"):
        extension = Extension(of_chunks, for_chunks)
        state, chunk_outputs = begin(
            params, state, chunks, extension, model=model, variant=chunk_variant
        )
    return state, (chunk_outputs, outputs)


def split_round(
    params: Params,
    state: EngineState,
    drafting: DecodeInputs,
    others: DecodeInputs,
    *,
    model: StepModel,
    variant: Variant,
    k: int,
) -> tuple[EngineState, tuple[StepOutputs, StepOutputs]]:
    """Run `decode_step` for two groups of requests: with `k` drafts each, and without drafts.

    Return the state, and a pair: the outputs for `drafting`, and the outputs for `others`.
    """
    target, aux_layers, parts = model.target, model.drafter.aux_layers, ((drafting, k), (others, 0))
    drafts, all_rows, held = [], [], []
    for inputs, num_drafts in parts:
        with jax.named_scope("draft"):
            state, draft = propose(
                params, state, inputs, model=model, variant=variant, k=num_drafts
            )
        rows = round_rows(state, inputs, num_drafts, model)
        drafts.append(draft)
        all_rows.append(rows)
        held.append(round_tokens(state, inputs.slots, draft, rows.width).reshape(-1))
    with jax.named_scope("verify"):
        rows = JoinedRows(tuple(all_rows))
        tokens = jnp.concatenate(held)
        features, caches = target.extend(params.target, tokens, rows, state.caches, aux_layers)
        logits = target.logits(params.target, features.hidden)
    state, outputs = replace(state, caches=caches), []
    for (inputs, num_drafts), draft, own, part in zip(
        parts, drafts, all_rows, rows.slices, strict=True
    ):
        by_request = own.by_request(logits[part])[:, : num_drafts + 1]
        extension = Extension(jax.tree.map(lambda x, part=part: x[part], features), by_request)
        with jax.named_scope("settle"):
            # The next round may draft for other requests, so all rows must be observed before it.
            arguments = inputs, draft, extension
            state, one = settle(
                params, state, *arguments, model=model, variant=variant, may_defer=False
            )
        outputs.append(one)
    first, second = outputs
    return state, (first, second)
