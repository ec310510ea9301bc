"""The interface of models. Engines can run any hashable value that has the methods of `Model`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jaxtyping import Float

from specjax.checkpoint.division import Share
from specjax.config import EngineConfig
from specjax.device.cache.kind import CacheKind, CacheSizes
from specjax.device.models.layers.rows import Rows
from specjax.device.vocabulary import Vocabulary


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Features:
    """Outputs of a forward pass, for the output head and the drafter."""

    hidden: Float[jax.Array, "N D"]  # after the final norm
    auxiliary: Float[jax.Array, "N auxiliary"] | None  # residual streams that enter `aux_layers`

    @classmethod
    def of(cls, hidden: jax.Array, auxiliary: Sequence[jax.Array]) -> "Features":
        """Return features from `hidden` and the states [N, D] of the auxiliary layers.

        The states are concatenated. `Features.auxiliary` is None if there are no states.
        """
        return cls(hidden, jnp.concatenate(auxiliary, axis=-1) if auxiliary else None)


class Model(Protocol):
    """A decoder, whose methods are pure functions of its parameters.

    The parameters are a pytree, which the engine does not look into.
    """

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
        """The cache kinds of the model's layers."""
        ...

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """Each layer's index into `cache_kinds`."""
        ...

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the logits that `logits` returns."""
        ...

    @property
    def num_devices(self) -> int:
        """The number of devices over which the weights are divided."""
        ...

    @property
    def shares(self) -> Mapping[str, Share]:
        """How each kind of axis, such as attention heads, is divided; see `TensorSpec.cuts`."""
        ...

    @property
    def local(self) -> Self:
        """The smaller model that each device runs.

        If there is only one device, this is the whole model.
        """
        ...

    def with_layers(self, num_layers: int) -> "Model":
        """Return the model with only its first `num_layers` layers.

        This is used to find the cost of a layer in compiled steps.
        """
        ...

    def with_pages(
        self, kept_layers: tuple[int, ...], layer_scales: tuple[tuple[float, float], ...]
    ) -> "Model":
        """Return the model with settings for pages in an 8-bit format.

        The pages of `kept_layers` keep the model's dtype. `layer_scales` has a pair of scales for
        each layer: of keys and of values, or in latent attention of latents and of rotated key
        parts. () if all are 1. Formats with scales of tokens ignore `layer_scales`.
        """
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

        `names` are the checkpoint's tensor names. They select the layout if a model has several
        layouts.
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
        """Run `tokens` i32[N] at the positions of `rows`, after the tokens in `caches`.

        Return the features, and the caches with the rows added.

        `caches` has one cache per entry of `cache_kinds`. It is None for rows without a cache, as
        in training.

        `aux_layers` lists the layers whose input (the residual stream before the norm) goes to
        `Features.auxiliary`, in that order; `num_layers` means the output of the last layer.
        """
        ...

    def embed(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Return the embedding's rows [N, D] for `tokens` i32[N], as stored in the checkpoint.

        The rows are not scaled, even if the model scales the input of its first layer, because
        draft heads read unscaled rows.
        """
        ...

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Return the next-token logits f32[N, V] for hidden states [N, D].

        If `vocabulary` is split, each device returns the columns of its tokens.
        """
        ...


def is_recurrent(model: Model) -> bool:
    """Return whether a layer keeps a state for each request, in addition to pages.

    If so, a request can reuse a cached prefix only if a snapshot of the state at the prefix's end
    is restored.
    """
    return any(kind.is_recurrent and kind.num_layers > 0 for kind in model.cache_kinds)


def page_windows(model: Model, config: EngineConfig) -> tuple[int, ...]:
    """Return the sizes, in tokens, of the attention windows whose layers have separate pages.

    A page of a window's layers is freed when all tokens in the page are behind the window. Windows
    of at least `max_model_len` are left out, because no token is ever behind them. The tuple is
    empty in exact mode, where requests keep their pages until they end.
    """
    if config.exact:
        return ()
    windows = {kind.window for kind in model.cache_kinds if kind.num_layers}
    return tuple(sorted(w for w in windows if w is not None and w < config.max_model_len))


def init_caches(model: Model, sizes: CacheSizes, dtype: Any) -> tuple[Any, ...]:
    """Create an empty cache for each cache kind of the model."""
    return tuple(kind.init(sizes, dtype) for kind in model.cache_kinds)


def take_snapshots(
    model: Model, snapshots: tuple[Any, ...], caches: tuple[Any, ...], moves: tuple[jax.Array, ...]
) -> tuple[Any, ...]:
    """Copy recurrent states to snapshots; return the new snapshots of each cache kind.

    `moves` holds three arguments of `CacheKind.take`: `slots`, `ids` and `ends`.
    """
    slots, ids, ends = moves
    each = zip(model.cache_kinds, snapshots, caches, strict=True)
    return tuple(kind.take(kept, ids, cache, slots, ends) for kind, kept, cache in each)


def restore_snapshots(
    model: Model, snapshots: tuple[Any, ...], caches: tuple[Any, ...], moves: tuple[jax.Array, ...]
) -> tuple[Any, ...]:
    """Copy snapshots to recurrent states; return the new cache of each cache kind.

    `moves` holds three arguments of `CacheKind.restore`: `slots`, `ids` and `ends`.
    """
    slots, ids, ends = moves
    each = zip(model.cache_kinds, snapshots, caches, strict=True)
    return tuple(kind.restore(cache, slots, kept, ids, ends) for kind, kept, cache in each)
