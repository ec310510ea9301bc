"""Describes the quantised weights of a model from the config alone, without weight files."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.quantised.described import described, tensor
from specjax.checkpoint.quantised.registry import read_format
from specjax.device.loading import keep_name
from specjax.device.models.config_fields import quantisation
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.model import Model
from specjax.device.parallel import specs_of
from specjax.device.weights.rounded import projections, rounded
from specjax.device.weights.stored import as_stored


def described_specs(hf: HFConfig, model: Model, quantization: str | None, dtype: str | None) -> Any:
    """Return the `TensorSpec`s of a model's parameters, in the form in which an engine holds them.

    The config or `quantization` decides which matrices are quantised, because there are no tensors.

    Args:
        hf: the config of the model.
        model: the model, without weights.
        quantization: see `load_weights`.
        dtype: the dtype of unquantised tensors; None for float32.

    Raises:
        ValueError: `quantization` changes no matrix.
    """
    config = quantisation(hf)[1]
    specs = specs_of(model)
    plain = {
        name: tensor(dtype or "float32", *shape)
        for spec in jax.tree.leaves(specs)
        for name, shape in zip(spec.names, spec.file_shapes, strict=True)
    }
    files = TensorFiles(Path(hf.origin), plain)
    if quantization is not None:
        files = rounded(specs, files, quantization, np.dtype(np.float32)).files
    elif (form := read_format(config)) is not None:
        files = form.join(described(files, form, projections(specs)), np.dtype(np.float32))
    elif config:  # MXFP4 experts, whose tensors are called *_blocks
        return as_stored(specs_of(model, {f"{name}_blocks" for name in plain}), files, keep_name)
    return as_stored(specs, files, keep_name)
