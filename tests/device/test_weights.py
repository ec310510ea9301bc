"""Weights, in every form that a device has for them, against products in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.device.weights import weight as weight_module
from specjax.device.weights.matrix import BLOCK_COLUMNS, MAX_ROWS, Blocks, Dense
from specjax.device.weights.table import Table
from specjax.device.weights.weight import weights_on

PARTS = ("q", 96), ("k", 64), ("v", 32)


def dense(num_in=24, parts=PARTS, dtype="float32"):
    shape = num_in, sum(size for _, size in parts)
    values = np.random.default_rng(0).normal(size=shape)
    return Dense(jnp.asarray(values, dtype), parts)


@pytest.mark.parametrize("platform, kind", [("cpu", Blocks), ("gpu", Dense)])
@pytest.mark.parametrize("num_rows", [1, 8, MAX_ROWS, 2 * MAX_ROWS + 3])
def test_products_are_those_of_the_matrix(platform, kind, num_rows):
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


def test_sums_are_of_the_type_that_is_asked_for():
    """1 beside 512 is lost in sums of bfloat16."""
    weight = Dense(jnp.ones((3, BLOCK_COLUMNS), jnp.bfloat16))
    x = jnp.array([[512, 1, -512]], jnp.bfloat16)
    for form in weight, Blocks(weight.values[None]), Table(weight.values.T):
        made = form.multiply(x, jnp.float32)
        assert made.dtype == jnp.float32 and (made == 1).all()


@pytest.mark.parametrize("given", [{"parts": (("q", 100),)}, {"dtype": "bfloat16"}])
def test_a_matrix_without_whole_blocks_of_float32_stays_as_it_is(given):
    weight = dense(**given)
    assert weight.on("cpu") is weight


def test_only_what_changes_is_copied_and_only_of_a_small_model(monkeypatch):
    tree = {"norm": jnp.ones(3), "up": dense(), "head": Table(jnp.ones((4, 3)))}
    made = weights_on("cpu", tree)
    assert made["norm"] is tree["norm"] and made["head"].values is tree["head"].values
    assert type(made["up"]) is Blocks
    assert jax.tree.map(lambda x: x, tree)["up"].parts == PARTS
    monkeypatch.setattr(weight_module, "MAX_DOUBLED", tree["up"].values.nbytes)
    assert weights_on("cpu", tree) is tree


def test_the_path_to_an_array_is_the_path_to_its_weight():
    (path, _), *_ = jax.tree_util.tree_leaves_with_path({"up": dense()})
    assert jax.tree_util.keystr(path) == "['up']"
