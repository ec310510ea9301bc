"""Unquantised matrices that are quantised when they are read.

Each row of a matrix, or each group of inputs in a row, has a scale. `nearest` computes the scales,
and rounds weights to numbers, as compressed-tensors does without calibration. The numbers and
scales are stored like those of compressed-tensors.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.quantised.bits import BITS, Bits
from specjax.checkpoint.quantised.compressed_tensors import UNPACKING
from specjax.checkpoint.quantised.nearest import (
    from_blocks,
    in_blocks,
    nearest,
    relative_error,
)
from specjax.checkpoint.quantised.packed import PackedTensor
from specjax.checkpoint.quantised.scaled import ScaledTensor
from specjax.checkpoint.stored_tensor import Readable

_KEPT = "float16", "bfloat16"  # dtypes that the scales of groups share with the weights


@dataclass(frozen=True)
class Part:
    """One of the tensors that store a quantised matrix."""

    path: Path  # of the plain matrix
    dtype: np.dtype
    shape: tuple[int, ...]
    compute: Callable[[], Any]

    def read(self) -> Any:
        """Return the tensor."""
        return self.compute()


@dataclass(eq=False)
class Rounded:
    """A matrix [..., O, I] of a file, rounded to the number format `bits` when it is read."""

    name: str
    source: Readable
    bits: Bits
    error: float | None = None  # of the matrix, see `relative_error`; None before it is read
    _scales: np.ndarray | None = None
    _lock: Any = field(default_factory=threading.Lock)

    def stored(self, dtype: np.dtype) -> ScaledTensor | PackedTensor:
        """Return the quantised matrix. Reading it returns dequantised weights in `dtype`."""
        *outer, depth = self.source.shape
        path, name, group = self.source.path, f"{self.name}_scale", self.bits.group
        if group is None:
            numbers = Part(path, np.dtype(self.bits.dtype), self.source.shape, self._read_numbers)
            scales = Part(path, np.dtype(np.float32), (*outer, 1), self._read_scales)
            return ScaledTensor(numbers, scales, name, (1, depth), dtype)
        words = Part(path, np.dtype(np.int32), (*outer, depth // 8), self._read_numbers)
        kept = np.dtype(_scales_dtype(self.source.dtype))
        scales = Part(path, kept, (*outer, depth // group), self._read_scales)
        own = words, scales, None, None, name, ""
        return PackedTensor(*own, UNPACKING, (outer[0], depth), group, dtype)

    def _read_numbers(self) -> jax.Array:
        with self._lock:
            return self._round()

    def _read_scales(self) -> np.ndarray:
        """Return the scales. Compute them, and the numbers, only if they are not known yet."""
        with self._lock:
            if self._scales is None:
                self._round()
            assert self._scales is not None
            return self._scales

    def _round(self) -> jax.Array:
        with np.errstate(over="ignore"):
            weights = self.source.read()
            weights = weights.astype(np.float32) if weights.dtype == np.float64 else weights
        numbers, scales, error = _rounded(weights, self.bits)
        self._scales, self.error = np.asarray(scales), float(error)
        if not np.isfinite(self.error):
            raise CheckpointError(
                f"{self.source.path}: {self.name} has NaN or infinity; download or export the "
                "checkpoint again"
            )
        return numbers


class RoundedFiles(NamedTuple):
    """The files of a checkpoint, with matrices that are quantised when they are read."""

    files: TensorFiles
    matrices: Mapping[str, Rounded]
    plain: tuple[str, ...]  # names of projection matrices that are not quantised

    def without(self, names: Iterable[str], files: TensorFiles) -> "RoundedFiles":
        """Return the checkpoint with the matrices `names` left unquantised, as in `files`."""
        tensors = {**self.files.tensors, **{name: files.tensors[name] for name in names}}
        left = {name: one for name, one in self.matrices.items() if name not in {*names}}
        return RoundedFiles(replace(files, tensors=tensors), left, (*self.plain, *names))

    def describe(self, quantization: str) -> str:
        """Return a text with the counts of quantised and unquantised matrices.

        Quantised matrices count only once they have been read. The text also has the largest
        relative error of these matrices.
        """
        errors = {name: one.error for name, one in self.matrices.items() if one.error is not None}
        worst = max(errors, key=errors.__getitem__, default="")
        line = f"{len(errors)} matrices are quantised to {quantization}"
        if errors:
            line += f"; the largest relative error is {errors[worst]:.2%}, of {worst}"
        if self.plain:
            line += f"; {len(self.plain)} stay plain, such as {self.plain[0]}"
        return line


def round_matrices(
    files: TensorFiles, names: Iterable[str], quantization: str, dtype: np.dtype
) -> RoundedFiles:
    """Return `files` with the matrices `names` replaced by matrices that are quantised when read.

    A `quantization` with groups leaves some matrices as they are: matrices with more than two axes,
    and matrices whose number of inputs is not a multiple of the group size.

    Args:
        quantization: a key of `BITS`.
        dtype: see `Format.join`.
    """
    bits = BITS[quantization]
    shapes = {name: files.shape(name) for name in names if name in files.tensors}
    fits = {
        name: bits.group is None or (len(shape) == 2 and shape[1] % bits.group == 0)
        for name, shape in shapes.items()
    }
    made = {name: Rounded(name, files.tensor(name), bits) for name, fit in fits.items() if fit}
    tensors = {**files.tensors, **{name: one.stored(dtype) for name, one in made.items()}}
    plain = tuple(name for name, fit in fits.items() if not fit)
    return RoundedFiles(replace(files, tensors=tensors), made, plain)


def _scales_dtype(dtype: Any) -> str:
    """Return the dtype of group scales for weights of `dtype`."""
    name = np.dtype(dtype).name
    return name if name in _KEPT else "float32"


@functools.partial(jax.jit, static_argnames="bits")
def _rounded(weights: jax.Array, bits: Bits) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return numbers and scales as compressed-tensors stores them, and the relative error."""
    *outer, depth = weights.shape
    block = 1, bits.group or depth
    scales_dtype = "float32" if bits.group is None else _scales_dtype(weights.dtype)
    numbers, scales = nearest(weights, block, bits, scales_dtype)
    by = scales.astype(jnp.float32)[..., :, None, :, None]
    made = from_blocks(in_blocks(numbers.astype(jnp.float32), block) * by, weights.shape)
    error = relative_error(made, weights)
    if bits.dtype != "int4":
        return numbers, scales, error
    codes = (numbers + 8).astype(jnp.uint32).reshape(*outer, -1, 8)
    words = functools.reduce(jnp.bitwise_or, [codes[..., i] << 4 * i for i in range(8)])
    return jax.lax.bitcast_convert_type(words, jnp.int32), scales, error
