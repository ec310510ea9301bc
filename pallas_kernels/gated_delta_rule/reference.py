"""The gated delta rule in plain JAX: token by token, or in chunks of matrix products."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule.types import DeltaRuleCache, DeltaRuleWeights, Heads

CHUNK = 64
EPSILON = 1e-6  # of the l2 normalisation

# By default GPUs multiply f32 as tf32, whose errors would accumulate in the state.
einsum, matmul = partial(jnp.einsum, precision="highest"), partial(jnp.matmul, precision="highest")


class Tokens(NamedTuple):
    """Inputs of the rule for T tokens, f32."""

    q: jax.Array  # [B, T, H_v, D_k]
    k: jax.Array  # [B, T, H_v, D_k]
    v: jax.Array  # [B, T, H_v, D_v]
    g: jax.Array  # [B, T, H_v]
    beta: jax.Array  # [B, T, H_v]

    def only(self, is_real: jax.Array) -> "Tokens":
        """Replace tokens that are not is_real bool[B, T] by ones that leave every state unchanged,
        even if they are NaN."""
        wide = is_real[..., None]
        q, k, v = (jnp.where(wide[..., None], x, 0.0) for x in (self.q, self.k, self.v))
        g, beta = (jnp.where(wide, x, 0.0) for x in (self.g, self.beta))
        return Tokens(q, k, v, g, beta)


def gated_delta_rule_reference(
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
) -> tuple[jax.Array, DeltaRuleCache]:
    """See `gated_delta_rule`."""
    state, ring, ring_gates = cache
    heads, conv = cache.heads, weights.conv
    num_slots, num_columns, num_taps = state.shape[1], ring.shape[2], conv.shape[0]
    max_pending = cache.max_pending(num_taps)
    counts = (positions >= 0).sum(axis=1)
    starts = positions[:, 0]
    # Steps of any width use one shape, the widest, because XLA's rounding depends on the shape.
    width = positions.shape[1]
    num_new = width if folds else max_pending
    raw, z, new_gates = split_inputs(_resize(x, num_new), weights, heads)
    is_new = _resize(positions >= 0, num_new)
    first = (starts - pending)[:, None]  # number of tokens in the state

    # All tokens that this call reads: those of the ring in their order, then the new ones.
    places = starts[:, None] + jnp.arange(-(num_taps - 1 + max_pending), 0)
    columns = places % num_columns
    read = jnp.minimum(slots, num_slots - 1)[:, None]  # padding reads another slot, unused
    is_known = (places >= 0) & (places >= first - (num_taps - 1))
    known = jnp.where(is_known[..., None], ring[layer, read, columns], 0)
    inputs = jnp.concatenate([known, raw.astype(ring.dtype)], axis=1)
    columns, places = columns[:, num_taps - 1 :], places[:, num_taps - 1 :]
    all_gates = jnp.concatenate([ring_gates[layer, read, columns], new_gates], axis=1)
    is_real = jnp.concatenate([(places >= 0) & (places >= first), is_new], axis=1)
    tokens = split_tokens(convolve(inputs, conv), all_gates, heads).only(is_real)

    def step(t, carry):
        s, out = carry
        token = (jax.lax.dynamic_index_in_dim(x, t, 1, keepdims=False) for x in tokens)
        s, o = advance(s, *token)
        # Outputs of pending tokens go to index 0, which the first new token overwrites.
        return s, jax.lax.dynamic_update_index_in_dim(out, o, t - max_pending, 1)

    s = jnp.where(first[..., None, None] > 0, state[layer, read[:, 0]], 0.0)
    out = jnp.zeros((len(slots), num_new, heads.num_values, heads.value_dim), jnp.float32)
    # Both loops have the same body, and bounds that XLA cannot unroll, so that a token runs the
    # same machine code and gives the same bits in every call.
    longest = jnp.max(jnp.where(counts > 0, pending, 0))
    s, out = jax.lax.fori_loop(max_pending - longest, max_pending, step, (s, out))
    if folds:
        s, out = recur_chunks(s, Tokens(*(x[:, max_pending:] for x in tokens)))
    else:
        _, out = jax.lax.fori_loop(max_pending, max_pending + counts.max(), step, (s, out))

    write = jnp.where(counts > 0, slots, num_slots)  # past the end: dropped
    state = state.at[layer, write].set(s, mode="drop")
    if folds:
        tail = counts[:, None] + jnp.arange(num_taps - 1)
        last = jnp.take_along_axis(inputs, (max_pending + tail)[..., None], axis=1)
        kept = jnp.full((len(slots), *ring.shape[2:]), jnp.nan, ring.dtype)
        columns = (starts[:, None] - (num_taps - 1) + tail) % num_columns
        kept = kept.at[jnp.arange(len(slots))[:, None], columns].set(last)
        ring = ring.at[layer, write].set(kept, mode="drop")
        ring_gates = ring_gates.at[layer, write].set(jnp.nan, mode="drop")
    else:
        column = jnp.where(positions >= 0, positions % num_columns, num_columns)
        ring = ring.at[layer, write[:, None], column].set(
            x[..., : heads.channels].astype(ring.dtype), mode="drop"
        )
        ring_gates = ring_gates.at[layer, write[:, None], column].set(
            _resize(new_gates, width), mode="drop"
        )
    out = out.astype(x.dtype)
    if weights.norm is not None:
        out = gated_norm(out, z, weights.norm, eps)
    return _resize(out, width), DeltaRuleCache(state, ring, ring_gates)


def split_inputs(
    x: jax.Array, weights: DeltaRuleWeights, heads: Heads
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split the projection x [B, T, C + H_v D_v + 2 H_v] into q | k | v [B, T, C], the output gate
    [B, T, H_v, D_v], and g and beta f32[B, T, 2, H_v]."""
    inner = heads.num_values * heads.value_dim
    ends = heads.channels, heads.channels + inner, heads.channels + inner + heads.num_values
    raw, z, b, a = jnp.split(x, ends, axis=-1)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    g = -jnp.exp(weights.log_decay) * jax.nn.softplus(a + weights.decay_bias)
    z = z.reshape(*z.shape[:2], heads.num_values, heads.value_dim)
    return raw, z, jnp.stack([g, jax.nn.sigmoid(b)], axis=2)


def gated_norm(o: jax.Array, z: jax.Array, norm: jax.Array, eps: float) -> jax.Array:
    """Compute w rmsnorm(o) silu(z) of o and z [..., D_v] in o's dtype; statistics, gate in f32."""
    y = o.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    y = (norm * y.astype(o.dtype)).astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))
    return y.astype(o.dtype)


def _resize(x: jax.Array, length: int) -> jax.Array:
    """Truncate or zero-pad x [B, T, ...] to T = length."""
    padding = max(0, length - x.shape[1])
    return jnp.pad(x[:, :length], ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))


def convolve(x: jax.Array, conv: jax.Array) -> jax.Array:
    """Return silu(causal convolution) f32[B, T, C] of x [B, W - 1 + T, C], weights [W, C]."""
    num_taps = conv.shape[0]
    length = x.shape[1] - num_taps + 1
    x, conv = x.astype(jnp.float32), conv.astype(jnp.float32)
    y = x[:, :length] * conv[0]
    for tap in range(1, num_taps):
        y = y + x[:, tap : tap + length] * conv[tap]
    return jax.nn.silu(y)


def split_tokens(y: jax.Array, gates: jax.Array, heads: Heads) -> Tokens:
    """Split channels f32[B, T, C] into q, k and v per value head; gates are f32[B, T, 2, H_v]."""
    batch, length, _ = y.shape
    key_channels = heads.num_keys * heads.key_dim
    q, k, v = jnp.split(y, [key_channels, 2 * key_channels], axis=-1)

    def per_value_head(z):
        z = z.reshape(batch, length, heads.num_keys, heads.key_dim)
        z = z * jax.lax.rsqrt((z * z).sum(-1, keepdims=True) + EPSILON)
        return jnp.repeat(z, heads.num_values // heads.num_keys, axis=2)

    return Tokens(
        per_value_head(q) * heads.key_dim**-0.5,
        per_value_head(k),
        v.reshape(batch, length, heads.num_values, heads.value_dim),
        gates[:, :, 0],
        gates[:, :, 1],
    )


def advance(
    s: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Run one token: return states f32[B, H_v, D_v, D_k] and outputs f32[B, H_v, D_v]."""
    s = s * jnp.exp(g)[..., None, None]
    u = beta[..., None] * (v - einsum("bhvk,bhk->bhv", s, k))
    s = s + u[..., None] * k[..., None, :]
    return s, einsum("bhvk,bhk->bhv", s, q)


def recur_chunks(s: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """Run `advance` over T tokens in chunks of matrix products (the WY form; paper, section 3.3);
    return the states after them and the outputs f32[B, T, H_v, D_v].

    With G the running sum of g inside a chunk, A = tril(beta_i e^(G_i - G_j) k_i . k_j, -1) and
    U = (I + A)^-1 beta (V - e^G K S^T):

        O = e^G Q S^T + tril(e^(G_i - G_j) Q K^T) U        S <- e^(G_end) S + U^T e^(G_end - G) K
    """
    batch, length, num_heads, value_dim = tokens.v.shape
    size = min(CHUNK, 1 << (length - 1).bit_length())
    padding = -length % size

    def chunks(x):  # [B, T, H, ...] -> [T / size, B, H, size, ...]; zeros keep the state
        x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(batch, -1, size, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

    row = jnp.arange(size)
    is_before, is_before_strictly = row[None] <= row[:, None], row[None] < row[:, None]

    def step(s, chunk):
        q, k, v, g, beta = chunk
        total = jnp.cumsum(g, axis=-1)  # [B, H, size]
        # Above the diagonal the difference is positive, and exp might overflow.
        decay = jnp.exp(jnp.where(is_before, total[..., :, None] - total[..., None, :], -jnp.inf))
        grown = jnp.exp(total)[..., None]
        beta = beta[..., None]
        lower = beta * decay * einsum("bhik,bhjk->bhij", k, k)
        lower = jnp.where(is_before_strictly, lower, 0.0)
        right = beta * (v - grown * einsum("bhik,bhvk->bhiv", k, s))
        u = matmul(invert_unit_lower(lower), right)
        inner = decay * einsum("bhik,bhjk->bhij", q, k)
        out = grown * einsum("bhik,bhvk->bhiv", q, s) + matmul(inner, u)
        left = jnp.exp(total[..., -1:] - total)[..., None] * k
        s = grown[..., -1:, :] * s + einsum("bhiv,bhik->bhvk", u, left)
        return s, out

    s, out = jax.lax.scan(step, s, jax.tree.map(chunks, tokens))
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(batch, length + padding, num_heads, value_dim)
    return s, out[:, :length]


def invert_unit_lower(lower: jax.Array) -> jax.Array:
    """Return (I + A)^-1 of strictly lower triangular A [..., n, n], n a power of two.

    Pairs of inverted diagonal blocks are merged until one is left: the corner of the inverse of
    [[P, 0], [C, Q]] is -Q^-1 C P^-1. A batched triangular solve would touch fewer elements, but on
    the CPU XLA's calls BLAS for every matrix, and may hang there.
    """
    *batch, n, _ = lower.shape
    inverse = jnp.ones((*batch, n, 1, 1), lower.dtype)
    size = 1
    while size < n:
        num_pairs = n // (2 * size)
        blocks = lower.reshape(*batch, num_pairs, 2 * size, num_pairs, 2 * size)
        pair = jnp.arange(num_pairs)
        corner = jnp.moveaxis(blocks, -2, -3)[..., pair, pair, size:, :size]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -matmul(matmul(second, corner), first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]
