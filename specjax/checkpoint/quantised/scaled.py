"""Weights in 8 bits with scales: one per block, per output, per group of inputs or per tensor.

A weight is a number of the tensor X [..., O, I], float8_e4m3fn or int8, times its scale. The scales
are the tensor X_scale_inv (DeepSeek, Qwen, Mistral) or X_scale (compressed-tensors). Their shape
shows which numbers share a scale. Only the size of a block is read from the config.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.quantised.format import group_size, read_positive
from specjax.checkpoint.spec import TensorSpec, module_of
from specjax.checkpoint.stored_tensor import Readable

FLOAT8, INT8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.int8)
STORED = FLOAT8, INT8
SUFFIXES = "_scale_inv", "_scale"
# Scales of activations and of caches, which are not quantised here.
_UNUSED = tuple(f".{name}_scale" for name in ("activation", "input", "output", *"qkv", "kv"))
Block = tuple[int, int]


@dataclass(frozen=True)
class ScaledTensor:
    """An 8-bit tensor with its scales; `read` returns their product."""

    weight: Readable
    scales: Readable
    scales_name: str
    block: Block  # rows and columns that share a scale
    dtype: np.dtype  # dtype of the product, which is computed in f32

    @property
    def path(self) -> Path:
        """The file of the 8-bit tensor."""
        return self.weight.path

    @property
    def form(self) -> tuple[np.dtype, int]:
        """The properties in which matrices must agree to be merged: dtype, columns per block."""
        return self.weight.dtype, self.block[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.weight.shape

    def read(self) -> jax.Array:
        """Return the numbers times their scales, computed on JAX's default device for speed."""
        return _multiply(self.weight.read(), self.read_scales(), self.block, self.dtype)

    def read_scales(self) -> np.ndarray:
        """Return the scales f32[..., blocks of rows, blocks of columns].

        Raises:
            CheckpointError: a scale is not a positive number.
        """
        scales = np.asarray(read_positive(self.scales, self.scales_name), np.float32)
        return scales.reshape(num_blocks(self.shape, self.block))


@dataclass(frozen=True)
class ValuesSpec(TensorSpec):
    """The `TensorSpec` of the numbers of an 8-bit matrix, without their scales."""

    def read(self, find: Callable[[str], Any]) -> list[Any]:
        """See `TensorSpec.read`."""
        return [find(name).weight.read() for name in self.names]


@dataclass(frozen=True)
class ScalesSpec(TensorSpec):
    """The `TensorSpec` of an 8-bit matrix's scales, f32[blocks of rows, blocks of columns].

    The matrix may merge several tensors of 8-bit numbers. `file_shapes` are the shapes of these
    tensors.
    """

    blocks: tuple[Block, ...] = ()  # for each tensor, the rows and columns that share a scale

    @property
    def block(self) -> Block:
        """The size (rows, columns) of the merged matrix's blocks, which have one scale each.

        Each block of the matrix lies within a block of one merged tensor. The matrix's blocks can
        have fewer rows than the tensors' blocks, so that no block crosses a border between two
        tensors, or between two parts of a head.
        """
        sizes = [shape[0] for shape in self.file_shapes]
        firsts = list(accumulate(sizes[:-1]))
        within = [rows for (rows, _), size in zip(self.blocks, sizes, strict=True) if rows < size]
        parts = [size for parts in self.interleaved for size in parts]
        return math.gcd(*firsts, *within, *parts) or sizes[0], self.blocks[0][1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the scales."""
        rows = sum(shape[0] for shape in self.file_shapes)
        return num_blocks((rows, self.file_shapes[0][1]), self.block)

    def read(self, find: Callable[[str], Any]) -> list[Any]:
        """See `TensorSpec.read`."""
        return [find(name).read_scales() for name in self.names]

    def join(self, parts: Any, dtype: np.dtype) -> Any:
        """Return the scales of the merged matrix, given the scales of each tensor."""
        # Join the indices of scales by row, because scales by row would be much larger.
        shapes = tuple((shape[0],) for shape in self.file_shapes)
        firsts = accumulate((len(part) for part in parts[:-1]), initial=0)
        indices = [
            first + np.arange(size) // rows
            for first, (size,), (rows, _) in zip(firsts, shapes, self.blocks, strict=True)
        ]
        by_row = TensorSpec(self.names, shapes, interleaved=self.interleaved)
        index = by_row.join(indices, np.dtype(np.int32))[:: self.block[0]]
        return module_of(parts[0]).concatenate(parts)[index]


def with_scales(files: TensorFiles, block: Block | None, dtype: np.dtype) -> TensorFiles:
    """Return a copy of `files`, in which a `ScaledTensor` replaces each 8-bit tensor with scales.

    Reading a `ScaledTensor` returns the product in `dtype`. `block` is the size of blocks that
    share a scale; None if all scales are per output or per tensor.

    Raises:
        CheckpointError: scales have a wrong shape; the error names the tensor.
    """
    tensors = {name: x for name, x in files.tensors.items() if not name.endswith(_UNUSED)}
    for name, weight in files.tensors.items():
        scales = next((name + one for one in SUFFIXES if name + one in tensors), None)
        if weight.dtype not in STORED or scales is None:
            continue
        if len(weight.shape) < 2:
            raise CheckpointError(
                f"{files.folder}: {name} must be a matrix, because it has scales ({scales}); got "
                f"{list(weight.shape)}"
            )
        found = tensors.pop(scales)
        blocks = {num_blocks(weight.shape, one): one for one in _possible(weight, found, block)}
        fitting = [one for shape, one in blocks.items() if _is_like(found.shape, shape)]
        if not fitting:
            what = f" in blocks of {list(block)}" if block else ""
            shapes = " or ".join(str(list(shape)) for shape in blocks)
            raise CheckpointError(
                f"{files.folder}: {scales} must be {shapes} for {name} {list(weight.shape)}{what}; "
                f"got {list(found.shape)}"
            )
        tensors[name] = ScaledTensor(weight, found, scales, fitting[0], np.dtype(dtype))
    return replace(files, tensors=tensors)


def _possible(weight: Readable, scales: Readable, block: Block | None) -> list[Block]:
    rows, columns = weight.shape[-2:]
    group = group_size(columns, scales.shape[-1]) if weight.dtype == INT8 and scales.shape else None
    groups = [(1, group)] if group else []
    return [*([block] if block else []), *groups, (1, columns), (rows, columns)]


def num_blocks(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Return the shape of the scales of a matrix with the shape [..., O, I]."""
    sizes = zip(shape[-2:], block, strict=True)
    return (*shape[:-2], *(-(-size // side) for size, side in sizes))


def _is_like(found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether scales of the shape `found` fit the shape `shape`.

    They fit if the shapes are equal. If `shape` has one column, axes of size 1 are ignored.
    """
    own = tuple(size for size in found if size > 1)
    return found == shape or (shape[-1] == 1 and own == tuple(n for n in shape if n > 1))


@partial(jax.jit, static_argnames=("block", "dtype"))
def _multiply(weight: jax.Array, scales: jax.Array, block: Block, dtype: np.dtype) -> jax.Array:
    rows, columns = weight.shape[-2:]
    scales = jnp.repeat(scales, block[0], axis=-2)[..., :rows, :]
    scales = jnp.repeat(scales, block[1], axis=-1)[..., :columns]
    return (weight.astype(jnp.float32) * scales).astype(dtype)
