"""Matrices of 4-bit numbers that have a scale, and perhaps a zero point, per group of inputs.

    weight[o, i] = (numbers[o, i] - zeros[g, o]) scales[g, o] factor

g is the group of input i. The numbers are of one of two kinds:

    integers    from 0 to 15; all zero points are 8 if the file has none, and the factor is 1
    floats      E2M1, with zero points of 0; some formats have a factor

A number is stored as a code of 4 bits. Formats differ in how they pack codes into words.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.quantised.format import read_positive
from specjax.checkpoint.spec import module_of
from specjax.checkpoint.stored_tensor import Readable

_POSITIVE = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0
E2M1 = (*_POSITIVE, *(-x for x in _POSITIVE))  # the floats of 4 bits, by their code


def unchanged(x: Any) -> Any:
    """Return `x`. Use this in an `Unpacking` for a tensor that needs no conversion."""
    return x


class Unpacking(NamedTuple):
    """Functions that unpack a format's tensors.

    The results can be larger than the shapes in the comments below, because their axes can be
    padded at the ends.
    """

    codes: Callable[[Any], Any]  # returns u8[O, I]
    scales: Callable[[Any], Any]  # returns [groups, O], or [1, 1]
    zeros: Callable[[np.ndarray], np.ndarray] = unchanged  # returns u8[groups, O]
    factor: Callable[[np.ndarray], np.ndarray] = unchanged  # returns f32, with one number
    is_float: bool = False
    scales_dtype: str | None = None  # if it is not the dtype of the stored scales
    # For outputs, then for inputs: (their axis of the words, number of codes of a word along it)
    axes: tuple[tuple[int, int], tuple[int, int]] = ((0, 1), (1, 8))


class PackedForm(NamedTuple):
    """The properties in which packed matrices must agree to be merged into one matrix."""

    unpack: Unpacking
    num_in: int  # including the padding in `PackedTensor.order`
    group: int  # the number of inputs in a group
    has_zeros: bool
    has_factor: bool
    scales_dtype: str
    order: bytes  # of the inputs, see `PackedTensor.order`; empty if it is the usual one


@dataclass(frozen=True)
class PackedTensor:
    """A matrix of 4-bit numbers with its scales; `read` returns the weights."""

    weight: Readable
    scales: Readable
    zeros: Readable | None
    groups: Readable | None  # i32[I], the group of each input; None if groups are consecutive
    name: str  # of the scales, in errors
    groups_name: str
    unpack: Unpacking
    shape: tuple[int, ...]  # (O, I)
    group: int
    dtype: np.dtype  # of the weights that `read` returns, which are computed in f32
    factor: Readable | None = None
    factor_name: str = ""

    @property
    def path(self) -> Path:
        """The file of the numbers."""
        return self.weight.path

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return -(-self.shape[1] // self.group)

    @cached_property
    def form(self) -> PackedForm:
        """The matrix's `PackedForm`.

        This reads the zero points and the groups, because the form depends on their values.
        """
        order = b"" if self.order is None else self.order.tobytes()
        num_in = self.shape[1] if self.order is None else len(self.order)
        sizes = self.unpack, num_in, self.group
        dtype = self.unpack.scales_dtype or self.scales.dtype.name
        has = self.used_zeros is not None, self.factor is not None
        return PackedForm(*sizes, *has, dtype, order)

    @cached_property
    def used_zeros(self) -> np.ndarray | None:
        """The zero points u8[groups, O]; None if there are none, or all of them are 8."""
        if self.zeros is None:
            return None
        zeros = np.asarray(self.unpack.zeros(self.zeros.read()))
        zeros = zeros[: self.num_groups, : self.shape[0]]
        return None if (zeros == 8).all() else zeros

    @cached_property
    def order(self) -> np.ndarray | None:
        """A permutation i32[I] of the inputs, after which each group's inputs are consecutive.

        None if they are consecutive already.

        Raises:
            CheckpointError: a group has more or fewer inputs than the group size.
        """
        if self.groups is None:
            return None
        groups, depth = np.asarray(self.groups.read(), np.int64), self.shape[1]
        usual = np.arange(depth) // self.group
        if (groups == usual).all():
            return None
        order = np.argsort(groups, kind="stable")
        if not (groups[order] == usual).all():
            raise CheckpointError(
                f"{self.groups.path}: {self.groups_name} must give each of {self.num_groups} "
                f"groups {self.group} inputs; download or export the checkpoint again"
            )
        return order.astype(np.int32)

    def read_scales(self) -> Any:
        """Return the scales as they are stored; see `read_positive`.

        Scales of integer codes must not be 0. For E2M1 codes, a stored 0 is allowed. As float8, it
        is a tiny scale that was rounded to zero. As u8, it is an exponent and means 2^-127.

        Raises:
            CheckpointError: a scale is neither a positive number nor an allowed 0.
        """
        return read_positive(self.scales, self.name, may_be_zero=self.unpack.is_float)

    def read_factor(self) -> np.ndarray | None:
        """Return the factor, an array f32 with one number; None if there is none."""
        if self.factor is None:
            return None
        return self.unpack.factor(read_positive(self.factor, self.factor_name))

    def read(self) -> jax.Array:
        """Return the weights [O, I] in `dtype`, computed on JAX's default device."""
        given = self.weight.read(), self.read_scales(), self.used_zeros, self.read_factor()
        given = *given, self.order
        return _weights(*given, self.unpack, self.shape, self.group, self.dtype)


def nibbles(words: Any, axis: int, order: tuple[int, ...] = tuple(range(8))) -> Any:
    """Unpack words that hold several 4-bit codes each; return the codes as u8.

    The codes of a word are adjacent along `axis` in the result. Number j of these codes comes from
    bits 4 order[j] to 4 order[j] + 3 of the word.
    """
    codes = module_of(words).stack([(words >> 4 * place) & 15 for place in order], axis=axis + 1)
    shape = [len(order) * size if i == axis else size for i, size in enumerate(words.shape)]
    return codes.astype(np.uint8).reshape(shape)


@partial(jax.jit, static_argnames=("unpack", "shape", "group", "dtype"))
def _weights(
    words: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    factor: jax.Array | None,
    order: jax.Array | None,
    unpack: Unpacking,
    shape: tuple[int, int],
    group: int,
    dtype: np.dtype,
) -> jax.Array:
    rows, depth = shape
    groups = jnp.arange(depth) // group
    if order is not None:
        groups = groups[jnp.argsort(order)]
    codes = unpack.codes(words)[:rows, :depth]
    by_group = unpack.scales(scales).astype(jnp.float32)
    by_group = jnp.broadcast_to(by_group, (-(-depth // group), rows))
    if unpack.is_float:
        numbers = jnp.array(E2M1, jnp.float32)[codes]
    else:
        shift = 8.0 if zeros is None else zeros.astype(jnp.float32)[groups].T
        numbers = codes.astype(jnp.float32) - shift
    weights = numbers * by_group[groups].T
    return (weights if factor is None else weights * factor.reshape(1, 1)).astype(dtype)
