"""The choice of experts, at the shapes of models, as compiled for an H200."""

import jax
import pytest

from pallas_kernels.route import Rule, route
from specjax.inspect.resources import Resources

MAX_SHARED = 8192  # bytes that sums over rows take; the largest tiles would take four times as many
SIGMOID = Rule(is_sigmoid=True, scaling=1.8)
# By name: rows, experts, chosen of them, rule, dtype of the logits.
CASES = {
    "Qwen3-30B-A3B": (8, 128, 8, Rule(), "bfloat16"),
    "Qwen3-30B-A3B, 64 rows": (64, 128, 8, Rule(), "bfloat16"),
    "Qwen3.5-35B-A3B": (8, 256, 8, Rule(), "bfloat16"),
    "Qwen3-Next-80B-A3B": (8, 512, 10, Rule(), "bfloat16"),
    "Qwen3-Next-80B-A3B, 16 rows": (16, 512, 10, Rule(), "bfloat16"),
    "gpt-oss-20b": (8, 32, 4, Rule(), "bfloat16"),
    "GLM-4.7-Flash": (8, 64, 4, SIGMOID, "float32"),
    "not normalised": (8, 64, 8, Rule(normalises=False), "bfloat16"),
    "one row": (1, 128, 8, Rule(), "bfloat16"),
    # As many as there may be.
    "most experts": (16, 512, 32, SIGMOID, "float32"),
    "most rows": (256, 32, 4, Rule(normalises=False), "float32"),
}

pytestmark = pytest.mark.h200


def routing(name):
    """For compile.py: the choice of a step with padding rows."""
    rows, experts, chosen, rule, dtype = CASES[name]

    def run(logits, correction, is_padding):
        given = correction if rule.is_sigmoid else None
        return route(logits, chosen, rule, given, is_padding, kernels="triton")

    shapes = ((rows, experts), dtype), ((experts,), "float32"), ((rows,), "bool")
    return jax.jit(run), tuple(jax.ShapeDtypeStruct(*one) for one in shapes), {}


@pytest.fixture(scope="module")
def reports(compile_for_h200):
    """By case."""
    requests = [{"function": "routing", "arguments": {"name": name}} for name in CASES]
    return dict(zip(CASES, compile_for_h200(__file__, requests, resources=True), strict=True))


def test_it_is_one_launch(reports):
    for name, report in reports.items():
        (thunk,) = report["thunks"]
        assert "route" in thunk["name"], name


def test_nothing_spills_and_no_tile_passes_between_warps(reports):
    for name, report in reports.items():
        (found,) = report["resources"]
        kernel = Resources(**found)
        assert not kernel.spills, (name, kernel)
        assert kernel.shared_bytes <= MAX_SHARED, (name, kernel)
