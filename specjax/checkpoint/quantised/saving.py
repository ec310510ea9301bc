"""Writes a quantised checkpoint in the format of compressed-tensors."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.checkpoint import safetensors_file
from specjax.checkpoint.quantised.bits import BITS
from specjax.checkpoint.quantised.format import Converted
from specjax.checkpoint.quantised.rounding import RoundedFiles
from specjax.checkpoint.save import FILE
from specjax.checkpoint.stored_tensor import Readable
from specjax.checkpoint.writing import naming

_END = ".weight"
Parts = dict[str, Readable]  # the tensors of a matrix, by name


def save_rounded(
    folder: Path, made: RoundedFiles, config: Mapping[str, Any], quantization: str
) -> None:
    """Write tensors and config.json to `folder`. Tensors are read and written one at a time.

    Args:
        made: the result of `round_matrices`.
        config: the config of the unquantised checkpoint.
        quantization: a key of `BITS`.

    Raises:
        ValueError: `folder` has weights, or is a file.
        CheckpointError: a matrix has NaN or infinity.
        OSError: there is no space or no permission; the error names the folder.
    """
    check_empty(folder)
    text = json.dumps({**config, "quantization_config": _config(made, quantization)}, indent=2)
    tensors: dict[str, Readable] = {}
    for name, tensor in made.files.tensors.items():
        is_plain = name not in made.matrices
        tensors |= {name: tensor} if is_plain else FORMS[quantization].parts(name, tensor)
    layout = {name: (x.dtype, x.shape) for name, x in tensors.items()}
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
            weights = Path(temporary, FILE)
            arrays = ((name, np.asarray(x.read())) for name, x in tensors.items())
            safetensors_file.write(weights, layout, arrays)
            Path(temporary, "config.json").write_text(text + "\n")
            for name in FILE, "config.json":
                os.replace(Path(temporary, name), folder / name)


def check_empty(folder: Path) -> None:
    """Raise a ValueError if a folder has weights, or is a file."""
    if folder.is_file() or any(folder.glob("*.safetensors*")) or any(folder.glob("*.bin*")):
        raise ValueError(f"{folder} is a file or has weights; name a new folder")


class _Shape:
    """A tensor whose two numbers are the shape of a packed matrix. See `Readable`."""

    dtype, shape = np.dtype(np.int64), (2,)

    def __init__(self, matrix: Any):
        self.path, self._sizes = matrix.path, matrix.shape

    def read(self) -> np.ndarray:
        """Return the shape."""
        return np.array(self._sizes, np.int64)


def _with_scales(name: str, tensor: Any) -> Parts:
    return {name: tensor.weight, f"{name}_scale": tensor.scales}


def _packed(name: str, tensor: Any) -> Parts:
    own = {"packed": tensor.weight, "scale": tensor.scales, "shape": _Shape(tensor)}
    return {f"{name}_{end}": part for end, part in own.items()}


def _packed_bytes(name: str, tensor: Any) -> Parts:
    if len(tensor.shape) > 2:  # experts in one tensor, which cannot be packed into words
        return _with_scales(name, tensor)
    words = tensor.shape[0], -(-tensor.shape[1] // 4)
    packed = Converted(tensor.weight, _words, np.dtype(np.int32), words)
    return _packed(name, tensor) | {f"{name}_packed": packed}


def _words(numbers: Any) -> np.ndarray:
    """Pack numbers i8[O, I] into words i32. A word has four numbers, plus 128 each."""
    codes = np.asarray(numbers).view(np.uint8) ^ 0x80
    return np.pad(codes, ((0, 0), (0, -codes.shape[1] % 4))).view(np.int32)


class Form(NamedTuple):
    """How compressed-tensors stores matrices of one kind of numbers."""

    format: str  # its name in the config
    parts: Callable[[str, Any], Parts]  # returns the tensors of a matrix, given its name


# By key of `BITS`. 8-bit integers are packed into words, too: compressed-tensors and vLLM read
# separate bytes only in the format `int-quantized` (W8A8), where activations have 8 bits as well.
FORMS = {
    "fp8": Form("float-quantized", _with_scales),
    "int8": Form("pack-quantized", _packed_bytes),
    "int4": Form("pack-quantized", _packed),
}


def _config(made: RoundedFiles, quantization: str) -> dict[str, Any]:
    """Return the `quantization_config`. Unquantised modules are listed under "ignore"."""
    bits = BITS[quantization]
    plain = {
        name.removesuffix(_END)
        for name, tensor in made.files.tensors.items()
        if name.endswith(_END) and len(tensor.shape) == 2 and name not in made.matrices
    }
    if f"lm_head{_END}" not in made.matrices:
        plain.add("lm_head")  # a tied head is a module without a tensor
    weights = {
        "num_bits": int(np.dtype(bits.dtype).itemsize * 8) if bits.group is None else 4,
        "type": "float" if quantization == "fp8" else "int",
        "symmetric": True,
        "strategy": "channel" if bits.group is None else "group",
        "group_size": bits.group,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMS[quantization].format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(plain),
    }
