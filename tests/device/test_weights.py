"""Weights in every form that devices use, compared with products in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.packed_matmul import FourBits
from specjax.device.weights import matrix as matrix_module
from specjax.device.weights import weight as weight_module
from specjax.device.weights.matrix import FEW_ROWS, Blocks, Dense
from specjax.device.weights.narrow import narrow
from specjax.device.weights.packed import Packed
from specjax.device.weights.scaled import Scaled
from specjax.device.weights.stored import dequantise
from specjax.device.weights.table import Table
from specjax.device.weights.weight import second_form_bytes, weights_on

PARTS = ("q", 96), ("k", 64), ("v", 32)


def dense(num_in=24, parts=PARTS, dtype="float32"):
    shape = num_in, sum(size for _, size in parts)
    values = np.random.default_rng(0).normal(size=shape)
    return Dense(jnp.asarray(values, dtype), parts)


def run_on(monkeypatch, vendor, instructions):
    monkeypatch.setattr(matrix_module, "cpu_vendor", lambda: vendor)
    monkeypatch.setattr(matrix_module, "cpu_instructions", lambda: instructions)


@pytest.fixture(params=[("AuthenticAMD", "AVX-512", 64), ("GenuineIntel", "AVX2", 16)])
def columns(request, monkeypatch):
    """The number of columns of a block on a certain CPU."""
    run_on(monkeypatch, *request.param[:2])
    return request.param[2]


@pytest.mark.slow
@pytest.mark.parametrize("platform, kind", [("cpu", Blocks), ("gpu", Dense)])
@pytest.mark.parametrize("num_rows", [0, 1, FEW_ROWS, FEW_ROWS + 1])
def test_products_are_those_of_the_matrix(platform, kind, num_rows, columns):
    plain = dense()
    weight = plain.on(platform)
    assert type(weight) is kind and weight.num_out == 192
    x = jnp.asarray(np.random.default_rng(1).normal(size=(num_rows, 24)), jnp.float32)
    expected = np.asarray(x, np.float64) @ np.asarray(plain.values, np.float64)
    np.testing.assert_allclose(jax.jit(kind.multiply)(weight, x), expected, atol=1e-5)
    for first in weight.start("k"), weight.start("v"), 128:  # within a block, and at its edge
        made = weight.multiply_from(x, first)
        np.testing.assert_allclose(made, expected[:, first:], atol=1e-5)
    parts = weight.split(weight.multiply(x))
    assert list(parts) == ["q", "k", "v"]
    np.testing.assert_allclose(parts["k"], expected[:, 96:160], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["reference", "interpret"])
def test_products_with_scaled_numbers(kernels):
    values = np.random.default_rng(0).normal(size=(192, 24)).astype("float8_e4m3fn")
    scales = np.linspace(0.5, 2, 6, dtype=np.float32)[:, None]
    given = Scaled(jnp.asarray(values), PARTS, scales=jnp.asarray(scales), block=(32, 24))
    weight = weights_on("cpu", {"qkv": given}, kernels)["qkv"]
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 24)), jnp.float32)
    expected = np.asarray(x, np.float64) @ (values.astype(float) * scales.repeat(32, 0)).T
    np.testing.assert_allclose(jax.jit(Scaled.multiply)(weight, x), expected, atol=1e-4)
    made = weight.multiply_from(x[0].astype(jnp.bfloat16), weight.start("k"))
    assert made.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(made, float), expected[0, :, 96:], atol=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["reference", "interpret"])
def test_products_with_packed_numbers(kernels):
    """Groups have 32 inputs, in another order than the inputs of the product."""
    rng, form = np.random.default_rng(0), FourBits(32)
    codes, order = rng.integers(0, 16, (192, 96)).astype(np.uint8), rng.permutation(96)
    scales = rng.uniform(0.1, 0.2, (3, 192)).astype(np.float32)
    arrays = {"scales": jnp.asarray(scales), "zeros": None, "factors": None}
    arrays["order"] = jnp.asarray(order)
    given = Packed(form.pack(jnp.asarray(codes)), PARTS, **arrays, num_in=96, form=form)
    weight = weights_on("cpu", {"qkv": given}, kernels)["qkv"]
    matrix = np.zeros((96, 192))
    matrix[order] = ((codes - 8.0) * scales.repeat(32, 0).T).T
    np.testing.assert_allclose(weight.plain(jnp.float32).values, matrix, rtol=1e-6)
    x = jnp.asarray(rng.normal(size=(2, 5, 96)), jnp.float32)
    expected = np.asarray(x, np.float64) @ matrix
    np.testing.assert_allclose(jax.jit(Packed.multiply)(weight, x), expected, atol=1e-4)
    made = weight.multiply_from(x[0], weight.start("k"))
    np.testing.assert_allclose(made, expected[0, :, 96:], atol=1e-4)


def test_matrices_of_the_same_form_share_the_programs_that_round_and_widen_them(compilations):
    before = len(compilations.names)
    for layer in dense(num_in=40), dense(num_in=40):
        made = narrow(layer, "int8")
        wide = dequantise({"up": made}, np.dtype("float32"))["up"]
        np.testing.assert_allclose(wide.values, layer.values, atol=0.02)
    names = compilations.names[before:]
    assert [names.count(f"jit({name})") for name in ("quantise", "_plain")] == [1, 1]


def test_sums_are_of_the_type_that_is_asked_for():
    """512 + 1 is 512 in bfloat16, so a sum in bfloat16 would lose the 1."""
    weight = Dense(jnp.ones((3, 16), jnp.bfloat16))
    x = jnp.array([[512, 1, -512]], jnp.bfloat16)
    for form in (
        weight,
        Blocks(weight.values, column_blocks=weight.values[None]),
        Table(weight.values.T),
    ):
        made = form.multiply(x, jnp.float32)
        assert made.dtype == jnp.float32 and (made == 1).all()


@pytest.mark.parametrize("shape", [(2, 4), (4, 5)])
def test_rows_may_have_several_axes(shape, columns):
    plain = dense()
    x = jnp.asarray(np.random.default_rng(2).normal(size=(*shape, 24)), jnp.float32)
    made = plain.on("cpu").multiply(x)
    np.testing.assert_allclose(made, plain.multiply(x), atol=1e-5)


@pytest.mark.parametrize("num_rows, is_batch", [(FEW_ROWS, True), (FEW_ROWS + 1, False)])
def test_only_few_rows_are_multiplied_by_blocks(num_rows, is_batch, columns):
    x = jnp.ones((num_rows, 24))
    for multiply in Blocks.multiply, lambda w, x: Blocks.multiply_from(w, x, 64):
        lines = str(jax.make_jaxpr(multiply)(dense().on("cpu"), x)).splitlines()
        (dot,) = [line for line in lines if "dot_general" in line]
        assert (f"{num_rows},{columns}]" in dot) == is_batch, dot


@pytest.mark.parametrize("given", [{"parts": (("q", 100),)}, {"dtype": "bfloat16"}])
def test_a_matrix_without_whole_blocks_of_float32_stays_as_it_is(given, columns):
    weight = dense(**given)
    assert weight.on("cpu") is weight and not weight.changes_on("cpu", weight.values.dtype)


def test_an_intel_cpu_with_avx_512_multiplies_whole_matrices(monkeypatch):
    run_on(monkeypatch, "GenuineIntel", "AVX-512")
    weight = dense()
    assert weight.on("cpu") is weight and not weight.changes_on("cpu", weight.values.dtype)


def test_arrays_on_the_host_and_of_several_devices_stay_as_they_are(columns):
    plain = dense()
    values: Any = np.asarray(plain.values)
    host = Dense(values, PARTS)
    assert host.on("cpu") is host
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "x")
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    both = Dense(jax.device_put(plain.values, over), PARTS)
    assert len(mesh.devices) == 1 or both.on("cpu") is both


@pytest.mark.slow
def test_only_what_changes_is_copied_and_only_of_a_small_model(columns, monkeypatch):
    tree = {"norm": jnp.ones(3), "up": dense(), "head": Table(jnp.ones((4, 3)))}
    made = weights_on("cpu", tree)
    assert made["norm"] is tree["norm"] and made["head"].values is tree["head"].values
    assert type(made["up"]) is Blocks
    assert jax.tree.map(lambda x: x, tree)["up"].parts == PARTS
    paths = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}
    assert paths == {"['norm']", "['up']", "['head']"}  # an array's is its weight's
    assert second_form_bytes("cpu", "float32", tree) == tree["up"].values.nbytes
    assert second_form_bytes("gpu", "float32", tree) == 0
    monkeypatch.setattr(weight_module, "MAX_DOUBLED", tree["up"].values.nbytes)
    assert weights_on("cpu", tree) is tree and not second_form_bytes("cpu", "float32", tree)
