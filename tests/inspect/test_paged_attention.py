"""Paged attention at the shapes of real models, compiled for an H200: resources and traffic."""

from dataclasses import asdict, dataclass, replace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention import paged_attention

CAPACITY = 8192  # tokens of a request
NUM_PAGES, NUM_LAYERS = 8192, 32

pytestmark = pytest.mark.h200


@dataclass(frozen=True)
class Case:
    batch: int
    num_rows: int
    num_heads: int
    num_kv_heads: int
    dim: int
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None  # the same
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    @property
    def kernel(self):
        """The name of the first kernel."""
        return "paged_attention" + (f"_window_{self.window}" if self.window else "")

    def __str__(self):
        given = asdict(self).values()
        return "-".join(str(value) for value in given if value not in (None, False))


LLAMA_8B = [
    Case(batch, num_rows, 32, 8, 128)
    for batch, num_rows in ((1, 8), (8, 1), (8, 4), (64, 1), (64, 4), (256, 4), (1, 512))
]
QWEN = [
    Case(batch, num_rows, num_heads, 4, 256)
    for num_heads in (16, 24)  # of Qwen3.5-4B and Qwen3.5-27B
    for batch, num_rows in ((1, 8), (32, 4), (1, 512))
]
SMALL = [Case(8, 4, 32, 8, 64), Case(1, 16, 8, 8, 64), Case(1, 512, 14, 2, 64)]
# A step and a prompt of each dimension.
FEW = [Case(8, 4, 32, 8, 128), *QWEN[1:3], SMALL[1]]
# The scales of a pool by its dtype.
SCALES = {
    "float8_e4m3fn": lambda pool: jax.ShapeDtypeStruct((pool[0], 2), jnp.float32),
    "int8": lambda pool: jax.ShapeDtypeStruct(pool[:5], jnp.float32),
}
CASES = [
    *(*LLAMA_8B, *QWEN, *SMALL),
    *(replace(case, page_size=64) for case in FEW),
    *(replace(case, dtype="float32") for case in FEW),
    *(replace(case, kv_dtype=dtype) for case in FEW for dtype in SCALES),
    Case(1, 4, 32, 1, 128),  # one key head for all
    Case(64, 1, 32, 8, 128, window=1024),
    Case(8, 16, 32, 8, 128, soft_cap=50.0, window=1024),
    Case(1, 512, 16, 4, 256, soft_cap=50.0, window=1024),
    *(Case(8, 4, 64, 8, 64, window=window, has_sinks=True) for window in (None, 128)),
]


def program(**case):
    """For compile.py: return the jitted function, its shapes, and no static arguments."""
    case, shape = Case(**case), jax.ShapeDtypeStruct
    kv_dtype = jnp.dtype(case.kv_dtype or case.dtype)
    num_pages = NUM_PAGES if case.kv_dtype is None else 2 * NUM_PAGES  # 8-bit numbers
    pool = (NUM_LAYERS, num_pages, case.page_size, 2, case.num_kv_heads, case.dim)
    shapes = (
        shape((case.batch, case.num_rows, case.num_heads, case.dim), case.dtype),
        shape(pool, kv_dtype),
        shape((), jnp.int32),
        shape((case.batch, CAPACITY // case.page_size), jnp.int32),
        shape((case.batch, case.num_rows), jnp.int32),
        SCALES[case.kv_dtype](pool) if case.kv_dtype else None,
        shape((case.num_heads,), case.dtype) if case.has_sinks else None,
    )
    settings = {"window": case.window, "soft_cap": case.soft_cap, "kernels": "triton"}

    @jax.jit
    def attend(*arrays):
        *arrays, scales, sinks = arrays
        return paged_attention(*arrays, scales=scales, sinks=sinks, **settings)

    return attend, shapes, {}


@pytest.fixture(scope="module")
def reports(compile_for_h200):
    """Reports by case."""
    cases = {case: ("program", asdict(case)) for case in CASES}
    return compile_for_h200(__file__, cases, resources=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_fit_the_device(reports, fitting_kernels, case):
    """There are one or two kernels. bf16 products use tensor cores, and f32 is not rounded.

    With enough rows, the products are Hopper's (wgmma). The pool is not copied: temporary memory
    holds only the splits' partial results, a quarter of the pool of one layer.
    """
    report, kernels = reports[case], fitting_kernels(reports[case])
    assert kernels.keys() <= {case.kernel, "paged_attention_combine"}
    assert report["top_level"] == ["kCustomKernel"] * len(kernels)
    rows = case.num_rows * case.num_heads // case.num_kv_heads
    of_bf16 = [f"{'wgmma.mma_async' if rows > 32 else 'mma.sync'} bf16"]
    assert list(kernels[case.kernel].products) == ([] if case.dtype == "float32" else of_bf16)
    layer = 2 * NUM_PAGES * case.page_size * case.num_kv_heads * case.dim * 2
    assert report["memory"]["temp"] < layer // 4
