"""The functions that kernels call, and the two backends that compile kernels for a GPU.

A kernel is a Pallas kernel whose arguments are refs to whole operands in global memory. It reads
`pl.program_id`, and calls the functions below. Masked loads index every dimension with arrays,
because interpret mode supports nothing else. The backends are

- "pallas": Pallas' lowering to Triton, which jax calls deprecated since 0.11;
- "jax_triton": `triton_source` turns the kernel's jaxpr into the text of a Triton function, and the
  package jax_triton compiles and calls this function. Pallas is used only to trace kernels.

Pallas is used if jax has it, unless the environment variable PALLAS_KERNELS_BACKEND names the other
backend. The variable is read whenever a kernel is traced.
"""

import functools
import hashlib
import importlib.util
import linecache
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.extend.core import Primitive

from pallas_kernels.capability import compute_capability
from pallas_kernels.triton_source import launch_grid, triton_source

BACKENDS = "pallas", "jax_triton"
VARIABLE = "PALLAS_KERNELS_BACKEND"
# XLA assembles the PTX, with a ptxas that may be older than Triton's. These are the PTX versions of
# CUDA 12.3, the first CUDA whose graphs are used, and 12.8, the first for compute capability 12.0.
PTX_VERSION, PTX_VERSION_FROM_10_0 = 83, 87

warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")


def _find_plt() -> Any:
    try:
        from jax.experimental.pallas import triton
    except ImportError:
        return None
    return triton


plt = _find_plt()  # None if jax has removed it


def backend() -> str | None:
    """Return the name of the backend that compiles kernels for a GPU; None if none is installed.

    Raises:
        ValueError: the environment names a backend that is unknown or not installed.
    """
    asked = os.environ.get(VARIABLE)
    if asked is None and plt:  # fast path for every traced operation: no search for packages
        return BACKENDS[0]
    there = plt, importlib.util.find_spec("jax_triton")
    able = [name for name, found in zip(BACKENDS, there, strict=True) if found]
    if asked is None:
        return able[0] if able else None
    if asked not in BACKENDS:
        raise ValueError(f"{VARIABLE}={asked!r} is unknown; choose one of {', '.join(BACKENDS)}")
    if asked not in able:
        remedies = dict(zip(BACKENDS, ("unset it", "pip install jax-triton"), strict=True))
        raise ValueError(f"{VARIABLE}={asked!r} is not installed; {remedies[asked]}")
    return asked


def packages_of_backend() -> tuple[str, ...]:
    """Return the packages, in addition to jax, whose versions determine the code of kernels."""
    return ("jax-triton", "triton") if backend() == "jax_triton" else ()


def load(ref: Any, *, mask: jax.Array, other: Any) -> jax.Array:
    """Return the elements that an indexed ref selects, or `other` where the mask is false."""
    if plt:
        return plt.load(ref, mask=mask, other=other)
    from jax._src.pallas import primitives  # what that wraps

    return primitives.load(ref, None, mask=mask, other=other)


def store(ref: Any, value: jax.Array, *, mask: jax.Array | None = None) -> None:
    """Write `value` to the elements that an indexed ref selects, where the mask is true."""
    if plt:
        plt.store(ref, value, mask=mask)
    else:
        from jax._src.pallas import primitives

        primitives.store(ref, None, value, mask=mask)


def dot(
    a: jax.Array,
    b: jax.Array,
    *,
    trans_b: bool = False,
    allow_tf32: bool | None = None,
    precision: Any = None,
) -> jax.Array:
    """Return the product a b in f32, or a b^T if `trans_b` is true.

    f32 operands are multiplied as tf32, unless `allow_tf32` or `precision` forbids it.
    """
    if allow_tf32 is not None:
        precision = jax.lax.Precision.HIGH if allow_tf32 else jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(
        a,
        b,
        dimension_numbers=(((1,), (1 if trans_b else 0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def barrier(values: Any) -> Any:
    """Synchronise all threads of the thread block; return `values` unchanged."""
    if backend() == "pallas":
        plt.debug_barrier()
        return values
    return jax.lax.optimization_barrier(values)


def multiply_add(a: jax.Array, b: jax.Array, c: jax.Array, *, interpret: bool) -> jax.Array:
    """Return `a * b + c` for f32 arrays of one shape, as one fused multiply-add.

    Only the sum is rounded; the product a * b is not. If c is the result of another product, c is
    rounded to f32 before it is added.

    A compiler may or may not fuse a product into the sum that follows, so the bits of a plain
    `a * b + c` depend on the compiler. This function always compiles to the same instruction.
    Interpret mode lacks the instruction, and computes a plain `a * b + c`. An optimisation barrier
    then keeps the compiler from fusing the product that gives c.
    """
    if interpret:
        return a * b + jax.lax.optimization_barrier(c)
    if backend() != "pallas":
        return _multiply_add.bind(a, b, c)
    (sum_,) = plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[a, b, c],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(c.shape, c.dtype)],
    )
    return sum_


def log2(x: jax.Array, *, interpret: bool) -> jax.Array:
    """Return log2 of normal f32 numbers, computed by the GPU's approximate instruction.

    For x in (0.5, 2), the absolute error is at most 2^-22. For other x, the relative error is at
    most 2^-22 (PTX ISA). In interpret mode the function is `jnp.log2`.
    """
    if interpret:
        return jnp.log2(x)
    if backend() != "pallas":
        return _log2.bind(x)
    (found,) = plt.elementwise_inline_asm(
        "lg2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return found


def widen(x: jax.Array, *, interpret: bool) -> jax.Array:
    """Return float8_e4m3fn or int8 numbers as bf16. With the backend "pallas", NaN becomes 480.

    With this backend, assembly converts four numbers at a time. The bits of a float8 number are
    moved to the places of sign, exponent and mantissa in a bf16 number. The result is multiplied by
    2^120, because the two formats have different exponent biases (7 and 127). For int8, the lower
    seven bits are written into the last bits of the bf16 number 128, which gives 128 plus these
    bits. Then 128 is subtracted, or 256 if the sign bit is set.
    """
    if interpret or backend() != "pallas":
        return x.astype(jnp.bfloat16)
    (found,) = plt.elementwise_inline_asm(
        _OF_INT8
        if x.dtype == jnp.int8
        else """{
        .reg .b32 a, b, s, t, scale, zero;
        mov.b32 scale, 0x7b807b80;
        mov.b32 zero, 0x80008000;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.u32 s, a, 4;
        shr.u32 t, b, 4;
        and.b32 s, s, 0x07f007f0;
        and.b32 t, t, 0x07f007f0;
        and.b32 a, a, 0x80008000;
        and.b32 b, b, 0x80008000;
        or.b32 s, s, a;
        or.b32 t, t, b;
        fma.rn.bf16x2 $0, s, scale, zero;
        fma.rn.bf16x2 $1, t, scale, zero;
        }""",
        args=[x],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)],
    )
    return found


_OF_INT8 = """{
    .reg .b32 a, b, s, t, minus;
    mov.b32 minus, 0xbf80bf80;
    prmt.b32 a, $2, 0, 0x4140;
    prmt.b32 b, $2, 0, 0x4342;
    lop3.b32 s, a, 0x00800080, 0x43004300, 0xea;
    lop3.b32 t, b, 0x00800080, 0x43004300, 0xea;
    lop3.b32 a, a, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 b, b, 0x007f007f, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, s, minus, a;
    fma.rn.bf16x2 $1, t, minus, b;
}"""


def widen_nibbles(x: jax.Array, dtype: Any, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Return the lower and the upper four bits of each byte, minus 8, as bf16 or f32.

    For bf16, inline assembly writes four bits into the last bits of the number 128, which gives 128
    plus these bits. Then it subtracts 136.
    """
    if interpret or dtype != jnp.bfloat16 or backend() != "pallas":
        low, high = (part.astype(jnp.float32) - 8 for part in _halves(x))
        return low.astype(dtype), high.astype(dtype)
    code = """
        lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
        fma.rn.bf16x2 {out}, a, one, less;
    """
    constants = {"one": 0x3F803F80, "less": 0xC308C308}
    return _widened(x, 0, code, constants), _widened(x, 4, code, constants)


def widen_e2m1(x: jax.Array, dtype: Any, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Return the numbers in the lower and in the upper four bits of each byte, as bf16 or f32.

    The numbers are floats of 4 bits: a sign, an exponent of two bits, and one bit of mantissa. For
    bf16, inline assembly shifts these bits to the places of sign, exponent and mantissa in a bf16.
    Then it multiplies the bf16 by 2^126, because the exponent biases of the formats are 1 and 127.
    """
    if interpret or dtype != jnp.bfloat16 or backend() != "pallas":
        low, high = (e2m1(part).astype(dtype) for part in _halves(x))
        return low, high
    code = """
        shl.b32 s, a, 12;
        shl.b32 a, a, 6;
        and.b32 s, s, 0x80008000;
        lop3.b32 a, a, 0x01c001c0, s, 0xea;
        fma.rn.bf16x2 {out}, a, scale, zero;
    """
    constants = {"scale": 0x7E807E80, "zero": 0x80008000}
    return _widened(x, 0, code, constants), _widened(x, 4, code, constants)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    whole = x.astype(jnp.uint32)
    return whole & 15, whole >> 4


def _widened(x: jax.Array, shift: int, code: str, constants: Mapping[str, int]) -> jax.Array:
    """Shift words of four bytes to the right by `shift` bits, and convert the bytes to bf16.

    `code` is assembly that converts two bytes. The register `a` has one byte in each of its two
    16-bit halves, in the low bits. If `shift` is not 0, a byte's high bits come from the next byte.
    `constants` has the names and values of the registers that the assembly can read.
    """
    sets = "\n".join(f"mov.b32 {name}, {value:#x};" for name, value in constants.items())
    (found,) = plt.elementwise_inline_asm(
        f"""{{
        .reg .b32 w, a, s, {", ".join(constants)};
        {sets}
        shr.u32 w, $2, {shift};
        prmt.b32 a, w, 0, 0x4140;
        {code.format(out="$0")}
        prmt.b32 a, w, 0, 0x4342;
        {code.format(out="$1")}
        }}""",
        args=[x],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)],
    )
    return found


def e2m1(bits: jax.Array) -> jax.Array:
    """Return the f32 numbers of E2M1 codes u32, 0 to 15: 0, 0.5, 1, 1.5, 2, 3, 4, 6, -0, ..."""
    exponent, mantissa = (bits >> 1) & 3, bits & 1
    doubled = (2 + mantissa) << jnp.maximum(exponent, 1) >> 1
    twice = jnp.where(exponent > 0, doubled, mantissa).astype(jnp.float32)
    return jnp.where(bits > 7, -0.5, 0.5) * twice


# These replace inline assembly in the text of a Triton function.
_multiply_add, _log2 = Primitive("multiply_add"), Primitive("approximate_log2")
_multiply_add.def_abstract_eval(lambda a, b, c: c)
_log2.def_abstract_eval(lambda x: x)


def triton_call(
    kernel: Callable[..., None],
    operands: Sequence[jax.Array],
    out_shapes: Sequence[jax.ShapeDtypeStruct],
    *,
    name: str,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int = 1,
    aliases: Mapping[int, int] | None = None,
    interpret: bool = False,
) -> tuple[Any, ...]:
    """Run `kernel` on `grid`, and return the outputs.

    The kernel's arguments are refs to the whole operands, then to the whole outputs. `aliases` maps
    operands to the outputs that reuse their buffers. Such an operand is updated in place if the
    caller donated or created it.
    """
    whole = pl.no_block_spec
    aliases = dict(aliases or {})
    is_pallas = interpret or backend() == "pallas"
    call = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[whole] * len(operands),
        out_specs=[whole] * len(out_shapes),
        out_shape=list(out_shapes),
        input_output_aliases=aliases,
        # Without compiler parameters, the backend would depend on jax's version.
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages)
        if plt and is_pallas
        else None,
        interpret=interpret or not is_pallas,
        name=name,
    )
    if is_pallas:
        return tuple(call(*operands))
    (traced,) = jax.make_jaxpr(call)(*operands).eqns
    source = triton_source(
        traced.params["jaxpr"], name=name, grid=grid, aliases=aliases, num_inputs=len(operands)
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return launch(source, name, operands, out_shapes, launch_grid(grid), aliases, options)


def launch(
    source: str,
    name: str,
    operands: Sequence[jax.Array],
    out_shapes: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    aliases: Mapping[int, int],
    options: Mapping[str, int],
) -> tuple[Any, ...]:
    """Run a Triton function with jax_triton, and return the outputs.

    `source` is the text of a module with the function `name`. `grid` is a result of `launch_grid`.
    `options` has num_warps and num_stages. `triton_call` explains the other arguments.
    """
    import jax_triton  # pyright: ignore[reportMissingImports]

    capability = compute_capability()
    assert capability is not None  # see `dispatch.why_not`
    refs = {output: jax.new_ref(operands[i]) for i, output in aliases.items()}
    with jax.named_scope(name):
        made = iter(
            jax_triton.triton_call(
                *(refs[aliases[i]] if i in aliases else x for i, x in enumerate(operands)),
                kernel=_compiled(source, name),
                out_type=[shape for i, shape in enumerate(out_shapes) if i not in refs],
                grid=grid,
                name=name,
                compute_capability=10 * capability[0] + capability[1],
                backend_options={
                    **options,
                    "enable_fp_fusion": True,  # as with Pallas
                    "ptx_version": PTX_VERSION if capability < (10, 0) else PTX_VERSION_FROM_10_0,
                },
            )
        )
    return tuple(jax.freeze(refs[i]) if i in refs else next(made) for i in range(len(out_shapes)))


@functools.cache
def _compiled(source: str, name: str) -> Any:
    """Return the function `name` of the module text `source`.

    Triton reads the text from `linecache`, under the name of a file that does not exist. The name
    contains a digest of the text, so it is the same in every process, as compilation caches need.
    """
    file = f"<{name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    module: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, file, "exec"), module)
    return module[name]
