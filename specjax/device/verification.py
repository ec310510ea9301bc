"""Decides which drafts are accepted, and which token follows them, by one of four methods.

Row t of request b's logits predicts the token at position `Target.lengths[b]` + t, given the
committed tokens and the first t drafts. A verdict has the accepted drafts and one more token. That
token replaces the first rejected draft, or follows the last draft.

    seed_exact  the target's tokens are sampled, and drafts that equal them are accepted. The output
                does not depend on the drafts (Daliri, Musco and Suresh 2024)
    rejection   a draft is accepted with probability min(1, p/q) (Leviathan et al. 2023, Chen et al.
                2023)
    block       the longest prefix that passes a joint test is accepted (Sun et al. 2024)
    synthetic   drafts are accepted at given rates, whether right or wrong. This is only for
                measuring speed

The first three methods emit tokens with the target's distribution. At temperature 0 all three emit
the same tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int32

from specjax.config import SpeculativeConfig
from specjax.device.noise import Stream, uniform_noise
from specjax.device.requests import Sampling
from specjax.device.sampling import choose, scale, through_edits
from specjax.device.vocabulary import WHOLE, Vocabulary


class Draft(NamedTuple):
    """Tokens proposed for the K positions after the last committed token."""

    tokens: Int32[jax.Array, "B K"]
    # The distributions from which the tokens were drawn; None if they are one-hot or not used.
    probs: Float32[jax.Array, "B K V"] | None
    counts: Int32[jax.Array, "B"] | None = None  # number of tokens proposed; None if always K

    @classmethod
    def stacked(
        cls, tokens: Sequence[jax.Array], probs: Sequence[jax.Array], batch: int
    ) -> "Draft":
        """Return a draft of K positions. `tokens` holds an i32[B] for each position.

        `probs` holds, for each position, the distributions f32[B, V] from which the tokens were
        sampled. `probs` is empty if the draft has no distributions. `batch` is B.
        """
        return cls(
            jnp.stack(tokens, axis=1) if tokens else jnp.zeros((batch, 0), jnp.int32),
            jnp.stack(probs, axis=1) if probs else None,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Target:
    """The target's logits for K + 1 positions, and how tokens are sampled from them."""

    logits: Float32[jax.Array, "B R V"]  # not yet edited by `edit`
    sampling: Sampling  # [B]
    lengths: Int32[jax.Array, "B"]  # number of committed tokens; row 0 predicts this position
    num_drafts: Int32[jax.Array, "B"]  # how many of the K drafts may be accepted
    has_edits: Bool[jax.Array, ""] | None = None  # see `sampling.through_edits`
    edit: Callable[[jax.Array], jax.Array] | None = field(default=None, metadata={"static": True})
    vocabulary: Vocabulary = field(default=WHOLE, metadata={"static": True})
    kernels: str = field(default="auto", metadata={"static": True})

    def choose(self, logits: jax.Array, positions: jax.Array) -> jax.Array:
        """Return a sampled token i32[N] for each row of logits f32[N, V]; see `sampling.choose`."""
        return choose(
            logits, self.sampling, positions, vocabulary=self.vocabulary, kernels=self.kernels
        )

    def through_edits(self, use: Callable[["Target"], Any]) -> Any:
        """Return `use(target)` for this target with edited logits; see `sampling.through_edits`."""
        done = replace(self, edit=None, has_edits=None)
        return through_edits(
            lambda logits: use(replace(done, logits=logits)),
            self.logits,
            self.edit,
            self.has_edits,
        )

    def at(self, row: jax.Array) -> jax.Array:
        """Return the logits [B, V] of one row per request, selected by `row` i32[B]."""
        return jnp.take_along_axis(self.logits, row[:, None, None], axis=1)[:, 0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verdict:
    """The result of a verification. The first `num_accepted` + 1 of `tokens` are emitted."""

    tokens: Int32[jax.Array, "B R"]  # -1 where the target's logits leave no token
    num_accepted: Int32[jax.Array, "B"]  # 0..K


class Verification(Protocol):
    """A verification method. It is hashable, because programs are compiled for it."""

    @property
    def shares_noise(self) -> bool:
        """Whether drafts are sampled with the target's noise rather than separate noise."""
        ...

    def verify(self, draft: Draft, target: Target) -> Verdict:
        """Return the verdict: the accepted drafts of each request, and the token after them."""
        ...


@dataclass(frozen=True)
class SeedExact:
    """Accept the leading drafts that equal the target's own samples."""

    shares_noise: bool = True

    def verify(self, draft: Draft, target: Target) -> Verdict:
        """See `Verification.verify`."""
        batch, num_rows, num_columns = target.logits.shape

        def draw(target):
            return target.choose(target.logits.reshape(-1, num_columns), target.lengths)

        tokens = target.through_edits(draw).reshape(batch, num_rows)
        return Verdict(tokens, _leading(draft.tokens == tokens[:, :-1], target.num_drafts))


@dataclass(frozen=True)
class Rejection:
    """Accept draft d with probability min(1, p(d)/q(d)).

    p is the target's distribution, and q the drafter's. If a draft is rejected, the token that
    replaces it is sampled from max(p - q, 0).
    """

    shares_noise: bool = False

    def verify(self, draft: Draft, target: Target) -> Verdict:
        """See `Verification.verify`."""

        def drawn(draft, target):
            p = target_probs(target)
            chances = acceptance(p[:, :-1], draft, target.vocabulary)
            accepted = _coins(target, chances.shape[1]) < chances
            num_accepted = _leading(accepted, target.num_drafts)
            is_end = num_accepted == target.num_drafts
            q = _draft_probs_at(draft, num_accepted, p.shape[-1], target.vocabulary)
            q = jnp.where(is_end[:, None], 0.0, q)
            return num_accepted, _row(p, num_accepted) - q

        return _verify_drawn(draft, target, drawn)


@dataclass(frozen=True)
class Block:
    """Accept the longest prefix of drafts that passes a test on its joint probability."""

    shares_noise: bool = False

    def verify(self, draft: Draft, target: Target) -> Verdict:
        """See `Verification.verify`."""

        def drawn(draft, target):
            p = target_probs(target)
            joint, chances = block_acceptance(p, draft, target.num_drafts, target.vocabulary)
            # Each prefix has its own coin; the longest prefix whose coin wins is accepted.
            k = chances.shape[1]
            number = jnp.arange(k)[None]
            wins = (_coins(target, k) < chances) & (number < target.num_drafts[:, None])
            num_accepted = jnp.max(jnp.where(wins, number + 1, 0), axis=1, initial=0)
            is_end = num_accepted == target.num_drafts
            q = _draft_probs_at(draft, num_accepted, p.shape[-1], target.vocabulary)
            q = jnp.where(is_end[:, None], 0.0, q)
            left = jnp.take_along_axis(joint, num_accepted[:, None], axis=1)
            return num_accepted, jnp.where(is_end[:, None], 1.0, left) * _row(p, num_accepted) - q

        return _verify_drawn(draft, target, drawn)


@dataclass(frozen=True)
class Synthetic:
    """Accept draft i with probability rates[i] / rates[i-1] if all drafts before it are accepted.

    The first draft is accepted with probability rates[0]. So rates[i] is the unconditional
    probability that draft i is accepted. The rates must not increase. Drafts that the target cannot
    produce, for example because a grammar forbids them, are never accepted.
    """

    rates: tuple[float, ...]
    shares_noise: bool = True

    def verify(self, draft: Draft, target: Target) -> Verdict:
        """See `Verification.verify`."""
        return target.through_edits(partial(self._verify, draft))

    def _verify(self, draft: Draft, target: Target) -> Verdict:
        k = draft.tokens.shape[1]
        rates = jnp.array([1.0, *self.rates, *[0.0] * k][: k + 1])
        chances = rates[1:] / jnp.maximum(rates[:-1], jnp.finfo(jnp.float32).tiny)
        at_draft = target.vocabulary.at(target.logits[:, :-1], draft.tokens[..., None])
        accepted = (_coins(target, k) < chances[None]) & (at_draft[..., 0] > -jnp.inf)
        num_accepted = _leading(accepted, target.num_drafts)
        token = target.choose(target.at(num_accepted), target.lengths + num_accepted)
        return _verdict(draft, num_accepted, token)


def make_verification(config: SpeculativeConfig) -> Verification:
    """Return the verification method that a config names."""
    if config.verification == "synthetic":
        return Synthetic(config.synthetic_rates)
    return {"seed_exact": SeedExact, "rejection": Rejection, "block": Block}[config.verification]()


def target_probs(target: Target) -> jax.Array:
    """Return the target's probabilities f32[B, K+1, V], softmax(logits / T).

    If T = 0, they are one-hot at the argmax. Rows in which no token is possible are NaN.
    """
    num_rows, num_columns = target.logits.shape[1:]
    rows = target.logits.reshape(-1, num_columns)
    sampling, vocabulary = target.sampling.repeat(num_rows), target.vocabulary
    probs = vocabulary.softmax(scale(rows, sampling))
    token = vocabulary.argmax(rows)
    best = jnp.where((token < 0)[:, None], jnp.nan, vocabulary.one_hot(token, num_columns))
    greedy = (sampling.temperature == 0)[:, None]
    return jnp.where(greedy, best, probs).reshape(target.logits.shape)


def acceptance(probs: jax.Array, draft: Draft, vocabulary: Vocabulary = WHOLE) -> jax.Array:
    """Return each draft token's probability f32[B, K] of being accepted, min(1, p/q).

    `probs` f32[B, K, V] are the target's probabilities p.
    """
    return jnp.minimum(_ratios(probs, draft, vocabulary), 1.0)


def block_acceptance(
    probs: jax.Array, draft: Draft, num_drafts: jax.Array, vocabulary: Vocabulary = WHOLE
) -> tuple[jax.Array, jax.Array]:
    """Return p_i f32[B, K+1] for i = 0..K, and h_i f32[B, K] for i = 1..K.

    h_i is the probability that the test of the first i drafts succeeds (algorithm 2 in Sun et al.
    2024):

        p_0 = 1
        p_i = min(p_{i-1} p(d_i) / q(d_i), 1)
        S_i = sum_v max(p_i p(v) - q(v), 0)
        h_i = S_i / (S_i + 1 - p_i)

    d_i is the i-th draft. p is the target's distribution, and q is the drafter's. In the formula of
    p_i, p and q are distributions at the position of d_i; in the formula of S_i, at the next
    position.

    If no draft can follow draft i, h_i = p_i. This applies after a request's last draft, and if p
    is NaN after draft i, because no token is possible there.
    """
    k, num_columns = draft.tokens.shape[1], probs.shape[-1]
    joint = [jnp.ones(probs.shape[0])]
    ratios = _ratios(probs[:, :-1], draft, vocabulary)
    for i in range(k):
        joint.append(jnp.minimum(joint[-1] * ratios[:, i], 1.0))
    chances = []
    for i in range(1, k):
        q = draft_probs(draft, num_columns, vocabulary)[:, i]
        left = vocabulary.sum(jnp.maximum(joint[i][:, None] * probs[:, i] - q, 0.0))
        room = left + 1 - joint[i]
        inner = jnp.where(room > 0, left / jnp.where(room > 0, room, 1.0), 1.0)
        chances.append(jnp.where((i == num_drafts) | jnp.isnan(left), joint[i], inner))
    chances += joint[-1:] if k else []
    shape = (probs.shape[0], k)
    return jnp.stack(joint, axis=1), jnp.stack(chances, axis=1) if k else jnp.zeros(shape)


def draft_probs(draft: Draft, num_columns: int, vocabulary: Vocabulary = WHOLE) -> jax.Array:
    """Return the distributions f32[B, K, V] from which the drafts were sampled."""
    if draft.probs is None:
        return vocabulary.one_hot(draft.tokens, num_columns)
    return draft.probs


def _ratios(probs: jax.Array, draft: Draft, vocabulary: Vocabulary) -> jax.Array:
    at = draft.tokens[..., None]
    p = vocabulary.at(probs, at)[..., 0]
    if draft.probs is None:
        return p
    q = vocabulary.at(draft.probs, at)[..., 0]
    return jnp.where(q > 0, p / jnp.where(q > 0, q, 1.0), 0.0)


def _draft_probs_at(
    draft: Draft, row: jax.Array, num_columns: int, vocabulary: Vocabulary
) -> jax.Array:
    """Return the distribution f32[B, V] of one draft per request, selected by `row` i32[B].

    The result is undefined for a row past the last draft.
    """
    if draft.tokens.shape[1] == 0:
        return jnp.zeros((row.shape[0], num_columns))
    row = jnp.minimum(row, draft.tokens.shape[1] - 1)
    if draft.probs is None:
        token = jnp.take_along_axis(draft.tokens, row[:, None], axis=1)[:, 0]
        return vocabulary.one_hot(token, num_columns)
    return _row(draft.probs, row)


def _verify_drawn(
    draft: Draft,
    target: Target,
    drawn: Callable[[Draft, Target], tuple[jax.Array, jax.Array]],
) -> Verdict:
    """Return the verdict of a method that accepts drafts at random.

    `drawn` returns the number of accepted drafts i32[B], and the weights f32[B, V] from which the
    token after these drafts is sampled. Negative weights count as 0. In a greedy batch, drafts are
    compared with the argmax, which is equivalent and needs no sampling.
    """

    def verify(draft, target):
        num_accepted, weights = drawn(draft, target)
        vocabulary = target.vocabulary
        # Rounding may leave no positive weight: then p and q are equal, and p can be used.
        is_empty = vocabulary.all(weights <= 0)[:, None]
        spare = _row(target_probs(target), num_accepted)
        weights = jnp.where(is_empty, spare, jnp.maximum(weights, 0.0))
        positions = target.lengths + num_accepted
        seeds, num_columns = target.sampling.seeds, weights.shape[1]
        noise = vocabulary.noise(seeds, Stream.TARGET, (positions,), num_columns)
        token = vocabulary.argmax(jnp.log(weights) + noise)
        return _verdict(draft, num_accepted, token)

    def verify_greedy(draft, target):
        tokens = target.vocabulary.argmax(target.logits)
        return Verdict(tokens, _leading(draft.tokens == tokens[:, :-1], target.num_drafts))

    is_drawn = (target.sampling.temperature > 0).any()
    return target.through_edits(
        lambda target: jax.lax.cond(is_drawn, verify, verify_greedy, draft, target)
    )


def _coins(target: Target, count: int) -> jax.Array:
    """Return uniform draws f32[B, count], which differ in every step.

    The draws are a function of the request's seed and of the position where the step starts. If
    each draw were a function of its draft's position, outputs of the method `Block` would be wrong:
    the next step could use a draw that has already affected the outcome of this step.
    """
    return uniform_noise(target.sampling.seeds, Stream.ACCEPT, (target.lengths,), count)


def _leading(accepted: jax.Array, num_drafts: jax.Array) -> jax.Array:
    """Return the number i32[B] of drafts before the first rejected draft, at most `num_drafts`."""
    # Column by column, since XLA launches a kernel for every reduction, however small.
    count, is_leading = jnp.zeros_like(num_drafts), num_drafts > 0
    for column in range(accepted.shape[1]):
        is_leading &= accepted[:, column] & (column < num_drafts)
        count += is_leading.astype(count.dtype)
    return count


def _verdict(draft: Draft, num_accepted: jax.Array, token: jax.Array) -> Verdict:
    padded = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    is_last = jnp.arange(padded.shape[1])[None] == num_accepted[:, None]
    return Verdict(jnp.where(is_last, token[:, None], padded), num_accepted)


def _row(x: jax.Array, row: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, row[:, None, None], axis=1)[:, 0]
