"""Converts the fields of a request to `SamplingParams`.

If a request lacks a field, the checkpoint's generation_config.json determines the value. If this
file lacks the field, too, the default of OpenAI's API is used.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from specjax.sampling_params import (
    MAX_BAD_WORDS,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputs,
)
from specjax.server.errors import APIError
from specjax.server.settings import Limits
from specjax.server.wire import SAMPLING, GenerationFields

LISTS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias")
FORMATS = ("text", "json_object", "json_schema")
_FIRST_WORD = re.compile(r"[A-Za-z_]\w*(?:\[\w+\]|\.\w+)*")


def read_params(
    request: GenerationFields,
    defaults: SamplingParams,
    limits: Limits,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Return the sampling parameters of a request.

    Args:
        max_tokens: the maximum number of output tokens; None for as many as fit in the context.
        logprobs: the number of most likely tokens to report; None for no log-probabilities.

    Raises:
        APIError: a value is refused; `param` names the request's field.
    """
    _check_sizes(request, limits)
    given = {name: getattr(request, name) for name in SAMPLING}
    given = {name: value for name, value in given.items() if value is not None}
    if request.logit_bias is not None:
        given["logit_bias"] = _read_bias(request.logit_bias)
    is_stream = request.stream is True
    if is_stream and request.prompt_logprobs is not None:
        raise APIError(400, "prompt_logprobs needs stream=false", "prompt_logprobs")
    if request.stream_options is not None and not is_stream:
        raise APIError(400, "stream_options needs stream=true", "stream_options")
    kind = RequestOutputKind.DELTA if is_stream else RequestOutputKind.FINAL_ONLY
    given |= {"max_tokens": max_tokens, "logprobs": logprobs, "output_kind": kind}
    try:
        constraint = _read_constraint(request, limits)
        return replace(defaults, **given, structured_outputs=constraint)
    except ValueError as error:
        raise of_value(error, request) from None


def of_value(error: ValueError, request: Any, other: str | None = None) -> APIError:
    """Return the `APIError` for a value of the request that `error` refuses.

    The text of `error` usually begins with the name of a field of `SamplingParams`. In the result,
    this name is replaced by the name of the field in the request, which may differ (see
    `GenerationFields.renamed`). The result's `param` is the field that the text names. If the
    request has no such field, `param` is `other`.
    """
    message = str(error)
    names = getattr(request, "renamed", {})
    word = _FIRST_WORD.match(message)
    param = word[0] if word else ""
    field = re.split(r"[.\[]", param)[0]
    if field in names:
        message, param, field = names[field] + message[len(field) :], names[field], names[field]
    known = field in request.__struct_fields__
    return APIError(400, message, param if known else other)


def _read_bias(given: Mapping[str, float]) -> dict[int, float]:
    if bad := [token for token in given if not token.isdecimal() or len(token) > 10]:
        raise APIError(400, f"logit_bias has the key {bad[0]!r}; keys are token ids", "logit_bias")
    return {int(token): bias for token, bias in given.items()}


def _check_sizes(request: GenerationFields, limits: Limits) -> None:
    """Refuse long lists and texts before any work on them."""
    for name in LISTS:
        if (size := len(getattr(request, name) or ())) > limits.max_token_ids:
            raise APIError(400, f"{name} has {size} entries; at most {limits.max_token_ids}", name)
    words = request.bad_words or []
    if len(words) > MAX_BAD_WORDS:
        raise APIError(
            400, f"bad_words has {len(words)} texts; at most {MAX_BAD_WORDS}", "bad_words"
        )
    if any(len(text) > limits.max_stop_chars for text in words):
        text = f"a bad word has more than {limits.max_stop_chars} characters"
        raise APIError(400, text, "bad_words")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > limits.max_stops:
        raise APIError(400, f"stop has {len(stops)} texts; at most {limits.max_stops}", "stop")
    if any(len(text) > limits.max_stop_chars for text in stops):
        raise APIError(400, f"a stop has more than {limits.max_stop_chars} characters", "stop")


def _read_constraint(request: GenerationFields, limits: Limits) -> StructuredOutputs | None:
    """Return the constraint of `response_format` or `structured_outputs`."""
    found = _read_format(request.response_format)
    name, fields = "response_format", found
    if (given := request.structured_outputs) is not None:
        if found is not None:
            raise APIError(
                400, "structured_outputs and response_format both constrain; leave one out", name
            )
        name, fields = "structured_outputs", given
    if fields is None:
        return None
    if len(msgspec.json.encode(fields)) > limits.max_schema_bytes:
        raise APIError(400, f"{name} has more than {limits.max_schema_bytes} bytes", name)
    return SamplingParams(structured_outputs=fields).structured_outputs  # type: ignore


def _read_format(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    where = "response_format"
    kind = given.get("type")
    if kind not in FORMATS:
        raise APIError(
            400,
            f"{where}.type={kind!r} is not supported; one of {', '.join(FORMATS)}",
            f"{where}.type",
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    described = given.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        where = f"{where}.json_schema.schema"
        raise APIError(400, f"{where} must be a JSON schema, an object", where)
    return {"json": schema}
