"""Reads float8 weights with one scale per block, and multiplies them by their scales.

DeepSeek-V3 published this format. Next to a tensor X of float8_e4m3fn [..., M, N], there is a
tensor X_scale_inv [..., ceil(M / m), ceil(N / n)]. Block (i, j) of m x n elements is multiplied by
scale (i, j). Code that loads the weights does not see the scales.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.stored_tensor import Readable

STORED = np.dtype(ml_dtypes.float8_e4m3fn)
SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class ScaledTensor:
    """A float8 tensor with its scales; `read` returns their product."""

    weight: Readable
    scales: Readable
    block: tuple[int, int]
    dtype: np.dtype  # dtype of the product, which is computed in f32

    @property
    def path(self) -> Path:
        """The file of the float8 tensor."""
        return self.weight.path

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.weight.shape

    def read(self) -> jax.Array:
        """Return the product. JAX's default device computes it, which is faster than the host."""
        return _multiply(self.weight.read(), self.scales.read(), self.block, self.dtype)


def with_scales(files: TensorFiles, block: tuple[int, int], dtype: np.dtype) -> TensorFiles:
    """Return a copy of `files`, in which a `ScaledTensor` replaces each float8 tensor with scales.

    Reading a `ScaledTensor` returns the product in `dtype`.

    Raises:
        CheckpointError: scales do not have the shape that `block` requires; the error names the
            tensor.
    """
    tensors = dict(files.tensors)
    for name, weight in files.tensors.items():
        if weight.dtype != STORED or name + SUFFIX not in tensors:
            continue
        scales = tensors.pop(name + SUFFIX)
        sizes = zip(weight.shape[-2:], block, strict=True)
        expected = (*weight.shape[:-2], *(-(-size // side) for size, side in sizes))
        if scales.shape != expected:
            raise CheckpointError(
                f"{files.folder}: {name}{SUFFIX} must be {list(expected)} for {name} "
                f"{list(weight.shape)} in blocks of {list(block)}; got {list(scales.shape)}"
            )
        tensors[name] = ScaledTensor(weight, scales, block, np.dtype(dtype))
    return replace(files, tensors=tensors)


@partial(jax.jit, static_argnames=("block", "dtype"))
def _multiply(
    weight: jax.Array, scales: jax.Array, block: tuple[int, int], dtype: np.dtype
) -> jax.Array:
    rows, columns = weight.shape[-2:]
    scales = jnp.repeat(scales.astype(jnp.float32), block[0], axis=-2)[..., :rows, :]
    scales = jnp.repeat(scales, block[1], axis=-1)[..., :columns]
    return (weight.astype(jnp.float32) * scales).astype(dtype)
