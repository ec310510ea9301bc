"""The precision of matrix products, by platform and dtype."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import tiny_llama

from specjax.config import EngineConfig
from specjax.device.drafters.drafter import NoDrafter, Params, Variant
from specjax.device.layout import Layout
from specjax.device.placement import Placement, default_device
from specjax.device.verification import SeedExact
from specjax.engine.programs import Decode
from specjax.engine.step_model import empty_state, step_model
from specjax.engine.tracing import Static, Traces
from specjax.engine.xla_options import matmul_precision

TARGET = tiny_llama()
OWN = Placement.on(default_device())


def lowered(platform, dtype):
    """Lower a round of an engine for a device that claims to be of `platform`."""
    device = SimpleNamespace(platform=platform)
    placement: Any = SimpleNamespace(device=device, num_devices=1, sharding=OWN.sharding)
    config = EngineConfig(max_model_len=32, max_num_seqs=2, num_pages=8, dtype=dtype)
    static = Static(
        step_model(config, TARGET, NoDrafter(), SeedExact(), "cpu"),
        Layout.of(config, TARGET.vocab_size, ()),
    )
    weights = jax.tree.map(lambda spec: np.zeros(spec.shape, dtype), TARGET.specs())
    params, state = jax.device_put(
        (Params(weights, None), empty_state(config, static.model, 0)), OWN.sharding()
    )
    traces = Traces(static, dtype, params, state, placement, {})
    return traces.trace(Decode(2, 0, Variant())).lower().as_text()


@pytest.mark.parametrize(
    "dtype, platform, asked, found",
    [
        ("float32", "gpu", None, "HIGHEST"),
        ("float32", "gpu", "tensorfloat32", "HIGH"),
        ("float32", "cpu", None, "DEFAULT"),
        ("bfloat16", "gpu", None, "DEFAULT"),
    ],
)
def test_products_of_float32_are_not_rounded_unless_asked_for(dtype, platform, asked, found):
    x = jax.ShapeDtypeStruct((4, 4), dtype)
    with jax.default_matmul_precision(asked), matmul_precision(dtype, platform):
        traced = jax.make_jaxpr(jnp.dot)(x, x)
    (product,) = traced.eqns
    given = product.params["precision"] or (jax.lax.Precision.DEFAULT,)
    assert {one.name for one in given} == {found}


@pytest.mark.slow
def test_programs_are_traced_in_that_precision():
    precise, usual = lowered("gpu", "float32"), lowered("cpu", "float32")
    products = precise.count("stablehlo.dot_general ")
    assert products == precise.count("precision = [HIGHEST, HIGHEST]") > 4
    assert usual.count("stablehlo.dot_general ") == products and "HIGHEST" not in usual
