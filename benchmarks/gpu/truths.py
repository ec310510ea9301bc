"""Computes the kernels' equations in float64 by NumPy: one function per kernel.

A function takes the operands of one call. It follows the equations in `pallas_kernels`, for one
request, row or token at a time. Results are in the kernel's order. For a kernel that keeps a set of
logits, the results are the size of the set and its lowest logit.
"""

import math
from typing import Any

import numpy as np

from pallas_kernels.draw_tokens.reference import MIN_TAIL, keys, token_bits
from pallas_kernels.gated_delta_rule import Heads
from pallas_kernels.route import Rule

Array = np.ndarray


def f64(x: Any) -> Array:
    """Return a float64 copy on the host."""
    return np.asarray(x).astype(np.float64)


def softmax(x: Array, sinks: Array | None = None) -> tuple[Array, Array]:
    """Return the softmax along the last axis, and the logarithm of its denominator."""
    most = x.max(-1, keepdims=True)
    total = np.exp(x - most).sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - most)
    return np.exp(x - most) / total, np.squeeze(most + np.log(total), -1)


def silu(x: Array) -> Array:
    """Return x sigmoid(x)."""
    return x / (1 + np.exp(-x))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Return the RMSNorm of x along the last axis."""
    return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def paged_attention(
    q: Array,
    kv: Array,
    table: Array,
    positions: Array,
    *,
    window: int | None = None,
    origins: Array | None = None,
    soft_cap: float | None = None,
    scales: Array | None = None,
    sinks: Array | None = None,
) -> tuple[Array, Array]:
    """Return the attention's output [B, T, H, D], and the log-sum-exp [B, T, H] of its scores."""
    pages, q = np.asarray(kv)[0], f64(q)
    batch, _, num_heads, dim = q.shape
    group = num_heads // kv.shape[4]
    out, sums = np.zeros_like(q), np.zeros(q.shape[:3])
    sink = None if sinks is None else f64(sinks)[:, None, None]
    for b in range(batch):
        length = positions[b].max() + 1
        entries = f64(pages[table[b]]).reshape(-1, *pages.shape[2:])[:length]
        if scales is not None:
            entries = entries * f64(scales)[0, :, None, None]
        key, value = (np.repeat(entries[:, i], group, axis=1) for i in range(2))  # [j, H, D]
        scores = np.einsum("thd,jhd->htj", q[b], key) / math.sqrt(dim)
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        j, last = np.arange(length), positions[b][:, None]
        is_seen = j <= last
        if window is not None:
            is_seen &= j > (last if origins is None else origins[b][:, None]) - window
        weights, total = softmax(np.where(is_seen, scores, -np.inf), sink)
        out[b], sums[b] = np.einsum("htj,jhd->thd", weights, value), total.T
    return out, sums


def latent_attention(q: Array, pool: Array, table: Array, positions: Array, rank: int) -> Array:
    """Return the attention's output [B, T, H, rank].

    Scores are divided by the square root of the queries' width.
    """
    pages, q = np.asarray(pool)[0], f64(q)
    out = np.zeros((*q.shape[:3], rank))
    for b, rows in enumerate(positions):
        entries = f64(pages[table[b]]).reshape(-1, pages.shape[2])[: rows.max() + 1]
        scores = np.einsum("the,je->htj", q[b], entries) / math.sqrt(q.shape[3])
        is_seen = np.arange(len(entries)) <= rows[:, None]
        weights, _ = softmax(np.where(is_seen, scores, -np.inf))
        out[b] = np.einsum("htj,jr->thr", weights, entries[:, :rank])
    return out


def rope_write(
    qkv: Array, angles: Any, kv: Array, layer: int, table: Array, positions: Array, num_heads: int
) -> tuple[Array, Array]:
    """Return the pool after the write, and the rotated queries."""
    pool, dim, page_size = f64(kv), kv.shape[5], kv.shape[2]
    heads = f64(qkv).reshape(*positions.shape, -1, dim)
    cos, sin = (f64(x)[:, :, None] for x in angles)
    first, second = np.split(heads, 2, axis=-1)
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    num_kv_heads = kv.shape[4]
    for b, t in np.ndindex(positions.shape):
        place = positions[b, t]
        entry = pool[layer, table[b, place // page_size], place % page_size]
        entry[0] = turned[b, t, num_heads : num_heads + num_kv_heads]
        entry[1] = heads[b, t, -num_kv_heads:]
    return pool, turned[:, :, :num_heads]


def grouped_matmul(x: Array, weights: Array, sizes: Array, sources: Array) -> Array:
    """Return the product of each row x[sources[n]] with its group's matrix, sorted by group."""
    rows, ends = f64(x)[sources], np.cumsum(sizes)
    parts = [
        rows[end - size : end] @ f64(weights[g])
        for g, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    return np.concatenate(parts)


def float8(values: Array, scales: Array, block: tuple[int, int]) -> Array:
    """Return matrices [.., I, O]: the numbers `values` [.., O, I], times one scale per block."""
    rows, columns = (np.arange(n) // side for n, side in zip(values.shape[1:], block, strict=True))
    return (f64(values) * f64(scales)[:, rows][:, :, columns]).swapaxes(1, 2)


def mxfp4(values: Array, exponents: Array) -> Array:
    """Return matrices [.., I, O] in float64, unpacked from MXFP4; see the kernel's docstring."""
    runs = np.asarray(values).reshape(*values.shape[:2], -1, 1, 32)
    codes = np.concatenate([runs & 15, runs >> 4], axis=3).reshape(*values.shape[:2], -1)
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes > 7, -1, 1)
    scales = np.repeat(2.0 ** (f64(exponents) - 127), 32, axis=1)
    return numbers.swapaxes(1, 2)[:, : scales.shape[1]] * scales


def scaled_matmul(x: Array, values: Array, scales: Array, block: tuple[int, int]) -> Array:
    """Return the products of x with the matrix of numbers `values`, times one scale per block."""
    numbers = [np.arange(size) // side for size, side in zip(values.shape, block, strict=True)]
    return f64(x) @ (f64(values) * f64(scales)[np.ix_(*numbers)]).T


def packed_matmul(x: Array, values: Array, scales: Array, zeros: Array, group: int) -> Array:
    """Return the products of x with a matrix of 4-bit numbers; see the kernel's docstring."""
    return f64(x) @ packed(values, scales, zeros, x.shape[1], group).T


def packed(values: Array, scales: Array, zeros: Array, depth: int, group: int) -> Array:
    """Return matrices [..., O, I] of 4-bit numbers; see the docstring of `packed_matmul`."""
    values, outer = np.asarray(values), values.shape[:-1]
    runs = values.reshape(*outer, -1, math.gcd(group, 64))
    numbers = np.concatenate([runs & 15, runs >> 4], axis=-1).reshape(*outer, -1)[..., :depth]
    groups = np.arange(depth) // group
    of_inputs = (f64(one)[..., groups, :].swapaxes(-1, -2) for one in (zeros, scales))
    return (numbers - next(of_inputs)) * next(of_inputs)


def route(
    logits: Array, num_chosen: int, rule: Rule, correction: Array | None, is_padding: Array
) -> tuple[Array, ...]:
    """Return weights and experts [N, C]; entries and rows sorted by expert; rows per expert."""
    x = f64(logits)
    scores = 1 / (1 + np.exp(-x)) if rule.is_sigmoid else softmax(x)[0]
    ranked = scores + f64(correction) if correction is not None else x
    experts = np.argsort(-ranked, axis=1, kind="stable")[:, :num_chosen]  # ties: lower first
    weights = np.take_along_axis(scores, experts, axis=1)
    if rule.normalises:
        weights = weights / weights.sum(1, keepdims=True)
    experts = np.where(is_padding[:, None], experts[:1], experts)
    order = np.argsort(experts.reshape(-1), kind="stable")
    sizes = np.bincount(experts.reshape(-1), minlength=x.shape[1])
    return weights * rule.scaling, experts, order, order // num_chosen, sizes


def truncate(logits: Array, temperature: Array, top_k: Array, top_p: Array) -> tuple[Array, Array]:
    """Return the number of kept logits in each row, and the lowest of them."""
    counts, lowest = [], []
    for row, t, k, p in zip(f64(logits), f64(temperature), top_k, f64(top_p), strict=True):
        ordered = np.sort(row)[::-1]
        bound = ordered[k - 1] if k else -np.inf
        if p < 1:
            mass = np.exp((ordered - ordered[0]) / t) * (ordered >= bound)
            bound = ordered[np.searchsorted(np.cumsum(mass), p * mass.sum())]
        kept = row[row >= bound]
        counts.append(len(kept))
        lowest.append(kept.min())
    return np.array(counts)[:, None], np.array(lowest)[:, None]


def draw_tokens(
    logits: Array, temperature: Array, seeds: Array, places: Array, ids: Any, vocab_size: int
) -> Array:
    """Return the drawn tokens. Their noise comes from threefry's random bits."""
    random_keys, drawn = keys(seeds, 0, (places,)), []
    for row, key, t in zip(f64(logits), random_keys, f64(temperature), strict=True):
        if t > 0:
            bits = f64(token_bits(key, vocab_size))[: vocab_size if ids is None else None]
            u = np.minimum((bits + 0.5) * 2.0**-32, 1 - MIN_TAIL)
            noise = -np.log(-np.log1p(-u))
            row = row / t + (noise if ids is None else noise[ids])
        best = int(row.argmax())
        drawn.append(best if ids is None else ids[best])
    return np.array(drawn)


def delta_rule(x: Array, weights: Any, heads: Heads, eps: float) -> tuple[Array, Array]:
    """Return the outputs [n, H_v, D_v] of a request's n tokens, and the states.

    The n + 1 states are the states before and after each token.
    """
    num_keys, num_values, key_dim, value_dim = heads
    conv, log_decay, decay_bias, norm = map(f64, weights)
    inner = num_values * value_dim
    raw, z, b, a = np.split(f64(x), np.cumsum([heads.channels, inner, num_values]), axis=1)
    decay = np.exp(-np.exp(log_decay) * np.log1p(np.exp(a + decay_bias)))
    beta, taps = 1 / (1 + np.exp(-b)), len(conv)
    padded = np.concatenate([np.zeros((taps - 1, raw.shape[1])), raw])
    out = np.zeros((len(x), num_values, value_dim))
    states = np.zeros((len(x) + 1, num_values, value_dim, key_dim))
    for t in range(len(x)):
        y = silu((conv * padded[t : t + taps]).sum(0))
        q, k = y[: 2 * num_keys * key_dim].reshape(2, num_keys, key_dim)
        q, k = (
            np.repeat(one / np.sqrt((one**2).sum(1, keepdims=True) + 1e-6),
                      num_values // num_keys, axis=0)
            for one in (q, k)
        )  # fmt: skip
        v = y[2 * num_keys * key_dim :].reshape(num_values, value_dim)
        state = decay[t, :, None, None] * states[t]
        u = beta[t, :, None] * (v - np.einsum("hvk,hk->hv", state, k))
        states[t + 1] = state + u[:, :, None] * k[:, None]
        out[t] = np.einsum("hvk,hk->hv", states[t + 1], q) / math.sqrt(key_dim)
    return rms_norm(out, norm, eps) * silu(z).reshape(out.shape), states
