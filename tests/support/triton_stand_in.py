"""The parts of Triton that translated kernels use, in NumPy. Programs run one after another."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from pallas_kernels.triton_source import HEADER

PROGRAM = [0, 0, 0]  # that runs now


class Tensor(np.ndarray):
    """A value in a kernel, possibly a scalar. Integers are divided as in C."""

    def to(self, dtype: Any, bitcast: bool = False) -> "Tensor":
        return self.view(dtype) if bitcast else self.astype(dtype)

    def __floordiv__(self, other: Any) -> "Tensor":
        return tensor((self - np.fmod(self, other)).view(np.ndarray) // other)

    def __mod__(self, other: Any) -> "Tensor":
        return np.fmod(self, other)


def tensor(value: Any, dtype: Any = None) -> Tensor:
    return np.asarray(value, dtype).view(Tensor)


class Pointer:
    """Pointers into a one-dimensional array."""

    def __init__(self, array: np.ndarray, offset: Any):
        self.array, self.offset = array, tensor(offset)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.array, self.offset + offset)

    def places(self, mask: Any) -> np.ndarray:
        """Return the offsets where the mask is true. All of them must be inside the array."""
        places = np.asarray(self.offset)[np.asarray(mask)]
        assert np.all((places >= 0) & (places < len(self.array))), "out of bounds"
        return places


def broadcast_to(x: Any, shape: Sequence[int]) -> Any:
    if isinstance(x, Pointer):
        return Pointer(x.array, np.broadcast_to(x.offset, shape))
    return tensor(np.broadcast_to(x, shape))


def arange(start: int, stop: int) -> Tensor:
    assert (stop - start) & (stop - start - 1) == 0, "not a power of two"
    return tensor(np.arange(start, stop, dtype=np.int32))


def fma(a: Any, b: Any, c: Any) -> Tensor:
    a, b, c = (x.astype(np.float64) for x in (a, b, c))
    return (a * b + c).astype(np.float32)


def dot(a: Any, b: Any, input_precision: str) -> Tensor:
    return tensor(np.matmul(a.astype(np.float32), b.astype(np.float32)))


def inline_asm_elementwise(text: str, constraints: str, args: list, *_: Any, **options: Any) -> Any:
    assert text.startswith("lg2."), "no other is used"
    return tensor(np.log2(args[0]))


def elementwise(function: Any) -> Any:
    return lambda *xs: tensor(function(*xs))


def reduction(function: Any) -> Any:
    return lambda x, axis: tensor(function(x, axis=axis), x.dtype)


# As in Triton, a maximum ignores NaN.
tl = SimpleNamespace(
    abs=elementwise(np.abs),
    arange=arange,
    broadcast_to=broadcast_to,
    cumsum=reduction(np.cumsum),
    dot=dot,
    expand_dims=elementwise(lambda x, axes: np.expand_dims(x, tuple(axes))),
    fma=fma,
    inline_asm_elementwise=inline_asm_elementwise,
    full=lambda shape, value, dtype: tensor(np.full(shape, value, dtype)),
    max=reduction(np.fmax.reduce),
    maximum=elementwise(np.fmax),
    min=reduction(np.fmin.reduce),
    minimum=elementwise(np.fmin),
    program_id=lambda axis: tensor(PROGRAM[axis], np.int32),
    sum=reduction(np.sum),
    trans=elementwise(np.transpose),
    where=elementwise(np.where),
    bfloat16=jax.numpy.dtype("bfloat16"),
    float8e4nv=jax.numpy.dtype("float8_e4m3fn"),
    float32=np.float32,
    int1=np.bool_,
    int8=np.int8,
    int32=np.int32,
    int64=np.int64,
    uint32=np.uint32,
)
libdevice = SimpleNamespace(
    **{name: elementwise(getattr(np, name)) for name in ("exp", "exp2", "log", "log1p", "tanh")},
    rsqrt=elementwise(lambda x: 1 / np.sqrt(x)),
    popc=elementwise(lambda x: np.bitwise_count(x.view(np.uint32)).astype(np.int32)),
)


def counted(start: Any, stop: Any) -> Any:
    """Return the range of a loop, as an iterator of `Tensor`s."""
    return (tensor(i, np.int32) for i in range(int(start), int(stop)))


@functools.cache
def parsed(source: str) -> Any:
    return compile(source.removeprefix(HEADER), "<kernel>", "exec")


def launch(
    machine: Any,  # a `RaceChecker`
    source: str,
    name: str,
    operands: Sequence[jax.Array],
    out_shapes: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    aliases: Mapping[int, int],
    options: Mapping[str, int],
) -> tuple[Any, ...]:
    """Run a kernel on `machine`; a replacement of `triton_call.launch`."""
    memory = {"load": machine.load, "store": machine.store, "debug_barrier": machine.barrier}
    namespace = SimpleNamespace(**vars(tl), **memory)
    module: dict[str, Any] = {"tl": namespace, "libdevice": libdevice, "range": counted}
    exec(parsed(source), module)

    def run(*operands: Any) -> tuple[np.ndarray, ...]:
        given = [np.array(x) for x in operands]
        outs = [np.full(x.shape, machine.poison(x.dtype), x.dtype) for x in out_shapes]
        for operand, out in aliases.items():
            outs[out] = given[operand]
        inputs = [x.reshape(-1) for x in given]
        new = [out.reshape(-1) for i, out in enumerate(outs) if i not in aliases.values()]
        machine.begin(name, 32 * options["num_warps"], [inputs[i] for i in aliases], new)
        with np.errstate(all="ignore"):
            for place in machine.order(list(itertools.product(*map(range, grid)))):
                PROGRAM[: len(grid)] = place
                machine.begin_program()
                module[name](*(Pointer(x, 0) for x in (*inputs, *new)))
        return tuple(outs)

    return tuple(jax.pure_callback(run, tuple(out_shapes), *operands))
