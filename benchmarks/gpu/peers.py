"""Times kernels of other libraries, if installed, for the same work on the same card."""

import importlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from problems import (
    ATTENTION_HEADS,
    DELTA_HEADS,
    PAGE_SIZE,
    TINY_ATTENTION,
    TINY_HEADS,
    Problem,
    attention,
    delta_rule,
    normal,
    pool,
)
from timing import REPEATS, Setting, attempt, launch_times, measure, spread

DTYPE = "bfloat16"


def time_attention(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time attention of one token per request. All requests have the same length.

    Torch's cache is contiguous; the other caches are paged.
    """
    for model, heads in setting.pick(ATTENTION_HEADS, {"tiny": TINY_ATTENTION}).items():
        for batch, context in setting.pick(((64, 4096), (1, 4096)), ((2, 64),)):
            row = {"what": "peer attention", "model": model, "batch": batch, "context": context}
            moved = 2 * 2 * batch * context * heads[1] * heads[2]
            for peer, function in PEERS_OF_ATTENTION.items():
                timed = partial(function, heads, batch, context, setting, moved)
                yield try_peer(row | {"peer": peer}, timed)


def _torch_attention(
    heads: tuple[int, int, int], batch: int, context: int, setting: Setting, moved: int
) -> dict[str, Any]:
    torch = importlib.import_module("torch")
    device = setting.pick("cuda", "cpu")
    num_heads, num_kv_heads, dim = heads

    def random(*shape):
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    pairs = [[random(batch, num_kv_heads, context, dim) for _ in "kv"] for _ in range(4)]
    q = random(batch, num_heads, 1, dim)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
    times = torch_times(lambda: [attend(q, *pair) for pair in pairs], setting)
    return _figures(times, len(pairs), moved) | {"peer_version": torch.__version__}


def _flashinfer_attention(
    heads: tuple[int, int, int], batch: int, context: int, setting: Setting, moved: int
) -> dict[str, Any]:
    flashinfer = importlib.import_module("flashinfer")
    torch = importlib.import_module("torch")
    num_heads, num_kv_heads, dim = heads
    columns = -(-context // PAGE_SIZE)
    kinds = {"device": "cuda", "dtype": torch.bfloat16}
    pools = [
        torch.randn(batch * columns, 2, PAGE_SIZE, num_kv_heads, dim, **kinds) for _ in range(4)
    ]
    q = torch.randn(batch, num_heads, dim, **kinds)
    pages = torch.randperm(batch * columns, dtype=torch.int32, device="cuda")
    ends = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * columns
    last = torch.full((batch,), context - (columns - 1) * PAGE_SIZE, dtype=torch.int32)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(2**27, dtype=torch.uint8, device="cuda"), "NHD", use_tensor_cores=True
    )
    wrapper.plan(
        ends, pages, last.cuda(), num_heads, num_kv_heads, dim, PAGE_SIZE,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    times = torch_times(lambda: [wrapper.run(q, kv) for kv in pools], setting)
    return _figures(times, len(pools), moved) | {"peer_version": flashinfer.__version__}


def _jax_attention(
    heads: tuple[int, int, int], batch: int, context: int, setting: Setting, moved: int
) -> dict[str, Any]:
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")
    num_heads, num_kv_heads, dim = heads
    columns = context // PAGE_SIZE
    pages = [
        normal(i, (num_kv_heads, 2 * batch * columns, PAGE_SIZE, dim), DTYPE) for i in range(2)
    ]
    tables = np.random.default_rng(0).permutation(2 * batch * columns).astype(np.int32)
    items = tuple(jnp.asarray(tables.reshape(2, batch, columns)))
    q, lengths = normal(3, (batch, num_heads, dim), DTYPE), jnp.full(batch, context, jnp.int32)

    # The kernel divides a context into whole blocks of pages.
    block = min(8, columns)
    splits = min(16, columns // block)

    @jax.jit
    def run(q, pages, items, lengths):
        return [
            module.paged_attention(
                q, *pages, table, lengths, pages_per_compute_block=block, k_splits=splits,
                interpret=setting.is_cpu,
            )
            for table in items
        ]  # fmt: skip

    launch = partial(run, q, pages, items, lengths)
    return measure(launch, setting, calls=len(items), num_bytes=moved)


def _reference_attention(
    heads: tuple[int, int, int], batch: int, context: int, setting: Setting, moved: int
) -> dict[str, Any]:
    kv = pool(heads, setting.pick(2**31, 2**18), DTYPE)
    return _ours(attention(heads, batch, 1, context, DTYPE, kv), "reference", setting)


def _our_attention(
    heads: tuple[int, int, int], batch: int, context: int, setting: Setting, moved: int
) -> dict[str, Any]:
    kv = pool(heads, setting.pick(2**31, 2**18), DTYPE)
    return _ours(attention(heads, batch, 1, context, DTYPE, kv), setting.kernels, setting)


def _ours(problem: Problem, kernels: str, setting: Setting) -> dict[str, Any]:
    launch, calls = problem.launcher(kernels), len(problem.items)
    return measure(launch, setting, calls=calls, num_bytes=problem.num_bytes)


PEERS_OF_ATTENTION = {
    "specjax": _our_attention,
    "FlashInfer": _flashinfer_attention,
    "torch SDPA, contiguous": _torch_attention,
    "jax paged_attention": _jax_attention,
    "plain jax (our reference)": _reference_attention,
}


def time_delta_rule(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time the gated delta rule for T tokens.

    The kernel of flash-linear-attention does less: no convolution, no gates and no lazy states.
    """
    heads = setting.pick(DELTA_HEADS["27B"], TINY_HEADS)
    for batch, rows in setting.pick(((64, 1), (64, 4), (1, 4)), ((2, 2),)):
        row = {"what": "peer delta rule", "model": "27B", "batch": batch, "rows": rows}
        for peer, kernels in (
            ("specjax", setting.kernels),
            ("plain jax (our reference)", "reference"),
        ):
            problem = partial(delta_rule, heads, batch, rows, DTYPE)
            yield try_peer(
                row | {"peer": peer}, lambda p=problem, k=kernels: _ours(p(), k, setting)
            )
        timed = partial(_fla_delta_rule, heads, batch, rows, setting)
        yield try_peer(row | {"peer": "flash-linear-attention"}, timed)


def _fla_delta_rule(heads: Any, batch: int, rows: int, setting: Setting) -> dict[str, Any]:
    fla = importlib.import_module("fla.ops.gated_delta_rule")
    torch = importlib.import_module("torch")

    def random(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", dtype=dtype)

    # Key heads are repeated to the number of value heads, as the kernel requires.
    tokens = (batch, rows, heads.num_values)
    q, k = (random(*tokens, heads.key_dim) for _ in "qk")
    v, beta = random(*tokens, heads.value_dim), random(*tokens).sigmoid()
    g = -random(*tokens, dtype=torch.float32).abs()
    size = (batch, heads.num_values, heads.key_dim, heads.value_dim)
    states = [random(*size, dtype=torch.float32) for _ in range(4)]

    def launch():
        return [
            fla.fused_recurrent_gated_delta_rule(
                q, k, v, g, beta, initial_state=state, output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            for state in states
        ]  # fmt: skip

    moved = 2 * 4 * int(np.prod(size))
    return _figures(torch_times(launch, setting), len(states), moved)


def torch_times(launch: Callable[[], Any], setting: Setting) -> list[float]:
    """Return the seconds per launch of torch programs, like `launch_times`."""
    torch = importlib.import_module("torch")
    if setting.is_cpu:
        return launch_times(lambda: launch() and None, setting)

    def seconds(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            launch()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    for _ in range(3):
        seconds(1)
    count = max(1, int(0.02 / seconds(3)))
    return [seconds(count) for _ in range(REPEATS)]


def _figures(times: list[float], calls: int, moved: float) -> dict[str, Any]:
    wall = spread(times, 1e6 / calls)
    gbps = moved / wall["median"] / 1e3
    return {"wall_us": wall, "timed_by": "wall", "bytes": moved, "gbps": gbps}


def try_peer(row: dict[str, Any], function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call `attempt`. A library that is not installed is reported as absent, not as an error."""

    def run() -> dict[str, Any]:
        try:
            return function()
        except ImportError as error:
            return {"absent": str(error)[:200]}

    return attempt(row, run)
