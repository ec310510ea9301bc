"""The projection of few rows, at the shapes of models, as compiled for an H200."""

import jax
import pytest

from pallas_kernels.fused_linear import Norm, fused_linear
from specjax.inspect.resources import Resources

MAX_SHARED, SYSTEM_SHARED, NUM_SMS = 227 * 1024, 1024, 132  # bytes per SM, and of each program
NUM_ROWS = 8
# By model: the model's width, then those of qkv and of what `out` takes, and of the gated layer.
MODELS = {
    "Llama-3.2-1B": (2048, 3072, 2048, 8192),
    "Qwen3.5-4B": (2560, 12352, 4096, 9216),
    "Llama-3.1-8B": (4096, 6144, 4096, 14336),
}
PARTS = "qkv", "out", "gate_up", "down"

pytestmark = pytest.mark.h200


def layer(model, dtype="bfloat16"):
    """For compile.py: the four projections of a layer, which need not fit each other."""
    dim, qkv, heads, inner = MODELS[model]

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def run(x, attended, hidden, scale, weights):
        norm = Norm(scale, 1e-6, model.startswith("Qwen"))
        return (
            fused_linear(x, weights["qkv"], norm=norm, kernels="triton"),
            fused_linear(attended, weights["out"], residual=x, kernels="triton"),
            fused_linear(x, weights["gate_up"], norm=norm, is_gated=True, kernels="triton"),
            fused_linear(hidden, weights["down"], residual=x, kernels="triton"),
        )

    weights = dict(
        zip(PARTS, [(dim, qkv), (heads, dim), (dim, 2 * inner), (inner, dim)], strict=True)
    )
    rows = (shape(NUM_ROWS, size) for size in (dim, heads, inner))
    args = *rows, shape(dim), {name: shape(*sizes) for name, sizes in weights.items()}
    return jax.jit(run), args, {}


@pytest.fixture(scope="module")
def reports(compile_for_h200):
    """Those of layers by model and dtype."""
    cases = [(model, "bfloat16") for model in MODELS] + [("Llama-3.1-8B", "float32")]
    requests = [
        {"function": "layer", "arguments": {"model": model, "dtype": dtype}}
        for model, dtype in cases
    ]
    return dict(zip(cases, compile_for_h200(__file__, requests, resources=True), strict=True))


@pytest.fixture
def kernels(reports):
    """Resources of a layer's kernels by model and dtype."""
    return {
        case: [Resources(**fields) for fields in report["resources"]]
        for case, report in reports.items()
    }


def test_a_layer_is_four_launches(reports):
    for case, report in reports.items():
        launched = [thunk["name"] for thunk in report["thunks"]]
        assert ["fused_linear" in name for name in launched] == [True] * 4, (case, launched)


def test_nothing_spills_and_all_programs_run_at_once(kernels):
    for case, found in kernels.items():
        assert len(found) == 4
        for kernel in found:
            assert not kernel.spills, (case, kernel)
            at_once = -(-kernel.grid[0] // NUM_SMS)
            assert at_once * (kernel.shared_bytes + SYSTEM_SHARED) <= MAX_SHARED, (case, kernel)
            assert at_once * kernel.registers * kernel.threads[0] <= 65536, (case, kernel)


def test_bf16_runs_on_tensor_cores_and_fp32_is_exact(kernels):
    for (model, dtype), found in kernels.items():
        assert all(bool(kernel.products) == (dtype == "bfloat16") for kernel in found), model
