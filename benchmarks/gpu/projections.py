"""Times each matmul of Llama-3.1-8B, followed by a norm, with several XLA options."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from kernels import DTYPE
from problems import normal
from timing import Setting, attempt, measure

from pallas_kernels.rms_norm import add_rms_norm
from specjax.engine.xla_options import GPU_OPTIONS

# XLA options by which a matmul is compiled differently. "whole" has the engine's options, by which
# autotuning picks from cuBLAS and Triton. "split" sums parts of the depth in another kernel.
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


def time_matmuls(setting: Setting, *, num_rows: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Time matmuls with each number of rows, and the norm that reads their results.

    A step with 256 rows (64 requests, three drafts) took 10.3 ms on an H100, although reading its
    bytes takes only 7 ms.
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
            # The next matmul must wait for this norm, as in a model.
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
    """Return the times of a program that is compiled with the XLA options `options`.

    A CPU does not support the options, so they are ignored there.
    """
    options = {} if setting.is_cpu else dict(options)
    compiled = jax.jit(run).lower(*given).compile(compiler_options=options)
    return measure(partial(compiled, *given), setting, calls=calls, num_bytes=num_bytes)
