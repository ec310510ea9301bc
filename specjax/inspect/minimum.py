"""The minimum number of bytes that a decode step has to move.

    verify = W + S B L c + 2 R B + S B L T
    draft = P (W_d + W_h) + S_d B (P c + P - 1)
    observe = W_o + S_d B T
    step = verify + draft + observe

After verification, the drafter observes the step's rows, which means that it adds them to its
cache. If a later program does this, the step only stores the rows' features, and observe = F B.

The sizes of a step are:

- B: the number of requests;
- c: the number of tokens of context per request;
- T: the number of rows per request, K + 1;
- L: the number of the target's attention layers;
- P: the number of passes over the drafter's weights: K, or 1 if one pass makes all drafts. Each
  pass except the first writes a new row to the cache.

The numbers of bytes are:

- W: the target's weights, without an untied embedding;
- W_d: the drafter's weights;
- W_h: the output head that the drafter uses, or the head's quantised copy if there is one;
- W_o: the weights that compute the drafter's keys and values;
- S: the target's keys and values, per token and layer;
- S_d: the drafter's cache, per token;
- R: the target's recurrent states, per request, which are read and written once;
- F: the features of a row: the target's hidden states that the drafter reads.

Some models differ from these formulas:

- A layer with a window reads only the last tokens of the context.
- If a row uses k experts of a mixture, at most B T k experts are read, or B k in a pass that drafts
  one token.
- Some draft heads compute the first draft when they observe. Then W_o has all their weights except
  the embedding and the output head, and observing also reads the context.
- A draft model counts like a target in each pass, and observes nothing.

Activations are not counted, except in `report.Moved.with_activations`. That number includes the
bytes of embedded rows, and new keys and values that are read back.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pallas_kernels.page_formats import PageFormat
from specjax.checkpoint.given import dotted
from specjax.device.cache.kind import CacheKind, CacheSizes
from specjax.device.drafters.drafter import Drafter, Params
from specjax.device.models.model import Model
from specjax.device.weights.matrix import Matrix
from specjax.device.weights.weight import is_weight
from specjax.serving.memory import drafter_cache_bytes

# Parts of a drafter's parameters that are not needed to compute its keys and values.
_AFTER_KEYS = (
    *("mlp", "out", "out_bias", "mlp_norm", "norm", "lm_head", "embedding", "target_ids"),
    *("mask", "refinement", "attention_conv", "mlp_conv", "q_norm"),
)
# Parts that are read only for the context's keys and values.
_OF_CONTEXT = ("context_fc", "context_norm")
# Parts from which drafting reads at most a row per token.
_UNREAD = ("embedding", "target_ids", "mask_states", "previous", "candidates")


@dataclass(frozen=True)
class Minimum:
    """The minimum number of bytes that a step moves, by purpose."""

    weights: int  # the target's weights, read once
    keys_and_values: int  # the target's keys and values, read once, and new rows, written once
    states: int  # the target's recurrent states, read once and written once
    draft: int  # all bytes of drafting
    observe: int  # all bytes of the drafter's observation
    activations: int  # the target's activations, not included in `verify`

    @property
    def verify(self) -> int:
        """The minimum bytes of the target's forward pass."""
        return self.weights + self.keys_and_values + self.states

    @property
    def step(self) -> int:
        """The minimum bytes of the whole step."""
        return self.verify + self.draft + self.observe


def minimum_bytes(
    target: Model,
    drafter: Drafter,
    params: Params,
    *,
    batch: int,
    k: int,
    context: int,
    dtype: str,
    page_format: PageFormat | None = None,
    is_deferred: bool = False,
) -> Minimum:
    """Return the minimum bytes of a step, computed with the formulas of this module's docstring.

    The leaves of `params` are arrays or shapes. `page_format` is the format of the target's and the
    drafter's 8-bit pages; None for pages of `dtype`. `is_deferred` says whether a later program
    adds the step's tokens to the drafter's cache.
    """
    own = params.drafter
    num_rows, width = batch * (k + 1), np.dtype(dtype).itemsize
    embedded = num_rows * target.hidden_size * width
    new, read, state = _cache_bytes(target, dtype, page_format, context)
    draft = observe = 0
    if own is not None:
        model = getattr(own, "model", None)
        own_token = drafter_cache_bytes(drafter, 1, 0, dtype, page_format).per_page
        if model is not None:
            drafting: Any = drafter.weights
            read_by_model = _cache_bytes(drafting.model, dtype, page_format, context)
            draft = _model_bytes(model, batch, k, drafting.model, read_by_model)
            if params.head is not None:
                draft += k * (_size(params.head) - _head_bytes(model))
        else:
            passes = drafter.num_passes(k)
            draft = _drafted_bytes(params, target, passes, batch, k)
            draft += own_token * batch * (passes * context + max(passes - 1, 0))
            observe = _observed_bytes(own) + own_token * num_rows
            if hasattr(own, "mask_states"):  # the observed rows attend as well
                observe += own_token * batch * context
        if is_deferred:
            observe = embedded * (1 + len(drafter.aux_layers))
    return Minimum(
        weights=_read_bytes(target, params.target, num_rows),
        keys_and_values=read * batch + new * num_rows,
        states=2 * state * batch,
        draft=draft,
        observe=observe,
        activations=embedded + new * num_rows,
    )


def _model_bytes(
    params: Any, batch: int, k: int, model: Any, cache_bytes: tuple[int, int, int]
) -> int:
    """Return the bytes that a draft model moves when it drafts k tokens, one token per pass.

    The model's recurrent states are read in each of the k passes. The states are written only once,
    after verification, because they include only accepted tokens. `cache_bytes` is the result of
    `_cache_bytes`.
    """
    new, read, state = cache_bytes
    per_request = k * (read + new) + (k + 1) * state
    return k * _read_bytes(model, params, batch) + batch * per_request


def _drafted_bytes(params: Params, target: Model, passes: int, batch: int, k: int) -> int:
    """Return the bytes of the weights, including the output head, that drafting k tokens reads."""
    own, size = params.drafter, 0
    if _uses_head_of_target(own):
        copied = params.head is not None
        size = passes * (_size(params.head) if copied else _head_bytes(params.target))
    for path, leaf in jax.tree_util.tree_leaves_with_path(own):
        names = _names(path)
        if names[0] in ("blocks", "lm_heads"):  # Medusa's, one per draft
            times = int(int(names[1]) < k)
        elif names[0] == "refinement" and names[-1] == "bias":  # DSpark's, after each draft
            times = k
        else:
            times = 0 if {*names} & {*_UNREAD, *_OF_CONTEXT} else passes
        size += times * _used_size(names, leaf, target, batch)
    # Heads that read several of the target's states combine them in `observe`.
    return size - (_size(own.fc) if hasattr(own, "aux_norms") else 0) * passes


def _uses_head_of_target(own: Any) -> bool:
    return getattr(own, "lm_head", None) is None and not hasattr(own, "lm_heads")


def _cache_bytes(
    target: Model, dtype: str, page_format: PageFormat | None, context: int
) -> tuple[int, int, int]:
    """Return three sizes of a target's caches, in bytes.

    Returns:
        The size of the keys and values of one token.
        The size of the keys and values that attention reads for a request of `context` tokens.
        The size of a request's recurrent states, without the buffers of recent inputs.
    """
    new = read = state = 0
    for kind in target.cache_kinds:
        token = _token_bytes(kind, dtype, page_format)
        new += token
        read += token * (context if kind.window is None else min(context, kind.window))
        state += kind.num_layers * math.prod(kind.state_shape) * np.dtype(np.float32).itemsize
    return new, read, state


def _token_bytes(kind: CacheKind, dtype: str, page_format: PageFormat | None) -> int:
    """Return the bytes of a token's entries in the pages of all layers, with scales of tokens."""

    def size(num_pages: int) -> int:
        sizes = CacheSizes(0, num_pages, 1, 1, page_format=page_format)
        made = jax.eval_shape(lambda: kind.init(sizes, np.dtype(dtype)))
        return sum(map(_size, jax.tree.leaves(made)))

    return size(1) - size(0)


def _head_bytes(params: Any) -> int:
    return _size(params.embedding if params.lm_head is None else params.lm_head)


def _read_bytes(target: Model, params: Any, num_rows: int) -> int:
    """Return the bytes of the weights that a forward pass over `num_rows` rows reads.

    The pass reads all weights except an untied embedding, and experts that no row can use.
    """
    size = _size(params) - _size(params.embedding) - _size(params.lm_head) + _head_bytes(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        size -= _size(leaf) - _used_size(_names(path), leaf, target, num_rows)
    return size


def _used_size(names: list[str], leaf: Any, target: Model, num_rows: int) -> int:
    """Return how many bytes of a weight a forward pass over `num_rows` rows reads.

    If the weight has an array for each expert, only the experts that rows can use are read.
    """
    experts = getattr(target, "experts", None)
    is_of_experts = {*names[-2:]} & {"gate_up", "down"} and len(leaf.shape) == 3
    if experts is None or not is_of_experts:
        return _size(leaf)
    num_here = leaf.shape[0]  # a device may have only some of the experts
    return _size(leaf) // num_here * min(num_here, num_rows * experts.num_chosen)


def _observed_bytes(params: Any) -> int:
    """Return W_o: the bytes of the weights that a drafter reads when it observes rows."""
    if hasattr(params, "lm_heads"):  # Medusa only keeps a state of the target
        return 0
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight)
    leaves = [(_names(path), leaf) for path, leaf in found]
    if hasattr(params, "mask_states"):  # the last row gives the first draft
        after = {"lm_head", "embedding", "target_ids", "mask_states"}
        return sum(_size(leaf) for names, leaf in leaves if not after & {*names})
    used = [(names[-1], leaf) for names, leaf in leaves if not {*names} & {*_AFTER_KEYS}]
    return sum(_size_of_keys(leaf) if name == "qkv" else _size(leaf) for name, leaf in used)


def _size_of_keys(qkv: Matrix) -> int:
    """Return the bytes of the parts of a merged weight that compute keys and values."""
    columns = dict(qkv.parts)
    return _size(qkv) * (columns["k"] + columns["v"]) // qkv.num_out


def _names(path: tuple[Any, ...]) -> list[str]:
    return dotted(path).split(".")


def _size(tree: Any) -> int:
    return sum(x.size * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
