"""Every implementation of the grouped product, compared with a loop over rows in f64."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.triton import dialect

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.triton import grouped_matmul_triton
from pallas_kernels.grouped_packed_matmul.triton import grouped_packed_matmul_triton
from pallas_kernels.grouped_scaled_matmul.triton import grouped_scaled_matmul_triton
from pallas_kernels.packed_matmul import FourBits

# Sizes of the groups are data: cases with as many rows and as many groups are one program.
CASES = {
    "one-row": (1,),
    # Blocks of many rows, with 433 of them in 9 groups.
    "all-in-the-first": (433, 0, 0, 0, 0, 0, 0, 0, 0),
    "all-in-the-last": (0, 0, 0, 0, 0, 0, 0, 0, 433),
    "blocks": (8, 16, 64, 128, 0, 0, 217, 0, 0),
    "around-blocks": (7, 9, 1, 15, 17, 63, 65, 127, 129),
    "gaps": (0, 3, 0, 0, 12, 0, 413, 5, 0),
    # Blocks of 16, with 24 in 24.
    "more-groups-than-rows": (0, 1, 0, 0, 2, 0, 17, 0, 0, 0, 1, 0, *(0,) * 11, 3),
    "one-each": (1,) * 24,
    "no-rows": (0, 0, 0),
}


@cache
def compiled(kernels):
    return jax.jit(partial(grouped_matmul, kernels=kernels))


@pytest.fixture
def multiply(kernels):
    """A compiled implementation."""
    return compiled(kernels)


def arguments(group_sizes, dtype="float32", dims=(24, 40), seed=0):
    """Return x, weights and group sizes. Matrices that no row needs are NaN."""
    rng = np.random.default_rng(seed)
    sizes = np.array(group_sizes, np.int32)
    x = rng.normal(size=(sizes.sum(), dims[0]))
    weights = rng.normal(size=(len(sizes), *dims)) / np.sqrt(dims[0])
    weights[sizes == 0] = np.nan
    return x.astype(jnp.dtype(dtype)), weights.astype(jnp.dtype(dtype)), sizes


def product_by_definition(x, weights, group_sizes):
    x, weights = (z.astype(np.float64) for z in (x, weights))
    groups = np.repeat(np.arange(len(weights)), group_sizes)
    products = [row @ weights[group] for row, group in zip(x, groups, strict=True)]
    return np.array(products).reshape(len(x), weights.shape[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, "float32") for name in CASES),
        ("around-blocks", "bfloat16"),
        ("more-groups-than-rows", "bfloat16"),
    ],
)
def test_matches_the_definition(multiply, name, dtype):
    """With bf16, only the result is rounded."""
    inputs = arguments(CASES[name], dtype)
    out, expected = multiply(*inputs), product_by_definition(*inputs)
    assert out.dtype == dtype and out.shape == expected.shape
    rtol = 1e-6 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=rtol, atol=2e-6)


def test_the_gradient_of_the_reference():
    """Training a mixture uses this gradient. It is compared with the definition in f64."""
    x, weights, sizes = arguments(CASES["gaps"])
    weights = np.nan_to_num(weights)
    loss_by = np.random.default_rng(1).normal(size=(len(x), weights.shape[2])).astype(np.float32)

    @jax.jit
    @partial(jax.grad, argnums=(0, 1))
    def gradients(x, weights, sizes):
        return (grouped_matmul(x, weights, sizes, kernels="reference") * loss_by).sum()

    by_x, by_weights = gradients(x, weights, sizes)
    expected = product_by_definition(loss_by, weights.swapaxes(1, 2), sizes)
    np.testing.assert_allclose(by_x, expected, rtol=1e-5, atol=1e-5)
    groups = np.repeat(np.arange(len(weights)), sizes)
    for group in range(len(weights)):
        own = groups == group
        expected = x[own].astype(np.float64).T @ loss_by[own].astype(np.float64)
        np.testing.assert_allclose(by_weights[group], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.every_jax
def test_sums_of_bf16_are_f32(multiply):
    """The terms are 512, 1 and -512. A sum in bf16 would lose the 1."""
    x, weights, sizes = arguments(CASES["one-each"], "bfloat16")
    x[:], weights[:] = 0, 1
    x[:, [0, 9, 23]] = 512, 1, -512
    out = multiply(x, weights, sizes)
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)


@pytest.mark.optimized
def test_bits_do_not_depend_on_the_neighbours(multiply):
    """A row's product does not depend on its place in the group, or on other rows."""
    x, weights, _ = arguments((24, 0, 0), seed=1)
    weights = np.nan_to_num(weights, nan=0.5)

    def product(x, *group_sizes):
        return np.asarray(multiply(x, weights, np.array(group_sizes, np.int32)))

    first = product(x, 24, 0, 0)
    np.testing.assert_array_equal(product(x[::-1], 24, 0, 0)[::-1], first)
    fewer = product(x, 5, 10, 9)
    np.testing.assert_array_equal(fewer[:5], first[:5])
    assert not np.isclose(fewer[5:], first[5:]).all(axis=1).any()


@pytest.mark.every_jax
@pytest.mark.parametrize("name", ["around-blocks", "gaps", "more-groups-than-rows"])
def test_rows_come_from_and_go_to_where_they_are_told(multiply, name):
    """The first row of the result may be anywhere in its block.

    Sources may repeat. Rows that no source names are NaN.
    """
    x, weights, sizes = arguments(CASES[name])
    for seed in range(3):
        rng = np.random.default_rng(seed)
        sources, targets = rng.integers(0, 9, size=len(x)), rng.permutation(len(x))
        out = np.asarray(multiply(x, weights, sizes, None, targets))[targets]
        expected = product_by_definition(x, weights, sizes)
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=2e-6)
    named = np.where(np.arange(len(x))[:, None] < 9, x, np.nan)
    expected = product_by_definition(x[sources], weights, sizes)
    for to in targets, None:
        out = np.asarray(multiply(named, weights, sizes, sources, to))
        out = out if to is None else out[to]
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=2e-6)


def test_nan_in_a_row_stays_there(multiply):
    x, weights, sizes = arguments(CASES["more-groups-than-rows"])
    expected = product_by_definition(x, weights, sizes)
    x[[2, 7]] = expected[[2, 7]] = np.nan
    np.testing.assert_allclose(multiply(x, weights, sizes), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.every_jax
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "uint8"])
def test_experts_of_more_than_2_31_elements_have_addresses_of_64_bits(dtype):
    """Experts of DeepSeek-V3: the kernel computes an expert's offset in 64 bits.

    The offset, a number times the expert's size, also stays in 64 bits when it is added to the
    pointer.
    """
    depth, columns = 7168, 8192 if dtype == "uint8" else 4096

    def mxfp4(x, values, exponents, sizes):
        form = FourBits(32, is_float=True)
        return grouped_packed_matmul_triton(x, values, exponents, None, None, sizes, form=form)

    function, width, others = {
        "float8_e4m3fn": (
            partial(grouped_scaled_matmul_triton, block=(128, 128)),
            depth,
            [((256, columns // 128, depth // 128), "float32")],
        ),
        "uint8": (mxfp4, depth // 2, [((256, depth // 32, columns), dtype)]),
    }.get(dtype, (grouped_matmul_triton, depth, []))
    shape = (256, columns, width) if others else (256, depth, columns)
    x = (8, depth), "bfloat16" if others else dtype
    kernel = triton_text(function, x, (shape, dtype), *others, ((256,), "int32"))
    products = re.findall(rf"constant {columns * width} : (i\d+)", kernel)
    added = re.findall(r"tt\.addptr .*x(i\d+)>", kernel)
    assert {*products} == {"i64"}
    # The weights; other arrays are small. A step of MXFP4 has two loads.
    assert added.count("i64") == (2 if dtype == "uint8" else 1)
    if not others:
        assert "trunci" not in kernel


def triton_text(function, *arrays):
    """Return the kernel in Triton's language, as jax lowers it for a GPU that is not present."""
    args = [jax.ShapeDtypeStruct(*one) for one in arrays]
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(*args)
        module = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    (call,) = [
        one
        for one in module.body.operations[0].body.blocks[0]
        if "mhlo.backend_config" in one.attributes
    ]
    code = ir.StringAttr(ir.DictAttr(call.attributes["mhlo.backend_config"])["ir"]).value_bytes
    with ir.Context() as context:
        dialect.register_dialect(context)
        return str(ir.Module.parse(code))
