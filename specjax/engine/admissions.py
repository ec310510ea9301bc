"""The row that admits a request to its slot: its fields, from the host's request to the device."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.device.requests import Edits, Requests, Sampling
from specjax.device.step import AdmitInputs
from specjax.host.sequence import Sequence
from specjax.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
)

Fields = Mapping[str, tuple[int, type]]  # width and type of each, in the order of the row


def fields_of(mask_words: int, max_model_len: int) -> dict[str, tuple[int, type]]:
    """The fields of a row, for a bit per token in `mask_words` words."""
    scalars = {
        "slot": np.int32,
        "prompt_length": np.int32,
        "limit": np.int32,
        "temperature": np.float32,
        "seed": np.uint32,
        "top_k": np.int32,
        "top_p": np.float32,
        "min_p": np.float32,
        "repetition": np.float32,
        "presence": np.float32,
        "frequency": np.float32,
        "min_tokens": np.int32,
        "processor": np.int32,
    }
    return {name: (1, kind) for name, kind in scalars.items()} | {
        "stop_ids": (MAX_STOP_IDS, np.int32),
        "bias_ids": (MAX_LOGIT_BIAS, np.int32),
        "bias": (MAX_LOGIT_BIAS, np.float32),
        "bad_words": (MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS, np.int32),
        "allowed": (mask_words, np.uint32),
        "tokens": (max_model_len, np.int32),
    }


def values_of(sequence: Sequence, vocab_size: int, mask_words: int) -> dict[str, Any]:
    """What a sequence has in each field."""
    request = sequence.request
    params = request.params
    bad_words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1)
    for row, word in zip(bad_words, request.bad_words, strict=False):
        row[-len(word) :] = word
    return {
        "slot": sequence.slot,
        "prompt_length": len(request.prompt_token_ids),
        "limit": request.max_length,
        "temperature": params.temperature,
        "seed": request.seeds[sequence.index],
        "top_k": min(max(params.top_k, 0), vocab_size),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition": params.repetition_penalty,
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
        "min_tokens": params.min_tokens,
        "processor": request.processor,
        "stop_ids": request.stop_ids,
        "bias_ids": list(params.logit_bias or ()),
        "bias": list((params.logit_bias or {}).values()),
        "bad_words": bad_words,
        "allowed": _bitmask(params.allowed_token_ids, mask_words),
        "tokens": sequence.token_ids,
    }


def inputs_of(packed: jax.Array, fields: Fields) -> AdmitInputs:
    """What `admit` takes, of rows i32[B, ...] on the device."""
    values, start = {}, 0
    for name, (width, kind) in fields.items():
        words = packed[:, start : start + width]
        start += width
        if kind is np.float32 or name == "seed":
            words = jax.lax.bitcast_convert_type(words, jnp.dtype(kind))
        values[name] = words[:, 0] if width == 1 and name != "allowed" else words
    return AdmitInputs(
        slots=values["slot"],
        tokens=jnp.maximum(values["tokens"], 0),
        requests=Requests(
            prompt_lengths=values["prompt_length"],
            limits=values["limit"],
            stop_ids=values["stop_ids"],
            sampling=Sampling(
                temperature=values["temperature"],
                seeds=values["seed"],
                top_k=values["top_k"],
                top_p=values["top_p"],
                min_p=values["min_p"],
            ),
            edits=Edits(**{name: values[name] for name in Edits.__dataclass_fields__}),
        ),
    )


def _bitmask(token_ids: Any, mask_words: int) -> np.ndarray:
    if token_ids is None:
        return np.full(mask_words, 2**32 - 1, np.uint32)
    bits = np.zeros((mask_words, 32), np.uint64)
    bits.reshape(-1)[list(token_ids)] = 1
    return (bits << np.arange(32, dtype=np.uint64)).sum(axis=1).astype(np.uint32)
