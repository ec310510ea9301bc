"""What a kind of cache is: arrays that layers of a model share, and how rows use them.

A model lists its kinds, and holds one tree of arrays for each. The step, the engine and the plan of
memory go through that list, and know none of them by name.
"""

from typing import Any, NamedTuple, Protocol

import jax


class CacheSizes(NamedTuple):
    """How much room a cache has."""

    num_slots: int  # requests that may be resident
    num_pages: int
    page_size: int  # tokens
    max_rows: int  # of a request in one step, of which some may be rejected


class CacheKind(Protocol):
    """One kind of cache. Hashable; its arrays are arguments, layers being their first axis.

    Rows use it in one of three forms, see `Rows.mix`: `cached` serves, `causal` and `unrolled` are
    of training, without a cache, and have gradients. `inputs` are what the kind's layers project.
    """

    @property
    def name(self) -> str:
        """What Hugging Face configs call its layers."""
        ...

    @property
    def num_layers(self) -> int: ...
    @property
    def is_recurrent(self) -> bool:
        """Whether requests keep a state beside their pages, so that pages alone do not spare
        running the tokens in them."""
        ...

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Of what a layer keeps of a token in pages, in the cache's dtype; (0,) for nothing."""
        ...

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of the f32 state that a layer keeps of a request; (0,) for none."""
        ...

    def init(self, sizes: CacheSizes, dtype: Any) -> Any:
        """An empty cache."""
        ...

    def init_snapshots(self, num_snapshots: int, dtype: Any) -> Any:
        """Room for copies of what requests keep beside their pages; None if that is nothing."""
        ...

    def take(
        self, snapshots: Any, ids: jax.Array, cache: Any, slots: jax.Array, ends: jax.Array
    ) -> Any:
        """Snapshots with `ids` i32[B] of `slots` i32[B], which hold `ends` tokens, none pending.

        An id past the last is dropped.
        """
        ...

    def restore(
        self, cache: Any, slots: jax.Array, snapshots: Any, ids: jax.Array, ends: jax.Array
    ) -> Any:
        """The cache with `slots` as they were when `ids` were taken, `ends` tokens in.

        A slot past the last is dropped.
        """
        ...

    def cached(self, rows: Any, cache: Any, layer: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
        """What `CachedRows` read of the cache [N, ...], and the cache with the rows in it."""
        ...

    def causal(self, length: int, inputs: Any) -> jax.Array:
        """The same of whole sequences of `length` rows, each over those before it."""
        ...

    def unrolled(self, length: int, kept: Any, inputs: Any) -> tuple[jax.Array, Any]:
        """The same of a further draft for every row; `kept` () is of the drafts so far."""
        ...
