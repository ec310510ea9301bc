"""Products with 4-bit matrices, and a step of a model that has them, as compiled for an H200."""

import jax
import pytest

from pallas_kernels.packed_matmul import half, packed_matmul, packed_width

# Rows, depth, columns, group, and whether there are zero points: Llama-3.1-8B's matrices.
PRODUCTS = [
    (1, 4096, 6144, 128, False),
    (16, 14336, 4096, 128, True),
    (8, 4096, 28672, 64, False),
    (1, 4096, 4096, 32, False),
    (16, 4096, 4096, 16, True),
    (32, 4096, 4096, 128, True),
    (64, 4096, 28672, 128, False),
    (64, 4096, 28672, 64, True),
    (512, 4096, 28672, 128, True),
]

pytestmark = pytest.mark.h200


def product(rows, depth, columns, group, has_zeros):
    """For the compiler."""
    groups = -(-depth // group), columns
    x, values, scales, zeros = (
        jax.ShapeDtypeStruct(*one)
        for one in (
            ((rows, depth), "bfloat16"),
            ((columns, packed_width(depth, half(group))), "uint8"),
            (groups, "bfloat16"),
            (groups, "uint8"),
        )
    )
    args = x, values, scales, zeros if has_zeros else None
    return jax.jit(lambda *given: packed_matmul(*given, group)), args, {}


def test_products_run_on_tensor_cores_and_do_not_spill(compile_for_h200, fitting_kernels):
    names = "rows", "depth", "columns", "group", "has_zeros"
    cases = {case: ("product", dict(zip(names, case, strict=True))) for case in PRODUCTS}
    for report in compile_for_h200(__file__, cases, resources=True).values():
        (kernel,) = (x for name, x in fitting_kernels(report).items() if name == "packed_matmul")
        assert {one.split()[1] for one in kernel.products} == {"bf16"}
