"""The grouped product, mixtures of experts and their routes, compiled for an H200."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul.triton import grouped_matmul_triton
from pallas_kernels.route import Rule, route
from specjax.device.models.layers.mlp import MLP
from specjax.device.models.layers.moe import Experts, MoE, moe
from specjax.device.weights.experts import ExpertMatrices
from specjax.device.weights.matrix import Dense

# Rows, groups, depth, columns: Qwen3.5-35B-A3B's experts, of 64 tokens and of prompts' chunks, and
# Qwen3-Next's, 512 of which 10 are chosen. Last DeepSeek-V3's, more than 2^31 numbers.
SHAPES = [
    (512, 256, 2048, 1024),
    (8192, 512, 512, 2048),
    (65536, 256, 2048, 1024),
    (65536, 256, 512, 2048),
    (512, 256, 7168, 4096),
]
PRODUCTS = [*((*shape, "bfloat16") for shape in SHAPES)]
PRODUCTS += [(*SHAPES[0], "float32"), (*SHAPES[2], "float32")]
MIXTURES = 8, 256  # rows
SIGMOID = Rule(is_sigmoid=True, scaling=1.8)
# By name: rows, experts, chosen of them, rule, dtype of the logits.
ROUTES = {
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
ROUTE_SHARED = 8192  # bytes that sums over rows take; the largest tiles would take four times that

pytestmark = pytest.mark.h200


def product(rows, groups, depth, columns, dtype):
    """For compile.py: return a product whose rows are gathered from other places."""
    shapes = (rows, depth), (groups, depth, columns)
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    args += [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (groups, rows)]
    return jax.jit(grouped_matmul_triton), tuple(args), {}


def mixture(rows, num_experts=256, num_chosen=8):
    """For compile.py: return a mixture of experts like Qwen3.5-35B-A3B's."""
    dim, width = 2048, 512
    experts = Experts(num_experts, num_chosen, width, width, True)
    params = MoE(
        router=Dense((dim, num_experts)),
        gate_up=ExpertMatrices((num_experts, dim, 2 * width)),
        down=ExpertMatrices((num_experts, width, dim)),
        shared=MLP(Dense((dim, 2 * width)), Dense((width, dim))),
        shared_gate=Dense((dim, 1)),
    )
    args = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        (params, (rows, dim)),
        is_leaf=lambda x: type(x) is tuple and isinstance(x[0], int),
    )
    return jax.jit(functools.partial(moe, experts=experts, kernels="triton")), args, {}


def routing(name):
    """For compile.py: return the choice of experts for a step with padding rows."""
    rows, experts, chosen, rule, dtype = ROUTES[name]

    def run(logits, correction, is_padding):
        given = correction if rule.is_sigmoid else None
        return route(logits, chosen, rule, given, is_padding, kernels="triton")

    shapes = ((rows, experts), dtype), ((experts,), "float32"), ((rows,), "bool")
    return jax.jit(run), tuple(jax.ShapeDtypeStruct(*one) for one in shapes), {}


@pytest.fixture(scope="module")
def reports(compile_for_h200):
    """Reports of products by sizes and dtype, of mixtures by rows, and of routes by name."""
    names = "rows", "groups", "depth", "columns", "dtype"
    cases = {case: ("product", dict(zip(names, case, strict=True))) for case in PRODUCTS}
    cases |= {rows: ("mixture", {"rows": rows}) for rows in MIXTURES}
    cases |= {name: ("routing", {"name": name}) for name in ROUTES}
    return compile_for_h200(__file__, cases, resources=True)


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_bf16_runs_on_tensor_cores_and_fp32_is_exact(reports, fitting_kernels, case):
    (kernel,) = fitting_kernels(reports[case]).values()
    assert kernel.registers <= 128, kernel
    assert bool(kernel.products) == (case[-1] == "bfloat16"), kernel


@pytest.mark.parametrize("rows", MIXTURES)
def test_a_mixture_is_one_cuda_graph_of_few_kernels_and_copies_no_weight(reports, rows):
    layer = reports[rows]
    assert layer["is_one_command_buffer"]
    names = [thunk["name"] for thunk in layer["thunks"] if thunk["kind"] != "kCommandBuffer"]
    assert len(names) <= 15, names
    assert sum("grouped_matmul" in name for name in names) == 2
    # The largest of what is made on the way are the experts' outputs, 8 for each row.
    assert layer["memory"]["temp"] < 4 * rows * 8 * 2048 * 2


@pytest.mark.parametrize("name", ROUTES)
def test_a_route_is_one_launch_in_which_no_tile_passes_between_warps(
    reports, fitting_kernels, name
):
    (thunk,) = reports[name]["thunks"]
    assert "route" in thunk["name"]
    (kernel,) = fitting_kernels(reports[name]).values()
    assert kernel.shared_bytes <= ROUTE_SHARED, kernel
