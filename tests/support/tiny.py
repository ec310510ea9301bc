"""The smallest models and grammars, for tests in which outputs do not matter."""

from typing import Any

import numpy as np

from specjax.device.models.layers.rope import Rope
from specjax.device.models.llama import Llama


def tiny_llama(intermediate_size: int = 16, **changes: Any) -> Llama:
    """Return a Llama with one layer and 31 tokens. `changes` replace its fields."""
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "rope": Rope(head_dim=8)}
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_layers": 1, "max_position": 64} | heads
    fields: dict[str, Any] = sizes | {"rms_norm_eps": 1e-5} | changes
    return Llama(intermediate_size=intermediate_size, **fields)


class AnyText:
    """A grammar that permits every output. Its vocabulary has at most 32 tokens."""

    is_finished = False

    def accept(self, tokens: list[int]) -> None:
        """Do nothing."""

    def masks(self, drafts: list[int]) -> np.ndarray:
        """Return masks that permit all tokens."""
        return np.full((len(drafts) + 1, 1), -1, np.int32)
