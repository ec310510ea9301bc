"""Splits a cache kind into two if only some of its layers have 8-bit pages."""

from dataclasses import replace
from typing import Any

from specjax.device.cache.kind import CacheKind


def divide_kinds(
    kinds: tuple[CacheKind, ...],
    layer_kinds: tuple[int, ...],
    kept_layers: tuple[int, ...],
    layer_scales: tuple[tuple[float, float], ...],
) -> tuple[tuple[CacheKind, ...], tuple[int, ...]]:
    """Divide cache kinds, so that all layers of a kind store pages in the same way.

    Return the new kinds, and each layer's index into them.

    Args:
        kinds: the cache kinds of a model. The result begins with a kind for each of these, in the
            same order. New kinds follow.
        layer_kinds: each layer's index into `kinds`.
        kept_layers: layers whose pages keep the model's dtype.
        layer_scales: the scales of each layer's pages; () if all are 1.
    """
    if not kept_layers and not layer_scales:
        return kinds, layer_kinds
    each = [(kind, i in kept_layers) for i, kind in enumerate(layer_kinds)]
    first = [
        (kind, (kind, False) not in each and (kind, True) in each) for kind in range(len(kinds))
    ]
    groups = list(dict.fromkeys([*first, *each]))

    def group(number: int, is_kept: bool) -> CacheKind:
        kind: Any = kinds[number]
        layers = [i for i, one in enumerate(each) if one == (number, is_kept)]
        if kind.token_shape == (0,):  # no pages
            return kind
        scales = tuple(layer_scales[i] for i in layers) if layer_scales else ()
        return replace(kind, num_layers=len(layers), keeps_dtype=is_kept, layer_scales=scales)

    return tuple(group(*one) for one in groups), tuple(map(groups.index, each))
