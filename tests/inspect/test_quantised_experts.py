"""Products with float8 and MXFP4 experts and latents, and a step, compiled for an H200."""

from functools import partial

import jax
import pytest

from pallas_kernels.batched_scaled_matmul.triton import batched_scaled_matmul_triton
from pallas_kernels.grouped_packed_matmul.triton import grouped_packed_matmul_triton
from pallas_kernels.grouped_scaled_matmul.triton import grouped_scaled_matmul_triton
from pallas_kernels.packed_matmul import FourBits

# Rows, groups, depth and columns of Qwen3-30B-A3B and DeepSeek-V3; below of gpt-oss-20b.
FLOAT8 = [
    (8, 128, 2048, 1536),
    (512, 128, 768, 2048),
    (4096, 128, 2048, 1536),
    (65536, 128, 2048, 1536),
    (512, 256, 7168, 4096),
]
CASES = [("float8", *shape, block) for shape in FLOAT8 for block in ("128", "1")]
CASES += [("mxfp4", rows, 32, 2880, 5760, "") for rows in (4, 256, 1024, 32768)]
# Qwen3-30B-A3B's experts with 4-bit numbers: AWQ and compressed-tensors, and NVFP4.
CASES += [
    (kind, rows, 128, 2048, 1536, "")
    for kind in ("zeros", "int4", "nvfp4")
    for rows in (8, 512, 4096, 65536)
]
# Latents of GLM-4.7-Flash and DeepSeek-V3: rows, heads, and both of the widths.
CASES += [
    *(
        ("latents", rows, 20, *widths, "64")
        for rows in (8, 256)
        for widths in ((192, 512), (512, 256))
    ),
    *(("latents", 8, 128, *widths, "128") for widths in ((128, 512), (512, 128))),
]

FOUR_BITS = {
    "mxfp4": (FourBits(32, is_float=True), "uint8"),
    "nvfp4": (FourBits(16, is_float=True), "float8_e4m3fn"),
    "int4": (FourBits(128), "bfloat16"),
    "zeros": (FourBits(128), "float16"),
}

pytestmark = pytest.mark.h200


def product(kind, rows, groups, depth, columns, block):
    """For compile.py: return a product whose rows are gathered from other places."""
    x, places = ((rows, depth), "bfloat16"), [((size,), "int32") for size in (groups, rows)]
    if kind == "latents":
        sides = (128, int(block)) if depth < columns else (int(block), 128)
        sizes = [-(-n // side) for n, side in zip((columns, depth), sides, strict=True)]
        x, places = ((rows, groups, depth), "bfloat16"), []
        arrays = x, ((groups, columns, depth), "float8_e4m3fn"), ((groups, *sizes), "float32")
        run = partial(batched_scaled_matmul_triton, block=sides)
    elif kind in FOUR_BITS:
        form, scales = FOUR_BITS[kind]
        of_groups = groups, form.num_groups(depth), columns
        arrays = x, ((groups, columns, form.width(depth)), "uint8"), (of_groups, scales)
        others = {
            "zeros": ((of_groups, "uint8"), ["zeros"]),
            "factors": (((groups, columns), "float32"), ["nvfp4"]),
        }
        given = [name for name, (_, kinds) in others.items() if kind in kinds]
        arrays += tuple(others[name][0] for name in given)

        def run(x, values, scales, *rest):
            optional = {"zeros": None, "factors": None, **dict(zip(given, rest, strict=False))}
            return grouped_packed_matmul_triton(
                *(x, values, scales, *optional.values()), *rest[len(given) :], form=form
            )
    else:
        of_block = (128, 128) if block == "128" else (1, depth)
        sizes = [-(-n // side) for n, side in zip((columns, depth), of_block, strict=True)]
        arrays = x, ((groups, columns, depth), "float8_e4m3fn"), ((groups, *sizes), "float32")
        run = partial(grouped_scaled_matmul_triton, block=of_block)

    args = tuple(jax.ShapeDtypeStruct(*one) for one in (*arrays, *places))
    return jax.jit(run), args, {}


def test_products_run_on_tensor_cores_and_do_not_spill(compile_for_h200, fitting_kernels):
    names = "kind", "rows", "groups", "depth", "columns", "block"
    cases = {case: ("product", dict(zip(names, case, strict=True))) for case in CASES}
    for case, report in compile_for_h200(__file__, cases, resources=True).items():
        (kernel,) = fitting_kernels(report).values()
        assert {one.split()[1] for one in kernel.products} == {"bf16"}, case
