"""Runs requests with an implementation of the gated delta rule, and with NumPy in float64."""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta_rule import (
    DeltaRuleCache,
    DeltaRuleWeights,
    Heads,
    gated_delta_rule,
)

LAYER, NUM_LAYERS = 1, 3
# Unless told, calls are so wide, with the sizes, slots and rows that are the defaults: each
# implementation is then two programs, of prompts and of steps.
PROMPT_WIDTH, STEP_WIDTH = 64, 6
TOLERANCE = 2e-5
BF16_TOLERANCE = 5 * 2**-9  # four roundings of an output, the first of its norm as well
EPS = 1e-3  # of the norm; large, so that a wrong eps changes results


@dataclass(frozen=True)
class Sizes:
    """The sizes of the gated delta rule and of its cache."""

    heads: Heads = Heads(2, 4, 16, 32)
    taps: int = 4
    most_rows: int = STEP_WIDTH
    dtype: str = "float32"
    is_normed: bool = True

    def cache(self, layers: int, slots: int) -> DeltaRuleCache:
        """Return the shapes and dtypes of a cache."""
        sizes = layers, slots, self.heads, self.taps, self.most_rows
        return DeltaRuleCache.shapes(*sizes, jnp.dtype(self.dtype))


SIZES = Sizes()


@dataclass(frozen=True)
class Streams:
    """The tokens of N requests, n tokens each, that are not rejected; and the expected results."""

    x: np.ndarray  # f32[N, n, C + H_v D_v + 2 H_v], exact in the sizes' dtype
    weights: DeltaRuleWeights  # f32 arrays, likewise
    heads: Heads

    @classmethod
    def random(cls, sizes: Sizes, num_streams: int, length: int, seed: int = 0) -> "Streams":
        """Return random tokens and weights.

        With these weights, some heads forget within a token, and others within hundreds of tokens.
        """
        rng = np.random.default_rng(seed)
        heads = sizes.heads

        def held(z):
            return z.astype(jnp.dtype(sizes.dtype)).astype(np.float32)

        x = rng.normal(size=(num_streams, length, heads.inputs))
        weights = DeltaRuleWeights(
            held(rng.normal(size=(sizes.taps, heads.channels)) / 2),
            np.linspace(-7.0, 1.0, heads.num_values, dtype=np.float32),
            rng.normal(size=heads.num_values).astype(np.float32),
            held(rng.uniform(0.5, 2.0, heads.value_dim)) if sizes.is_normed else None,
        )
        return cls(held(x), weights, heads)

    @functools.cached_property
    def truth(self) -> tuple[np.ndarray, np.ndarray]:
        return rule_by_definition(self)


def rule_by_definition(streams: Streams) -> tuple[np.ndarray, np.ndarray]:
    """Compute outputs [N, n, H_v, D_v] and states [N, n + 1, H_v, D_v, D_k] in float64.

    State i of a request is the state after i tokens.
    """
    x = streams.x.astype(np.float64)
    conv, log_decay, decay_bias, norm = (
        None if z is None else z.astype(np.float64) for z in streams.weights
    )
    num_streams, length, _ = x.shape
    num_keys, num_values, key_dim, value_dim = streams.heads
    channels, inner = streams.heads.channels, num_values * value_dim
    x, z, b, a = np.split(x, np.cumsum([channels, inner, num_values]), axis=2)
    gs, betas = -np.exp(log_decay) * np.log1p(np.exp(a + decay_bias)), 1 / (1 + np.exp(-b))
    out = np.zeros((num_streams, length, num_values, value_dim))
    states = np.zeros((num_streams, length + 1, num_values, value_dim, key_dim))
    for t in range(length):
        y = sum(conv[-1 - i] * x[:, t - i] for i in range(min(len(conv), t + 1)))
        y = y / (1 + np.exp(-y))
        for j in range(num_values):
            key_head = j // (num_values // num_keys)
            q = y[:, key_head * key_dim :][:, :key_dim]
            k = y[:, (num_keys + key_head) * key_dim :][:, :key_dim]
            v = y[:, 2 * num_keys * key_dim + j * value_dim :][:, :value_dim]
            q, k = (z / np.sqrt((z**2).sum(1, keepdims=True) + 1e-6) for z in (q, k))
            g, beta = gs[:, t, j, None, None], betas[:, t, j, None, None]
            decayed = np.exp(g) * states[:, t, j]
            u = beta * (v[..., None] - decayed @ k[..., None])
            states[:, t + 1, j] = decayed + u * k[:, None]
            out[:, t, j] = (states[:, t + 1, j] @ q[..., None])[..., 0] / np.sqrt(key_dim)
    if norm is not None:
        gate = (z / (1 + np.exp(-z))).reshape(out.shape)
        out = norm * out / np.sqrt((out**2).mean(-1, keepdims=True) + EPS) * gate
    return out, states


def error(actual: Any, expected: np.ndarray) -> float:
    """Return the largest difference, relative to the largest expected value.

    It is infinite if an element of `actual` is not finite.
    """
    actual = np.asarray(actual, np.float64)
    if not np.isfinite(actual).all():
        return np.inf
    return np.abs(actual - expected).max() / np.abs(expected).max()


@functools.partial(jax.jit, static_argnames=("folds", "kernels"), donate_argnames="cache")
def rule(x, weights, cache, layer, slots, positions, pending, *, folds, kernels):
    return gated_delta_rule(
        x, weights, cache, layer, slots, positions, pending, folds=folds, eps=EPS, kernels=kernels
    )


class Serving:
    """A batch of requests with one cache. Row r has slot slots[r], and the tokens of one stream.

    Everything that the rule must not read is NaN: other slots and layers, slots of new requests,
    and padding rows. In each call, the requests and the padding requests are in random order.
    """

    def __init__(
        self,
        kernels: str,
        streams: Streams,
        sizes: Sizes = SIZES,
        *,
        slots: Sequence[int] | None = None,
        num_slots: int = 5,
        batch: int = 4,
        fill: float = np.nan,
    ):
        self.kernels, self.streams, self.sizes = kernels, streams, sizes
        self.slots = np.arange(len(streams.x)) if slots is None else np.array(slots)
        self.num_slots, self.padding = num_slots, batch - len(self.slots)
        self.stream = np.arange(len(self.slots))
        self.pending, self.length = np.zeros_like(self.stream), np.zeros_like(self.stream)
        self.rng = np.random.default_rng(0)
        heads, dtype = sizes.heads, jnp.dtype(sizes.dtype)
        shapes = sizes.cache(NUM_LAYERS, num_slots)
        filled = (np.full(shape.shape, fill, shape.dtype) for shape in shapes)
        self.cache = on_device(DeltaRuleCache(*filled))
        conv, log_decay, decay_bias, norm = streams.weights
        norm = None if norm is None else norm.astype(dtype)
        self.weights = DeltaRuleWeights(conv.astype(dtype), log_decay, decay_bias, norm)
        self.out = np.full((*streams.x.shape[:2], heads.num_values, heads.value_dim), np.nan)

    def begin(self, rows: np.ndarray, streams: Sequence[int] | np.ndarray) -> None:
        """Replace the requests in some rows by new requests of these streams, in the same slots."""
        self.stream[rows], self.pending[rows], self.length[rows] = streams, 0, 0

    def fork(self) -> "Serving":
        """Return a copy of the requests and the cache, which can continue differently."""
        other = copy.copy(self)
        for name in "stream", "pending", "length", "rng", "out":
            setattr(other, name, copy.deepcopy(getattr(self, name)))
        other.cache = on_device(self.cache)
        return other

    def prompt(self, *counts: int, width: int = PROMPT_WIDTH, idle_slots: Any = None) -> None:
        """Run the next counts[r] tokens of the request in each row r as a chunk of a prompt."""
        self.step(counts, counts, width, folds=True, idle_slots=idle_slots)

    def step(
        self,
        counts: Any,
        stands: Any,
        width: int = STEP_WIDTH,
        *,
        folds: bool = False,
        pending: Any = None,
        idle_slots: Any = None,
    ) -> None:
        """Run counts[r] tokens in each row r. The first stands[r] tokens are accepted.

        The rejected tokens have meaningless inputs.
        """
        counts, stands, row = np.array(counts), np.array(stands), np.arange(width)
        at = self.length[:, None] + row
        is_real, is_right = row < counts[:, None], row < stands[:, None]
        taken = self.stream[:, None], np.minimum(at, self.streams.x.shape[1] - 1)
        kinds = self.rng.choice([np.nan, np.inf, -np.inf, 1e30, 3.0], is_right.shape)
        garbage = np.where(is_real, kinds, np.nan)
        x = np.where(is_right[..., None], self.streams.x[taken], garbage[..., None])
        positions = np.where(is_real, at, -1)
        slots = self.slots if idle_slots is None else np.where(counts > 0, self.slots, idle_slots)
        pending = self.pending if pending is None else np.array(pending)

        order = self.rng.permutation(len(counts) + self.padding)

        def laid_out(z, fill, dtype):
            rest = np.full((self.padding, *z.shape[1:]), fill, z.dtype)
            return np.concatenate([z, rest])[order].astype(dtype)

        out, self.cache = rule(
            laid_out(x, np.nan, jnp.dtype(self.sizes.dtype)),
            self.weights,
            self.cache,
            np.int32(LAYER),
            laid_out(slots, self.num_slots, np.int32),
            laid_out(positions, -1, np.int32),
            laid_out(pending, self.sizes.most_rows, np.int32),
            folds=folds,
            kernels=self.kernels,
        )
        assert out.dtype == self.sizes.dtype
        out = np.asarray(out, np.float32)[np.argsort(order)][: len(counts)]
        self.out[np.broadcast_to(taken[0], at.shape)[is_right], at[is_right]] = out[is_right]
        self.pending = np.where(counts > 0, 0 if folds else stands, self.pending)
        self.length = self.length + stands

    @property
    def states(self) -> np.ndarray:
        """The requests' states f32[rows, H_v, D_v, D_k], which do not include pending tokens."""
        return np.asarray(self.cache.state)[LAYER, self.slots]

    def of_requests(self) -> list[np.ndarray]:
        """Return the requests' parts of the cache's arrays, in float32."""
        return [np.asarray(x)[LAYER, self.slots].astype(np.float32) for x in self.cache]

    def check(self) -> None:
        """Compare outputs and states with the results in float64."""
        rounding = BF16_TOLERANCE if self.sizes.dtype == "bfloat16" else TOLERANCE
        for r, (i, n) in enumerate(zip(self.stream, self.length, strict=True)):
            out, states = (z[i] for z in self.streams.truth)
            assert not n or error(self.out[i, :n], out[:n]) < rounding
            if (num_folded := n - self.pending[r]) > 0:
                assert error(self.states[r], states[num_folded]) < TOLERANCE


def on_device(cache: DeltaRuleCache) -> DeltaRuleCache:
    """Copy a cache to the device, without compiling a program."""
    return DeltaRuleCache(*(jnp.array(np.asarray(x)) for x in cache))
