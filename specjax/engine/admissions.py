"""Packs newly admitted requests into an array, which the device unpacks as `AdmitInputs`.

`device/requests.py` declares the fields of a request.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from specjax.device.inputs import AdmitInputs
from specjax.device.layout import Layout
from specjax.device.requests import Edits, Requests, Sampling
from specjax.host.residency import slot_of
from specjax.host.sequence import Sequence
from specjax.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS


def pack_admissions(sequences: list[Sequence], batch: int, layout: Layout) -> np.ndarray:
    """Pack the requests of `sequences` into one array of `batch` rows; unused rows are padding."""
    packed, rows = layout.packing(AdmitInputs).rows(batch)
    fields = [field.reshape(batch, -1) for field in jax.tree.leaves(rows)]  # views
    for row, sequence in enumerate(sequences):
        values = jax.tree.leaves(_admission(sequence, layout), is_leaf=_is_value)
        for field, value in zip(fields, values, strict=True):
            numbers = np.asarray(value, field.dtype).reshape(-1)
            field[row, : len(numbers)] = numbers
    return packed


def _admission(sequence: Sequence, layout: Layout) -> Any:
    """Return one sequence's row of `AdmitInputs`. Lists of ids in the row are not padded."""
    request, params = sequence.request, sequence.request.params
    bias = params.logit_bias or {}
    requests = _row(
        Requests,
        prompt_lengths=len(request.prompt_token_ids),
        limits=request.max_length,
        stop_ids=request.stop_ids,
        sampling=_row(
            Sampling,
            temperature=params.temperature,
            seeds=request.seeds[sequence.index],
            top_k=min(max(params.top_k, 0), layout.vocab_size),
            top_p=params.top_p,
            min_p=params.min_p,
        ),
        edits=_row(
            Edits,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            min_tokens=params.min_tokens,
            bias_ids=list(bias),
            bias=list(bias.values()),
            bad_words=_flush_right(request.bad_words),
            allowed=_bitmask(params.allowed_token_ids, layout.mask_words),
            processor=request.processor,
        ),
    )
    slot = slot_of(sequence)
    return _row(AdmitInputs, slots=slot, requests=requests, tokens=sequence.token_ids)


def _row(kind: Callable[..., Any], **values: Any) -> Any:
    """Make a `kind` object (a dataclass). Its fields hold one request's values, not arrays."""
    return kind(**values)


def _is_value(node: Any) -> bool:
    """Return whether `node` is a value or a list of values, and not a dataclass."""
    return not isinstance(node, AdmitInputs | Requests | Sampling | Edits)


def _flush_right(bad_words: Any) -> np.ndarray:
    rows = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int32)
    for row, word in zip(rows, bad_words, strict=False):
        row[-len(word) :] = word
    return rows


def _bitmask(token_ids: Any, mask_words: int) -> np.ndarray:
    """Return a bitmask i32[mask_words] of token ids. If `token_ids` is None, every bit is set."""
    bits = np.zeros(mask_words * 32, bool)
    bits[slice(None) if token_ids is None else list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
