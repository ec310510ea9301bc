"""Results of every kernel against its reference in f32, and against its own when run again.

An error is |out - truth| / |truth|, in the Euclidean norm, the largest of the arrays that a call
gives; truth is the reference on the same values in f32, with exact f32 products. In bf16 it is
held against the error of the reference in bf16, which is what XLA makes of plain jnp.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from problems import (
    ATTENTION_HEADS,
    DELTA_HEADS,
    ROUTES,
    TINY_ATTENTION,
    TINY_HEADS,
    TINY_ROUTES,
    Problem,
    add_norm,
    attention,
    delta_rule,
    draws,
    experts,
    pool,
    rotation,
    routes,
    truncation,
)
from projections import LAYERS, TINY_LAYER, projection
from timing import Setting, attempt

ONLY_F32 = "truncation", "draw_tokens", "route"  # of which bf16 is no coarser reference
TOLERANCE_F32, TOLERANCE_BF16, TIMES = 2e-5, 1.5, 3
GIB = 2**30

Make = Callable[[Any], Problem]  # of a dtype


def check_kernels(setting: Setting, dtype: str) -> Iterator[dict[str, Any]]:
    """Every kernel that takes the dtype."""
    for name, make in problems(setting):
        if name[0] not in ONLY_F32 or dtype == "float32":
            row = {"what": name[0], "shape": list(name[1:]), "dtype": dtype}
            yield attempt(row, lambda make=make: check(make, dtype, setting))


def problems(setting: Setting) -> Iterator[tuple[tuple[Any, ...], Make]]:
    """Names with shapes, and what makes the problem."""
    attention_heads = setting.pick(ATTENTION_HEADS, {"tiny": TINY_ATTENTION})
    # The 4B's heads differ in number alone; each shape takes half a minute, of compilation.
    delta_heads = setting.pick({"27B": DELTA_HEADS["27B"]}, {"tiny": TINY_HEADS})
    for model, heads in attention_heads.items():
        for batch, rows, context in setting.pick(
            ((4, 1, 1000), (4, 4, 4099), (64, 4, 515), (1, 512, 700)),
            ((2, 4, 40),),
        ):

            def make(dtype, heads=heads, batch=batch, rows=rows, context=context):
                # In the longest, pages lie further than 32 bits of bytes reach.
                size = 5 * GIB if context > 4096 else 0.5 * GIB
                kv = pool(heads, setting.pick(size, 2**18), dtype)
                return attention(heads, batch, rows, context, dtype, kv, num_items=1)

            yield ("paged_attention", model, batch, rows, context), make
    for model, heads in delta_heads.items():
        for batch, rows, folds in setting.pick(
            ((1, 1, False), (16, 4, False), (64, 1, False), (2, 200, True)), ((2, 4, False),)
        ):

            def make(dtype, heads=heads, batch=batch, rows=rows, folds=folds):
                return delta_rule(heads, batch, rows, dtype, folds=folds, layers=1)

            yield ("gated_delta_rule", model, batch, rows, folds), make
    for model, heads in attention_heads.items():
        for batch, rows in setting.pick(((1, 4), (64, 1)), ((2, 2),)):

            def make(dtype, heads=heads, batch=batch, rows=rows):
                return rotation(heads, batch, rows, dtype)

            yield ("rope_write", model, batch, rows), make
    for rows, dim in setting.pick(((8, 4096), (256, 5120)), ((4, 64),)):

        def make(dtype, rows=rows, dim=dim):
            return add_norm(rows, dim, dtype)

        yield ("add_rms_norm", rows, dim), make
    layers = setting.pick(LAYERS, {"tiny": TINY_LAYER})
    for rows, (model, layer) in zip((1, 8, 16), layers.items(), strict=False):
        for name, part in layer.items():

            def make(dtype, rows=rows, part=part):
                return projection(rows, part, dtype, num_items=1)

            yield ("fused_linear", model, name, rows), make
    for tokens in setting.pick((8, 256, 2048), (4,)):
        mixture, shape = setting.pick(((256, 8), (2048, 1024)), ((4, 2), (32, 32)))
        for is_gated in False, True:

            def make(dtype, own=(tokens, mixture, *shape, is_gated)):
                return experts(*own, dtype)

            yield ("grouped_matmul", tokens, *mixture, *shape, is_gated), make
    for model, sizes in setting.pick(ROUTES, {"tiny": TINY_ROUTES}).items():
        for rows in setting.pick((1, 8, 16), (4,)):

            def make(dtype, rows=rows, sizes=sizes):
                return routes(rows, sizes, dtype)

            yield ("route", model, rows), make
    for rows, vocab in setting.pick(((8, 151936), (64, 248320)), ((4, 300),)):
        yield ("truncation", rows, vocab), lambda dtype, n=rows, v=vocab: truncation(n, v)
        yield ("draw_tokens", rows, vocab), lambda dtype, n=rows, v=vocab: draws(n, v)


def check(make: Make, dtype: str, setting: Setting) -> dict[str, Any]:
    """Errors of the kernel and of the reference, and whether it repeats itself bit by bit."""
    problem = make(dtype)
    given = problem.state, problem.items[0]

    def program(kernels: str) -> Callable[..., list[jax.Array]]:
        return jax.jit(lambda *given: jax.tree.leaves(problem.call(*given, kernels, None)))

    with jax.default_matmul_precision("highest"):
        truth = program("reference")(*jax.tree.map(_as_f32, given))
    run = program(setting.kernels)
    first = run(*given)
    is_same = [bool(same_bits(first, run(*given))) for _ in range(TIMES - 1)]
    error = float(largest_error(first, truth))
    row = {"error": error, "is_repeatable": all(is_same)}
    if dtype == "float32":
        return row | {"tolerance": TOLERANCE_F32, "passes": error <= TOLERANCE_F32}
    plain = float(largest_error(program("reference")(*given), truth))
    bound = TOLERANCE_BF16 * plain
    return row | {"plain_error": plain, "tolerance": bound, "passes": error <= bound}


@jax.jit
def largest_error(outs: list[jax.Array], truths: list[jax.Array]) -> jax.Array:
    """Of the arrays; infinite where they do not agree on what is a number."""
    return jnp.max(jnp.stack(list(map(relative_error, outs, truths))))


def relative_error(out: jax.Array, truth: jax.Array) -> jax.Array:
    """|out - truth| / |truth|."""
    out, truth = out.astype(jnp.float32), truth.astype(jnp.float32)
    finite = jnp.isfinite(truth)
    agree = jnp.where(finite, jnp.isfinite(out), (out == truth) | (jnp.isnan(out + truth)))
    difference = jnp.linalg.norm(jnp.where(finite, out - truth, 0.0))
    size = jnp.linalg.norm(jnp.where(finite, truth, 0.0))
    relative = difference / jnp.where(size > 0, size, 1.0)
    return jnp.where(agree.all(), relative, jnp.inf)


@jax.jit
def same_bits(some: list[jax.Array], others: list[jax.Array]) -> jax.Array:
    """Whether two rows of arrays are the same, NaNs included."""
    pairs = zip(some, others, strict=True)
    return jnp.stack([(_bits(a) == _bits(b)).all() for a, b in pairs]).all()


def _bits(x: jax.Array) -> jax.Array:
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, unsigned)


def _as_f32(x: Any) -> Any:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
