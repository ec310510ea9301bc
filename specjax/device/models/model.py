"""What the engine asks of a model. Any hashable value with these methods will do."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax

from specjax.device.models.layers.attention import Rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Features:
    """What a forward pass leaves behind for the head and the drafter."""

    hidden: jax.Array  # [N, D], after the final norm
    auxiliary: jax.Array | None  # [N, len(aux_layers) D], residual stream entering those layers


class Model(Protocol):
    """A decoder as pure functions of its parameters, a pytree that is opaque to the engine."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position(self) -> int: ...

    def specs(self) -> Any:
        """The parameters as a tree of `TensorSpec`."""
        ...

    def extend(
        self, params: Any, tokens: jax.Array, rows: Rows, kv: Any, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Features, Any]:
        """Run tokens i32[N] at `rows` on top of the context `kv`: (features, kv with the rows).

        `aux_layers` lists the layers whose input (the residual stream, un-normed) is wanted in
        `Features.auxiliary`, in that order; the number of layers stands for the last one's output.
        """
        ...

    def embed(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Input embeddings [N, D] of tokens i32[N]."""
        ...

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Next-token logits f32[N, V] of hidden states [N, D]."""
        ...
