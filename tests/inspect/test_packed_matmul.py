"""Products with 4-bit matrices, and a step of a model that has them, compiled for an H200."""

import jax
import pytest

from pallas_kernels.packed_matmul import FourBits, packed_matmul

# Rows, depth, columns, the form, and whether there are zero points: Llama-3.1-8B's matrices.
PRODUCTS = [
    (1, 4096, 6144, [128], False),
    (16, 14336, 4096, [128], True),
    (8, 4096, 28672, [64], False),
    (1, 4096, 4096, [32], True),
    (16, 4096, 6144, [16, True], False),
    (32, 4096, 4096, [128], True),
    (64, 4096, 28672, [128], False),
    (64, 4096, 28672, [64], True),
    (64, 4096, 6144, [16, True], False),
    (512, 4096, 28672, [128], True),
]

pytestmark = pytest.mark.h200


def product(rows, depth, columns, form, has_zeros):
    """For compile.py: return a product. FP4 numbers have scales in float8."""
    form = FourBits(*form)
    groups = form.num_groups(depth), columns
    arrays = ((rows, depth), "bfloat16"), ((columns, form.width(depth)), "uint8")
    arrays += (groups, "float8_e4m3fn" if form.is_float else "bfloat16"), (groups, "uint8")
    *args, zeros, factors = (jax.ShapeDtypeStruct(*x) for x in (*arrays, ((columns,), "float32")))
    args = *args, zeros if has_zeros else None, factors if form.is_float else None
    return jax.jit(lambda *given: packed_matmul(*given, form)), args, {}


def test_products_run_on_tensor_cores_and_do_not_spill(compile_for_h200, fitting_kernels):
    names = "rows", "depth", "columns", "form", "has_zeros"
    cases = {i: ("product", dict(zip(names, case, strict=True))) for i, case in enumerate(PRODUCTS)}
    for report in compile_for_h200(__file__, cases, resources=True).values():
        (kernel,) = (x for name, x in fitting_kernels(report).items() if name == "packed_matmul")
        assert {one.split()[1] for one in kernel.products} == {"bf16"}
