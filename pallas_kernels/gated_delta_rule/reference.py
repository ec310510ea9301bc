"""The gated delta rule in plain JAX: token by token, or in chunks of matrix products."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule.types import DeltaRuleCache, DeltaRuleWeights, Heads

CHUNK = 64
EPSILON = 1e-6  # eps of the l2 normalisation

# By default GPUs multiply f32 as tf32, whose errors would accumulate in the state.
einsum, matmul = partial(jnp.einsum, precision="highest"), partial(jnp.matmul, precision="highest")


class Tokens(NamedTuple):
    """T tokens, after the convolution, for the recurrence. All arrays are f32."""

    q: jax.Array  # [B, T, H_v, D_k]
    k: jax.Array  # [B, T, H_v, D_k]
    v: jax.Array  # [B, T, H_v, D_v]
    g: jax.Array  # [B, T, H_v]
    beta: jax.Array  # [B, T, H_v]

    def only(self, is_real: jax.Array) -> "Tokens":
        """Return the tokens, with zeros for each token whose `is_real` bool[B, T] is false.

        Zeros leave every state unchanged, and replace NaN.
        """
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
    num_slots, num_taps, max_pending = cache.state.shape[1], len(weights.conv), cache.max_pending
    heads = cache.heads
    counts = (positions >= 0).sum(axis=1)
    starts = positions[:, 0]
    # Steps of all widths use the widest shape, because XLA's rounding depends on the shape.
    width = positions.shape[1]
    num_new = width if folds else max_pending
    raw, z, gates = split_inputs(_resize(x, num_new), weights, heads)
    read = jnp.minimum(slots, num_slots - 1)[:, None]  # padding reads some slot, unused

    places = starts[:, None] + jnp.arange(1 - num_taps, 0)[None]
    history = cache.ring[layer, read, places % cache.ring.shape[2]]
    history = jnp.where((places >= 0)[..., None], history, 0)
    inputs = jnp.concatenate([history, raw.astype(history.dtype)], axis=1)
    tokens = split_tokens(convolve(inputs, weights.conv), gates, heads)
    tokens = tokens.only(_resize(positions >= 0, num_new))
    folded = _read_pending(cache, layer, read, starts, pending)

    # First the pending tokens, whose u is known, then the new ones.
    verified = *tokens[:3], jnp.exp(tokens.g), tokens.beta, jnp.zeros_like(tokens.v)
    pairs = zip(folded, verified, strict=True)
    everything = [jnp.concatenate(pair, axis=1) for pair in pairs]

    def step(t, carry):
        s, out, corrections = carry
        token = (jax.lax.dynamic_index_in_dim(x, t, 1, keepdims=False) for x in everything)
        s, o, u = advance(s, *token)
        # Results of pending tokens go to index 0, which the first new token overwrites.
        at = t - max_pending
        out = jax.lax.dynamic_update_index_in_dim(out, o, at, 1)
        return s, out, jax.lax.dynamic_update_index_in_dim(corrections, u, at, 1)

    first = starts - pending  # number of tokens in the state
    s = jnp.where(first[:, None, None, None] > 0, cache.state[layer, read[:, 0]], 0.0)
    out = jnp.zeros((len(slots), num_new, heads.num_values, heads.value_dim), jnp.float32)
    # Both loops have the same body, and bounds that XLA cannot unroll, so that a token runs the
    # same machine code and gives the same bits in folding and in verification.
    longest = jnp.max(jnp.where(counts > 0, pending, 0))
    s, *carry = jax.lax.fori_loop(max_pending - longest, max_pending, step, (s, out, out))
    if folds:
        s, out = recur_chunks(s, tokens)
        cache = _keep_history(cache, layer, slots, counts, starts, inputs)
    else:
        ends = max_pending, max_pending + counts.max()
        _, out, u = jax.lax.fori_loop(*ends, step, (s, *carry))
        k = tokens.k[:, :, :: heads.num_values // heads.num_keys]
        made = raw, u, k, jnp.exp(tokens.g)
        cache = _keep_tokens(cache, layer, slots, positions, made)
    write = jnp.where(counts > 0, slots, num_slots)  # past the end: dropped
    cache = cache._replace(state=cache.state.at[layer, write].set(s, mode="drop"))
    out = out.astype(x.dtype)
    if weights.norm is not None:
        out = gated_norm(out, z, weights.norm, eps)
    return _resize(out, width), cache


def _read_pending(
    cache: DeltaRuleCache, layer: jax.Array, slots: jax.Array, starts: jax.Array, pending: jax.Array
) -> tuple[jax.Array, ...]:
    """Return q, k, v, e^g, beta and u of the M tokens before the new tokens.

    Pending tokens are accepted tokens that the state lacks, and M is their maximum number. e^g and
    beta are [B, M, H_v]; the other arrays have one more axis. For pending tokens, e^g, k and u come
    from the cache's ring buffers. q, v and beta are zero: q serves only to compute outputs, and v
    and beta serve only to compute u. If fewer than M tokens are pending, the tokens before them
    have e^g = 1, and zeros in the other arrays. These values leave every state unchanged.
    """
    heads, max_pending = cache.heads, cache.max_pending
    places = starts[:, None] + jnp.arange(-max_pending, 0)[None]
    is_pending = ((places >= 0) & (places >= (starts - pending)[:, None]))[..., None]
    u = cache.u[layer, slots, places % max_pending]
    at = layer, slots, places % (2 * max_pending)
    k = jnp.repeat(cache.k[at], heads.num_values // heads.num_keys, axis=2)
    u, k = (jnp.where(is_pending[..., None], x, 0.0) for x in (u, k))
    decay = jnp.where(is_pending, cache.decay[at], 1.0)
    return jnp.zeros_like(k), k, jnp.zeros_like(u), decay, jnp.zeros_like(decay), u


def _keep_tokens(
    cache: DeltaRuleCache,
    layer: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    tokens: tuple[jax.Array, ...],
) -> DeltaRuleCache:
    """Return the cache after writing the new tokens to its ring buffers.

    `tokens` are the raw inputs, u, k and e^g [B, M, ...] of the new tokens.
    """
    width = positions.shape[1]

    def write(ring, x):
        # Padding, and rows past the last slot, point past the end and are dropped.
        column = jnp.where(positions >= 0, positions % ring.shape[2], ring.shape[2])
        x = _resize(x, width).astype(ring.dtype)
        return ring.at[layer, slots[:, None], column].set(x, mode="drop")

    return DeltaRuleCache(cache.state, *map(write, cache[1:], tokens))


def _keep_history(
    cache: DeltaRuleCache,
    layer: jax.Array,
    slots: jax.Array,
    counts: jax.Array,
    starts: jax.Array,
    inputs: jax.Array,
) -> DeltaRuleCache:
    """Return the cache after a prompt. Its ring buffers keep only the last W - 1 raw inputs.

    W is the number of tokens that the convolution spans. The rest of the ring buffers is filled
    with NaN. `inputs` [B, W - 1 + T, C] are the raw inputs of the W - 1 tokens before the new
    tokens, and of the T new tokens.
    """
    state, ring, *rings = cache
    num_columns = ring.shape[2]
    length = num_columns - cache.max_pending  # W - 1
    write = jnp.where(counts > 0, slots, state.shape[1])
    tail = counts[:, None] + jnp.arange(length)[None]
    last = jnp.take_along_axis(inputs, tail[..., None], axis=1)
    kept = jnp.full((len(slots), *ring.shape[2:]), jnp.nan, ring.dtype)
    columns = (starts[:, None] - length + tail) % num_columns
    kept = kept.at[jnp.arange(len(slots))[:, None], columns].set(last)
    ring = ring.at[layer, write].set(kept, mode="drop")
    rings = (x.at[layer, write].set(jnp.nan, mode="drop") for x in rings)
    return DeltaRuleCache(state, ring, *rings)


def split_inputs(
    x: jax.Array, weights: DeltaRuleWeights, heads: Heads
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return q | k | v [B, T, C] before the convolution, the output gate z, and g and beta.

    x [B, T, C + H_v D_v + 2 H_v] is the output of the input projection. z is [B, T, H_v, D_v]. g
    and beta are stacked as f32[B, T, 2, H_v].
    """
    inner = heads.num_values * heads.value_dim
    ends = heads.channels, heads.channels + inner, heads.channels + inner + heads.num_values
    raw, z, b, a = jnp.split(x, ends, axis=-1)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    decay, bias = (-jnp.exp(weights.log_decay))[None, None], weights.decay_bias[None, None]
    g = decay * jax.nn.softplus(a + bias)
    z = z.reshape(*z.shape[:2], heads.num_values, heads.value_dim)
    return raw, z, jnp.stack([g, jax.nn.sigmoid(b)], axis=2)


def gated_norm(o: jax.Array, z: jax.Array, norm: jax.Array, eps: float) -> jax.Array:
    """Return `norm` * rmsnorm(o) * silu(z) [..., D_v] in o's dtype.

    The statistics of the norm and the gate silu(z) are computed in f32.
    """
    y = o.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    norm = jax.lax.broadcast_to_rank(norm, y.ndim)
    y = (norm * y.astype(o.dtype)).astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))
    return y.astype(o.dtype)


def _resize(x: jax.Array, length: int) -> jax.Array:
    """Return x [B, T, ...], truncated or zero-padded to T = `length`."""
    padding = max(0, length - x.shape[1])
    return jnp.pad(x[:, :length], ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))


def convolve(x: jax.Array, conv: jax.Array) -> jax.Array:
    """Return silu(y) f32[B, T, C], where y is the causal convolution of x with `conv` [W, C].

    x is [B, W - 1 + T, C]: it starts with the W - 1 tokens before the T tokens.
    """
    num_taps = conv.shape[0]
    length = x.shape[1] - num_taps + 1
    x, conv = x.astype(jnp.float32), conv.astype(jnp.float32)
    y = x[:, :length] * conv[0][None, None]
    for tap in range(1, num_taps):
        y = y + x[:, tap : tap + length] * conv[tap][None, None]
    return jax.nn.silu(y)


def split_tokens(y: jax.Array, gates: jax.Array, heads: Heads) -> Tokens:
    """Return the `Tokens`, with q, k and v for each value head.

    q, k and v are split from the channels y f32[B, T, C], the result of `convolve`. `gates`
    f32[B, T, 2, H_v] are g and beta.
    """
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
    s: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    known: jax.Array | float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the states f32[B, H_v, D_v, D_k] after one token, the token's output, and u.

    u is the correction of the state, `known` + beta (v - S k). For a new token, `known` is 0. For a
    pending token, beta is 0, and `known` is the token's u. The output and u are f32[B, H_v, D_v].
    """
    s = s * decay[..., None, None]
    u = known + beta[..., None] * (v - einsum("bhvk,bhk->bhv", s, k))
    s = s + u[..., None] * k[..., None, :]
    return s, einsum("bhvk,bhk->bhv", s, q), u


def recur_chunks(s: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """Return the states after T tokens, and the tokens' outputs f32[B, T, H_v, D_v].

    The results are equivalent to T calls of `advance`, but are computed in chunks by matrix
    products (the WY form; Yang et al. 2024, section 3.3). For a chunk whose tokens are the rows of
    Q, K and V:

        G_i = g_1 + ... + g_i
        A = tril(beta_i e^(G_i - G_j) k_i . k_j, -1)
        U = (I + A)^-1 beta (V - e^G K S^T)
        O = e^G Q S^T + tril(e^(G_i - G_j) Q K^T) U
        S <- e^(G_end) S + U^T e^(G_end - G) K

    beta and powers of e scale rows, and G_end is the G of the chunk's last token.
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
        # Above the diagonal the difference is positive, so exp could overflow.
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
    """Return (I + A)^-1, where A = `lower` [..., n, n] is strictly lower triangular.

    n must be a power of two. The diagonal blocks of I + A are inverted, starting with blocks of
    size 1. Each step merges the inverses of adjacent blocks P and Q, with the block C below P:

        [P 0]^-1   [P^-1            0   ]
        [C Q]    = [-Q^-1 C P^-1    Q^-1]

    A batched triangular solve would touch fewer elements. But on the CPU, XLA calls BLAS for every
    matrix in such a solve, and may hang there.
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
