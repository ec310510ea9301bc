"""Makes inputs of the kernels at the shapes of real models, to test results and to measure time.

A `Problem` has a state, which each call updates. Calls use its items in turn, so that no call finds
its data in the card's cache. `num_bytes` is the minimum number of bytes that a call moves. Values
are random, because the card processes zeros faster. The values have the same bits on every device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.draw_tokens import draw_tokens
from pallas_kernels.gated_delta_rule import (
    DeltaRuleCache,
    DeltaRuleWeights,
    Heads,
    gated_delta_rule,
)
from pallas_kernels.gated_delta_rule.triton import gated_delta_rule_triton
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.paged_attention import paged_attention, paged_attention_part
from pallas_kernels.paged_attention.triton import paged_attention_triton
from pallas_kernels.rms_norm import add_rms_norm
from pallas_kernels.rope_write import HeadWeights, rope_write
from pallas_kernels.route import Rule, route
from pallas_kernels.truncation import truncate

CACHE_BYTES = 2**28  # total size of a problem's items, several times the card's cache
PAGE_SIZE, TAPS, MAX_ROWS, EPS = 16, 4, 6, 1e-6
DELTA_HEADS = {"4B": Heads(16, 32, 128, 128), "27B": Heads(16, 48, 128, 128)}
TINY_HEADS = Heads(1, 2, 16, 16)
# The number of query heads, the number of key heads, and the dimension of a head.
ATTENTION_HEADS = {"Llama-8B": (32, 8, 128), "Qwen-27B": (24, 4, 256)}
TINY_ATTENTION = (4, 2, 64)
# Variants of `attention`; None is plain attention.
FORMS = "window", "sinks", "soft cap", "float8", "part"
# The number of heads, the width of a latent, and the width of a rotated key.
LATENT_HEADS = {"GLM-4.7-Flash": (20, 512, 64), "DeepSeek-V3": (128, 512, 64)}
TINY_LATENT = (4, 64, 16)
# The number of experts, the number of experts per row, and the rule that chooses them.
ROUTES = {
    "Qwen3-30B-A3B": (128, 8, Rule()),
    "gpt-oss-20b": (32, 4, Rule()),
    "GLM-4.7-Flash": (64, 4, Rule(is_sigmoid=True, scaling=1.8)),
    "Qwen3.5-35B-A3B": (256, 8, Rule()),
    "Qwen3-Next-80B-A3B": (512, 10, Rule()),
}
TINY_ROUTES = (8, 2, Rule())


@dataclass(frozen=True)
class Problem:
    """Inputs for calls of one kernel: a state that each call updates, and items to use in turn.

    `call(state, item, kernels, config)` returns the new state and an output.
    """

    state: Any
    items: tuple[Any, ...]
    call: Callable[[Any, Any, str, Any], tuple[Any, Any]]
    num_bytes: float
    # Takes a call's new state and output; returns the results to check.
    results: Callable[[Any, Any], Any] = lambda state, output: output

    def program(self, kernels: str, config: Any = None) -> Callable[[Any, Any], tuple[Any, Any]]:
        """Return a jitted program that runs a call for each item in turn, and donates the state."""

        @partial(jax.jit, donate_argnums=0)
        def run(state, items):
            one = jax.jit(partial(self.call, kernels=kernels, config=config))  # a single trace
            outputs = []
            for item in items:
                state, output = one(state, item)
                outputs.append(output)
            return state, outputs

        return run

    def launcher(self, kernels: str, config: Any = None) -> Callable[[], Any]:
        """Return a function that launches the program, each time on the previous launch's state.

        The first launch consumes the problem's state.
        """
        run, state = self.program(kernels, config), [self.state]

        def launch():
            state[0], outputs = run(state[0], self.items)
            return outputs

        return launch


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(seed, shape, dtype):
    # A number is a scaled sum of eight integers, so that no device rounds differently.
    place = _hash(jax.lax.iota(jnp.uint32, int(np.prod(shape))))
    total = jnp.zeros(place.shape, jnp.int32)
    for i in range(4):
        word = _hash(place ^ _hash(jnp.uint32(4 * seed + i)))
        total += (word >> 16).astype(jnp.int32) + (word & 0xFFFF).astype(jnp.int32)
    scale = np.float32((8 * (2**32 - 1) / 12) ** -0.5)
    centred = (total - 4 * 0xFFFF).astype(jnp.float32)
    return (centred * scale).astype(dtype).reshape(shape)


def _hash(x):
    """Mix the bits of every word, like the last steps of MurmurHash3 (Appleby 2011)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return numbers with a nearly standard normal distribution, computed on the device."""
    return _normal(seed, tuple(shape), jnp.dtype(dtype).name)


def attention(
    heads: tuple[int, int, int],
    batch: int,
    num_rows: int,
    context: int,
    dtype: Any,
    kv: jax.Array,
    num_items: int = 4,
    form: str | None = None,
) -> Problem:
    """Return the problem of attention for rows at the end of `context` tokens.

    The tokens are in random pages of the pool `kv`.
    """
    num_heads, num_kv_heads, dim = heads
    columns = -(-context // PAGE_SIZE)
    needed = batch * columns
    pages = np.random.default_rng(0).permutation(kv.shape[1])
    positions = np.tile(np.arange(context - num_rows, context, dtype=np.int32), (batch, 1))
    items = []
    for i in range(num_items):
        table = np.take(pages, np.arange(i * needed, (i + 1) * needed), mode="wrap")
        q = normal(i, (batch, num_rows, num_heads, dim), dtype)
        items.append((q, table.reshape(batch, columns).astype(np.int32), positions))
    options = attention_options(form, heads, positions)

    def call(kv, item, kernels, config):
        arguments = item[0], kv, jnp.int32(0), *item[1:]
        if form == "part":
            return kv, paged_attention_part(*arguments, kernels=kernels)
        if config is not None:
            interpret = kernels == "interpret"
            return kv, paged_attention_triton(*arguments, config=config, interpret=interpret)
        return kv, paged_attention(*arguments, **options, kernels=kernels)

    width = jnp.dtype(dtype).itemsize
    read = 2 * batch * context * num_kv_heads * dim
    return Problem(kv, tuple(items), call, width * (read + 2 * batch * num_rows * num_heads * dim))


def attention_options(
    form: str | None, heads: tuple[int, int, int], positions: np.ndarray
) -> dict[str, Any]:
    """Return the options of `paged_attention` for a form.

    With a window, all rows of a request have the position of the first row as their origin.
    """
    num_heads, num_kv_heads, _ = heads
    if form == "window":
        origins = np.repeat(positions[:, :1], positions.shape[1], axis=1)
        return {"window": max(1, int(positions.max()) // 6), "origins": origins}
    if form == "sinks":
        return {"sinks": np.linspace(-2, 4, num_heads, dtype=np.float32)}
    if form == "soft cap":
        return {"soft_cap": 2.0}
    if form == "float8":
        return {"scales": np.array([[0.5, 2]], np.float32)}
    return {}


def pool(heads: tuple[int, int, int], num_bytes: float, dtype: Any) -> jax.Array:
    """Return a pool with the keys and values of one layer, for `attention`."""
    page = (PAGE_SIZE, 2, *heads[1:])
    num_pages = int(num_bytes // (np.prod(page) * jnp.dtype(dtype).itemsize))
    return normal(7, (1, num_pages, *page), dtype)


def latents(
    heads: tuple[int, int, int], batch: int, num_rows: int, context: int, dtype: Any
) -> Problem:
    """Return the problem of latent attention for rows at the end of `context` tokens.

    The latents are in random pages.
    """
    num_heads, rank, rotated = heads
    columns = -(-context // PAGE_SIZE)
    pages = np.random.default_rng(0).permutation(batch * columns).reshape(batch, columns)
    positions = np.tile(np.arange(context - num_rows, context, dtype=np.int32), (batch, 1))
    pool = normal(7, (1, batch * columns, PAGE_SIZE, rank + rotated), dtype)
    items = tuple(
        (normal(i, (batch, num_rows, num_heads, rank + rotated), dtype), pages.astype(np.int32),
         positions)
        for i in range(2)
    )  # fmt: skip

    def call(pool, item, kernels, config):
        scale = (rank + rotated) ** -0.5
        arguments = item[0], pool, jnp.int32(0), *item[1:]
        return pool, latent_attention(*arguments, rank=rank, scale=scale, kernels=kernels)

    numbers = batch * context * (rank + rotated) + batch * num_rows * num_heads * (
        2 * rank + rotated
    )
    return Problem(pool, items, call, jnp.dtype(dtype).itemsize * numbers)


def delta_rule(
    heads: Heads, batch: int, num_rows: int, dtype: Any, *, folds: bool = False, layers: int = 0
) -> Problem:
    """Return the problem of a step of the gated delta rule.

    The previous step left up to T tokens pending. Each call works on another layer.
    """
    state_bytes = 4 * batch * heads.num_values * heads.value_dim * heads.key_dim
    layers = layers or int(min(max(4, CACHE_BYTES // state_bytes), 32))
    channels = heads.channels
    shapes = DeltaRuleCache.shapes(layers, batch, heads, TAPS, MAX_ROWS, jnp.dtype(dtype))
    state, ring, u, k, decay = (normal(1 + i, x.shape, x.dtype) for i, x in enumerate(shapes))
    unit = heads.key_dim**-0.5
    cache = DeltaRuleCache(0.1 * state, ring, 0.1 * u, unit * k, jnp.exp(-jnp.abs(decay)))
    weights = delta_rule_weights(heads, dtype)
    rng = np.random.default_rng(0)
    slots = rng.permutation(batch).astype(np.int32)
    positions = (1000 + np.arange(batch)[:, None] + np.arange(num_rows)).astype(np.int32)
    pending = rng.integers(1, min(num_rows, MAX_ROWS) + 1, batch).astype(np.int32)
    items = tuple(
        (normal(10 + i, (batch, num_rows, heads.inputs), dtype), jnp.int32(i), slots, positions)
        + (pending,)
        for i in range(layers)
    )

    def call(state, item, kernels, config):
        weights, cache = state
        x, *where = item
        options = {"folds": folds, "eps": EPS}
        if config is not None:
            run = partial(gated_delta_rule_triton, config=config, interpret=kernels == "interpret")
        else:
            run = partial(gated_delta_rule, kernels=kernels)
        out, cache = run(x, weights, cache, *where, **options)
        return (weights, cache), out

    width = jnp.dtype(dtype).itemsize
    tokens = batch * num_rows * (heads.inputs + heads.num_values * heads.value_dim + channels)
    history = (batch * (TAPS - 1) + int(pending.sum())) * channels
    moved = 2 * state_bytes + width * (tokens + history)
    return Problem((weights, cache), items, call, moved, lambda state, out: (state[1], out))


def delta_rule_weights(heads: Heads, dtype: Any) -> DeltaRuleWeights:
    """Return weights with which some heads forget within a token, and others within hundreds."""
    return DeltaRuleWeights(
        normal(6, (TAPS, heads.channels), dtype) / 2,
        jnp.linspace(-7.0, 1.0, heads.num_values),
        normal(7, (heads.num_values,), "float32"),
        1 + normal(8, (heads.value_dim,), dtype) / 8,
    )


def last_layer(problem: Problem) -> Problem:
    """Return a delta rule problem with only its last item. The last layer's cache is a result."""

    def results(state, out):
        return [x[-1] for x in state[1]], out

    return replace(problem, items=problem.items[-1:], results=results)


def rotation(heads: tuple[int, int, int], batch: int, num_rows: int, dtype: Any) -> Problem:
    """Return the problem of `rope_write` for a step. Each call writes to another layer's pages."""
    num_heads, num_kv_heads, dim = heads
    layers, columns = 8, 8
    kv = normal(1, (layers, batch * columns, PAGE_SIZE, 2, num_kv_heads, dim), dtype)
    pages = np.random.default_rng(0).permutation(batch * columns).astype(np.int32)
    positions = np.tile(np.arange(40, 40 + num_rows, dtype=np.int32), (batch, 1))
    angle = normal(2, (batch, num_rows, dim // 2), "float32")
    width = (num_heads + 2 * num_kv_heads) * dim
    items = tuple(
        (normal(10 + i, (batch, num_rows, width), dtype), jnp.int32(i)) for i in range(layers)
    )
    table = pages.reshape(batch, columns)
    state = kv, (jnp.cos(angle), jnp.sin(angle)), table, positions

    def call(state, item, kernels, config):
        kv, angles, table, positions = state
        qkv, layer = item
        q, kv, _ = rope_write(
            qkv, HeadWeights(), angles, kv, layer, table, positions,
            num_heads=num_heads, kernels=kernels,
        )  # fmt: skip
        return (kv, angles, table, positions), q

    moved = 2 * batch * num_rows * width * jnp.dtype(dtype).itemsize
    return Problem(state, items, call, moved, lambda state, q: (state[0], q))


def add_norm(num_rows: int, dim: int, dtype: Any) -> Problem:
    """Return the problem of `add_rms_norm` for a residual stream and a summand."""
    shape = num_rows, dim
    items = tuple((normal(i, shape, dtype), normal(20 + i, shape, dtype)) for i in range(8))

    def call(weight, item, kernels, config):
        return weight, add_rms_norm(*item, weight, 1e-5, kernels=kernels)

    moved = 4 * num_rows * dim * jnp.dtype(dtype).itemsize
    return Problem(1 + normal(3, (dim,), dtype) / 8, items, call, moved)


def experts(
    num_tokens: int, mixture: tuple[int, int], depth: int, width: int, dtype: Any
) -> Problem:
    """Return the problem of a grouped matmul, for tokens with random experts.

    `mixture` is a pair: the number of experts, and the number of experts per token.
    """
    num_experts, num_chosen = mixture
    rng, items, read = np.random.default_rng(0), [], 0
    for i in range(2):
        chosen = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :num_chosen]
        order = np.argsort(chosen.reshape(-1), kind="stable")
        sizes = np.bincount(chosen.reshape(-1), minlength=num_experts).astype(np.int32)
        sources = (order // num_chosen).astype(np.int32)
        items.append((normal(i, (num_tokens, depth), dtype), sizes, sources))
        read = int((sizes > 0).sum())

    def call(weights, item, kernels, config):
        x, sizes, sources = item
        return weights, grouped_matmul(x, weights, sizes, sources, kernels=kernels)

    itemsize = jnp.dtype(dtype).itemsize
    rows = num_tokens * depth + num_tokens * num_chosen * width
    weights = normal(5, (num_experts, depth, width), dtype) / depth**0.5
    return Problem(weights, tuple(items), call, itemsize * (read * depth * width + rows))


def routes(num_rows: int, experts: tuple[int, int, Rule], dtype: Any) -> Problem:
    """Return the problem of `route` for the logits of a router.

    Logits have ties in bfloat16. If there are several rows, the last row is padding.
    """
    num_experts, num_chosen, rule = experts
    correction = normal(9, (num_experts,), "float32") / 8 if rule.is_sigmoid else None
    items = tuple(normal(i, (num_rows, num_experts), dtype) for i in range(8))
    is_padding = (np.arange(num_rows) > 0) & (np.arange(num_rows) == num_rows - 1)

    def call(correction, logits, kernels, config):
        made = route(logits, num_chosen, rule, correction, is_padding, kernels=kernels)
        return correction, made._replace(weights=made.weights[: num_rows - 1 or 1])

    read = num_rows * num_experts * jnp.dtype(dtype).itemsize
    written = 4 * (4 * num_rows * num_chosen + num_experts)
    return Problem(correction, items, call, read + written)


def draws(num_rows: int, vocab_size: int, *, num_columns: int | None = None) -> Problem:
    """Return the problem of drawing tokens, greedily in even rows and at a temperature in odd rows.

    If `num_columns` is given, tokens are drawn from this number of token ids.
    """
    settings = (
        np.resize([0.0, 0.8], num_rows).astype(np.float32),
        np.arange(num_rows, dtype=np.uint32),
        np.arange(num_rows, dtype=np.int32),
    )
    width = num_columns or vocab_size
    items = tuple(3 * normal(i, (num_rows, width), "float32") for i in range(4))
    ids = {}
    if num_columns:
        ids = {"token_ids": jnp.array(draw_ids(vocab_size, num_columns)), "vocab_size": vocab_size}

    def call(settings, logits, kernels, config):
        temperature, seeds, places = settings
        drawn = draw_tokens(logits, temperature, seeds, 0, (places,), kernels=kernels, **ids)
        return settings, drawn

    return Problem(settings, items, call, 4 * num_rows * width)


def draw_ids(vocab_size: int, num_columns: int) -> np.ndarray:
    """Return a token id for each column of logits, in random order."""
    ids = np.random.default_rng(0).permutation(vocab_size)[:num_columns]
    return ids.astype(np.int32)


def truncation(num_rows: int, vocab_size: int) -> Problem:
    """Return the problem of truncating the logits of a confident model.

    Rows have top_k, top_p, both or neither.
    """
    settings = (
        np.full(num_rows, 0.8, np.float32),
        np.resize([50, 0, 20, 0], num_rows).astype(np.int32),
        np.resize([1.0, 0.9, 0.95, 1.0], num_rows).astype(np.float32),
        np.zeros(num_rows, np.float32),
    )
    items = tuple(3 * normal(i, (num_rows, vocab_size), "float32") for i in range(4))

    def call(settings, logits, kernels, config):
        return settings, truncate(logits, *settings, kernels=kernels)

    return Problem(settings, items, call, 2 * 4 * num_rows * vocab_size)
