"""Top-k, top-p and min-p, which exclude tokens of a row from sampling.

Let p = softmax(logits / temperature). Three rules apply in this order, each to the tokens that the
rules before it keep:

    min_p keeps p >= min_p max(p)
    top_k keeps the k largest p; 0 keeps all
    top_p keeps the largest p, until they sum to at least top_p of the remaining mass; 1 keeps all

A logit that ties with the smallest kept logit is kept, too. So the result does not depend on the
order of equal logits, and one threshold per row determines the result.
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
    """Return logits f32[N, V], with -inf for tokens that min_p, top_k or top_p exclude.

    Args:
        logits: f32[N, V].
        temperature: f32[N], above 0.
        top_k: i32[N]; 0 to keep all tokens.
        top_p: f32[N]; 1 to keep all tokens.
        min_p: f32[N]; 0 to keep all tokens.
        axis: inside `shard_map`, the mesh axis over which the columns are split; None if they are
            not split. If they are split, plain JAX runs, with 8 exchanges of 60 bytes per row for
            top_k, and 8 more for top_p.
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
