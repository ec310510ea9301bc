"""Registers, spills, shared memory and launches of kernels, as ptxas and XLA report them."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.triton_call import triton_call

pytestmark = pytest.mark.h200

ROWS, COLUMNS = 128, 256


def scale(x, out):
    row = pl.program_id(0)
    out[row, :] = x[row, :] * 2


def crowd(x, out):
    """A kernel whose tile needs twice the registers of one warp."""
    tile = x[...]
    out[...] = tile * tile.sum(axis=0)[None] + jnp.exp(tile) * tile.sum(axis=1)[:, None]


def triton(num_warps, kernels, size=(ROWS, COLUMNS)):
    """For compile.py: run Triton kernels of this file, given by name, one after another."""

    @jax.jit
    def run(x):
        for name in kernels:
            (x,) = triton_call(
                globals()[name],
                [x],
                [jax.ShapeDtypeStruct(x.shape, x.dtype)],
                name=name,
                grid=(ROWS,) if name == "scale" else (1,),
                num_warps=num_warps,
            )
        return x

    return run, (jax.ShapeDtypeStruct(tuple(size), jnp.float32),), {}


def mosaic():
    """For compile.py: run a kernel of Mosaic."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def double(x, out):
        out[...] = x[...] * 2

    run = plgpu.kernel(
        double,
        out_type=jax.ShapeDtypeStruct((128, 128), jnp.float32),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="doubling",
    )
    return jax.jit(run), (jax.ShapeDtypeStruct((128, 128), jnp.float32),), {}


@pytest.fixture(scope="module")
def resources(compile_for_h200, resources_of):
    """Resources by case, then by kernel name."""
    cases = {
        "both": ("triton", {"num_warps": 4, "kernels": ["scale", "scale"]}),
        "crowd": ("triton", {"num_warps": 1, "kernels": ["crowd"], "size": (64, 128)}),
        "mosaic": ("mosaic", {}),
    }
    # Mosaic's kernels name their file with its folder, so their digests hold for one folder only.
    made = compile_for_h200(__file__, cases, resources=True, kept=None)
    return {name: resources_of(report) for name, report in made.items()}


def test_a_kernel_that_spills_is_found(resources):
    """A kernel that does not spill is not reported."""
    (scale,) = resources["both"].values()  # the second call is of the same kernel
    assert scale.name == scale.kernel == "scale" and not scale.spills
    assert scale.grid == (ROWS, 1, 1) and scale.threads == (128, 1, 1)
    assert 4 < scale.registers < 64
    assert scale.static_shared_bytes == scale.dynamic_shared_bytes == 0
    (crowd,) = resources["crowd"].values()
    assert crowd.spills and crowd.spill_store_bytes > 0 and crowd.spill_load_bytes > 0
    assert crowd.registers >= 64 and crowd.threads == (32, 1, 1)


def test_mosaic_tells_of_its_kernels(resources):
    doubling = resources["mosaic"]["doubling"]
    assert doubling.is_mosaic and not doubling.spills and doubling.registers > 0
    assert doubling.grid is None
