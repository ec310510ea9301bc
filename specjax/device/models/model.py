"""What the engine asks of a model. Any hashable value with these methods will do."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Float

from specjax.device.cache.kind import CacheKind, CacheSizes
from specjax.device.models.layers.rows import Rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Features:
    """What a forward pass leaves behind for the head and the drafter."""

    hidden: Float[jax.Array, "N D"]  # after the final norm
    auxiliary: Float[jax.Array, "N auxiliary"] | None  # residual stream entering those layers

    @classmethod
    def of(cls, hidden: jax.Array, auxiliary: Sequence[jax.Array]) -> "Features":
        """With the states [N, D] of auxiliary layers side by side, if there are any."""
        return cls(hidden, jnp.concatenate(auxiliary, axis=-1) if auxiliary else None)


class Model(Protocol):
    """A decoder as pure functions of its parameters, a pytree that is opaque to the engine."""

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
        """What layers keep of requests; a layer's kind is one of these."""
        ...

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """Of each layer, the index of its kind."""
        ...

    def with_layers(self, num_layers: int) -> "Model":
        """The model's first layers alone, to look at what they take."""
        ...

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        """How names of tensors start that a checkpoint may hold beside the model's own."""
        ...

    def specs(self, names: Collection[str] = ()) -> Any:
        """The parameters as a tree of `TensorSpec`.

        `names` are those of the files at hand, which tell where there is more than one layout.
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
        """Run tokens i32[N] at `rows` on top of `caches`: (features, caches with the rows).

        There is a cache of each of `cache_kinds`; or None for rows that need none, as in training.

        `aux_layers` lists the layers whose input (the residual stream, un-normed) is wanted in
        `Features.auxiliary`, in that order; the number of layers means the last one's output.
        """
        ...

    def embed(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Input embeddings [N, D] of tokens i32[N]."""
        ...

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Next-token logits f32[N, V] of hidden states [N, D]."""
        ...


def is_recurrent(model: Model) -> bool:
    """Whether requests keep a state beside their pages, so that pages alone do not spare running
    the tokens in them."""
    return any(kind.is_recurrent and kind.num_layers > 0 for kind in model.cache_kinds)


def init_caches(model: Model, sizes: CacheSizes, dtype: Any) -> tuple[Any, ...]:
    """An empty cache of each kind."""
    return tuple(kind.init(sizes, dtype) for kind in model.cache_kinds)
