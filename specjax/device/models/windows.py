"""Reads the sliding windows of layers from Hugging Face configs."""

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.checkpoint.errors import CheckpointError
from specjax.device.models.hf_config import HFConfig

FULL, SLIDING = "full_attention", "sliding_attention"
# The default of `sliding_window`, by model type.
_DEFAULTS: Mapping[str, int | None] = {
    "mistral": 4096,
    "ministral": 4096,
    "qwen2": 4096,
    "qwen3": 4096,
    "qwen3_moe": 4096,
    "gpt_oss": 128,
    "gemma2": 4096,
    "gemma3_text": 4096,
}
# N by model type: if `layer_types` is not set, every N-th layer has no window.
_PERIODS = {"gpt_oss": 2, "gemma2": 2, "gemma3_text": 6}
_PERIOD_FIELDS = {"gemma3_text": "sliding_window_pattern"}
# _SWITCHED: types in which `use_sliding_window` turns windows on. _FROM_LAYER: types in which only
# the layers from `max_window_layers` on have windows. _WITHOUT: types without windows.
_SWITCHED = ("qwen2", "qwen3", "qwen3_moe")
_FROM_LAYER = ("qwen2", "qwen3")
_WITHOUT = ("llama",)


def read_windows(hf: HFConfig, kind: str, num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer in tokens, None for a layer without a window.

    The tuple is empty if no layer has a window.

    Args:
        kind: the model type, which determines the defaults.

    Raises:
        CheckpointError: the fields are inconsistent, or do not belong to this model type.
    """
    if kind in _WITHOUT:
        hf.require_unset("use_sliding_window")
        return ()
    window = _read_window(hf, kind)
    types = hf.get("layer_types", _default_types(hf, kind, num_layers, window))
    check_layer_types(hf.origin, types, num_layers)
    if SLIDING not in types:
        return ()
    if window is None:
        raise CheckpointError(
            f"{hf.origin}: layer_types has {SLIDING!r}, but sliding_window is not set"
            + (", or use_sliding_window is false" if kind in _SWITCHED else "")
        )
    return tuple(window if one == SLIDING else None for one in types)


def check_layer_types(origin: str, types: Any, num_layers: int) -> None:
    """Raise `CheckpointError` unless `types` names full or sliding attention for each layer."""
    is_list = isinstance(types, Sequence) and len(types) == num_layers
    if not is_list or any(one not in (FULL, SLIDING) for one in types):
        raise CheckpointError(
            f"{origin}: layer_types must name {FULL!r} or {SLIDING!r} for each of "
            f"num_hidden_layers={num_layers}; got {types!r}"
        )


def _read_window(hf: HFConfig, kind: str) -> int | None:
    is_on = hf.flag("use_sliding_window") if kind in _SWITCHED else True
    # Null, unlike a missing field, means that there is no window.
    given = hf.fields.get("sliding_window", _DEFAULTS.get(kind))
    return hf.integer("sliding_window", given) if is_on and given is not None else None


def _default_types(hf: HFConfig, kind: str, num_layers: int, window: int | None) -> list[str]:
    if kind in _PERIODS:
        period = _PERIODS[kind]
        if kind in _PERIOD_FIELDS:
            period = hf.integer(_PERIOD_FIELDS[kind], period)
        return [SLIDING if (i + 1) % period else FULL for i in range(num_layers)]
    if window is None:
        return [FULL] * num_layers
    first = hf.count("max_window_layers", 28) if kind in _FROM_LAYER else 0
    return [FULL if i < first else SLIDING for i in range(num_layers)]
