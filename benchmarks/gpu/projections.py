"""Projections with what stands around them: as XLA makes them, and in one launch each."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from kernels import DTYPE, tune
from problems import CACHE_BYTES, Problem, normal
from timing import Setting, attempt, launch_times, measure, spread

from pallas_kernels.fused_linear import Norm, fused_linear
from pallas_kernels.fused_linear.triton import (
    NUMBERS,
    FusedLinearTuning,
    choose_config,
    fused_linear_triton,
)
from pallas_kernels.rms_norm import add_rms_norm
from specjax.engine.xla_options import GPU_OPTIONS

EPS = 1e-5
WAYS = "fused", "apart"
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

    @property
    def num_weights(self) -> int:
        return self.depth * self.width * (1 + self.is_gated)


Layer = Mapping[str, Part]


def _layer(dim: int, qkv: int, heads: int, inner: int) -> Layer:
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
TINY_LAYER = _layer(32, 48, 32, 64)


def projection(num_rows: int, part: Part, dtype: Any, num_items: int = 0) -> Problem:
    """A part of a layer, in one launch; each call is of another layer."""
    itemsize = jnp.dtype(dtype).itemsize
    num_items = num_items or max(2, min(32, CACHE_BYTES // (itemsize * part.num_weights)))
    items = tuple(
        (normal(i, (num_rows, part.depth), dtype), _weight(i, part, dtype))
        for i in range(num_items)
    )
    around = 1 + normal(98, (part.depth,), dtype) / 8, normal(99, (num_rows, part.width), dtype)

    def call(around, item, kernels, config):
        if config is None:
            return around, fused_linear(*item, **_around(part, *around), kernels=kernels)
        run = partial(fused_linear_triton, config=config, interpret=kernels == "interpret")
        return around, run(*item, **_around(part, *around))

    moved = part.num_weights + num_rows * (part.depth + part.width)
    return Problem(around, items, call, itemsize * moved)


def _weight(seed: int, part: Part, dtype: Any) -> jax.Array:
    shape = part.depth, part.width * (1 + part.is_gated)
    return normal(50 + seed, shape, dtype) / part.depth**0.5


def _around(part: Part, scale: jax.Array, stream: jax.Array) -> dict[str, Any]:
    norm, residual = (Norm(scale, EPS, False), None) if part.has_norm else (None, stream)
    return {"norm": norm, "is_gated": part.is_gated, "residual": residual}


def time_projections(setting: Setting) -> Iterator[dict[str, Any]]:
    """Layers' projections in one launch and apart, and with other tiles."""
    layers = setting.pick(LAYERS, {"tiny": TINY_LAYER})
    parts = [(model, name, part) for model, layer in layers.items() for name, part in layer.items()]
    for model, name, part in setting.pick(parts, parts[2:]):
        for way in WAYS:
            row = {"what": "layer's projection", "model": model, "part": name, "rows": 8}
            yield attempt(row | {"way": way}, partial(_time_part, part, way, setting))
    for model, name, part in setting.pick(parts, parts[2:]):
        row = {"what": "fused_linear", "model": model, "part": name, "rows": 8}
        yield from _time_tiles(row, part, setting)


def _time_tiles(row: dict[str, Any], part: Part, setting: Setting) -> Iterator[dict[str, Any]]:
    """Numbers of stages, and blocks of as many numbers of the weight."""
    base = choose_config(part.depth, part.width, part.is_gated, part.has_norm, DTYPE)
    others = [replace(base, num_stages=stages) for stages in (3, 4, 6, 8)]
    for columns in 64, 32, 16:
        for depth, warps in (128, 2), (64, 4), (256, 4):
            tiles = max(1, NUMBERS // (columns * (1 + part.is_gated) * depth))
            others.append(FusedLinearTuning(columns, depth, tiles, warps, base.num_stages))
    make = partial(projection, 8, part, DTYPE, setting.pick(0, 2))
    yield from tune(row, make, base, setting.pick(others, others[:1]), setting)


def time_layers(setting: Setting) -> Iterator[dict[str, Any]]:
    """Layers without their attention, in a CUDA graph.

    Unlike the times of kernels, these have what passes between one launch and the next.
    """
    for model, layer in setting.pick(LAYERS, {"tiny": TINY_LAYER}).items():
        for num_rows in setting.pick((8, 1, 16), (3,)):
            for way in WAYS:
                row = {"what": "layer", "model": model, "rows": num_rows, "way": way}
                yield attempt(row, partial(_time_layer, layer, num_rows, way, setting))


def _time_part(part: Part, way: str, setting: Setting) -> dict[str, Any]:
    """A part in one launch, or apart: the sum is then with the norm after it, so that a layer's
    parts add up to the same."""
    problem = projection(8, part, DTYPE, setting.pick(0, 2))

    def run(around, items):
        if way == "fused":
            return [problem.call(around, item, setting.kernels, None)[1] for item in items]
        return [_apart(part, x, x, around[0], weight, setting.kernels) for x, weight in items]

    given, calls = (problem.state, problem.items), len(problem.items)
    return _measure(run, given, GPU_OPTIONS, setting, calls, problem.num_bytes)


def _apart(
    part: Part, stream: jax.Array, x: jax.Array, scale: jax.Array, weight: jax.Array, kernels: str
) -> tuple[jax.Array, jax.Array]:
    """The stream, to which x is added if it is normed, and the product."""
    if part.has_norm:
        stream, x = add_rms_norm(stream, x, scale, EPS, kernels=kernels)
    y = x @ weight
    if part.is_gated:
        gate, up = jnp.split(y, 2, axis=-1)
        y = jax.nn.silu(gate) * up
    return stream, y


def _time_layer(layer: Layer, num_rows: int, way: str, setting: Setting) -> dict[str, Any]:
    """Wall microseconds of each of several layers."""
    num_bytes = 2 * sum(part.num_weights for part in layer.values())
    count = setting.pick(max(2, CACHE_BYTES // num_bytes), 2)
    weights = [
        {name: _weight(i, part, DTYPE) for name, part in layer.items()} for i in range(count)
    ]
    stream, attended = (normal(0, (num_rows, layer[name].depth), DTYPE) for name in ("qkv", "o"))
    scale = jnp.ones(stream.shape[1], DTYPE)

    def run(stream, attended, weights):
        delta, made = jnp.zeros_like(stream), []
        for of_layer in weights:
            given = layer, of_layer, scale, attended, setting.kernels
            if way == "fused":
                stream, qkv = _fused_layer(stream, *given)
            else:
                stream, delta, qkv = _layer_apart(stream, delta, *given)
            made.append(qkv)
        return stream, delta, made

    options = {} if setting.is_cpu else dict(GPU_OPTIONS)
    given = stream, attended, weights
    compiled = jax.jit(run).lower(*given).compile(compiler_options=options)
    wall = spread(launch_times(partial(compiled, *given), setting), 1e6 / count)
    return {"wall_us": wall, "bytes": num_bytes, "gbps": num_bytes / wall["median"] / 1e3}


def _fused_layer(stream, layer, weights, scale, attended, kernels):
    def project(name, x, stream):
        around = _around(layer[name], scale, stream)
        return fused_linear(x, weights[name], **around, kernels=kernels)

    qkv = project("qkv", stream, stream)
    stream = project("o", attended, stream)
    hidden = project("gate_up", stream, stream)
    return project("down", hidden, stream), qkv


def _layer_apart(stream, delta, layer, weights, scale, attended, kernels):
    def project(name, x, stream):
        return _apart(layer[name], stream, x, scale, weights[name], kernels)

    stream, qkv = project("qkv", delta, stream)
    _, delta = project("o", attended, stream)
    stream, hidden = project("gate_up", delta, stream)
    return *project("down", hidden, stream), qkv


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
