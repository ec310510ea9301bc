"""Matrices of 4-bit numbers that have a scale, and perhaps a zero point, per group of inputs.

    weight[o, i] = (numbers[o, i] - zeros[g, o]) scales[g, o]

where g is the group of input i, and numbers and zeros are from 0 to 15. Without zeros, 8 is
subtracted. Formats differ in how they pack numbers into words.
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
from specjax.checkpoint.stored_tensor import Readable


class Unpacking(NamedTuple):
    """Functions that unpack a format's tensors. The results may be padded at the ends of axes."""

    numbers: Callable[[jax.Array], jax.Array]  # returns u8[O, I]
    scales: Callable[[jax.Array], jax.Array]  # returns [groups, O], or [1, 1]
    zeros: Callable[[jax.Array], jax.Array]  # returns u8[groups, O]


class PackedForm(NamedTuple):
    """What matrices must share to be merged into one matrix of packed numbers."""

    unpack: Unpacking
    num_in: int
    group: int  # the number of inputs in a group
    has_zeros: bool
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
        """See `PackedForm`. Zero points and groups are read, because their values matter."""
        order = b"" if self.order is None else self.order.tobytes()
        sizes = self.unpack, self.shape[1], self.group, self.used_zeros is not None
        return PackedForm(*sizes, self.scales.dtype.name, order)

    @cached_property
    def used_zeros(self) -> np.ndarray | None:
        """The zero points u8[groups, O]; None if all of them are 8."""
        if self.zeros is None:
            return None
        zeros = np.asarray(self.unpack.zeros(self.zeros.read()))
        zeros = zeros[: self.num_groups, : self.shape[0]]
        return None if (zeros == 8).all() else zeros

    @cached_property
    def order(self) -> np.ndarray | None:
        """The order i32[I] of inputs in which groups are consecutive; None if they are so already.

        Raises:
            CheckpointError: a group has more or fewer inputs than its size.
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
        """Return the scales as they are stored; see `read_positive`."""
        return read_positive(self.scales, self.name)

    def read(self) -> jax.Array:
        """Return the weights [O, I] in `dtype`, computed on JAX's default device."""
        given = self.weight.read(), self.read_scales(), self.used_zeros, self.order
        return _weights(*given, self.unpack, self.shape, self.group, self.dtype)


def nibbles(
    words: Any, axis: int, order: tuple[int, ...] = tuple(range(8)), *, xp: Any = jnp
) -> Any:
    """Return u8 numbers from words i32, each of eight numbers that are adjacent along `axis`.

    The number at place j of a word is in bits 4 order[j] to 4 order[j] + 3. `xp` is the module of
    the words' array type: NumPy or `jax.numpy`.
    """
    numbers = xp.stack([(words >> 4 * place) & 15 for place in order], axis=axis + 1)
    shape = [8 * size if i == axis else size for i, size in enumerate(words.shape)]
    return numbers.astype(np.uint8).reshape(shape)


def unchanged(x: Any) -> Any:
    """Return `x`. Use this in a `Unpacking` for a tensor that needs no conversion."""
    return x


@partial(jax.jit, static_argnames=("unpack", "shape", "group", "dtype"))
def _weights(
    words: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
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
    numbers = unpack.numbers(words)[:rows, :depth].astype(jnp.float32)
    by_group = unpack.scales(scales).astype(jnp.float32)
    by_group = jnp.broadcast_to(by_group, (-(-depth // group), rows))
    shift = 8.0 if zeros is None else zeros.astype(jnp.float32)[groups].T
    return ((numbers - shift) * by_group[groups].T).astype(dtype)
