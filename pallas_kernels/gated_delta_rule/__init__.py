"""The gated delta rule with one lazily advanced state per request (Yang et al. 2024).

For every value head with state S [D_v, D_k]: decay, read, write, then read the output:

    S <- e^g S      u = beta (v - S k)      S <- S + u k^T      o = S q

with g = -exp(log_decay) softplus(a + decay_bias) and beta = sigmoid(b). The output is o, or, with
a norm weight w, w rmsnorm(o) silu(z). q, k and v are a causal depthwise convolution of raw inputs
over the last W tokens, followed by silu; q and k are then l2-normalised per head and q is scaled by
D_k^-1/2. Value head j reads key head j // (H_v / H_k).

A request's cache is one state, and a ring of the raw inputs and gates of its last tokens: the token
at position p is in column p mod R. The state lags behind: it contains all tokens but the last
`pending` ones. These are accepted, but the step that ran them could not know that. A call first
folds them into the state from the ring and writes the state once. Then it runs the T new tokens on
a copy of the state, and writes their inputs to the ring for the next call, which knows how many
were accepted. So one state is read and written, however many tokens are verified, and rejected
tokens need no rollback: their columns are overwritten. The ring has raw inputs, not derived values,
so that folding a token in repeats exactly the computation of its own step.

With up to M pending and up to M new tokens, R = W - 1 + 2 M columns are enough that a call writes
none that it reads: its window (W - 1 tokens before the pending ones, the pending ones, the new
ones) fits in the ring. A sequential program would need M columns less; these let the programs of a
kernel run in any order: the programs of all value heads that share a key head read its channels,
and one of them may write the new columns before another has read.
"""

import jax

from pallas_kernels.dispatch import run
from pallas_kernels.gated_delta_rule.reference import gated_delta_rule_reference
from pallas_kernels.gated_delta_rule.triton import gated_delta_rule_triton
from pallas_kernels.gated_delta_rule.types import DeltaRuleCache as DeltaRuleCache
from pallas_kernels.gated_delta_rule.types import DeltaRuleWeights as DeltaRuleWeights
from pallas_kernels.gated_delta_rule.types import Heads as Heads
from pallas_kernels.gated_delta_rule.types import num_ring_columns as num_ring_columns

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
    """Return outputs [B, T, H_v, D_v] in x's dtype and the cache; use only the returned cache.

    Args:
        x: [B, T, C + H_v D_v + 2 H_v], q | k | v before the convolution, output gate z, write gate
            b and decay a of the new tokens: the unchanged output of the input projection.
        weights: see `DeltaRuleWeights`.
        cache: updated in place if the caller donated it.
        layer: i32[] layer of the cache.
        slots: i32[B], distinct; out of range for a padding row.
        positions: i32[B, T], absolute and consecutive in each request; -1 for padding, which
            follows the real rows. A request without real rows is left unchanged.
        pending: i32[B], accepted tokens before the new ones that the state lacks; at most M.
        folds: also fold the new tokens into the state, for prompts, which cannot be rejected. Then
            no tokens are pending; columns that no later call should read are filled with NaN. Large
            T runs in chunks of matrix products (the WY form). Without `folds`, at most M rows of a
            request are real.
        eps: of the output norm.
        kernels: implementation to use, see `dispatch.run`.

    Computes in f32, except for the roundings of `gated_norm`. Before position 0, state and inputs
    are zero whatever the slot contains.

    Raises:
        ValueError: shapes are inconsistent; the message names the argument.
        UnsupportedError: see `dispatch.run`.
    """
    if cache.state.ndim != 5 or cache.ring.ndim != 4:
        raise ValueError(
            f"cache.state must be [L, S, H_v, D_v, D_k] and cache.ring [L, S, R, C]; got "
            f"{cache.state.shape}, {cache.ring.shape}"
        )
    num_layers, num_slots, num_heads, value_dim, key_dim = cache.state.shape
    columns, channels = cache.ring.shape[2:]
    key_channels = channels - num_heads * value_dim
    if key_channels <= 0 or key_channels % (2 * key_dim) or num_heads * 2 * key_dim % key_channels:
        raise ValueError(
            f"cache.ring has C={channels} channels, which are not q, k and v for states "
            f"{cache.state.shape}"
        )
    inputs = cache.heads.inputs
    if x.ndim != 3 or x.shape[:2] != positions.shape or x.shape[2] != inputs:
        raise ValueError(
            f"x must be [B, T, C + H_v D_v + 2 H_v = {inputs}] with positions [B, T]; got "
            f"{x.shape}, {positions.shape}"
        )
    expected = (num_layers, num_slots, columns)
    if cache.ring.shape[:3] != expected or cache.gates.shape != (*expected, 2, num_heads):
        raise ValueError(
            f"cache.ring and cache.gates must start with {expected} [L, S, R], gates end with "
            f"{(2, num_heads)}; got {cache.ring.shape}, {cache.gates.shape}"
        )
    conv, log_decay, decay_bias, norm = weights
    if conv.ndim != 2 or conv.shape[1] != channels or conv.shape[0] + 1 > columns:
        raise ValueError(
            f"weights.conv must be [W < R={columns}, C={channels}], R = W - 1 + 2 M; got "
            f"{conv.shape}"
        )
    if log_decay.shape != (num_heads,) or decay_bias.shape != log_decay.shape:
        raise ValueError(
            f"weights.log_decay and weights.decay_bias must be [H_v={num_heads}]; got "
            f"{log_decay.shape}, {decay_bias.shape}"
        )
    if norm is not None and norm.shape != (value_dim,):
        raise ValueError(f"weights.norm must be [D_v={value_dim}] or None; got {norm.shape}")
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
