"""Drawing a token from every row of logits, with noise that is a function of seed and place.

    token = argmax_v (logits_v / T + g(seed, stream, counters, v)),     g = -log(-log u)

That is a draw from softmax(logits / T) (Gumbel-max). At temperature 0 it is the plain argmax.
Ties go to the first. The noise is counter-based (threefry): a token's does not depend on the row,
the batch, or how many others are drawn.

XLA draws with a second program in a conditional, and launches a kernel for every small array that
the noise is made from; the Triton kernel reads the logits once and does it all, row by row.
"""

import jax

from pallas_kernels.dispatch import run
from pallas_kernels.draw_tokens.reference import MIN_TEMPERATURE as MIN_TEMPERATURE
from pallas_kernels.draw_tokens.reference import argmax as argmax
from pallas_kernels.draw_tokens.reference import draw_tokens_reference
from pallas_kernels.draw_tokens.reference import gumbel_noise as gumbel_noise
from pallas_kernels.draw_tokens.reference import keys as keys
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
    """A token i32[N] for each row of logits, N = B T: T rows for each of B requests, end to end.

    Args:
        logits: f32[N, V], of which -inf is never drawn where anything else is there.
        temperature: f32[B], 0 for the argmax; others are at least MIN_TEMPERATURE.
        seeds: u32[B].
        stream: which of the independent sources of noise under a seed.
        counters: i32[B] each, what else keys the noise. The first is that of a request's first row
            and grows by one with every row, as a token's position does.
        token_ids: i32[V], distinct: what the columns are called, in the noise and in the result, if
            not by their number.
        vocab_size: how many tokens there are, with `token_ids`.
        kernels: implementation to use, see `dispatch`.

    Raises:
        ValueError: shapes that do not fit each other, naming the argument.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits must be [N, V]; got {logits.shape}")
    if temperature.ndim != 1 or seeds.shape != temperature.shape:
        raise ValueError(
            f"temperature and seeds must be [B]; got {temperature.shape} and {seeds.shape}"
        )
    if logits.shape[0] % temperature.shape[0]:
        raise ValueError(
            f"temperature must be [B], B a divisor of the N={logits.shape[0]} rows of logits; "
            f"got {temperature.shape}"
        )
    if any(counter.shape != seeds.shape for counter in counters):
        raise ValueError(
            f"counters must be [B={seeds.shape[0]}] each; got {[x.shape for x in counters]}"
        )
    if token_ids is not None and (token_ids.shape != logits.shape[1:] or vocab_size is None):
        raise ValueError(
            f"token_ids must be [V={logits.shape[1]}], and come with vocab_size; "
            f"got {token_ids.shape} and vocab_size={vocab_size}"
        )
    return run(
        "draw_tokens",
        kernels,
        IMPLEMENTATIONS,
        logits,
        temperature,
        seeds,
        int(stream),
        counters,
        token_ids,
        vocab_size,
    )
