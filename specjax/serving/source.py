"""Opens a model and its drafter from checkpoints, configs without weights, or Python objects."""

import reprlib
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checkpoint.config_json import read_json
from specjax.checkpoint.finite import check_params
from specjax.checkpoint.given import as_arrays
from specjax.checkpoint.hub import resolve
from specjax.config import SpeculativeConfig
from specjax.device.drafters.drafter import Drafter
from specjax.device.drafters.registry import (
    OWN_SHAPES,
    drafter_from_config,
    load_drafter,
    shape_drafter,
)
from specjax.device.loading import Log, no_log
from specjax.device.models.config_fields import check_plain
from specjax.device.models.described import described_specs
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.model import Model
from specjax.device.models.registry import (
    describe_checkpoint,
    describe_model,
    read_config,
    stored_specs,
)
from specjax.device.parallel import check_shapes, padding_of, specs_of
from specjax.device.placement import Placement
from specjax.device.weights.stored import dequantise
from specjax.methods import METHODS, OWN_SHAPE
from specjax.serving.defaults import params_dtype, stored_dtype

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")


@dataclass(frozen=True)
class ModelSource:
    """A model, and where its weights come from."""

    target: Model
    dtype: str | None  # dtype of the weights, if known
    hf: HFConfig | None = None  # the model's config; None for a `Model` value
    folder: Path | None = None  # the checkpoint's folder; None for a `Model` value or config file
    has_weights: bool = False  # whether the folder has weights
    params: Any = None  # the parameters of a `Model` value; None for a checkpoint
    quantization: str | None = None  # see `LLM`

    @cached_property
    def specs(self) -> Any:
        """The `TensorSpec`s of the parameters, with the dtypes and scales of quantised weights.

        If `quantization` is set, the specs describe the weights after quantisation. If the folder
        has no weights, the specs are made from the config.
        """
        if self.hf is None:
            return specs_of(self.target)
        if self.folder is None or not self.has_weights:
            return described_specs(self.hf, self.target, self.quantization, self.dtype)
        return stored_specs(self.folder, self.target, self.quantization, self.dtype)

    @property
    def origin(self) -> str:
        """The name of the model in errors."""
        return "a Model value" if self.hf is None else self.hf.origin


def open_model(
    model: str | Path | Model,
    params: Any = None,
    *,
    takes_configs: bool = False,
    num_devices: int = 1,
    divides_experts: bool = False,
    quantization: str | None = None,
    log: Log = no_log,
) -> ModelSource:
    """Open a checkpoint, or a `Model` value with its parameters.

    Args:
        model: a folder, a hub id, the name of a demo, or a `Model` value.
        params: the parameters of a `Model` value; None for a checkpoint.
        takes_configs: whether `model` may be the path of a config file (.json) without weights.
        num_devices: the number of devices over which the weights will be divided.
        divides_experts: whether each device then has whole experts.
        quantization: see `LLM`.
        log: called with lines of text about differences between config and weights, and about
            weights that are padded with zeros to divide them.

    Raises:
        ValueError: `params` is missing for a `Model` value, given with a checkpoint, or has invalid
            leaves; the model cannot be divided as requested; or `quantization` is given for a
            `Model` value or for quantised weights.
        CheckpointError: there is no such checkpoint, or its model is not supported.
    """
    on = partial(_divided, num_devices=num_devices, divides_experts=divides_experts, log=log)
    if isinstance(model, str | Path):
        if params is not None:
            raise ValueError("params goes with a Model value; a checkpoint has its own")
        path = Path(model).expanduser()
        if takes_configs and path.suffix == ".json" and not path.is_dir():
            hf = HFConfig(read_json(path.parent, path.name), str(path))
            if quantization is not None:
                check_plain(hf, quantization)
            target = on(describe_model(hf))
            return ModelSource(target, stored_dtype(hf), hf, quantization=quantization)
        folder = resolve(model)
        hf, is_complete = read_config(folder), has_weights(folder)
        target = describe_checkpoint(folder, hf, log) if is_complete else describe_model(hf)
        target = on(target)
        if quantization is not None:
            check_plain(hf, quantization)
        known = stored_dtype(hf), hf, folder, is_complete
        return ModelSource(target, *known, quantization=quantization)
    if params is None:
        raise ValueError(
            f"model={reprlib.repr(model)} must be a checkpoint (a folder, hub id or demo), or "
            "a Model value, which needs params"
        )
    if quantization is not None:
        raise ValueError(
            f"quantization={quantization!r} needs a checkpoint, not a Model value; leave it out, "
            "or save the model with specjax.save_model"
        )
    params = as_arrays(params, "params")
    target, dtype = on(model), params_dtype(params)
    if num_devices > 1:
        check_shapes(target, jax.eval_shape(partial(dequantise, dtype=dtype), params))
    check_params(params)
    return ModelSource(target, dtype, params=params)


def _divided(model: Any, num_devices: int, divides_experts: bool, log: Log) -> Any:
    """Return a model whose weights are divided over `num_devices` devices.

    `log` is called with a line about the weights that are padded with zeros.

    Raises:
        ValueError: experts are to be divided, but the model has none; or the model has no fields
            that say over how many devices it is divided.
    """
    if divides_experts and getattr(model, "experts", None) is None:
        raise ValueError("enable_expert_parallel=True needs a model with experts; leave it out")
    if num_devices == getattr(model, "num_devices", 1) == 1:
        return model
    known = [one.name for one in fields(model)] if is_dataclass(model) else []
    if missing := [name for name in ("num_devices", "divides_experts") if name not in known]:
        raise ValueError(
            f"tensor_parallel_size={num_devices} needs a Model value that is a dataclass with the "
            f"fields {' and '.join(missing)}, such as a Decoder, and {type(model).__name__} is "
            "none; use tensor_parallel_size=1, or data_parallel_size for replicas"
        )
    sizes: Any = {"num_devices": num_devices, "divides_experts": divides_experts}
    divided = replace(model, **sizes)  # pyright: ignore[reportArgumentType]
    if padding := padding_of(divided):
        log(f"zeros fill up what {num_devices} devices do not divide evenly: {padding}")
    return divided


def open_drafter(
    config: SpeculativeConfig,
    source: ModelSource,
    dtype: str,
    placement: Placement | None = None,
    log: Log = no_log,
) -> tuple[Drafter, Any]:
    """Return the drafter and its parameters, after checking that the drafter fits the target.

    The parameters are only shapes in three cases: `config.model` is `OWN_SHAPE`, which requests a
    head without a checkpoint; the target has no weights, and the drafter is part of the target's
    checkpoint, as an MTP module; or neither the target nor the drafter's folder has weights.

    Raises:
        ValueError: the drafter should be in the target's checkpoint, but the target is a `Model`
            value, which has no checkpoint.
        CheckpointError: there is no such checkpoint, or the drafter does not fit the target.
    """
    target, is_module = source.target, config.model is None and config.method in OWN_SHAPES
    is_described = source.hf is not None and not source.has_weights
    if config.model == OWN_SHAPE or (is_module and is_described):
        return shape_drafter(config.method, target, source.origin, dtype)
    folder = source.folder
    if not METHODS[config.method].has_weights:
        folder = None
    elif config.model is not None:
        folder = resolve(config.model)
        if is_described and not has_weights(folder):
            return drafter_from_config(folder, config, target, dtype)
    elif folder is None:
        raise ValueError(
            f"speculative_config.model=None with method={config.method!r} means the "
            "target's own checkpoint, but the target is a Model value; give the folder"
        )
    return load_drafter(folder, config, target, np.dtype(dtype), placement, source.folder, log)


def has_weights(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in _WEIGHTS)
