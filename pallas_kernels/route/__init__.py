"""The routes of a mixture of experts: the experts of each row, and the rows of each expert.

For logits l [N, E], the scores s are softmax(l) or sigmoid(l). A row's C experts are the experts
with the largest scores. With sigmoids, a correction can be added to the scores for this choice, but
not for the weights (DeepSeek-V3, section 2.1.2). The weights are

    w_c = scaling s_c, or scaling s_c / sum_c s_c if the rule normalises

Ties go to the lower expert. The pair of row n and its c-th expert is called entry n C + c. To find
the rows of each expert, the entries are sorted by expert.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import run
from pallas_kernels.route.reference import Routes as Routes
from pallas_kernels.route.reference import Rule as Rule
from pallas_kernels.route.reference import route_reference
from pallas_kernels.route.triton import fits, route_triton

IMPLEMENTATIONS = {"triton": route_triton, "reference": route_reference}


def route(
    logits: jax.Array,
    num_chosen: int,
    rule: Rule,
    correction: jax.Array | None = None,
    is_padding: jax.Array | None = None,
    *,
    kernels: str = "auto",
) -> Routes:
    """Return the routes of all rows; scores are f32.

    The kernel is a single program. The reference runs, regardless of `kernels`, if the arguments
    are too large for the kernel, or if the rule excludes groups of experts (see `triton.fits`).

    Args:
        logits: [N, E].
        num_chosen: C, the number of experts per row.
        rule: the rule by which experts are chosen and weighted.
        correction: f32[E], added to the sigmoids when experts are chosen; None for no correction.
        is_padding: bool[N], whether each row is padding; None if no row is. Padding rows go to the
            experts of row 0, with meaningless weights.
        kernels: implementation to use, see `dispatch.run`.

    Raises:
        ValueError: shapes or the rule are inconsistent; the message names the argument.
    """
    if logits.ndim != 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits must be floats [N, E]; got {logits.dtype}{list(logits.shape)}")
    num_rows, num_experts = logits.shape
    if not 0 < num_chosen <= num_experts:
        raise ValueError(f"num_chosen must be 1 to E={num_experts}; got {num_chosen}")
    if num_experts % rule.num_groups:
        raise ValueError(f"rule.num_groups must divide E={num_experts}; got {rule.num_groups}")
    if not rule.is_sigmoid and (correction is not None or rule.num_groups > 1):
        raise ValueError("correction and groups need rule.is_sigmoid")
    if correction is not None and correction.shape != (num_experts,):
        raise ValueError(f"correction must be [E={num_experts}]; got {correction.shape}")
    if is_padding is not None and (is_padding.shape, is_padding.dtype) != ((num_rows,), bool):
        raise ValueError(
            f"is_padding must be bool[N={num_rows}]; got {is_padding.dtype}{is_padding.shape}"
        )
    if not fits(num_rows, num_experts, num_chosen, rule):
        kernels = "reference"
    return run("route", kernels, IMPLEMENTATIONS, logits, num_chosen, rule, correction, is_padding)
