"""Checks every kernel against its reference in f32, and checks that its results are repeatable.

An array's error is |out - truth| / |truth| in the Euclidean norm. The truth is the result of the
reference in f32, for the same values and with exact f32 products. A call's error is the largest
error of its arrays. A kernel in bf16 may have a larger error: it is compared with the error of the
reference in bf16, which is plain jnp compiled by XLA.

The worst row has a separate error, because a wrong row among many hardly changes a norm. It is the
largest difference, divided by the root mean square of the array.

Programs are compiled in threads, from the shapes of their operands alone. Meanwhile, the main
thread makes the operands of the programs that are already compiled.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from problems import (
    ATTENTION_HEADS,
    DELTA_HEADS,
    FORMS,
    LATENT_HEADS,
    ROUTES,
    TINY_ATTENTION,
    TINY_HEADS,
    TINY_LATENT,
    TINY_ROUTES,
    Problem,
    add_norm,
    attention,
    delta_rule,
    draws,
    experts,
    last_layer,
    latents,
    pool,
    rotation,
    routes,
    truncation,
)
from schedules import split_states
from threads import compile_all
from timing import Setting, attempt

ONLY_F32 = "truncation", "draw_tokens"  # operations whose result in bf16 is not a coarser version
ONLY_BF16 = "float8"  # a form of attention that is checked only with bf16
EXACT = "route"  # must be exact in bf16 too, because a sort does not round
TOLERANCE_F32, TOLERANCE_BF16, TIMES = 2e-5, 1.5, 3
ROW_TOLERANCE_F32, ROW_TOLERANCE_BF16 = 5e-4, 2.5
GIB = 2**30

Make = Callable[[Any], Problem]  # makes the problem in a dtype


def check_kernels(setting: Setting, dtype: str) -> Iterator[dict[str, Any]]:
    """Check every kernel that supports the dtype."""
    yield from check_splits(setting, dtype)
    some = [
        (name, partial(make, dtype))
        for name, make in problems(setting)
        if (name[0] not in ONLY_F32 or dtype == "float32")
        and (ONLY_BF16 not in name or dtype == "bfloat16")
    ]
    made = compile_all([partial(compile_problem, make, dtype, setting) for _, make in some])
    for (name, make), programs in zip(some, made, strict=True):
        row = {"what": name[0], "shape": list(name[1:]), "dtype": dtype}
        is_exact = name[0] == EXACT
        yield attempt(
            row,
            lambda make=make, programs=programs, is_exact=is_exact: check(
                make(), programs(), dtype, is_exact=is_exact
            ),
        )


def check_splits(setting: Setting, dtype: str) -> Iterator[dict[str, Any]]:
    """Compare the gated delta rule's states after one step of T tokens, and after T steps."""
    heads, rows = setting.pick((DELTA_HEADS["27B"], 4), (TINY_HEADS, 2))
    for batch in setting.pick((7, 8), (1,)):  # smaller and larger tiles
        row = {"what": "split steps", "shape": [batch, rows], "dtype": dtype}

        def one(batch=batch):
            at_once, apart = split_states(heads, batch, rows, dtype, setting.kernels)
            is_same = bool(same_bits([at_once], [apart]))
            return {"is_same": is_same, "passes": is_same and bool(jnp.isfinite(apart).all())}

        yield attempt(row, one)


def problems(setting: Setting) -> Iterator[tuple[tuple[Any, ...], Make]]:
    """Yield pairs: a problem's name and sizes, and a function that makes the problem."""
    yield from _attentions(setting)
    yield from _delta_rules(setting)
    yield from _latents(setting)
    yield from _norms(setting)
    yield from _experts(setting)
    yield from _rows(setting)


def _attentions(setting: Setting) -> Iterator[tuple[tuple[Any, ...], Make]]:
    shapes = setting.pick(
        ((4, 1, 1000), (4, 4, 4099), (64, 4, 515), (1, 512, 700)),
        ((2, 4, 40),),
    )
    plain = [(*shape, None) for shape in shapes]
    models = setting.pick(ATTENTION_HEADS, {"tiny": TINY_ATTENTION}).items()
    # Other forms are checked with one shape per model; smoke has more of them.
    for (model, heads), shape in zip(models, shapes[-2:], strict=False):
        formed = [(*shape, form) for form in setting.pick(FORMS, ())]
        for batch, rows, context, form in plain + formed:

            def make(dtype, heads=heads, own=(batch, rows, context), form=form):
                # In the pool of the longest context, offsets exceed 32 bits.
                size = 5 * GIB if own[2] > 4096 else 0.5 * GIB
                stored = "float8_e4m3fn" if form == "float8" else dtype
                kv = pool(heads, setting.pick(size, 2**18), stored)
                return attention(heads, *own, dtype, kv, 1, form)

            name = "paged_attention", model, batch, rows, context
            yield (*name, form) if form else name, make
        for batch, rows in setting.pick(((1, 4), (64, 1)), ((2, 2),)):
            yield ("rope_write", model, batch, rows), partial(rotation, heads, batch, rows)


def _delta_rules(setting: Setting) -> Iterator[tuple[tuple[Any, ...], Make]]:
    # The 4B differs only in the number of heads; each shape takes half a minute to compile.
    for model, heads in setting.pick({"27B": DELTA_HEADS["27B"]}, {"tiny": TINY_HEADS}).items():
        # Batches below eight have other tiles.
        shapes = ((1, 1, False), (7, 4, False), (16, 4, False), (64, 1, False), (2, 200, True))
        for batch, rows, folds in setting.pick(shapes, ()):

            def make(dtype, heads=heads, batch=batch, rows=rows, folds=folds):
                return delta_rule(heads, batch, rows, dtype, folds=folds, layers=1)

            yield ("gated_delta_rule", model, batch, rows, folds), make
        # Offsets of states exceed 32 bits, as in an engine.
        layers, slots = setting.pick((24, 64), (2, 2))

        def make_last(dtype, heads=heads, layers=layers, slots=slots):
            return last_layer(delta_rule(heads, slots, 4, dtype, layers=layers))

        yield ("gated_delta_rule", model, slots, 4, "last layer", layers), make_last


def _latents(setting: Setting) -> Iterator[tuple[tuple[Any, ...], Make]]:
    glm, deepseek = LATENT_HEADS
    shapes = ((glm, 64, 4, 515), (deepseek, 8, 2, 1000), (glm, 1, 256, 700))
    for model, batch, rows, context in setting.pick(shapes, (("tiny", 2, 2, 40),)):
        heads = LATENT_HEADS.get(model, TINY_LATENT)
        name = "latent_attention", model, batch, rows, context
        yield name, partial(latents, heads, batch, rows, context)


def _norms(setting: Setting) -> Iterator[tuple[tuple[Any, ...], Make]]:
    for rows, dim in setting.pick(((8, 4096), (256, 5120)), ((4, 64),)):
        yield ("add_rms_norm", rows, dim), partial(add_norm, rows, dim)


def _experts(setting: Setting) -> Iterator[tuple[tuple[Any, ...], Make]]:
    for tokens in setting.pick((8, 256, 2048), (4,)):
        mixture, shape = setting.pick(((256, 8), (2048, 1024)), ((4, 2), (32, 32)))
        own = tokens, mixture, *shape
        yield ("grouped_matmul", tokens, *mixture, *shape), partial(experts, *own)
    for model, sizes in setting.pick(ROUTES, {"tiny": TINY_ROUTES}).items():
        for rows in setting.pick((1, 32), (4,)):  # smoke has 16
            yield ("route", model, rows), partial(routes, rows, sizes)


def _rows(setting: Setting) -> Iterator[tuple[tuple[Any, ...], Make]]:
    for rows, vocab, columns in setting.pick(
        ((8, 151936, 32000), (64, 248320, 32000)), ((4, 300, 70),)
    ):
        yield ("truncation", rows, vocab), lambda dtype, own=(rows, vocab): truncation(*own)
        yield ("draw_tokens", rows, vocab), lambda dtype, own=(rows, vocab): draws(*own)

        def make(dtype, own=(rows, vocab), columns=columns):
            return draws(*own, num_columns=columns)

        yield ("draw_tokens", rows, vocab, columns), make


def compile_problem(make: Callable[[], Problem], dtype: str, setting: Setting) -> dict[str, Any]:
    """Compile the kernel, the reference in f32, and the reference in bf16."""

    def operands():
        problem = make()
        return problem.state, problem.items[0]

    def program(kernels: str, given: Any) -> Any:
        def run(*given):
            problem = make()
            return jax.tree.leaves(problem.results(*problem.call(*given, kernels, None)))

        return jax.jit(run).lower(*given).compile()

    given = jax.eval_shape(operands)
    programs = {"kernel": program(setting.kernels, given)}
    if dtype != "float32":
        programs["plain"] = program("reference", given)
    with jax.default_matmul_precision("highest"):
        programs["truth"] = program(
            "reference", jax.eval_shape(partial(jax.tree.map, _as_f32), given)
        )
    return programs


def check(
    problem: Problem, programs: dict[str, Any], dtype: str, *, is_exact: bool
) -> dict[str, Any]:
    """Return the errors of the kernel and the reference, and whether the kernel's bits repeat.

    If `is_exact`, a kernel in bf16 has the tolerance of a kernel in f32, and the reference in bf16
    is not run.
    """
    given = problem.state, problem.items[0]
    truth = programs["truth"](*jax.tree.map(_as_f32, given))
    run = programs["kernel"]
    first = run(*given)
    is_same = all(bool(same_bits(first, run(*given))) for _ in range(TIMES - 1))
    error, row_error = map(float, largest_errors(first, truth))
    bounds = TOLERANCE_F32, ROW_TOLERANCE_F32
    row = {"error": error, "row_error": row_error, "is_repeatable": is_same}
    if dtype != "float32" and not is_exact:
        plain = list(map(float, largest_errors(programs["plain"](*given), truth)))
        bounds = TOLERANCE_BF16 * plain[0], ROW_TOLERANCE_BF16 * plain[1]
        row |= {"plain_error": plain[0], "plain_row_error": plain[1]}
    passes = error <= bounds[0] and row_error <= bounds[1]
    return row | {"tolerance": bounds[0], "row_tolerance": bounds[1], "passes": passes}


@jax.jit
def largest_errors(outs: list[jax.Array], truths: list[jax.Array]) -> jax.Array:
    """Return the largest error in norm and the largest error of a row, among several arrays.

    Both are infinite if an element is finite in `outs` but not in `truths`, or the reverse.
    """
    return jnp.max(jnp.stack(list(map(relative_errors, outs, truths))), axis=0)


def relative_errors(out: jax.Array, truth: jax.Array) -> jax.Array:
    """Return two errors of an array.

    The first is |out - truth| / |truth|. The second is the largest difference, divided by the root
    mean square of `truth`.
    """
    out, truth = out.astype(jnp.float32), truth.astype(jnp.float32)
    finite = jnp.isfinite(truth)
    agree = jnp.where(finite, jnp.isfinite(out), (out == truth) | (jnp.isnan(out + truth)))
    difference = jnp.abs(jnp.where(finite, out - truth, 0.0))
    size = jnp.linalg.norm(jnp.where(finite, truth, 0.0))
    size = jnp.where(size > 0, size, 1.0)
    largest = jnp.max(difference, initial=0.0) * jnp.sqrt(jnp.maximum(finite.sum(), 1))
    errors = jnp.stack([jnp.linalg.norm(difference), largest]) / size
    return jnp.where(agree.all(), errors, jnp.inf)


@jax.jit
def same_bits(some: list[jax.Array], others: list[jax.Array]) -> jax.Array:
    """Return whether two lists of arrays have the same bits, including NaNs."""
    pairs = zip(some, others, strict=True)
    return jnp.stack([(_bits(a) == _bits(b)).all() for a, b in pairs]).all()


def _bits(x: jax.Array) -> jax.Array:
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, unsigned)


def _as_f32(x: Any) -> Any:
    """Cast floats to f32, except float8, which has separate scales."""
    is_rounded = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1
    return x.astype(jnp.float32) if is_rounded else x
