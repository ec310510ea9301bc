"""The arrays of a cache that has only pages, and no recurrent states."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.page_formats import PageFormat


class Pages(NamedTuple):
    """The pages of L layers, and the scales of quantised pages.

    If the page format has scales of tokens, `scales` is [L, pages, page_size, ...]. If the format
    has scales of layers, `scales` is [L, 2], with one for each part of a token's entry, such as key
    and value. `scales` is None if pages hold unquantised numbers, or if all scales are 1.
    """

    values: jax.Array  # [L, pages, page_size, *token_shape]
    scales: jax.Array | None = None  # f32


def init_pages(
    places: tuple[int, int, int],
    token_shape: tuple[int, ...],
    scale_shape: tuple[int, ...],
    dtype: Any,
    stored: PageFormat | None,
    layer_scales: tuple[tuple[float, ...], ...] = (),
) -> Pages:
    """Create empty pages.

    Args:
        places: the number of layers, of pages per layer, and of tokens per page.
        token_shape: shape of a token's entry.
        scale_shape: shape of the scales of a token's entry.
        dtype: dtype of unquantised numbers.
        stored: the format of 8-bit numbers; None for unquantised numbers.
        layer_scales: `scale_shape[0]` scales for each layer; () if all are 1. Formats in which
            tokens have scales ignore this argument.
    """
    if stored is None:
        return Pages(jnp.zeros((*places, *token_shape), dtype))
    values, scales = jnp.zeros((*places, *token_shape), stored.dtype), None
    if stored.has_token_scales:
        scales = jnp.zeros((*places, *scale_shape), jnp.float32)
    elif layer_scales:
        scales = jnp.array(layer_scales, jnp.float32)
    return Pages(values, scales)
