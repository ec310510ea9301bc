"""Matrices that GPTQ and AWQ store as X.qweight, X.qzeros and X.scales instead of X.weight."""

from dataclasses import replace

import numpy as np

from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.quantised.described import Described, tensor
from specjax.checkpoint.quantised.format import check_axes, check_shape, group_size, take
from specjax.checkpoint.quantised.packed import PackedTensor, Unpacking

_END = ".qweight"


def with_qweights(
    files: TensorFiles, unpack: Unpacking, axis: int, group: int, dtype: np.dtype
) -> TensorFiles:
    """Return `files`, in which a `PackedTensor` X.weight replaces the tensors of each matrix X.

    These tensors are

        X.qweight    i32[I / 8, O] or i32[I, O / 8], words of eight codes
        X.qzeros     i32[groups, O / 8], words of eight zero points
        X.scales     [groups, O]
        X.g_idx      optional: i32[I], the group of each input

    Args:
        files: the tensors of a checkpoint.
        unpack: the functions that unpack these tensors.
        axis: the axis of X.qweight along which codes are packed: 0 for inputs, 1 for outputs.
        group: the usual number of inputs in a group; -1 for all inputs.
        dtype: see `PackedTensor`.

    Raises:
        CheckpointError: tensors are missing, or have a wrong shape; the error names them.
    """
    tensors, folder = dict(files.tensors), files.folder
    for name, words in files.tensors.items():
        if not name.endswith(_END):
            continue
        del tensors[name]
        stem = name.removesuffix(_END)
        parts = [f"{stem}.{part}" for part in ("scales", "qzeros", "g_idx")]
        scales, zeros = (take(tensors, folder, part, name) for part in parts[:2])
        groups = tensors.pop(parts[2], None)
        check_axes(folder, name, words)
        num_in, num_out = (8 * n if i == axis else n for i, n in enumerate(words.shape))
        count = scales.shape[0] if scales.shape else 0
        size = group_size(num_in, count, group) or (group if group > 0 else num_in)
        count = -(-num_in // size)
        about = f"{name} {list(words.shape)}"
        check_shape(folder, parts[0], about, scales, (count, num_out))
        check_shape(folder, parts[1], about, zeros, (count, -(-num_out // 8)))
        if groups is not None:
            check_shape(folder, parts[2], about, groups, (num_in,))
        own = words, scales, zeros, groups, parts[0], parts[2]
        sizes = (num_out, num_in), size, np.dtype(dtype)
        tensors[f"{stem}.weight"] = PackedTensor(*own, unpack, *sizes)
    return replace(files, tensors=tensors)


def qweights(
    name: str, shape: tuple[int, ...], group: int, *, axis: int
) -> dict[str, Described] | None:
    """Return the tensors that `with_qweights` reads for the matrix `name` [O, I].

    All values are 0. The result is None if a matrix of this shape cannot be packed.
    """
    if len(shape) != 2 or shape[0] % 8 or shape[axis - 1] % 8:
        return None
    (num_out, num_in), stem = shape, name.removesuffix("weight")
    count = -(-num_in // (group if group > 0 else num_in))
    sizes = (num_in // 8, num_out) if axis == 0 else (num_in, num_out // 8)
    return {
        f"{stem}qweight": tensor(np.int32, *sizes),
        f"{stem}qzeros": tensor(np.int32, count, num_out // 8),
        f"{stem}scales": tensor(np.float16, count, num_out),
    }
