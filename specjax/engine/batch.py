"""Packs the scheduler's plans into arrays for the device, and unpacks the results into lists.

Each program takes a plan as one int32 array, and returns its results as one int32 array. Newly
admitted requests and grammars' masks are additional inputs. Every array is newly allocated because
JAX reads host buffers after the call returns.
"""

from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.device.drafters.drafter import Variant
from specjax.device.extras import Extras
from specjax.device.inputs import DecodeInputs, PrefillInputs, SnapshotInputs
from specjax.device.layout import Layout
from specjax.device.models.model import Features
from specjax.device.step import StepOutputs
from specjax.host.plans import Chunk, DecodePlan, PrefillPlan
from specjax.host.request import Demands
from specjax.host.residency import slot_of
from specjax.host.sequence import RowOutput
from specjax.outputs import Logprob, TokenLogprobs

Part = PrefillPlan | DecodePlan  # a step has prefill chunks, a decode round, or both
EVERY = Extras.EDITS | Extras.MASKS | Extras.LOGPROBS


def extras_of(all_demands: Collection[Demands]) -> Extras:
    """Return flags for the optional work of a step, such as log-probabilities or grammar masks.

    `all_demands` holds the demands of the step's requests. A flag is set if at least one request
    needs the work.
    """
    extras = Extras(0)
    for demands in all_demands:
        if demands.edits:
            extras |= Extras.EDITS
        if demands.masks:
            extras |= Extras.MASKS
        if demands.logprobs is not None:
            extras |= Extras.LOGPROBS
    return extras


def pack(plan: Part, page_tables: np.ndarray, layout: Layout, extras: Extras) -> np.ndarray:
    """Pack a plan into one array i32[B, words]. Rows without a request are padding.

    `page_tables` is `Residents.page_tables`. `extras` are flags for the plan's optional work
    (see `extras_of`).
    """
    count = len(plan.sequences)
    if isinstance(plan, DecodePlan):
        packed, rows = layout.packing(DecodeInputs).rows(plan.batch)
        rows.num_drafts[:] = plan.num_drafts
        if plan.num_drafts:
            limits = [sequence.draft_limit for sequence in plan.sequences]
            rows.num_drafts[:count] = np.minimum(limits, plan.num_drafts)
        paths: Any = rows.suggestions
        for row, path in enumerate(plan.suggested):
            if path is not None:
                paths.starts[row] = path.start
                paths.tokens[row, : len(path.tokens)] = path.tokens
    else:
        packed, rows = layout.packing(PrefillInputs).rows(plan.batch)
        for row, chunk in enumerate(plan.chunks):
            rows.starts[row], rows.counts[row] = chunk.start, chunk.count
            rows.is_last[row], rows.is_resumed[row] = chunk.is_last, chunk.is_resumed
    rows.slots[:count] = slots = list(map(slot_of, plan.sequences))
    rows.extras[:] = extras
    tables = rows.page_tables.reshape(plan.batch, layout.num_tables, -1)  # a view
    tables[:count, :, : page_tables.shape[2]] = page_tables[slots]
    return packed


def pack_snapshots(
    chunks: Iterable[Chunk], batch: int, layout: Layout, *, is_taken: bool
) -> np.ndarray:
    """Pack the `SnapshotInputs` of prefill chunks into one array.

    A snapshot is a copy of a request's recurrent states. If `is_taken`, the inputs describe the
    snapshots to take after the chunks. Otherwise, they describe the snapshots to restore before the
    chunks.
    """
    packed, rows = layout.packing(SnapshotInputs).rows(batch)
    for row, chunk in enumerate(chunks):
        rows.slots[row] = slot_of(chunk.sequence)
        rows.ids[row] = chunk.taken if is_taken else chunk.restored
        rows.ends[row] = chunk.start + chunk.count if is_taken else chunk.start
    return packed


def pack_masks(plan: Part, drafts: np.ndarray | None, layout: Layout) -> np.ndarray:
    """Return grammar masks i32[B, R, ceil(V/32)] for the requests of a plan.

    R is the number of rows of logits per request: K + 1 for a decode round, and 1 for prefill
    chunks. A mask of all ones allows every token. Such masks are returned for padding rows, for
    requests without a grammar, and for sequences that have finished. If a grammar raises an
    exception, its sequence also gets such masks, and the exception is stored in `sequence.error`.
    When the step's tokens are read, only this sequence ends.

    `drafts` is i32[B, K], or None if no grammar depends on drafts. If a drafter found fewer than K
    drafts, the remaining entries of `drafts` are zeros.
    """
    num_rows = plan.k + 1 if isinstance(plan, DecodePlan) else 1
    masks = np.full((plan.batch, num_rows, layout.mask_words), -1, np.int32)
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
    """Return the output of each sequence of `plan`.

    `packed` i32[B, columns] is the host's copy of the array that `pack_outputs` made in a program
    of `variant`. `has_raw` means that `packed` has raw log-probabilities in addition to processed
    log-probabilities.
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
        *_, num_top, num_top_of_prompt = sequence.request.demands
        if logprobs is not None and num_top is not None:
            output.logprobs = _by_token(logprobs, row, output.tokens, num_top)
        if prompts is not None and num_top_of_prompt is not None:
            assert isinstance(plan, PrefillPlan)
            chunk = plan.chunks[row]
            following = sequence.reported[chunk.start + 1 :][: chunk.count]
            output.prompt_logprobs = _by_token(prompts, row, following, num_top_of_prompt)
            output.start = chunk.start
    return outputs


def export_features(plan: Part, features: Features) -> None:
    """Append the features (hidden states) of chunks to their sequences.

    Chunks whose request does not export features are skipped. `features` are on the host, and have
    `plan.width` rows for each chunk.
    """
    assert isinstance(plan, PrefillPlan), "rounds export no features"
    for row, chunk in enumerate(plan.chunks):
        if chunk.sequence.request.exports_features:
            rows = row * plan.width + np.arange(chunk.count)
            own = jax.tree.map(lambda x, rows=rows: x[rows], features)
            chunk.sequence.features.append((chunk.start, own))


def pack_outputs(outputs: StepOutputs) -> jax.Array:
    """Pack a step's results as an array i32[B, ...].

    Each row holds the number of tokens, the number of drafts, the tokens, their log-probabilities,
    and log-probabilities of prompt tokens, if the program computes these.
    """
    counts = outputs.num_tokens[:, None], outputs.num_drafts[:, None]
    parts = [*counts, outputs.tokens, outputs.logprobs]
    if outputs.prompt_logprobs is not None:
        parts.append(outputs.prompt_logprobs)
    return jnp.concatenate(parts, axis=1)


class _Reader:
    """Reads groups of columns of a packed array of results, from left to right."""

    def __init__(self, packed: np.ndarray):
        self._packed = packed
        self._start = 0

    def take(self, count: int) -> np.ndarray:
        self._start += count
        return self._packed[:, self._start - count : self._start]

    def logprobs(
        self, num_rows: int, num_top: int | None, has_raw: bool, *, is_wanted: bool
    ) -> tuple[Any, ...] | None:
        """Read the next fields of `Logprobs`, and return them as a tuple of nested lists.

        Return None if the fields are absent. If they are not wanted, skip them and return None.
        """
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
        # Indexing lists is several times faster than indexing arrays.
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
