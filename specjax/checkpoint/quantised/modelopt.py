"""Weights of NVIDIA's ModelOpt: NVFP4, and float8 with a scale per tensor.

A checkpoint may have matrices of both forms, and unquantised ones. The tensors show the form of
each matrix. A matrix X in NVFP4 has the tensors X.weight u8[O, I / 2], X.weight_scale and
X.weight_scale_2 (the factor, see `fp4`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.quantised.described import Described, is_named, of_config, tensor
from specjax.checkpoint.quantised.format import take
from specjax.checkpoint.quantised.fp4 import NVFP4, fp4_tensor
from specjax.checkpoint.quantised.scaled import FLOAT8, with_scales

_ALGORITHMS = "NVFP4", "FP8", "MIXED_PRECISION"
_END = ".weight_scale_2"


@dataclass(frozen=True)
class ModelOpt:
    """The `Format` of ModelOpt.

    Activations keep their dtype, even if the config quantises them.
    """

    described: ClassVar[str] = "modelopt (NVFP4, FP8, MIXED_PRECISION of these)"
    algorithm: str
    skipped: tuple[str, ...] = ()  # patterns of modules that are not quantised

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self | None:
        """See `Format`."""
        algorithm = config.get("quant_algo")
        if config.get("quant_method") != "modelopt" or algorithm not in _ALGORITHMS:
            return None
        return cls(algorithm, of_config(config, "ignore", "exclude_modules"))

    def join(self, files: TensorFiles, dtype: np.dtype) -> TensorFiles:
        """See `Format`."""
        tensors, folder = dict(files.tensors), files.folder
        for name in files.names():
            if name.endswith(_END):
                plain, scale = name.removesuffix("_scale_2"), name.removesuffix("_2")
                words, factor = (take(tensors, folder, one, name) for one in (plain, name))
                scales = scale, take(tensors, folder, scale, name)
                given = folder, plain, words, scales, (name, factor)
                tensors[plain] = fp4_tensor(*given, NVFP4, np.dtype(dtype))
        return with_scales(replace(files, tensors=tensors), None, dtype)

    def stored(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype
    ) -> dict[str, Described] | None:
        """Return the tensors that store a matrix; None for MIXED_PRECISION. See `Format`."""
        if is_named(name, self.skipped):
            return None
        if self.algorithm == "FP8":
            return {name: tensor(FLOAT8, *shape), f"{name}_scale": tensor(np.float32, *shape[:-2])}
        if self.algorithm != "NVFP4" or len(shape) != 2 or shape[1] % 16:
            return None
        num_out, num_in = shape
        return {
            name: tensor(np.uint8, num_out, num_in // 2),
            f"{name}_scale": tensor(FLOAT8, num_out, num_in // 16),
            f"{name}_scale_2": tensor(np.float32),
        }
