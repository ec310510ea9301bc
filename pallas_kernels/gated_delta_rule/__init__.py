"""The gated delta rule, with one state per request that is updated lazily (Yang et al. 2024).

Every value head has a state S [D_v, D_k]. Each token decays the state, adds a correction u to it,
and reads the output o:

    S <- e^g S
    u = beta (v - S k)
    S <- S + u k^T
    o = S q

The gates g and beta are computed from two projections of the token, a and b:

    g = -exp(log_decay) softplus(a + decay_bias)
    beta = sigmoid(b)

q, k and v are a causal depthwise convolution of raw inputs over the last W tokens, followed by
silu. Then q and k are l2-normalised per head, and q is scaled by D_k^-1/2. Value head j uses q and
k of key head j // (H_v / H_k). If there is a norm weight w, the result is w rmsnorm(o) silu(z),
where z is another projection of the token. Otherwise, the result is o.

A request's cache is one state, and ring buffers for its last tokens. The state lags behind: it
includes all accepted tokens except the last `pending` ones. When these tokens ran, it was not known
yet whether they would be accepted. So their e^g, k and u were only written to the rings.

A call first folds the pending tokens into the state, S <- e^g S + u k^T, and writes the state once.
Then it runs the T new tokens on a copy of the state, and writes their e^g, k and u to the rings.
The next call knows the number of accepted tokens. So one state is read and written, regardless of
the number of verified tokens. Rejected tokens need no rollback: their columns are overwritten.

Folding and verification round their results in the same order: e^g S is rounded, then u k^T is
added by one fused multiply-add. So a state has the same bits for any division of its tokens into
steps.

The token at position p is in column p mod n of a ring of n columns, so n consecutive tokens are in
different columns. Let M be the maximum number of new tokens in a call that verifies drafts. It is
also the maximum number of pending tokens. The readers and writers of a ring determine n:

- Raw inputs, W - 1 + M columns: the programs that prepare the new tokens run in any order. The
  convolution reads the W - 1 tokens before the new tokens, while up to M new tokens are written.
- k and e^g, 2 M columns: one kernel writes up to M new tokens, before another kernel reads up to M
  pending tokens, which precede the new tokens.
- u, M columns: a new token may overwrite a pending token. Each program owns some rows of the state,
  and no other program uses these rows of u. The program reads all pending tokens before it writes
  the first new token.

Rejected tokens of earlier steps are at positions that the new tokens overwrite, or that a later
step overwrites before any step reads them.
"""

import jax

from pallas_kernels.dispatch import run
from pallas_kernels.gated_delta_rule.reference import gated_delta_rule_reference
from pallas_kernels.gated_delta_rule.triton import gated_delta_rule_triton
from pallas_kernels.gated_delta_rule.types import DeltaRuleCache as DeltaRuleCache
from pallas_kernels.gated_delta_rule.types import DeltaRuleWeights as DeltaRuleWeights
from pallas_kernels.gated_delta_rule.types import Heads as Heads

IMPLEMENTATIONS = {"triton": gated_delta_rule_triton, "reference": gated_delta_rule_reference}


def gated_delta_rule(
    x: jax.Array,
    weights: DeltaRuleWeights,
    cache: DeltaRuleCache,
    layer: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    pending: jax.Array,
    *,
    folds: bool,
    eps: float,
    kernels: str = "auto",
) -> tuple[jax.Array, DeltaRuleCache]:
    """Return outputs [B, T, H_v, D_v] in x's dtype, and the cache that replaces the old cache.

    Args:
        x: [B, T, C + H_v D_v + 2 H_v], the unchanged output of the input projection. For each new
            token it has q | k | v before the convolution, output gate z, write gate b and decay a.
        weights: see `DeltaRuleWeights`.
        cache: the old cache, which is updated in place if the caller donated it.
        layer: i32[], the index of the layer in the cache.
        slots: i32[B], the requests' slots, which are distinct; out of range for a padding request.
        positions: i32[B, T], absolute positions, consecutive within a request; -1 for padding rows,
            which follow the real rows. The slot of a request without real rows is left unchanged.
        pending: i32[B], how many of the last accepted tokens the state does not include; at most
            the cache's `max_pending`, M.
        folds: true for prompts, whose tokens cannot be rejected. Then the new tokens are folded
            into the state, too, and no tokens are pending afterwards. Columns of the rings that no
            later call reads are filled with NaN. A long prompt is computed in chunks, by matrix
            products (the WY form). If false, a request has at most M real rows.
        eps: eps of the output norm.
        kernels: implementation to use, see `dispatch.run`.

    All arithmetic is f32, except for the roundings of `gated_norm`. The state and the inputs before
    position 0 are zero, regardless of the slot's contents.

    Raises:
        ValueError: shapes are inconsistent; the message names the argument.
        UnsupportedError: see `dispatch.run`.
    """
    _check_cache(cache)
    conv, log_decay, decay_bias, norm = weights
    heads = cache.heads
    if x.ndim != 3 or x.shape[:2] != positions.shape or x.shape[2] != heads.inputs:
        raise ValueError(
            f"x must be [B, T, C + H_v D_v + 2 H_v = {heads.inputs}] with positions [B, T]; got "
            f"{x.shape}, {positions.shape}"
        )
    num_taps = cache.ring.shape[2] - cache.max_pending + 1
    if conv.shape != (num_taps, heads.channels):
        raise ValueError(
            f"weights.conv must be [W={num_taps}, C={heads.channels}] for a ring of W - 1 + M "
            f"columns; got {conv.shape}"
        )
    if log_decay.shape != (heads.num_values,) or decay_bias.shape != log_decay.shape:
        raise ValueError(
            f"weights.log_decay and weights.decay_bias must be [H_v={heads.num_values}]; got "
            f"{log_decay.shape}, {decay_bias.shape}"
        )
    if norm is not None and norm.shape != (heads.value_dim,):
        raise ValueError(f"weights.norm must be [D_v={heads.value_dim}] or None; got {norm.shape}")
    if slots.shape != positions.shape[:1] or pending.shape != slots.shape:
        raise ValueError(
            f"slots and pending must be [B={positions.shape[0]}]; got {slots.shape}, "
            f"{pending.shape}"
        )
    return run(
        "gated_delta_rule",
        kernels,
        IMPLEMENTATIONS,
        x,
        weights,
        cache,
        layer,
        slots,
        positions,
        pending,
        folds=folds,
        eps=eps,
    )


def _check_cache(cache: DeltaRuleCache) -> None:
    """Check that the arrays of a cache have consistent sizes."""
    state, ring, u, k, decay = cache
    if (state.ndim, ring.ndim, u.ndim, k.ndim) != (5, 4, 5, 5):
        raise ValueError(
            "cache must have state [L, S, H_v, D_v, D_k], ring [L, S, W - 1 + M, C], "
            f"u [L, S, M, H_v, D_v] and k [L, S, 2 M, H_k, D_k]; got {state.shape}, {ring.shape}, "
            f"{u.shape}, {k.shape}"
        )
    layers, slots, *_ = state.shape
    heads, max_pending = cache.heads, cache.max_pending
    if not heads.num_keys or heads.num_values % heads.num_keys:
        raise ValueError(
            f"cache.k must have H_k heads that divide H_v={heads.num_values}; got {k.shape}"
        )
    num_taps = max(1, ring.shape[2] - max_pending + 1)
    expected = DeltaRuleCache.shapes(layers, slots, heads, num_taps, max_pending, ring.dtype)
    for name, array, fits in zip(cache._fields, cache, expected, strict=True):
        if array.shape != fits.shape:
            raise ValueError(
                f"cache.{name} must be {fits.shape} to match u {u.shape} and k {k.shape}, with "
                f"W > 0; got {array.shape}"
            )
