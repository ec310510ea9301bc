"""The bytes that a decode step cannot do without.

    verify = W + S B L c + 2 R B + S B L T        W: weights, less the rows of an embedding
    draft  = K (W_d + W_h) + S_d B (K c + K - 1)  W_d: the drafter's weights, W_h: the head's
    observe = W_o + S_d B T                       W_o: what makes the drafter's keys and values
    step   = verify + draft + observe

for B requests of c tokens, T = K + 1 rows each; L attention layers whose keys and values take S
bytes a token, R bytes of recurrent states a request, S_d bytes a token in the drafter's cache.
Weights are read once, states read and written once, keys and values read once by each pass over
them and written once. Of a mixture of experts no more are read than B T k choices can name. The
drafts' K passes each read the context; all but the first write a row, which the cache lacked.
W_o are the weights that come before attention, its queries' columns included: one matrix holds
queries, keys and values. Activations are not in it. `with_activations` adds what the figures of
our design counted as ideal: the rows that are embedded, and new keys and values read back.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from specjax.device.drafters.drafter import Drafter
from specjax.device.models.model import Model
from specjax.serving.memory import drafter_cache_bytes

# Parts of a drafter's tree that are not read to make keys and values.
_AFTER_KEYS = ("mlp", "out", "out_bias", "mlp_norm", "norm", "lm_head", "embedding", "target_ids")


@dataclass(frozen=True)
class Minimum:
    """Bytes of a step, by its parts."""

    weights: int  # of the target, read once
    keys_and_values: int  # of the target, read once and new rows written
    states: int  # recurrent, read and written once
    draft: int
    observe: int
    activations: int  # that `with_activations` adds to the target's

    @property
    def verify(self) -> int:
        """The target's forward pass."""
        return self.weights + self.keys_and_values + self.states

    @property
    def step(self) -> int:
        """All of it."""
        return self.verify + self.draft + self.observe


def minimum_bytes(
    target: Model,
    drafter: Drafter,
    params: Any,
    drafter_params: Any,
    *,
    batch: int,
    k: int,
    context: int,
    dtype: str,
) -> Minimum:
    """The sums of this module's docstring; parameters are arrays or their shapes."""
    num_rows, width = batch * (k + 1), np.dtype(dtype).itemsize
    embedded = num_rows * target.hidden_size * width
    token, state = _cache_bytes(target, dtype)
    own_token = drafter_cache_bytes(drafter, 1, dtype).per_page
    draft = observe = 0
    if drafter_params is not None:
        # `specs` keeps the embedding apart from weights that every draft reads.
        once = _size(drafter_params) - _size(getattr(drafter_params, "embedding", None))
        own_head = getattr(drafter_params, "lm_head", None) is not None
        head = 0 if own_head else _head_bytes(params)
        draft = k * (once + head) + own_token * batch * (k * context + max(k - 1, 0))
        observe = _observed_bytes(drafter_params) + own_token * num_rows
    return Minimum(
        weights=_read_bytes(target, params, num_rows),
        keys_and_values=token * (batch * context + num_rows),
        states=2 * state * batch,
        draft=draft,
        observe=observe,
        activations=embedded + token * num_rows,
    )


def _cache_bytes(target: Model, dtype: str) -> tuple[int, int]:
    """Of a token's keys and values, and of a request's recurrent states without their rings."""
    token = state = 0
    for kind in target.cache_kinds:
        token += kind.num_layers * math.prod(kind.token_shape) * np.dtype(dtype).itemsize
        state += kind.num_layers * math.prod(kind.state_shape) * np.dtype(np.float32).itemsize
    return token, state


def _head_bytes(params: Any) -> int:
    return _size(params.embedding if params.lm_head is None else params.lm_head)


def _read_bytes(target: Model, params: Any, num_rows: int) -> int:
    """Every weight once; of an embedding that is not the head, none, and of experts those used."""
    size = _size(params) - _size(params.embedding) - _size(params.lm_head) + _head_bytes(params)
    experts = getattr(target, "experts", None)
    if experts is None:
        return size
    used = min(1.0, num_rows * experts.num_chosen / experts.num_experts)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if _names(path)[-1] in ("gate_up", "down") and len(leaf.shape) == 3:
            size -= int(_size(leaf) * (1 - used))
    return size


def _observed_bytes(params: Any) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return sum(_size(leaf) for path, leaf in leaves if not set(_names(path)) & set(_AFTER_KEYS))


def _names(path: tuple[Any, ...]) -> list[str]:
    return [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", "")))) for key in path]


def _size(tree: Any) -> int:
    return sum(x.size * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
