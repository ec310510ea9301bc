"""Top-k, top-p and min-p: which logits of a row a token may be drawn from.

With p = softmax(logits / temperature), each applies to the tokens that those before it keep:

    min_p keeps p >= min_p max(p)
    top_k keeps the k largest; 0 keeps all
    top_p keeps the fewest largest that sum to at least top_p of the remaining mass; 1 keeps all

Logits that tie with the last one kept are kept, too. So the result does not depend on an order
among equals, and is given by one threshold per row.
"""

import jax

from pallas_kernels.dispatch import run
from pallas_kernels.truncation.reference import truncate_reference
from pallas_kernels.truncation.split import SplitColumns
from pallas_kernels.truncation.triton import truncate_triton

IMPLEMENTATIONS = {"triton": truncate_triton, "reference": truncate_reference}


def truncate(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    axis: str | None = None,
    kernels: str = "auto",
) -> jax.Array:
    """Return logits f32[N, V] with those excluded by min_p, top_k or top_p set to -inf.

    Args:
        logits: f32[N, V].
        temperature: f32[N] above 0, for the probabilities.
        top_k: i32[N].
        top_p: f32[N].
        min_p: f32[N].
        axis: mesh axis over whose devices the columns are split, inside `shard_map`. Plain JAX
            runs then: 8 exchanges of 60 bytes a row for top_k, as many for top_p.
        kernels: implementation to use, see `dispatch.run`.

    Raises:
        ValueError: shapes are inconsistent; the message names the argument.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits must be [N, V]; got {logits.shape}")
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for name, values in given.items():
        if values.shape != logits.shape[:1]:
            raise ValueError(f"{name} must be [N={logits.shape[0]}]; got {values.shape}")
    if axis is not None:
        return truncate_reference(logits, *given.values(), columns=SplitColumns(axis))
    return run("truncation", kernels, IMPLEMENTATIONS, logits, *given.values())
