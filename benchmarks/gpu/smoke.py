"""Checks every kernel at a tiny shape and at a real shape, against results computed on a CPU.

The expected results are computed by NumPy in float64 (`truths`), and are stored in smoke.npz. So a
first check of a card compiles only the kernels. After a change of the cases, update the file:

    PYTHONPATH=. python benchmarks/gpu/smoke.py        writes smoke.npz again

An error is the largest difference of an element, divided by the root mean square of the whole
array. So a wrong row among many is found. For a large array, the file has only the products of each
row with two vectors of signs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import truths
from problems import (
    DELTA_HEADS,
    EPS,
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
    attention_options,
    draw_ids,
    draws,
    experts,
    latents,
    normal,
    pool,
    rotation,
    routes,
    truncation,
)
from quantised import packed, scaled
from quantised_experts import BLOCK, PACKED, quantised_experts, scaled_heads
from schedules import served_rule
from threads import compile_all
from timing import Setting, attempt

FILE = Path(__file__).with_suffix(".npz")
MAX_NUMBERS = 2**12  # maximum size of an array that is stored as a whole
TOLERANCES = {"float32": 2e-4, "bfloat16": 0.05}
TIMES = 3
F32, BF16 = "float32", "bfloat16"


@dataclass(frozen=True)
class Smoke:
    """Inputs of a kernel (`Problem`), and a float64 function that returns the kernel's outputs."""

    name: str
    dtype: str
    is_tiny: bool
    make: Callable[[], Problem]
    truth: Callable[[Any, Any], Any]  # takes a state and an item, returns the results
    see: Callable[[list[np.ndarray]], Any] = list  # selects the kernel's results to compare

    def program(self, kernels: str) -> Callable[[Any, Any], list[jax.Array]]:
        """Return a function that takes a state and an item, and returns the kernel's results."""

        def run(state, item):
            problem = self.make()
            return jax.tree.leaves(problem.results(*problem.call(state, item, kernels, None)))

        return run


def cases() -> Iterator[Smoke]:
    """Yield the cases. Kernels that changed most since they last ran on a card come first."""
    yield from _quantised_experts()
    yield from _packed()
    yield from _scaled()
    yield from _routes()
    for is_tiny, num_rows, vocab in (True, 4, 300), (False, 8, 151936):
        make = partial(truncation, num_rows, vocab)
        yield Smoke(f"truncation {num_rows}", F32, is_tiny, make, _truncation_truth, _kept)
    yield from _rules()
    yield from _latents()
    yield from _experts()
    yield from _draws()
    yield from _attentions()
    yield from _others()


def _truncation_truth(state: Any, item: Any) -> Any:
    counts, lowest = truths.truncate(item, *state[:3])
    return np.log(counts), lowest


def _kept(results: list[np.ndarray]) -> Any:
    """Return, for each row, the logarithm of the number of kept logits, and the lowest kept logit.

    The logarithm allows small differences: in float32, a sum of thousands of probabilities is
    rounded, which can change the number a little.
    """
    (logits,) = results
    counts = np.isfinite(logits).sum(1, keepdims=True)
    return np.log(counts), np.where(np.isfinite(logits), logits, np.inf).min(1, keepdims=True)


def _quantised_experts() -> Iterator[Smoke]:
    for is_tiny, tokens, mixture, sizes, dtype in (
        (True, 4, (4, 2), (96, 40), F32),
        (False, 8, (32, 4), (1024, 512), BF16),
        (False, 256, (16, 4), (512, 256), BF16),
    ):

        def of_float8(weights, item):
            x, sizes, sources = item
            return [truths.grouped_matmul(x, truths.float8(*weights, BLOCK), sizes, sources)]

        def of_mxfp4(weights, item):
            x, sizes, sources = item
            return [truths.grouped_matmul(x, truths.mxfp4(*weights), sizes, sources)]

        def of_int4(weights, item):
            x, sizes, sources = item
            matrices = truths.packed(*weights, x.shape[1], PACKED["int4"].group)
            return [truths.grouped_matmul(x, matrices.swapaxes(1, 2), sizes, sources)]

        for kind, name, truth in (
            ("float8", "grouped_scaled_matmul", of_float8),
            ("mxfp4", "grouped_packed_matmul powers", of_mxfp4),
            ("int4", "grouped_packed_matmul zeros", of_int4),
        ):
            make = partial(quantised_experts, kind, tokens, mixture, *sizes, dtype)
            yield Smoke(f"{name} {tokens}", dtype, is_tiny, make, truth)
    for is_tiny, *sizes, dtype in (True, 4, 3, 80, 50, F32), (False, 8, 20, 512, 256, BF16):

        def of_heads(weights, item):
            matrices = truths.float8(*weights, BLOCK)
            return [np.einsum("nhi,hio->nho", truths.f64(item[0]), matrices)]

        make = partial(scaled_heads, *sizes, dtype)
        yield Smoke(f"batched_scaled_matmul {sizes[0]}", dtype, is_tiny, make, of_heads)


def _packed() -> Iterator[Smoke]:
    for is_tiny, rows, depth, width, group, dtype in (
        (True, 4, 200, 72, 32, F32),
        (False, 1, 4096, 1024, 128, BF16),
        (False, 40, 1024, 4096, 64, BF16),
        (False, 300, 512, 1000, 16, BF16),
    ):

        def truth(nothing, item, group=group):
            return [truths.packed_matmul(*item, group)]

        make = partial(packed, rows, depth, width, group, dtype)
        yield Smoke(f"packed_matmul {rows}", dtype, is_tiny, make, truth)


def _scaled() -> Iterator[Smoke]:
    for is_tiny, rows, depth, width, block, dtype in (
        (True, 4, 200, 72, (128, 128), F32),
        (False, 1, 4096, 1024, (128, 128), BF16),
        (False, 40, 1024, 4096, (1, 1024), BF16),
        (False, 300, 512, 1000, (64, 128), BF16),
    ):

        def truth(nothing, item, block=block):
            return [truths.scaled_matmul(*item, block)]

        make = partial(scaled, rows, depth, width, block, dtype)
        yield Smoke(f"scaled_matmul {rows}", dtype, is_tiny, make, truth)


def _routes() -> Iterator[Smoke]:
    shapes = [(True, 4, TINY_ROUTES, "tiny", F32)]
    shapes += [(False, rows, ROUTES[name], name, BF16) for name, rows in
               (("Qwen3.5-35B-A3B", 16), ("gpt-oss-20b", 32))]  # fmt: skip
    shapes.append((False, 16, ROUTES["GLM-4.7-Flash"], "GLM-4.7-Flash", F32))
    for is_tiny, rows, sizes, name, dtype in shapes:
        is_padding = np.arange(rows) == rows - 1

        def truth(correction, logits, sizes=sizes, is_padding=is_padding):
            weights, *others = truths.route(logits, *sizes[1:], correction, is_padding)
            return weights[:-1], *others

        make = partial(routes, rows, sizes, dtype)
        yield Smoke(f"route {name} {rows}", dtype, is_tiny, make, truth)


def _rules() -> Iterator[Smoke]:
    for is_tiny, heads, batch, prompt, rows, dtype in (
        (True, TINY_HEADS, 2, 40, 2, F32),
        (False, DELTA_HEADS["27B"], 2, 150, 4, BF16),
        (False, DELTA_HEADS["4B"], 9, 33, 4, BF16),  # has the tiles of a larger batch
    ):

        def truth(weights, item, heads=heads):
            outs = []
            for first, step, last, accepted in zip(*item, strict=True):
                begun = np.concatenate([first, step])
                out, states = truths.delta_rule(begun, weights, heads, EPS)
                kept = len(first) + int(accepted)
                other = np.concatenate([begun[:kept], last])
                after, _ = truths.delta_rule(other, weights, heads, EPS)
                outs.append((out[: len(first)], out[len(first) :], after[kept:], states[kept]))
            return map(np.stack, zip(*outs, strict=True))

        make = partial(served_rule, heads, batch, prompt, rows, dtype)
        name = f"gated_delta_rule {heads.num_values} {batch}"
        yield Smoke(name, dtype, is_tiny, make, truth)


def _latents() -> Iterator[Smoke]:
    glm, deepseek = LATENT_HEADS.values()
    for is_tiny, heads, batch, rows, context, dtype in (
        (True, TINY_LATENT, 2, 3, 40, F32),
        (False, glm, 2, 4, 515, BF16),
        (False, deepseek, 1, 2, 300, BF16),
        (False, glm, 1, 64, 100, BF16),  # a chunk of a prompt
    ):

        def truth(pages, item, rank=heads[1]):
            return [truths.latent_attention(item[0], pages, *item[1:], rank)]

        make = partial(latents, heads, batch, rows, context, dtype)
        yield Smoke(f"latent_attention {heads[0]} {rows}", dtype, is_tiny, make, truth)


def _experts() -> Iterator[Smoke]:
    for is_tiny, tokens, mixture, sizes, dtype in (
        (True, 4, (4, 2), (32, 32), F32),
        (False, 8, (32, 4), (1024, 512), BF16),
        (False, 256, (16, 4), (512, 256), BF16),
    ):

        def truth(weights, item):
            x, sizes, sources = item
            return [truths.grouped_matmul(x, weights, sizes, sources)]

        make = partial(experts, tokens, mixture, *sizes, dtype)
        yield Smoke(f"grouped_matmul {tokens}", dtype, is_tiny, make, truth)


def _draws() -> Iterator[Smoke]:
    for is_tiny, rows, vocab, columns in (
        (True, 4, 300, None),
        (True, 4, 300, 70),
        (False, 16, 151936, None),
        (False, 16, 151936, 32000),
    ):

        def truth(settings, logits, vocab=vocab, columns=columns):
            temperature, seeds, places = settings
            ids = draw_ids(vocab, columns) if columns else None
            return [truths.draw_tokens(logits, temperature, seeds, places, ids, vocab)]

        make = partial(draws, rows, vocab, num_columns=columns)
        name = f"draw_tokens {rows}{', of token ids' if columns else ''}"
        yield Smoke(name, F32, is_tiny, make, truth)


def _attentions() -> Iterator[Smoke]:
    for is_tiny, heads, batch, rows, context, dtype in (
        (True, TINY_ATTENTION, 2, 4, 50, F32),
        (False, (32, 8, 128), 3, 4, 515, BF16),
        (False, (24, 4, 256), 1, 2, 2000, BF16),
        (False, (32, 8, 128), 1, 100, 130, BF16),
    ):
        for form in (None, *FORMS):
            if form and heads[0] == 24:
                continue

            def truth(kv, item, form=form, heads=heads):
                options = attention_options(form, heads, item[2])
                out, sums = truths.paged_attention(item[0], kv, *item[1:], **options)
                return (out, sums) if form == "part" else [out]

            own = heads, batch, rows, context, BF16 if form == "float8" else dtype

            def make(own=own, form=form):
                stored = "float8_e4m3fn" if form == "float8" else own[4]
                kv = pool(own[0], 2**18 * own[1] * own[0][1], stored)  # with unused pages
                return attention(*own, kv, 1, form)

            name = f"paged_attention {heads[0]} {rows}{f', {form}' * bool(form)}"
            yield Smoke(name, own[4], is_tiny, make, truth)


def _others() -> Iterator[Smoke]:
    for is_tiny, heads, batch, rows, dtype in (
        (True, TINY_ATTENTION, 2, 2, F32),
        (False, (32, 8, 128), 8, 4, BF16),
    ):

        def truth(state, item, num_heads=heads[0]):
            kv, angles, table, positions = state
            written, q = truths.rope_write(item[0], angles, kv, 0, table, positions, num_heads)
            return written[0], q

        def see(results):
            written, q = results
            return written[0], q

        make = partial(rotation, heads, batch, rows, dtype)
        yield Smoke(f"rope_write {batch}", dtype, is_tiny, make, truth, see)
    for is_tiny, rows, dim, dtype in (True, 4, 64, F32), (False, 64, 4096, BF16):

        def truth(weight, item):
            x, delta, weight = map(truths.f64, (*item, weight))
            return x + delta, truths.rms_norm(x + delta, weight, 1e-5)

        make = partial(add_norm, rows, dim, dtype)
        yield Smoke(f"add_rms_norm {rows}", dtype, is_tiny, make, truth)


def check_smoke(
    setting: Setting, only_tiny: bool = False, most: int | None = None
) -> Iterator[dict[str, Any]]:
    """Check the cases, or only the first `most` cases.

    Only tiny cases are checked if `only_tiny`, or if kernels are interpreted.
    """
    some = [one for one in cases() if one.is_tiny or not (only_tiny or setting.is_cpu)][:most]
    with np.load(FILE) as expected:
        programs = compile_all([partial(compile_case, one, setting.kernels) for one in some])
        for one, program in zip(some, programs, strict=True):
            row = {"what": "smoke", "shape": one.name.replace(",", "").split(), "dtype": one.dtype}
            yield attempt(row, lambda one=one, program=program: check(one, program(), expected))


def compile_case(case: Smoke, kernels: str) -> Callable[[Any, Any], list[jax.Array]]:
    """Compile a case's program, from the shapes of its operands alone."""
    run = jax.jit(case.program(kernels))
    return run.lower(*jax.eval_shape(partial(given, case))).compile()


def given(case: Smoke) -> tuple[Any, Any]:
    """Return the operands of a case's program: a state and an item."""
    problem = case.make()
    return problem.state, problem.items[0]


def check(case: Smoke, program: Any, expected: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the largest error of a case, and whether repeated runs give the same bits."""
    operands = given(case)
    runs = [[np.asarray(x) for x in program(*operands)] for _ in range(TIMES)]
    bits = [[x.tobytes() for x in run] for run in runs]
    is_same = bits[1:] == bits[:-1]
    error = max(
        worst_error(digest(x), expected[f"{case.name}/{i}"])
        for i, x in enumerate(case.see(runs[0]))
    )
    tolerance = TOLERANCES[case.dtype]
    return {
        "error": error,
        "tolerance": tolerance,
        "is_repeatable": is_same,
        "passes": error <= tolerance and is_same,
    }


def digest(x: np.ndarray) -> np.ndarray:
    """Return the form of x that the file stores: x, or the products of its rows with two vectors.

    Products are stored if x is large. The vectors' elements are signs.
    """
    if np.issubdtype(x.dtype, np.integer):
        return x
    x = x.astype(np.float64)
    return x if x.size <= MAX_NUMBERS else x.reshape(-1, x.shape[-1]) @ _signs(x.shape[-1])


@cache
def _signs(size: int) -> np.ndarray:
    return np.sign(np.asarray(normal(99, (size, 2), F32), np.float64) + 1e-9)


def worst_error(found: np.ndarray, truth: np.ndarray) -> float:
    """Return the largest error of an array.

    It is infinite if shapes or integers differ, or if a value is not finite.
    """
    if found.shape != truth.shape or not np.isfinite(found).all():
        return float("inf")
    if np.issubdtype(truth.dtype, np.integer):
        return 0.0 if np.array_equal(found, truth) else float("inf")
    truth = truth.astype(np.float64)
    return float(np.abs(found - truth).max() / np.sqrt(np.mean(truth**2)))


def main() -> None:
    """Compute the expected results of all cases, and write them to the file."""
    found = {}
    for case in cases():
        operands = jax.tree.map(np.asarray, given(case))
        for i, x in enumerate(map(digest, map(np.asarray, case.truth(*operands)))):
            is_whole = np.issubdtype(x.dtype, np.integer)
            found[f"{case.name}/{i}"] = x.astype(np.int32 if is_whole else np.float32)
    np.savez_compressed(FILE, **found)
    print(f"{FILE.name}: {len(found)} arrays, {FILE.stat().st_size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
