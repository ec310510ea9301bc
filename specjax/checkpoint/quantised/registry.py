"""The registry of formats of quantised weights."""

from collections.abc import Mapping
from typing import Any

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.quantised.awq import AWQ
from specjax.checkpoint.quantised.compressed_tensors import CompressedTensors
from specjax.checkpoint.quantised.format import Format
from specjax.checkpoint.quantised.fp8 import FP8
from specjax.checkpoint.quantised.gptq import GPTQ
from specjax.checkpoint.quantised.modelopt import ModelOpt

FORMATS: tuple[type[Format], ...] = (FP8, CompressedTensors, GPTQ, AWQ, ModelOpt)
# Endings of names that only quantised checkpoints have.
_QUANTISED = ".qweight", ".weight_packed", ".weight_scale_inv", ".weight_scale"


def read_format(config: Any) -> Format | None:
    """Return the format that a `quantization_config` describes; None if it is not supported."""
    if not isinstance(config, Mapping):
        return None
    found = (one.read(config) for one in FORMATS)
    return next((one for one in found if one is not None), None)


def described() -> str:
    """Return a text that lists the supported formats."""
    return "; ".join(one.described for one in FORMATS)


def refuse_quantised(files: TensorFiles) -> None:
    """Raise a CheckpointError if there are quantised tensors.

    Call this for a checkpoint whose config has no `quantization_config`.
    """
    if found := next((name for name in files.names() if name.endswith(_QUANTISED)), None):
        raise CheckpointError(
            f"{files.folder}: {found} belongs to a quantised matrix, but config.json has no "
            "quantization_config; use the config.json that was exported with the weights"
        )
