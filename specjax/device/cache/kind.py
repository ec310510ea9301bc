"""The interface of cache kinds. A cache kind defines a cache's arrays, and how layers use them.

A model lists its cache kinds, and each kind has one pytree of arrays. The step, the engine and the
memory planning iterate over this list. They do not depend on specific kinds.
"""

from typing import Any, NamedTuple, Protocol

import jax

from pallas_kernels.page_formats import PageFormat
from specjax.device.cache.pages import Pages, init_pages


class CacheSizes(NamedTuple):
    """The capacity of a cache."""

    num_slots: int  # maximum number of resident requests
    num_pages: int  # pages per layer, in layers without separate `window_pages`
    page_size: int  # tokens per page
    max_rows: int  # maximum number of rows per request in a step
    num_snapshots: int = 0  # number of snapshots of recurrent states
    window_pages: tuple[tuple[int, int], ...] = ()  # (window, number of its pages)
    page_format: PageFormat | None = None  # of 8-bit pages; None: pages have the model's dtype

    def pages(self, window: int | None) -> int:
        """Return the number of pages per layer, for layers with this `window` (None: no window)."""
        return next((pages for one, pages in self.window_pages if one == window), self.num_pages)


class CacheKind(Protocol):
    """One kind of cache, as a hashable value that holds no arrays.

    Its methods take and return the cache's arrays, whose first axis is the layer. Four methods run
    a layer. Serving calls `write` and then `read`. Training usually calls `causal` or `unrolled`,
    which can be differentiated and do not take the cache's arrays. All four take `inputs`
    (`RowInputs`): the projected rows, such as queries, keys and values, and weights that all rows
    share.

    If a kind is recurrent, the cache has a state per slot. A slot is an index that the engine gives
    a running request.
    """

    @property
    def name(self) -> str:
        """The name of this kind of layer in Hugging Face configs."""
        ...

    @property
    def num_layers(self) -> int: ...
    @property
    def is_recurrent(self) -> bool:
        """Whether each request has a recurrent state.

        If so, tokens found in the prefix cache can be skipped only if a snapshot of the state after
        these tokens is restored.
        """
        ...

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of one token's entry in the pages of one layer; (0,) if there are no pages."""
        ...

    @property
    def window(self) -> int | None:
        """Number of tokens that a row attends to, including itself; None for all."""
        ...

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of one request's f32 state in one layer; (0,) if there is no state."""
        ...

    @property
    def row_size(self) -> int:
        """The number of additional intermediate values per row in one layer.

        Memory planning adds this number to its estimate for all kinds of layers, which is a fixed
        multiple of the model's width.
        """
        ...

    def init(self, sizes: CacheSizes, dtype: Any) -> Any:
        """Return an empty cache. `dtype` is the model's dtype."""
        ...

    def init_snapshots(self, num_snapshots: int, dtype: Any) -> Any:
        """Allocate snapshots of recurrent states; return None if the kind has no such states."""
        ...

    def take(
        self, snapshots: Any, ids: jax.Array, cache: Any, slots: jax.Array, ends: jax.Array
    ) -> Any:
        """Copy recurrent states of requests to snapshots; return the new snapshots.

        `slots` i32[B] are the requests' slots. `ids` i32[B] are the snapshots to overwrite.
        `ends` i32[B] is the number of tokens that each state includes. The states must include all
        tokens in the caches, as after a prefill chunk. Out-of-range ids are ignored.
        """
        ...

    def restore(
        self, cache: Any, slots: jax.Array, snapshots: Any, ids: jax.Array, ends: jax.Array
    ) -> Any:
        """Copy snapshots to recurrent states of requests; return the new cache.

        The arguments are as in `take`, except that `ends` is the number of tokens that each
        snapshot includes. Out-of-range slots are ignored.
        """
        ...

    def write(self, rows: Any, cache: Any, layer: jax.Array, inputs: Any) -> tuple[Any, Any]:
        """Add `rows` (`CachedRows`) to the cache; return the queries for `read`, and the cache.

        A recurrent kind computes the output here, and returns it in place of queries.
        """
        ...

    def read(self, rows: Any, cache: Any, layer: jax.Array, inputs: Any, queries: Any) -> jax.Array:
        """Return the layer's output [N, ...].

        `queries` is the first result of `write` for the same rows. `cache` is the second result, to
        which other parts of the step can have added rows since.
        """
        ...

    def causal(self, length: int, inputs: Any) -> jax.Array:
        """Return the output of causal attention within sequences of `length` rows each."""
        ...

    def unrolled(self, length: int, kept: Any, inputs: Any) -> tuple[jax.Array, Any]:
        """Run one more drafting step in training; return its output and the new `kept`.

        A drafting step makes one more draft after every row of the sequences. `kept` is a tuple
        with an entry for each previous step. The new `kept` also has an entry for this step.
        """
        ...


class PagesOnly:
    """The base class of cache kinds that store everything in pages."""

    num_layers: int
    window: Any
    keeps_dtype: bool  # whether pages have the model's dtype, regardless of the format
    layer_scales: tuple[tuple[float, float], ...]  # for formats with scales of layers; () if all 1

    @property
    def is_recurrent(self) -> bool:
        """False: requests have only pages."""
        return False

    @property
    def token_shape(self) -> tuple[int, ...]:
        """See `CacheKind.token_shape`."""
        raise NotImplementedError

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scales of a token's entry, for page formats in which tokens have scales."""
        raise NotImplementedError

    @property
    def scaled_parts(self) -> tuple[str, str]:
        """The checkpoint's scale for each of the two parts of a token's entry: "k" or "v".

        "k" is the scale of keys, and "v" is the scale of values. The two parts are usually the key
        and the value.
        """
        return "k", "v"

    @property
    def state_shape(self) -> tuple[int, ...]:
        """(0,): there is no state."""
        return (0,)

    @property
    def row_size(self) -> int:
        """0: memory planning always includes queries, keys and values; see `CacheKind.row_size`."""
        return 0

    def init(self, sizes: CacheSizes, dtype: Any) -> Pages:
        """Create empty pages."""
        places = self.num_layers, sizes.pages(self.window), sizes.page_size
        stored = None if self.keeps_dtype else sizes.page_format
        shapes = self.token_shape, self.scale_shape
        return init_pages(places, *shapes, dtype, stored, self.layer_scales)

    def init_snapshots(self, num_snapshots: int, dtype: Any) -> None:
        """Return None: pages need no snapshots."""

    def take(
        self, snapshots: None, ids: jax.Array, cache: Pages, slots: jax.Array, ends: jax.Array
    ) -> None:
        """Return None: pages need no snapshots."""

    def restore(
        self, cache: Pages, slots: jax.Array, snapshots: None, ids: jax.Array, ends: jax.Array
    ) -> Pages:
        """Return the cache unchanged: pages need no snapshots."""
        return cache
