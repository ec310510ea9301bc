"""Operations on logits [..., V], whose columns are tokens, on one device or split over several.

All code that reads logits calls a `Vocabulary` for reductions over all tokens, and for the columns
of given tokens. If the logits are split, the devices exchange results per row instead of logits.
The logits processors of users are an exception: for them, the devices exchange the logits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.draw_tokens import (
    argmax,
    draw_scored,
    draw_tokens,
    gumbel_noise,
    scored_argmax,
)
from pallas_kernels.truncation import truncate
from specjax.device.requests import Sampling

ALIGNMENT = 64  # tokens that share words of a mask and calls of the noise generator


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary with the logits of all tokens on one device. It is hashable."""

    @property
    def mesh_axis(self) -> str | None:
        """The mesh axis over which the columns are split; None on one device."""
        return None

    def num_columns(self, total: int) -> int:
        """Return the number of columns that each device has if there are `total` tokens."""
        return total

    def without_padding(self, logits: jax.Array) -> jax.Array:
        """Return logits [..., V] with -inf in the columns past the last token."""
        return logits

    def whole(self, logits: jax.Array) -> jax.Array:
        """Return the logits of all tokens on every device."""
        return logits

    def part(self, logits: jax.Array) -> jax.Array:
        """Return this device's columns [..., V] of `logits`, which have columns for all tokens."""
        return logits

    def columns(
        self, ids: jax.Array, num_columns: int, is_used: jax.Array | None = None
    ) -> jax.Array:
        """Return the column numbers i32[...] of tokens i32[...] in this device's logits.

        The number is `num_columns`, which is out of range, for a token that is on another device,
        or for which `is_used` is false.
        """
        return ids if is_used is None else jnp.where(is_used, ids, num_columns)

    def at(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        """Return the values [..., n] of x [..., V] at tokens i32[..., n]."""
        return jnp.take_along_axis(x, ids, axis=-1)

    def sum(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        """Return the sum [...] of x [..., V] over all tokens."""
        return jnp.sum(x, axis=-1, dtype=dtype)

    def all(self, x: jax.Array) -> jax.Array:
        """Return whether x bool[..., V] is true for all tokens."""
        return jnp.all(x, axis=-1)

    def softmax(self, x: jax.Array) -> jax.Array:
        """Return the softmax of x [..., V] over all tokens."""
        return jax.nn.softmax(x, axis=-1)

    def log_softmax(self, x: jax.Array) -> jax.Array:
        """Return the log-softmax of x [..., V] over all tokens."""
        return jax.nn.log_softmax(x, axis=-1)

    def logsumexp(self, x: jax.Array) -> jax.Array:
        """Return the logarithm [...] of the sum of exp(x), for x [..., V]."""
        return jax.nn.logsumexp(x, axis=-1)

    def argmax(self, x: jax.Array) -> jax.Array:
        """Return the lowest token id i32[...] at which x [..., V] has its maximum.

        If no token is possible (see `draw_tokens.argmax`), return -1.
        """
        return argmax(x)

    def top_k(self, x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """Return the `count` largest values of x [..., V] and their tokens i32.

        Equal values are in the order of their tokens.
        """
        values, ids = jax.lax.top_k(x, count)
        return values, ids.astype(jnp.int32)

    def one_hot(self, ids: jax.Array, num_columns: int) -> jax.Array:
        """Return one-hot vectors f32[..., V] with 1 at tokens i32[...]."""
        return jax.nn.one_hot(ids, num_columns)

    def bits(self, words: jax.Array, num_columns: int) -> jax.Array:
        """Return a bit for each token, bool[..., V], from `words` i32[..., ceil(V/32)].

        Token v has bit v % 32 of word v // 32.
        """
        bits = (words[..., None] >> jax.lax.broadcast_to_rank(jnp.arange(32), words.ndim + 1)) & 1
        return bits.reshape(*words.shape[:-1], -1)[..., :num_columns] == 1

    def spread(self, logits: jax.Array, ids: jax.Array, vocab_size: int) -> jax.Array:
        """Return logits f32[N, V] of all tokens, given logits f32[N, V_d] of some tokens.

        `ids` i32[V_d] are these tokens. Other tokens get -inf.
        """
        full = jnp.full((logits.shape[0], vocab_size), -jnp.inf, logits.dtype)
        return full.at[:, ids].set(logits)

    def noise(
        self, seeds: jax.Array, stream: int, counters: tuple[jax.Array, ...], num_columns: int
    ) -> jax.Array:
        """Return Gumbel noise f32[N, V]; see `draw_tokens.gumbel_noise`."""
        return gumbel_noise(seeds, stream, counters, num_columns)

    def draw(
        self,
        logits: jax.Array,
        sampling: Sampling,
        stream: int,
        counters: tuple[jax.Array, ...],
        kernels: str,
    ) -> jax.Array:
        """Return a sampled token i32[N] for each row of logits f32[N, V]; see `draw_tokens`."""
        return draw_tokens(
            logits, sampling.temperature, sampling.seeds, stream, counters, kernels=kernels
        )

    def truncate(
        self,
        logits: jax.Array,
        temperature: jax.Array,
        top_k: jax.Array,
        top_p: jax.Array,
        min_p: jax.Array,
        kernels: str,
    ) -> jax.Array:
        """Return logits with -inf for tokens that top-k, top-p or min-p exclude; see `truncate`."""
        settings = temperature, top_k, top_p, min_p
        return truncate(logits, *settings, axis=self.mesh_axis, kernels=kernels)

    def through_whole(self, use: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
        """Apply `use` to the logits of all tokens; return this device's columns of the result."""
        return self.part(use(self.whole(logits)))


WHOLE = Vocabulary()


@dataclass(frozen=True)
class SplitVocabulary(Vocabulary):
    """A vocabulary split over devices, which hold the logits of `size` consecutive tokens each.

    The devices lie along the mesh axis `axis`. Call the methods inside `shard_map`, with the same
    tokens, seeds and settings on all devices. Columns past the last token must hold -inf, so that
    they are never drawn.
    """

    total: int  # number of tokens
    num_devices: int
    axis: str

    @property
    def mesh_axis(self) -> str:
        """See `Vocabulary`."""
        return self.axis

    @property
    def size(self) -> int:
        """The number of columns on each device, a multiple of 64."""
        return ALIGNMENT * -(-self.total // (ALIGNMENT * self.num_devices))

    @property
    def first(self) -> jax.Array:
        """The token of this device's first column, i32[]."""
        return jax.lax.axis_index(self.axis) * self.size

    def num_columns(self, total: int) -> int:
        """Return the number of logits on each device."""
        return self.size

    def whole(self, logits: jax.Array) -> jax.Array:
        """See `Vocabulary`."""
        gathered = jax.lax.all_gather(logits, self.axis, axis=logits.ndim - 1, tiled=True)
        return gathered[..., : self.total]

    def part(self, logits: jax.Array) -> jax.Array:
        """See `Vocabulary`."""
        return self._part(logits, self.size, -jnp.inf)

    def without_padding(self, logits: jax.Array) -> jax.Array:
        """See `Vocabulary`."""
        if self.num_devices * self.size == self.total:
            return logits
        is_token = self.first + jnp.arange(self.size) < self.total
        return jnp.where(jax.lax.broadcast_to_rank(is_token, logits.ndim), logits, -jnp.inf)

    def columns(
        self, ids: jax.Array, num_columns: int, is_used: jax.Array | None = None
    ) -> jax.Array:
        """See `Vocabulary`."""
        is_here = self._is_here(ids) if is_used is None else self._is_here(ids) & is_used
        return jnp.where(is_here, ids - self.first, num_columns)

    def at(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        """See `Vocabulary`."""
        found = jnp.take_along_axis(x, ids - self.first, axis=-1, mode="clip")
        return jax.lax.psum(jnp.where(self._is_here(ids), found, 0), self.axis)

    def sum(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        """See `Vocabulary`."""
        return jax.lax.psum(jnp.sum(x, axis=-1, dtype=dtype), self.axis)

    def all(self, x: jax.Array) -> jax.Array:
        """See `Vocabulary`."""
        return self.sum(~x, jnp.int32) == 0

    def softmax(self, x: jax.Array) -> jax.Array:
        """See `Vocabulary`."""
        largest, total = self._exponential_sum(x)
        return jnp.exp(x - largest[..., None]) / total[..., None]

    def log_softmax(self, x: jax.Array) -> jax.Array:
        """See `Vocabulary`."""
        largest, total = self._exponential_sum(x)
        return x - largest[..., None] - jnp.log(total)[..., None]

    def logsumexp(self, x: jax.Array) -> jax.Array:
        """See `Vocabulary`."""
        largest, total = self._exponential_sum(x)
        return largest + jnp.log(total)

    def argmax(self, x: jax.Array) -> jax.Array:
        """See `Vocabulary`."""
        token, score = scored_argmax(x)
        return self._best(token + self.first, score)

    def top_k(self, x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """See `Vocabulary`."""
        values, ids = jax.lax.top_k(x, min(count, self.size))
        values, ids = self._gather(values, ids.astype(jnp.int32) + self.first)
        # In the order of the devices, so that of equal values the first token comes first.
        values, ids = (jnp.moveaxis(y, 0, -2).reshape(*x.shape[:-1], -1) for y in (values, ids))
        values, places = jax.lax.top_k(values, count)
        return values, jnp.take_along_axis(ids, places, axis=-1)

    def one_hot(self, ids: jax.Array, num_columns: int) -> jax.Array:
        """See `Vocabulary`."""
        return jax.nn.one_hot(ids - self.first, num_columns)

    def bits(self, words: jax.Array, num_columns: int) -> jax.Array:
        """See `Vocabulary`."""
        return super().bits(self._part(words, self.size // 32, 0), num_columns)

    def spread(self, logits: jax.Array, ids: jax.Array, vocab_size: int) -> jax.Array:
        """See `Vocabulary`."""
        full = jnp.full((logits.shape[0], self.size), -jnp.inf, logits.dtype)
        columns = self.columns(ids, self.size)
        return full.at[:, columns].set(logits, mode="drop")

    def noise(
        self, seeds: jax.Array, stream: int, counters: tuple[jax.Array, ...], num_columns: int
    ) -> jax.Array:
        """See `Vocabulary`."""
        return gumbel_noise(seeds, stream, counters, num_columns, self.first)

    def draw(
        self,
        logits: jax.Array,
        sampling: Sampling,
        stream: int,
        counters: tuple[jax.Array, ...],
        kernels: str,
    ) -> jax.Array:
        """See `Vocabulary`."""
        token, score = draw_scored(
            logits,
            sampling.temperature,
            sampling.seeds,
            stream,
            counters,
            first=self.first,
            kernels=kernels,
        )
        return self._best(token, score)

    def _is_here(self, ids: jax.Array) -> jax.Array:
        return (ids >= self.first) & (ids < self.first + self.size)

    def _part(self, x: jax.Array, size: int, padding: float) -> jax.Array:
        """Return this device's `size` columns of x, which has the columns of all devices."""
        missing = self.num_devices * size - x.shape[-1]
        whole = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=padding)
        return jax.lax.dynamic_slice_in_dim(
            whole, jax.lax.axis_index(self.axis) * size, size, axis=-1
        )

    def _exponential_sum(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the maximum m [...] of x [..., V], and the sum [...] of exp(x - m)."""
        # Finite, since some devices may have no token that is allowed.
        largest = jnp.maximum(jnp.max(x, axis=-1), jnp.finfo(x.dtype).min)
        total = jnp.sum(jnp.exp(x - largest[..., None]), axis=-1)
        all_largest, totals = jax.lax.all_gather(jnp.stack([largest, total]), self.axis, axis=1)
        largest = jnp.max(all_largest, axis=0)
        return largest, jnp.sum(totals * jnp.exp(all_largest - largest[None]), axis=0)

    def _best(self, token: jax.Array, score: jax.Array) -> jax.Array:
        """Return the token i32[...] with the highest score over all devices.

        `token` is this device's best token, and `score` f32[...] is its score. The result is -1 if
        the highest score is -inf or NaN.
        """
        scores, tokens = self._gather(score, token)
        best = jnp.argmax(scores, axis=0)[None]  # the first NaN, if there is one
        token, score = (jnp.take_along_axis(x, best, axis=0)[0] for x in (tokens, scores))
        return jnp.where(score > -jnp.inf, token, -1)

    def _gather(self, scores: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the scores f32 and tokens i32 of all devices, both [devices, ...].

        Both arrays are sent in one exchange.
        """
        pair = jnp.stack([jax.lax.bitcast_convert_type(scores, jnp.int32), tokens])
        scores, tokens = jax.lax.all_gather(pair, self.axis, axis=1)
        return jax.lax.bitcast_convert_type(scores, jnp.float32), tokens
