"""Chooses how pages of keys and values are stored, from the options of an LLM."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from pallas_kernels.page_formats import FP8, FP8_BYTES, PAGE_FORMATS, PageFormat
from specjax.checkpoint.files import open_checkpoint
from specjax.checkpoint.kv_scales import KVScales, read_kv_scales
from specjax.checks import check_choice, is_integer
from specjax.config import KV_CACHE_DTYPES, SpeculativeConfig
from specjax.device.loading import Log
from specjax.device.models.model import Model
from specjax.device.models.tensor_names import TensorNames
from specjax.device.placement import default_device
from specjax.serving.source import ModelSource

WINDOWS = "sliding_window"


class ChosenPages(NamedTuple):
    """The result of `choose_pages`.

    Attributes:
        source: the model, with settings for its pages.
        target: the format of the target's pages; None for pages of the model's dtype.
        drafter: the format of the drafter's pages, or None.
    """

    source: ModelSource
    target: PageFormat | None
    drafter: PageFormat | None


def choose_pages(
    source: ModelSource,
    speculation: SpeculativeConfig | None,
    kv_cache_dtype: Any,
    skip_layers: Any,
    log: Log,
    kernels: str = "auto",
) -> ChosenPages:
    """Return the page formats for `kv_cache_dtype` and `kv_cache_dtype_skip_layers`.

    The result also has the model, in which the skipped layers are marked: their pages are not in 8
    bits. If the format has one scale per layer, the model gets the checkpoint's scales.

    Raises:
        ValueError: an option is invalid; the message says which values are allowed.
        CheckpointError: a scale in the checkpoint is not one positive number.
    """
    check_choice("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    stored = _format(kv_cache_dtype, kernels)
    own = speculation.kv_cache_dtype if speculation else None
    drafters = stored if own is None else _format(own, kernels)
    kept = _kept_layers(source.target, skip_layers)
    if stored is None:
        if kept:
            raise ValueError(
                f"kv_cache_dtype_skip_layers={skip_layers!r} goes with 8-bit pages, not with "
                f"kv_cache_dtype={kv_cache_dtype!r}; leave it out"
            )
        return ChosenPages(source, None, drafters)
    scales = () if stored.has_token_scales else _layer_scales(source, log)
    if kept or scales:
        source = replace(source, target=source.target.with_pages(kept, scales))
    return ChosenPages(source, stored, drafters)


def _format(name: str, kernels: str) -> PageFormat | None:
    """Return the page format of a `kv_cache_dtype` on this device; None for the model's dtype."""
    stored = PAGE_FORMATS.get(name)
    on_cpu = default_device().platform == "cpu" and kernels != "interpret"
    return FP8_BYTES if on_cpu and stored == FP8 else stored


def _kept_layers(target: Model, skipped: Any) -> tuple[int, ...]:
    """Return the layers that `kv_cache_dtype_skip_layers` names, in order."""
    if skipped is None:
        return ()
    kinds = [target.cache_kinds[kind] for kind in target.layer_kinds]
    paged = [i for i, kind in enumerate(kinds) if kind.token_shape != (0,)]
    windowed = [i for i in paged if kinds[i].window is not None]
    where = f"kv_cache_dtype_skip_layers={skipped!r}"
    if isinstance(skipped, str) or not isinstance(skipped, Iterable):
        raise ValueError(f"{where} must be a list of layers' numbers and {WINDOWS!r}")
    kept: set[int] = set()
    for one in skipped:
        number = int(one) if isinstance(one, str) and one.isdecimal() else one
        if one == WINDOWS and windowed:
            kept.update(windowed)
        elif is_integer(number) and number in paged:
            kept.add(number)
        else:
            also = f", or {WINDOWS!r}" if windowed else ""
            raise ValueError(
                f"{where} has {one!r}; name layers with keys and values, which are "
                f"{_ranges(paged)}{also}"
            )
    return tuple(sorted(kept))


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as text, with ranges of adjacent numbers, like "0-3, 7"."""
    ends = [i for i in numbers if i + 1 not in numbers]
    starts = [i for i in numbers if i - 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def _layer_scales(source: ModelSource, log: Log) -> tuple[tuple[float, float], ...]:
    """Return the checkpoint's pair of scales for each layer's pages; () if it has no scales."""
    if source.folder is None or not source.has_weights:
        return ()
    target, files = source.target, open_checkpoint(source.folder)
    attentions = [f"model.layers.{i}.self_attn" for i in range(target.num_layers)]
    found = read_kv_scales(files, attentions, TensorNames.of(files.names()).stored)
    if not found:
        return ()
    num = sum(scales != KVScales() for scales in found)
    log(f"{source.folder}: 8-bit keys and values have the checkpoint's scales in {num} layers")
    kinds: list[Any] = [target.cache_kinds[kind] for kind in target.layer_kinds]
    parts = [("k", "v") if kind.token_shape == (0,) else kind.scaled_parts for kind in kinds]
    return tuple(
        (getattr(scales, one), getattr(scales, other))
        for (one, other), scales in zip(parts, found, strict=True)
    )
