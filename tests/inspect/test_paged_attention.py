"""Paged attention at the shapes of real models, as compiled for an H200: what its kernels take."""

from dataclasses import asdict, dataclass, replace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention import paged_attention
from specjax.inspect.resources import Resources

CAPACITY = 8192  # tokens of a request
NUM_PAGES, NUM_LAYERS = 8192, 32
SHARED_MEMORY = 227 * 1024  # that one program may have

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


def program(**case):
    """For the compiler: the jitted function, its shapes, and nothing static."""
    case = Case(**case)
    kv_dtype = jnp.dtype(case.kv_dtype or case.dtype)
    pool = (NUM_LAYERS, NUM_PAGES, case.page_size, 2, case.num_kv_heads, case.dim)
    shapes: tuple[jax.ShapeDtypeStruct | None, ...] = (
        jax.ShapeDtypeStruct((case.batch, case.num_rows, case.num_heads, case.dim), case.dtype),
        jax.ShapeDtypeStruct(pool, kv_dtype),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((case.batch, CAPACITY // case.page_size), jnp.int32),
        jax.ShapeDtypeStruct((case.batch, case.num_rows), jnp.int32),
    )
    is_scaled = kv_dtype == jnp.float8_e4m3fn
    shapes += (jax.ShapeDtypeStruct((2, case.num_kv_heads), jnp.float32) if is_scaled else None,)
    shapes += (jax.ShapeDtypeStruct((case.num_heads,), case.dtype) if case.has_sinks else None,)

    @jax.jit
    def attend(q, kv, layer, page_table, positions, kv_scale, sinks):
        return paged_attention(
            q,
            kv,
            layer,
            page_table,
            positions,
            window=case.window,
            soft_cap=case.soft_cap,
            kv_scale=kv_scale,
            sinks=sinks,
            kernels="triton",
        )

    return attend, shapes, {}


LLAMA_8B = [
    Case(batch, num_rows, 32, 8, 128)
    for batch, num_rows in (*((1, 8), (8, 1), (8, 4), (64, 1), (64, 4), (256, 4), (1, 512)),)
]
QWEN = [
    Case(batch, num_rows, num_heads, 4, 256)
    for num_heads in (16, 24)  # of Qwen3.5-4B and Qwen3.5-27B
    for batch, num_rows in ((1, 8), (32, 4), (1, 512))
]
SMALL = [Case(8, 4, 32, 8, 64), Case(1, 16, 8, 8, 64), Case(1, 512, 14, 2, 64)]
# A step and a prompt of each dimension.
FEW = [Case(8, 4, 32, 8, 128), *QWEN[1:3], SMALL[1]]
OTHERS = [
    Case(1, 4, 32, 1, 128),  # one key head for all
    Case(64, 1, 32, 8, 128, window=1024),
    Case(8, 16, 32, 8, 128, soft_cap=50.0, window=1024),
    Case(1, 512, 16, 4, 256, soft_cap=50.0, window=1024),
    *(Case(8, 4, 64, 8, 64, window=window, has_sinks=True) for window in (None, 128)),
    *(replace(case, kv_dtype="float8_e4m3fn") for case in FEW[:3]),
]
CASES = [
    *LLAMA_8B,
    *QWEN,
    *SMALL,
    *(replace(case, page_size=64) for case in FEW),
    *(replace(case, dtype="float32") for case in FEW),
    *OTHERS,
]


@pytest.fixture(scope="module")
def reports(compile_for_h200):
    """Reports by case."""
    requests = [{"function": "program", "arguments": asdict(case)} for case in CASES]
    made = compile_for_h200(__file__, requests, resources=True, timeout=1200)
    return dict(zip(CASES, made, strict=True))


def kernels_of(report):
    """Resources by name."""
    return {one.name: one for one in (Resources(**fields) for fields in report["resources"])}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_fit_the_device(reports, case):
    """One kernel or two, in which nothing spills."""
    kernels = kernels_of(reports[case])
    assert kernels.keys() <= {case.kernel, "paged_attention_combine"}
    assert reports[case]["top_level"] == ["kCustomKernel"] * len(kernels)
    for kernel in kernels.values():
        assert not kernel.spills, kernel
        assert kernel.shared_bytes <= SHARED_MEMORY, kernel


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_of_the_dtype(reports, case):
    """bf16 on tensor cores, those of Hopper where there are rows for them; f32 as it is."""
    products = kernels_of(reports[case])[case.kernel].products
    if case.dtype == "float32":
        assert not products
    else:
        rows = case.num_rows * case.num_heads // case.num_kv_heads
        assert list(products) == [f"{'wgmma.mma_async' if rows > 32 else 'mma.sync'} bf16"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_pool_is_not_copied(reports, case):
    """Scratch is the partials of the splits: a quarter of what one layer of the pool takes."""
    layer = 2 * NUM_PAGES * case.page_size * case.num_kv_heads * case.dim * 2
    assert reports[case]["memory"]["temp"] < layer // 4
