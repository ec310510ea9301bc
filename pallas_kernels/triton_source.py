"""Translates a kernel's jaxpr into the source text of a Triton function, one line per equation.

Values keep the jaxpr's shapes and dtypes. Loops and branches become loops and branches of Triton,
so that Triton's compiler pipelines them. A ref becomes a pointer to a whole array in row-major
order. Indexing becomes arithmetic on offsets, which have 32 bits, or 64 bits for arrays with 2^31
elements or more. Making the text needs neither triton nor a GPU, so tests can read and run it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

HEADER = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
"""
TYPES = {"bool": "int1", "float8_e4m3fn": "float8e4nv"}  # other dtypes have the same name in Triton
MAX_OFFSET = 2**31  # limit of an i32
MAX_PROGRAMS = 2**16 - 1  # along the second and third axis of a grid
TF32 = jax.lax.Precision.HIGH, jax.lax.Precision.DEFAULT

# As in Pallas' lowering, functions are libdevice's, and a maximum ignores NaN.
ELEMENTWISE = {
    "abs": "tl.abs({})",
    "add": "{} + {}",
    "and": "{} & {}",
    "approximate_log2": "tl.inline_asm_elementwise("
    "'lg2.approx.ftz.f32 $0, $1;', '=f,f', [{}], tl.float32, is_pure=True, pack=1)",
    "eq": "{} == {}",
    "exp": "libdevice.exp({})",
    "exp2": "libdevice.exp2({})",
    "ge": "{} >= {}",
    "gt": "{} > {}",
    "le": "{} <= {}",
    "log": "libdevice.log({})",
    "log1p": "libdevice.log1p({})",
    "lt": "{} < {}",
    "max": "tl.maximum({}, {})",
    "min": "tl.minimum({}, {})",
    "mul": "{} * {}",
    "multiply_add": "tl.fma({}, {}, {})",
    "ne": "{} != {}",
    "neg": "-{}",
    "not": "~{}",
    "or": "{} | {}",
    "population_count": "libdevice.popc({})",
    "rem": "{} % {}",
    "reshard": "{}",
    "rsqrt": "libdevice.rsqrt({})",
    "select_n": "tl.where({0}, {2}, {1})",
    "shift_left": "{} << {}",
    "sign": "({0} > 0).to(tl.int32) - ({0} < 0).to(tl.int32)",
    "sub": "{} - {}",
    "tanh": "libdevice.tanh({})",
    "xor": "{} ^ {}",
}
REDUCTIONS = {"reduce_max": "max", "reduce_min": "min", "reduce_sum": "sum"}


def triton_source(
    jaxpr: Any,
    *,
    name: str,
    grid: Sequence[int],
    aliases: Mapping[int, int],
    num_inputs: int,
) -> str:
    """Return the text of a module with a Triton function for a kernel traced to `jaxpr`.

    The function takes pointers to the inputs, then to the outputs that alias no input.

    Args:
        jaxpr: the kernel's jaxpr, whose arguments are refs to the inputs, then to all outputs.
        name: the function's name.
        grid: the grid for which the kernel was written; `launch_grid` returns the grid to launch.
        aliases: maps inputs to the outputs that reuse their buffers.
        num_inputs: the number of refs that are inputs.

    Raises:
        NotImplementedError: an operation of the kernel has no translation.
    """
    inputs = {output: f"x{i}" for i, output in aliases.items()}
    refs = [f"x{i}" for i in range(num_inputs)]
    refs += [inputs.get(i, f"out{i}") for i in range(len(jaxpr.invars) - num_inputs)]
    writer = _Writer()
    writer.start(grid)
    writer.translate(jaxpr, refs)
    signature = f"def {name}({', '.join(dict.fromkeys(refs))}):"
    constants = [f"    {name} = {value}" for value, name in writer.constants.items()]
    return HEADER + "\n".join([signature, *constants, *writer.lines]) + "\n"


def launch_grid(grid: Sequence[int]) -> tuple[int, ...]:
    """Return `grid`, or one axis with all programs if an axis after the first is too long."""
    return tuple(grid) if max(grid[1:], default=0) <= MAX_PROGRAMS else (math.prod(grid),)


def _dtype(dtype: Any) -> str:
    return f"tl.{TYPES.get(jnp.dtype(dtype).name, jnp.dtype(dtype).name)}"


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


class _Writer:
    """The lines of a Triton function, and the names of its values."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.constants: dict[str, str] = {}  # names by value
        self.programs: list[str] = []
        self.depth, self.num_names = 1, 0

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def new_name(self) -> str:
        self.num_names += 1
        return f"v{self.num_names}"

    def assign(self, value: str) -> str:
        """Return `value` if it is a name, else a new name to which `value` is assigned."""
        if value.isidentifier():
            return value
        name = self.new_name()
        self.line(f"{name} = {value}")
        return name

    def constant(self, value: Any, aval: Any) -> str:
        is_float = jnp.issubdtype(aval.dtype, jnp.floating)
        number = repr(float(value) if is_float else int(value))
        if is_float and not math.isfinite(float(value)):
            number = f'float("{number}")'
        text = f"tl.full([], {number}, {_dtype(aval.dtype)})"
        return self.constants.setdefault(text, f"c{len(self.constants)}")

    def start(self, grid: Sequence[int]) -> None:
        if len(launch_grid(grid)) == len(grid):
            self.programs = [self.assign(f"tl.program_id({i})") for i in range(len(grid))]
            return
        rest = self.assign("tl.program_id(0)")
        for size in grid:
            self.programs.append(self.assign(f"{rest} % {size}"))
            rest = self.assign(f"{rest} // {size}")

    def translate(self, jaxpr: Any, arguments: Sequence[str]) -> list[str]:
        """Write the equations of a jaxpr; return the names of its outputs."""
        jaxpr = _opened(jaxpr)
        names = dict(zip(jaxpr.invars, arguments, strict=True))

        def name_of(atom: Any) -> str:
            is_literal = hasattr(atom, "val")
            return self.constant(atom.val, atom.aval) if is_literal else names[atom]

        for eqn in jaxpr.eqns:
            given = [name_of(atom) for atom in eqn.invars]
            kind = eqn.primitive.name
            if kind in ELEMENTWISE:
                made = [ELEMENTWISE[kind].format(*given)]
            elif kind in REDUCTIONS:
                made = [_reduction(REDUCTIONS[kind], given[0], eqn.params["axes"])]
            elif kind == "jit":
                made = self.translate(eqn.params["jaxpr"], given)
            elif kind in RULES:
                made = RULES[kind](self, eqn, *given)
            else:
                raise NotImplementedError(f"{eqn.primitive.name} has no translation to Triton")
            names |= zip(eqn.outvars, map(self.assign, made), strict=True)
        return [name_of(atom) for atom in jaxpr.outvars]

    def block(
        self, jaxpr: Any, arguments: Sequence[str], results: Sequence[str], skip: int
    ) -> None:
        """Write `jaxpr`, indented; assign its outputs after the first `skip` to `results`."""
        self.depth += 1
        made = self.translate(jaxpr, arguments)[skip:]
        self.line(f"{', '.join(results)} = {', '.join(made)}" if results else "pass")
        self.depth -= 1

    def loop(
        self,
        start: str,
        stop: str,
        carry: Sequence[str],
        body: Any,
        consts: Sequence[str],
        skip: int,
    ) -> list[str]:
        """Write a loop; return the names of its results.

        The inputs of `body` are `consts`, the index, the loop's end (only if `skip` is 2), and the
        carry. The outputs of `body` are `skip` values, which are dropped, and the new carry.
        """
        results, i = [self.new_name() for _ in carry], self.new_name()
        for result, initial in zip(results, carry, strict=True):
            self.line(f"{result} = {initial}")
        self.line(f"for {i} in range({start}, {stop}):")
        self.block(body, [*consts, *(i, stop)[:skip], *results], results, skip)
        return results

    def broadcast(
        self, name: str, old: Sequence[int], new: Sequence[int], at: Sequence[int]
    ) -> str:
        """Return the value `name` with the shape `old`, broadcast to the shape `new`.

        Axis i of `old` becomes axis at[i] of `new`.
        """
        added = [i for i in range(len(new)) if i not in at]
        if old and added:
            name = self.assign(f"tl.expand_dims({name}, {added})")
        sizes = [old[list(at).index(i)] if i in at else 1 for i in range(len(new))]
        return name if old and sizes == list(new) else f"tl.broadcast_to({name}, {list(new)})"

    def pointer(self, ref: str, array: Any, transforms: Sequence[Any]) -> str:
        """Return pointers to the elements that an index selects in a ref to `array`.

        Raises NotImplementedError for an index with both arrays and slices.
        """
        indices = transforms[0].indices if transforms else [_Slice(0, n, 1) for n in array.shape]
        shape = transforms[0].int_indexer_shape if transforms else ()
        slices = [index for index in indices if hasattr(index, "stride")]
        if len(transforms) > 1 or (shape and slices):
            raise NotImplementedError("an index with both arrays and slices has no translation")
        is_wide, axis, terms = math.prod(array.shape) >= MAX_OFFSET, 0, []
        for index, stride in zip(indices, _strides(array.shape), strict=True):
            if hasattr(index, "stride"):
                at = f"tl.arange(0, {index.size})"
                if added := [i for i in range(len(slices)) if i != axis]:
                    at = f"tl.expand_dims({at}, {added})"
                index, axis = f"({index.start} + {at} * {index.stride})", axis + 1
            index = f"{index}.to(tl.int64)" if is_wide else index
            terms.append(f"{index} * {stride}" if stride > 1 else index)
        shape = [*shape, *(index.size for index in slices)]
        offset = f"{ref} + ({' + '.join(terms)})" if terms else ref
        return self.assign(f"tl.broadcast_to({offset}, {shape})" if shape else offset)


class _Slice(NamedTuple):
    start: int
    size: int
    stride: int


def _reduction(name: str, value: str, axes: Sequence[int]) -> str:
    for axis in sorted(axes, reverse=True):
        value = f"tl.{name}({value}, {axis})"
    return value


def _convert(writer: _Writer, eqn: Any, x: str) -> list[str]:
    (old,), (new,) = eqn.invars, eqn.outvars
    if old.aval.dtype == new.aval.dtype:
        return [x]
    # Floats become integers by dropping the fraction. They must fit.
    return [f"{x}.to({_dtype(new.aval.dtype)})"]


def _bitcast(writer: _Writer, eqn: Any, x: str) -> list[str]:
    return [f"{x}.to({_dtype(eqn.params['new_dtype'])}, bitcast=True)"]


def _divide(writer: _Writer, eqn: Any, x: str, y: str) -> list[str]:
    is_float = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
    return [f"{x} / {y}" if is_float else f"{x} // {y}"]  # both round integers towards zero


def _shift_right_logical(writer: _Writer, eqn: Any, x: str, y: str) -> list[str]:
    if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.unsignedinteger):
        raise NotImplementedError("a logical shift of signed integers has no translation")
    return [f"{x} >> {y}"]


def _program_id(writer: _Writer, eqn: Any) -> list[str]:
    return [writer.programs[eqn.params["axis"]]]


def _iota(writer: _Writer, eqn: Any) -> list[str]:
    shape, axis = eqn.params["shape"], eqn.params["dimension"]
    dtype = jnp.dtype(eqn.params["dtype"])
    text = f"tl.arange(0, {shape[axis]})"
    name = writer.assign(text if dtype == jnp.int32 else f"{text}.to({_dtype(dtype)})")
    return [writer.broadcast(name, shape[axis : axis + 1], shape, [axis])]


def _broadcast_in_dim(writer: _Writer, eqn: Any, x: str, *_: str) -> list[str]:
    at, shape = eqn.params["broadcast_dimensions"], eqn.params["shape"]
    return [writer.broadcast(x, eqn.invars[0].aval.shape, shape, at)]


def _broadcast_to(writer: _Writer, eqn: Any, x: str) -> list[str]:
    old, new = eqn.invars[0].aval.shape, eqn.params["shape"]
    return [writer.broadcast(x, old, new, range(len(new) - len(old), len(new)))]


def _dot_general(writer: _Writer, eqn: Any, a: str, b: str) -> list[str]:
    ((a_axis,), (b_axis,)), batch = eqn.params["dimension_numbers"]
    if batch != ((), ()):
        raise NotImplementedError("a product of batches has no translation")
    a, b = f"tl.trans({a})" if a_axis == 0 else a, f"tl.trans({b})" if b_axis == 1 else b
    precision = eqn.params["precision"] or (jax.lax.Precision.DEFAULT,)
    kind = "tf32" if any(one in TF32 for one in precision) else "ieee"
    return [f'tl.dot({a}, {b}, input_precision="{kind}")']


def _load(writer: _Writer, eqn: Any, *given: str) -> list[str]:
    ref, transforms, mask, other = eqn.params["args_tree"].unflatten(given)
    pointer = writer.pointer(ref, eqn.invars[0].aval, transforms)
    masks = [f", {key}={value}" for key, value in (("mask", mask), ("other", other)) if value]
    return [f"tl.load({pointer}{''.join(masks)})"]


def _get(writer: _Writer, eqn: Any, ref: str, *given: str) -> list[str]:
    transforms = eqn.params["tree"].unflatten(given)
    return [f"tl.load({writer.pointer(ref, eqn.invars[0].aval, transforms)})"]


def _store(writer: _Writer, eqn: Any, *given: str) -> list[str]:
    ref, transforms, value, mask = eqn.params["args_tree"].unflatten(given)
    return _write(writer, eqn, ref, transforms, value, f", mask={mask}" if mask else "")


def _swap(writer: _Writer, eqn: Any, ref: str, value: str, *given: str) -> list[str]:
    return _write(writer, eqn, ref, eqn.params["tree"].unflatten(given), value, "")


def _write(
    writer: _Writer, eqn: Any, ref: str, transforms: Sequence[Any], value: str, mask: str
) -> list[str]:
    writer.line(f"tl.store({writer.pointer(ref, eqn.invars[0].aval, transforms)}, {value}{mask})")
    return ["None"]  # the previous element, which no kernel uses


def _barrier(writer: _Writer, eqn: Any, *given: str) -> list[str]:
    writer.line("tl.debug_barrier()")
    return list(given)


def _cond(writer: _Writer, eqn: Any, index: str, *given: str) -> list[str]:
    """Write an if statement; return the names of its results.

    Both branches assign to these names. An else branch that would be empty is left out.

    Raises:
        NotImplementedError: there are not exactly two branches.
    """
    if len(eqn.params["branches"]) != 2:
        raise NotImplementedError("a choice between more than two branches has no translation")
    results = [writer.new_name() for _ in eqn.outvars]
    no, yes = eqn.params["branches"]
    writer.line(f"if {index} != 0:")
    writer.block(yes, given, results, 0)
    if results or _opened(no).eqns:
        writer.line("else:")
        writer.block(no, given, results, 0)
    return results


def _while(writer: _Writer, eqn: Any, *given: str) -> list[str]:
    """Write a `fori_loop` that was traced to a while loop; return the names of its final carry.

    The carry is the index, the end, and the body's results.

    Raises:
        NotImplementedError: the loop is not a `fori_loop`.
    """
    cond, body = (_opened(eqn.params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
    num_consts = eqn.params["body_nconsts"]
    first, end = body.invars[num_consts : num_consts + 2]
    is_counted = (
        [one.primitive.name for one in cond.eqns] == ["lt"]
        and cond.eqns[0].invars == cond.invars[:2]
        and body.outvars[1] is end
        and _is_next(body, first)
    )
    if eqn.params["cond_nconsts"] or not is_counted:
        raise NotImplementedError("a loop other than fori_loop has no translation")
    consts, (start, stop), carry = (
        given[:num_consts],
        given[num_consts:][:2],
        given[num_consts + 2 :],
    )
    return [stop, stop, *writer.loop(start, stop, carry, body, consts, 2)]


def _scan(writer: _Writer, eqn: Any, *given: str) -> list[str]:
    """Write a `fori_loop` that was traced to a scan; return the names of its final carry.

    The carry is the index and the body's results.

    Raises:
        NotImplementedError: the scan is not a `fori_loop`.
    """
    length, body = eqn.params["length"], _opened(eqn.params["jaxpr"])
    num_consts = len(given) - len(eqn.outvars)
    first = body.invars[num_consts]
    if eqn.params["reverse"] or not _is_next(body, first):
        raise NotImplementedError("a scan other than fori_loop has no translation")
    consts, start, carry = given[:num_consts], given[num_consts], given[num_consts + 1 :]
    stop = writer.assign(f"{start} + {length}")
    return [stop, *writer.loop(start, stop, carry, body, consts, 1)]


def _opened(jaxpr: Any) -> Any:
    if getattr(jaxpr, "consts", ()):
        raise NotImplementedError("an array captured by a kernel has no translation")
    return getattr(jaxpr, "jaxpr", jaxpr)


def _is_next(body: Any, i: Any) -> bool:
    """Return whether the first output of a loop's body is i + 1."""
    return any(
        one.primitive.name == "add"
        and one.invars[0] is i
        and getattr(one.invars[1], "val", None) == 1
        and one.outvars[0] is body.outvars[0]
        for one in body.eqns
    )


RULES: dict[str, Callable[..., list[str]]] = {
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast_in_dim,
    "broadcast_to": _broadcast_to,
    "cond": _cond,
    "convert_element_type": _convert,
    "cumsum": lambda writer, eqn, x: [f"tl.cumsum({x}, {eqn.params['axis']})"],
    "div": _divide,
    "dot_general": _dot_general,
    "get": _get,
    "iota": _iota,
    "masked_load": _load,
    "masked_swap": _store,
    "optimization_barrier": _barrier,
    "program_id": _program_id,
    "scan": _scan,
    "shift_right_logical": _shift_right_logical,
    "swap": _swap,
    "while": _while,
}
