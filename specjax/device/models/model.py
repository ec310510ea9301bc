"""The interface of a model to the engine: any hashable value with these methods."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Float

from specjax.config import EngineConfig
from specjax.device.cache.kind import CacheKind, CacheSizes
from specjax.device.models.layers.rows import Rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Features:
    """Outputs of a forward pass, for the output head and the drafter."""

    hidden: Float[jax.Array, "N D"]  # after the final norm
    auxiliary: Float[jax.Array, "N auxiliary"] | None  # residual stream entering `aux_layers`

    @classmethod
    def of(cls, hidden: jax.Array, auxiliary: Sequence[jax.Array]) -> "Features":
        """Concatenate the states [N, D] of the auxiliary layers, if any."""
        return cls(hidden, jnp.concatenate(auxiliary, axis=-1) if auxiliary else None)


class Model(Protocol):
    """A decoder: pure functions of its parameters, a pytree that the engine does not look into."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def max_position(self) -> int: ...
    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """The cache kinds of its layers."""
        ...

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """Each layer's index into `cache_kinds`."""
        ...

    def with_layers(self, num_layers: int) -> "Model":
        """Return the model with only its first layers, to measure their cost."""
        ...

    @property
    def head_shape(self) -> Any:
        """A `llama.Llama` with one dense layer: the shape of a new EAGLE head for this model."""
        ...

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        """Name prefixes of checkpoint tensors that the model ignores."""
        ...

    def specs(self, names: Collection[str] = ()) -> Any:
        """Return the parameters as a tree of `TensorSpec`.

        `names` are the checkpoint's tensor names; they select the layout if there are several.
        """
        ...

    def extend(
        self,
        params: Any,
        tokens: jax.Array,
        rows: Rows,
        caches: tuple[Any, ...] | None,
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[Features, tuple[Any, ...]]:
        """Run tokens i32[N] at `rows` after `caches`; return the features, and caches with the
        rows.

        `caches` has one cache per entry of `cache_kinds`; None for rows without cache, as in
        training.

        `aux_layers` lists the layers whose input (the residual stream before the norm) goes to
        `Features.auxiliary`, in that order; `num_layers` means the output of the last layer.
        """
        ...

    def embed(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Return the rows [N, D] of the embedding for tokens i32[N], as stored in the checkpoint.

        They are not scaled, even if the model scales the input of its first layer: draft heads read
        them like this.
        """
        ...

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Return the next-token logits f32[N, V] for hidden states [N, D]."""
        ...


def is_recurrent(model: Model) -> bool:
    """Return whether requests have a state in addition to pages, so that reusing pages is not
    enough to skip running their tokens."""
    return any(kind.is_recurrent and kind.num_layers > 0 for kind in model.cache_kinds)


def page_windows(model: Model, config: EngineConfig) -> tuple[int, ...]:
    """Return the windows whose layers have separate pages, which are freed behind the window.

    Empty in exact mode, where requests keep their pages to the end.
    """
    if config.exact:
        return ()
    windows = {kind.window for kind in model.cache_kinds if kind.num_layers}
    return tuple(sorted(w for w in windows if w is not None and w < config.max_model_len))


def init_caches(model: Model, sizes: CacheSizes, dtype: Any) -> tuple[Any, ...]:
    """Create an empty cache of each kind."""
    return tuple(kind.init(sizes, dtype) for kind in model.cache_kinds)


def take_snapshots(
    model: Model, snapshots: tuple[Any, ...], caches: tuple[Any, ...], moves: tuple[jax.Array, ...]
) -> tuple[Any, ...]:
    """Return the snapshots of each kind after `CacheKind.take`; `moves` are slots, ids and ends."""
    slots, ids, ends = moves
    each = zip(model.cache_kinds, snapshots, caches, strict=True)
    return tuple(kind.take(kept, ids, cache, slots, ends) for kind, kept, cache in each)


def restore_snapshots(
    model: Model, snapshots: tuple[Any, ...], caches: tuple[Any, ...], moves: tuple[jax.Array, ...]
) -> tuple[Any, ...]:
    """Return the caches of each kind after `CacheKind.restore`; `moves` are slots, ids and ends."""
    slots, ids, ends = moves
    each = zip(model.cache_kinds, snapshots, caches, strict=True)
    return tuple(kind.restore(cache, slots, kept, ids, ends) for kind, kept, cache in each)
