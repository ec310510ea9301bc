"""Products with float8 matrices, and a step of a model that has them, compiled for an H200."""

import json

import jax
import numpy as np
import pytest

from pallas_kernels.scaled_matmul import scaled_matmul
from specjax.checkpoint import safetensors_file
from specjax.device.models.registry import describe_model, read_config
from specjax.inspect.report import StepRequest, compile_steps

F8 = "float8_e4m3fn"
# Rows, depth, columns, the block, and the dtype: Llama-3.1-8B's matrices, and DeepSeek-V3's merged
# latents.
PRODUCTS = [
    (1, 4096, 6144, (128, 128), F8),
    (16, 14336, 4096, (128, 128), F8),
    (64, 4096, 28672, (128, 128), F8),
    (64, 4096, 4096, (1, 4096), F8),
    (1, 3584, 4096, (128, 32), F8),  # a part of a matrix, cut within blocks
    (8, 7168, 2112, (64, 128), F8),
    (512, 4096, 28672, (128, 128), F8),
    (1, 4096, 28672, (1, 4096), "int8"),
    (64, 4096, 6144, (1, 128), "int8"),
]
CONFIG = {
    **{"model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}

pytestmark = pytest.mark.h200


def product(rows, depth, columns, block, dtype):
    """For compile.py: return a product with a float8 matrix."""
    sizes = [-(-size // side) for size, side in zip((columns, depth), block, strict=True)]
    arrays = ((rows, depth), "bfloat16"), ((columns, depth), dtype), (sizes, "float32")
    args = tuple(jax.ShapeDtypeStruct(*one) for one in arrays)
    return jax.jit(lambda *given: scaled_matmul(*given, tuple(block))), args, {}


def test_products_run_on_tensor_cores_and_do_not_spill(compile_for_h200, fitting_kernels):
    names = "rows", "depth", "columns", "block", "dtype"
    cases = {case: ("product", dict(zip(names, case, strict=True))) for case in PRODUCTS}
    for report in compile_for_h200(__file__, cases, resources=True).values():
        (kernel,) = (x for name, x in fitting_kernels(report).items() if name == "scaled_matmul")
        assert {one.split()[1] for one in kernel.products} == {"bf16"}


def test_a_step_reads_float8_and_copies_none(kept, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shapes = {}
    for spec in jax.tree.leaves(describe_model(read_config(tmp_path)).specs()):
        for name, shape in zip(spec.names, spec.file_shapes, strict=True):
            is_narrow = name.endswith("_proj.weight")
            shapes[name] = np.dtype("float8_e4m3fn" if is_narrow else "bfloat16"), shape
            if is_narrow:
                blocks = tuple(-(-size // 128) for size in shape)
                shapes[f"{name}_scale_inv"] = np.dtype("float32"), blocks
    arrays = ((name, np.zeros(shape, dtype)) for name, (dtype, shape) in shapes.items())
    safetensors_file.write(tmp_path / "model.safetensors", shapes, arrays)
    (report,) = compile_steps(
        [StepRequest(model=tmp_path, batch=2, k=0, context=24)], resources=True, kept=kept
    )
    assert report.is_one_command_buffer and not report.large_copies
    layers = [one for layer in report.layers.values() for one in layer.kernels]
    assert sum("scaled_matmul" in (one.pallas or "") for one in layers) == 4
    assert not any(one.spills for one in report.resources)
