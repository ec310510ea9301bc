"""The interface of a kind of cache: arrays shared by layers of a model, and how rows use them.

A model lists its kinds, and has one pytree of arrays for each. The step, the engine and the memory
planning iterate over that list, and do not depend on specific kinds.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp


class CacheSizes(NamedTuple):
    """The capacity of a cache."""

    num_slots: int  # requests that may be resident
    num_pages: int  # of layers without pages of their own
    page_size: int  # tokens
    max_rows: int  # of a request in one step; some may be rejected
    num_snapshots: int = 0  # of recurrent states
    window_pages: tuple[tuple[int, int], ...] = ()  # (window, pages) of layers that have their own
    page_dtype: Any = None  # of what pages hold; None for the dtype of the model

    def pages(self, window: int | None) -> int:
        """Return the pages of layers with this window."""
        return next((pages for one, pages in self.window_pages if one == window), self.num_pages)


class CacheKind(Protocol):
    """One kind of cache. Hashable; its arrays, with layers as first axis, are passed in.

    Rows use it in one of three forms, see `Rows.mix`: `cached` for serving; `causal` and `unrolled`
    for training, without a cache and with gradients. `inputs` are the layer's projections.
    """

    @property
    def name(self) -> str:
        """The name of its layers in Hugging Face configs."""
        ...

    @property
    def num_layers(self) -> int: ...
    @property
    def is_recurrent(self) -> bool:
        """Whether requests have a state besides their pages, so that reusing pages alone does not
        save running their tokens."""
        ...

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of a token's entry in the pages of a layer; (0,) if none."""
        ...

    @property
    def window(self) -> int | None:
        """How many tokens a row reads in the pages, itself included; None for all."""
        ...

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a request's f32 state in a layer; (0,) if none."""
        ...

    @property
    def row_size(self) -> int:
        """Numbers that a layer makes of a row on the way, beyond a few times the model's width."""
        ...

    def init(self, sizes: CacheSizes, dtype: Any) -> Any:
        """Create an empty cache of a model of `dtype`."""
        ...

    def init_snapshots(self, num_snapshots: int, dtype: Any) -> Any:
        """Allocate snapshots of what requests keep outside pages; None if that is nothing."""
        ...

    def take(
        self, snapshots: Any, ids: jax.Array, cache: Any, slots: jax.Array, ends: jax.Array
    ) -> Any:
        """Copy `slots` i32[B], at `ends` tokens with none pending, to snapshots `ids` i32[B].

        Out-of-range ids are dropped. Returns the snapshots.
        """
        ...

    def restore(
        self, cache: Any, slots: jax.Array, snapshots: Any, ids: jax.Array, ends: jax.Array
    ) -> Any:
        """Copy snapshots `ids`, taken at `ends` tokens, back to `slots`; return the cache.

        Out-of-range slots are dropped.
        """
        ...

    def cached(self, rows: Any, cache: Any, layer: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
        """Return the output [N, ...] of `CachedRows` on the cache, and the cache with the rows."""
        ...

    def causal(self, length: int, inputs: Any) -> jax.Array:
        """Return the output for whole sequences of `length` rows, each causal in itself."""
        ...

    def unrolled(self, length: int, kept: Any, inputs: Any) -> tuple[jax.Array, Any]:
        """Return the output for one more draft of every row, and `kept` with it; () at first."""
        ...


class PagesOnly:
    """Base of kinds that keep nothing of a request but its pages."""

    num_layers: int
    window: Any

    @property
    def is_recurrent(self) -> bool:
        """False: requests have pages only."""
        return False

    @property
    def token_shape(self) -> tuple[int, ...]:
        """See `CacheKind.token_shape`."""
        raise NotImplementedError

    @property
    def state_shape(self) -> tuple[int, ...]:
        """(0,): there is no state."""
        return (0,)

    @property
    def row_size(self) -> int:
        """0: queries, keys and values are about as wide as the model."""
        return 0

    def init(self, sizes: CacheSizes, dtype: Any) -> jax.Array:
        """Create an empty pool [layers, pages, page_size, *token_shape]."""
        pages = self.num_layers, sizes.pages(self.window), sizes.page_size
        page_dtype = dtype if sizes.page_dtype is None else sizes.page_dtype
        return jnp.zeros((*pages, *self.token_shape), page_dtype)

    def init_snapshots(self, num_snapshots: int, dtype: Any) -> None:
        """Return None: pages are kept and need no snapshots."""

    def take(
        self, snapshots: None, ids: jax.Array, cache: jax.Array, slots: jax.Array, ends: jax.Array
    ) -> None:
        """Copy nothing: the pages themselves are kept."""

    def restore(
        self, cache: jax.Array, slots: jax.Array, snapshots: None, ids: jax.Array, ends: jax.Array
    ) -> jax.Array:
        """Return the cache unchanged: the page table refers to the kept pages."""
        return cache
