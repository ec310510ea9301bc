"""Attention over latents at the shapes of real models, compiled for an H200."""

from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.latent_attention import latent_attention
from specjax.device.cache.latent import LatentAttention
from specjax.device.cache.latent_prompt import attend_plainly
from specjax.device.cache.pages import Pages
from specjax.device.cache.rows import CachedRows
from specjax.device.weights.latent_up import LatentUp
from specjax.engine.xla_options import GPU_OPTIONS

CAPACITY = 8192  # tokens of a request
NUM_PAGES, NUM_LAYERS, RANK, ROTATED = 8192, 8, 512, 64
WIDTH = 2048  # of a chunk

pytestmark = pytest.mark.h200


@dataclass(frozen=True)
class Case:
    batch: int
    num_rows: int
    num_heads: int
    page_size: int = 16
    dtype: str = "bfloat16"
    pool: str | None = None  # its dtype, if another

    def __str__(self):
        return "-".join(map(str, asdict(self).values()))


POOLS = "float8_e4m3fn", "int8"
CASES = [
    # GLM-4.7-Flash has 20 heads; DeepSeek-V3 128, of which 16 are on one of eight devices.
    *(Case(batch, num_rows, 20) for batch in (1, 64) for num_rows in (1, 4)),
    *(Case(8, 4, 16), Case(8, 1, 128), Case(1, 8, 128, page_size=64), Case(1, 512, 20)),
    *(Case(batch, 4, 20, pool=pool) for batch in (1, 64) for pool in POOLS),
    *(Case(1, 8, 128, page_size=64, pool=pool) for pool in POOLS),
    *(Case(8, 4, 20, dtype="float32"), Case(1, 1, 16, dtype="float32", page_size=64)),
]
# Heads, D_n, D_v.
PLAIN = {"GLM-4.7-Flash": (20, 192, 256), "DeepSeek-V3": (128, 128, 128)}


def program(**case):
    """For compile.py: return attention over the latents themselves (the absorbed form)."""
    case, width = Case(**case), RANK + ROTATED
    places = NUM_LAYERS, NUM_PAGES * (2 if case.pool else 1), case.page_size
    shapes = (
        ((case.batch, case.num_rows, case.num_heads, width), case.dtype),
        ((*places, width), case.pool or case.dtype),
        ((), jnp.int32),
        ((case.batch, CAPACITY // case.page_size), jnp.int32),
        ((case.batch, case.num_rows), jnp.int32),
        ((*places, 2) if case.pool == "int8" else (NUM_LAYERS, 2), jnp.float32),
    )
    shapes = shapes if case.pool else shapes[:-1]

    @jax.jit
    def attend(*arrays):
        *arrays, scales = arrays if case.pool else (*arrays, None)
        return latent_attention(*arrays, rank=RANK, scale=0.1, scales=scales, kernels="triton")

    return attend, tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes), {}


def kind_of(name):
    num_heads, nope_dim, value_dim = PLAIN[name]
    return LatentAttention(
        num_layers=NUM_LAYERS,
        num_heads=num_heads,
        rank=RANK,
        nope_dim=nope_dim,
        rope_dim=ROTATED,
        value_dim=value_dim,
        scale=0.1,
        is_interleaved=True,
    )


def chunk(name):
    """For compile.py: return the attention of a prompt's chunk, over keys and values of heads."""
    kind = kind_of(name)
    shapes = {
        "positions": ((WIDTH,), jnp.int32),
        "table": ((1, CAPACITY // 16), jnp.int32),
        "pool": ((NUM_LAYERS, NUM_PAGES, 16, RANK + ROTATED), jnp.bfloat16),
        "layer": ((), jnp.int32),
        "nope": ((WIDTH, kind.num_heads, kind.nope_dim), jnp.bfloat16),
        "rope": ((WIDTH, kind.num_heads, ROTATED), jnp.bfloat16),
        "up": ((kind.num_heads * (kind.nope_dim + kind.value_dim), RANK), jnp.bfloat16),
    }

    @jax.jit
    def attend(positions, table, *arrays):
        pool, *arrays, up = arrays
        rows = CachedRows(positions, table, folds=True, kernels="triton")
        weight = LatentUp(up, kind.num_heads, kind.nope_dim)
        return attend_plainly(rows, Pages(pool), *arrays, weight, kind.scale)

    return attend, tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes.values()), {}


@pytest.fixture(scope="module")
def reports(compile_for_h200):
    """Reports of `program` by case, and of `chunk` by model."""
    cases = {case: ("program", asdict(case)) for case in CASES}
    cases |= {name: ("chunk", {"name": name}) for name in PLAIN}
    return compile_for_h200(__file__, cases, resources=True, options=GPU_OPTIONS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_fit_the_device(reports, fitting_kernels, case):
    """There are one or two kernels. bf16 products use tensor cores, and the pool is not copied."""
    kernels = fitting_kernels(reports[case])
    assert kernels.keys() <= {"latent_attention", "latent_attention_combine"}
    launched = [one["name"] for one in reports[case]["thunks"] if one["kind"] == "kCustomKernel"]
    assert len(launched) == len(kernels)
    products = kernels["latent_attention"].products
    assert bool(products) == (case.dtype == "bfloat16")
    assert all(product.endswith("bf16") for product in products)
    layer = NUM_PAGES * case.page_size * (RANK + ROTATED) * 2
    assert reports[case]["memory"]["temp"] < layer // 4


@pytest.mark.parametrize("name", PLAIN)
def test_a_chunk_stays_within_the_memory_planned(reports, fitting_kernels, name):
    """Keys and values of only one block of the context exist at a time."""
    assert any("paged_attention" in kernel for kernel in fitting_kernels(reports[name]))
    assert 0 < reports[name]["memory"]["temp"] <= WIDTH * kind_of(name).row_size * 2
