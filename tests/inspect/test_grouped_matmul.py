"""The grouped product, and the mixtures it is for, as compiled for an H200."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul.triton import grouped_matmul_triton
from specjax.device.models.layers.mlp import MLP
from specjax.device.models.layers.moe import Experts, MoE, moe
from specjax.device.weights.experts import ExpertMatrices
from specjax.device.weights.matrix import Dense
from specjax.inspect.resources import Resources

MAX_SHARED = 227 * 1024
# Rows, groups, depth, columns: Qwen3.5-35B-A3B's experts, of 64 tokens and of prompts' chunks, and
# Qwen3-Next's, 512 of which 10 are chosen. Last DeepSeek-V3's, more than 2^31 numbers.
SHAPES = [
    (512, 256, 2048, 1024),
    (8192, 512, 512, 2048),
    (65536, 256, 2048, 1024),
    (65536, 256, 512, 2048),
    (512, 256, 7168, 4096),
]

pytestmark = pytest.mark.h200


def product(rows, groups, depth, columns, dtype="bfloat16"):
    """For the compiler: a product whose rows come from others."""
    shapes = (rows, depth), (groups, depth, columns)
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    args += [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (groups, rows)]
    return jax.jit(grouped_matmul_triton), tuple(args), {}


def mixture(rows, num_experts=256, num_chosen=8):
    """For compile.py: a layer of Qwen3.5-35B-A3B."""
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


MIXTURES = 8, 256  # rows


@pytest.fixture(scope="module")
def reports(compile_for_h200):
    """Those of products by shape and dtype, those of mixtures by rows."""
    names = "rows", "groups", "depth", "columns", "dtype"
    products = [(*shape, "bfloat16") for shape in SHAPES]
    products += [(*SHAPES[0], "float32"), (*SHAPES[2], "float32")]
    requests = [
        {"function": "product", "arguments": dict(zip(names, case, strict=True))}
        for case in products
    ]
    requests += [{"function": "mixture", "arguments": {"rows": rows}} for rows in MIXTURES]
    made = compile_for_h200(__file__, requests, resources=True)
    return dict(zip([*products, *MIXTURES], made, strict=True))


@pytest.fixture
def kernels(reports):
    """Resources of products by shape and dtype."""
    found = {case: report["resources"] for case, report in reports.items() if case not in MIXTURES}
    return {case: Resources(**fields) for case, (fields,) in found.items()}


def test_nothing_spills_and_everything_fits(kernels):
    for case, kernel in kernels.items():
        assert not kernel.spills, (case, kernel)
        assert kernel.shared_bytes <= MAX_SHARED, (case, kernel)
        assert kernel.registers <= 128, (case, kernel)


def test_bf16_runs_on_tensor_cores_and_fp32_is_exact(kernels):
    for (*shape, dtype), kernel in kernels.items():
        assert bool(kernel.products) == (dtype == "bfloat16"), (shape, dtype, kernel)


@pytest.mark.parametrize("rows", MIXTURES)
def test_a_mixture_is_one_cuda_graph_of_few_kernels(reports, rows):
    layer = reports[rows]
    assert layer["is_one_command_buffer"]
    kernels = [thunk for thunk in layer["thunks"] if thunk["kind"] != "kCommandBuffer"]
    assert len(kernels) <= 15, [thunk["name"] for thunk in kernels]
    assert sum("grouped_matmul" in thunk["name"] for thunk in kernels) == 2


@pytest.mark.parametrize("rows", MIXTURES)
def test_no_weight_is_copied(reports, rows):
    """The largest of what is made on the way are the experts' outputs, 8 for each row."""
    assert reports[rows]["memory"]["temp"] < 4 * rows * 8 * 2048 * 2
