"""Projections with what stands around them: as XLA makes them, and in one launch each."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from kernels import DTYPE, tune
from problems import CACHE_BYTES, Problem, normal
from timing import Setting, attempt, measure

from pallas_kernels.fused_linear import Norm, fused_linear
from pallas_kernels.fused_linear.triton import choose_config, fused_linear_triton
from pallas_kernels.rms_norm import add_rms_norm
from specjax.engine.precompile import GPU_OPTIONS

EPS = 1e-5
# What XLA may take for a matmul. Whole is what an engine compiles, where its tuner picks from
# cuBLAS and Triton; split, it sums parts of the depth in a kernel more.
FEW_ROWS_WAYS = {"whole": GPU_OPTIONS, "split": {}}
MANY_ROWS_WAYS = FEW_ROWS_WAYS | {
    "cublas": GPU_OPTIONS | {"xla_gpu_enable_triton_gemm": False},
    "triton": GPU_OPTIONS | {"xla_gpu_cublas_fallback": False},
    "triton, all tiles": GPU_OPTIONS
    | {"xla_gpu_cublas_fallback": False, "xla_gpu_exhaustive_tiling_search": True},
}
MATMULS = {
    "o": (4096, 4096),
    "qkv": (4096, 6144),
    "gate_up": (4096, 28672),
    "down": (14336, 4096),
}  # of Llama-3.1-8B


class Part(NamedTuple):
    """A projection of D to F: with the norm before it if it begins a branch, else with the sum."""

    depth: int
    width: int
    has_norm: bool = False
    is_gated: bool = False


def _layer(dim: int, qkv: int, heads: int, inner: int) -> dict[str, Part]:
    return {
        "qkv": Part(dim, qkv, has_norm=True),
        "o": Part(heads, dim),
        "gate_up": Part(dim, inner, has_norm=True, is_gated=True),
        "down": Part(inner, dim),
    }


LAYERS = {
    "Llama-3.2-1B": _layer(2048, 3072, 2048, 8192),
    "Qwen3.5-4B": _layer(2560, 12352, 4096, 9216),  # one of three out of four, with a delta rule
    "Llama-3.1-8B": _layer(4096, 6144, 4096, 14336),
}
TINY_LAYER = {"gate_up": Part(32, 48, has_norm=True, is_gated=True), "down": Part(48, 32)}


def projection(num_rows: int, part: Part, dtype: Any, num_items: int = 0) -> Problem:
    """A part of a layer, in one launch; each call is of another layer."""
    depth, width, has_norm, is_gated = part
    columns = width * (1 + is_gated)
    itemsize = jnp.dtype(dtype).itemsize
    num_items = num_items or max(2, min(32, CACHE_BYTES // (itemsize * depth * columns)))
    items = tuple(
        (normal(i, (num_rows, depth), dtype), normal(50 + i, (depth, columns), dtype) / depth**0.5)
        for i in range(num_items)
    )
    around = 1 + normal(98, (depth,), dtype) / 8, normal(99, (num_rows, width), dtype)

    def call(around, item, kernels, config):
        scale, residual = around
        options = {
            "norm": Norm(scale, EPS, False) if has_norm else None,
            "is_gated": is_gated,
            "residual": None if has_norm else residual,
        }
        if config is not None:
            interpret = kernels == "interpret"
            return around, fused_linear_triton(*item, **options, config=config, interpret=interpret)
        return around, fused_linear(*item, **options, kernels=kernels)

    moved = depth * columns + num_rows * (depth + width)
    return Problem(around, items, call, itemsize * moved)


def time_projections(setting: Setting) -> Iterator[dict[str, Any]]:
    """Layers' projections in one launch and apart, and with other tiles."""
    layers = setting.pick(LAYERS, {"tiny": TINY_LAYER})
    parts = [(model, name, part) for model, layer in layers.items() for name, part in layer.items()]
    for model, name, part in parts:
        for way in "fused", "apart":
            row = {"what": "layer's projection", "model": model, "part": name, "rows": 8}
            yield attempt(row | {"way": way}, partial(_time_way, part, way, setting))
    for model, name, part in parts:
        row = {"what": "fused_linear", "model": model, "part": name, "rows": 8}
        base = choose_config(part.depth, part.width, part.is_gated, part.has_norm, DTYPE)
        others = [replace(base, num_stages=stages) for stages in (3, 4, 6, 8)]
        others += [replace(base, num_warps=4), replace(base, block_depth=256, num_warps=4)]
        others += [
            replace(base, block_columns=columns, num_tiles=tiles)
            for columns, tiles in ((16, 2), (16, 4), (32, 1), (32, 2), (64, 1))
        ]
        make = partial(projection, 8, part, DTYPE, setting.pick(0, 2))
        yield from tune(row, make, base, setting.pick(others, others[:1]), setting)


def _time_way(part: Part, way: str, setting: Setting) -> dict[str, Any]:
    """A part in one launch, or `apart` as engines run it without: the sum comes with the norm that
    follows it, so that the parts of a layer add up to the same, and one alone is a sum apart."""
    problem = projection(8, part, DTYPE, setting.pick(0, 2))

    def run(around, items):
        if way == "fused":
            return [problem.call(around, item, setting.kernels, None)[1] for item in items]
        return [apart(around[0], *item) for item in items]

    def apart(scale, x, weight):
        if not part.has_norm:
            return x @ weight
        stream, normed = add_rms_norm(x, x, scale, EPS, kernels=setting.kernels)
        y = normed @ weight
        if part.is_gated:
            gate, up = jnp.split(y, 2, axis=-1)
            y = jax.nn.silu(gate) * up
        return stream, y

    calls = len(problem.items)
    given = problem.state, problem.items
    return _measure(run, given, GPU_OPTIONS, setting, calls, problem.num_bytes)


def time_matmuls(setting: Setting, *, num_rows: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Matmuls of so many rows with the kernel that reads them, in all of XLA's ways.

    At 256 rows, 64 requests with three drafts, a step took 10.3 ms on an H100, and reading alone 7.
    """
    ways = FEW_ROWS_WAYS if max(num_rows) <= 64 else MANY_ROWS_WAYS
    for rows in setting.pick(num_rows, (8,)):
        for part, sizes in setting.pick(MATMULS, {"tiny": (512, 64)}).items():
            for way, options in ways.items():
                row = {"what": "projection", "part": part, "rows": rows, "way": way}
                yield attempt(row, partial(_time_projection, rows, *sizes, options, setting))


def _time_projection(
    num_rows: int, depth: int, width: int, options: Mapping[str, Any], setting: Setting
) -> dict[str, Any]:
    count = max(2, min(8, 2**28 // (2 * depth * width)))
    weights = [normal(i, (depth, width), DTYPE) for i in range(count)]
    x, stream = normal(9, (num_rows, depth), DTYPE), normal(10, (num_rows, width), DTYPE)
    scale = jnp.ones(width, DTYPE)

    def run(x, stream, weights):
        for weight in weights:
            stream, normed = add_rms_norm(stream, x @ weight, scale, 1e-5, kernels=setting.kernels)
            # The next one waits for this one, as a layer does for the one before.
            x = x + normed[:, :1]
        return stream, x

    moved = 2.0 * (depth * width + num_rows * (depth + 3 * width))
    return _measure(run, (x, stream, weights), options, setting, count, moved)


def _measure(
    run: Callable[..., Any],
    given: tuple[Any, ...],
    options: Mapping[str, Any],
    setting: Setting,
    calls: int,
    num_bytes: float,
) -> dict[str, Any]:
    """Times of a program that is compiled with XLA's `options`, which a CPU would not know."""
    options = {} if setting.is_cpu else dict(options)
    compiled = jax.jit(run).lower(*given).compile(compiler_options=options)
    return measure(partial(compiled, *given), setting, calls=calls, num_bytes=num_bytes)
