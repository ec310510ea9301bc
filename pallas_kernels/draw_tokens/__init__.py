"""Samples one token per row of logits.

    token = argmax_v (logits_v / temperature + g_v)
    g_v = -log(-log u_v), where u_v is uniform in (0, 1)

This samples from softmax(logits / temperature) (the Gumbel-max trick). At temperature 0 the token
is the plain argmax. Ties go to the first token. A row without a possible token gives -1.

The noise g_v is counter-based: it is a function of the request's seed, the stream, the counters
(for example the token's position) and v. It does not depend on the row, the batch, or the number of
other tokens drawn.

In plain JAX, XLA launches many small kernels to compute the noise. The Triton version reads the
logits once, and launches two kernels.
"""

import jax

from pallas_kernels.dispatch import run
from pallas_kernels.draw_tokens.reference import MIN_TEMPERATURE as MIN_TEMPERATURE
from pallas_kernels.draw_tokens.reference import argmax as argmax
from pallas_kernels.draw_tokens.reference import draw_tokens_reference
from pallas_kernels.draw_tokens.reference import gumbel_noise as gumbel_noise
from pallas_kernels.draw_tokens.reference import keys as keys
from pallas_kernels.draw_tokens.reference import scored_argmax as scored_argmax
from pallas_kernels.draw_tokens.triton import draw_tokens_triton

IMPLEMENTATIONS = {"triton": draw_tokens_triton, "reference": draw_tokens_reference}


def draw_tokens(
    logits: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    stream: int,
    counters: tuple[jax.Array, ...],
    *,
    token_ids: jax.Array | None = None,
    vocab_size: int | None = None,
    kernels: str = "auto",
) -> jax.Array:
    """Return one token i32[N] per row. Each of B requests has T consecutive rows, so N = B T.

    Args:
        logits: f32[N, V]; -inf is never drawn. A row with only -inf, or with a NaN, has no possible
            token: its result is -1.
        temperature: f32[B]; 0 for the argmax. Other values are raised to at least MIN_TEMPERATURE.
        seeds: u32[B], a seed per request.
        stream: selects one of the independent sources of noise under a seed.
        counters: arrays i32[B] with numbers per request that also key the noise, for example the
            position of the first row. Row t of a request uses the first array's number plus t, and
            the other arrays' numbers unchanged.
        token_ids: i32[V], the columns' token ids, which are distinct. The noise is keyed by these
            ids, and the returned tokens are such ids. None if the ids are the column numbers.
        vocab_size: size of the full vocabulary; needed with `token_ids`.
        kernels: implementation to use, see `dispatch`.

    Raises:
        ValueError: shapes are inconsistent; the message names the argument.
    """
    _check(logits, temperature, seeds, counters)
    if token_ids is not None and (token_ids.shape != logits.shape[1:] or vocab_size is None):
        raise ValueError(
            f"token_ids must be [V={logits.shape[1]}], and need vocab_size; "
            f"got {token_ids.shape} and vocab_size={vocab_size}"
        )
    keyed = temperature, seeds, int(stream), counters
    return run("draw_tokens", kernels, IMPLEMENTATIONS, logits, *keyed, token_ids, vocab_size)


def draw_scored(
    logits: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    stream: int,
    counters: tuple[jax.Array, ...],
    *,
    first: jax.Array,
    kernels: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Return one token i32[N] per row, and its score f32[N], for one part of a larger vocabulary.

    The part has V tokens, starting with token `first` (i32[], a multiple of 64). The returned
    tokens are ids in the larger vocabulary. A token's score is logit / temperature + noise, or the
    logit at temperature 0. If every part of a vocabulary is sampled like this, the token with the
    highest score is the token that `draw_tokens` samples from the whole vocabulary.

    If no token is possible in a row, its token is -1, and its score is NaN if a logit is NaN, else
    -inf. Other arguments and errors are as in `draw_tokens`.
    """
    _check(logits, temperature, seeds, counters)
    keyed = temperature, seeds, int(stream), counters
    return run("draw_tokens", kernels, IMPLEMENTATIONS, logits, *keyed, None, None, first)


def _check(
    logits: jax.Array, temperature: jax.Array, seeds: jax.Array, counters: tuple[jax.Array, ...]
) -> None:
    if logits.ndim != 2:
        raise ValueError(f"logits must be [N, V]; got {logits.shape}")
    if temperature.ndim != 1 or seeds.shape != temperature.shape:
        raise ValueError(
            f"temperature and seeds must be [B]; got {temperature.shape} and {seeds.shape}"
        )
    if logits.shape[0] % temperature.shape[0]:
        raise ValueError(
            f"temperature must be [B], and B must divide the N={logits.shape[0]} rows of logits; "
            f"got {temperature.shape}"
        )
    if any(counter.shape != seeds.shape for counter in counters):
        raise ValueError(
            f"counters must be [B={seeds.shape[0]}] each; got {[x.shape for x in counters]}"
        )
