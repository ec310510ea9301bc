"""Parses a drafter that a user names as METHOD=CHECKPOINT, as CHECKPOINT, or as METHOD."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import open_checkpoint
from specjax.checkpoint.hub import resolve
from specjax.checks import did_you_mean
from specjax.config import SpeculativeConfig
from specjax.device.drafters.dflash_files import OF_TRANSFORMERS
from specjax.device.drafters.medusa import find_first_file
from specjax.device.drafters.p_eagle import MASK_KEYS
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.registry import MODELS, read_config
from specjax.methods import METHODS, OWN_METHODS, OWN_SHAPE
from specjax.serving.source import has_weights

# Methods by their names in the speculators library, and by parts of architectures' names.
_SPECULATORS = {
    "eagle": "eagle",
    "eagle3": "eagle3",
    "peagle": "p_eagle",
    "dflash": "dflash",
    "dspark": "dflash",
}
_ARCHITECTURES = {"DFlash": "dflash", "DSpark": "dflash", "Medusa": "medusa"}


class NamedDrafter(NamedTuple):
    """A drafting method, and its checkpoint (None without a separate checkpoint)."""

    method: str
    model: str | None


def parse_drafter(
    text: str,
    *,
    option: str = "--drafter",
    method: str | None = None,
    target: str | Path | None = None,
    takes_shapes: bool = False,
) -> NamedDrafter:
    """Return the drafter that an option names.

    Args:
        option: the option's name in errors.
        method: the method, if another option sets it; None to find it.
        target: the model that the drafter drafts for.
        takes_shapes: whether the caller needs only the shapes of the drafter's weights. If so, a
            method whose shapes follow from the target's shapes needs no checkpoint.

    Raises:
        ValueError: the text is malformed, or names another method than `method`.
        CheckpointError: the checkpoint's files do not indicate the method.
    """
    name, has_method, checkpoint = text.partition("=")
    if name not in METHODS and not (has_method and checkpoint and not Path(text).exists()):
        return NamedDrafter(method or _method_of(text, option, target), text)
    if name not in METHODS:
        raise ValueError(
            f"{option} {text}: {name!r} is not a method; use one of {', '.join(METHODS)}"
            f"{did_you_mean(name, METHODS)}"
        )
    if method not in (None, name):
        raise ValueError(
            f"{option} {text}: the method is {method!r} by another option; leave one out"
        )
    if checkpoint:
        return NamedDrafter(name, checkpoint)
    if takes_shapes and METHODS[name].needs_shape:
        return NamedDrafter(name, OWN_SHAPE)
    if name not in OWN_METHODS:
        raise ValueError(f"{option} {text} lacks a checkpoint; give --drafter {name}=CHECKPOINT")
    return NamedDrafter(name, None)


def with_method(
    config: SpeculativeConfig | Mapping[str, Any], target: str | Path | None
) -> SpeculativeConfig:
    """Return a `SpeculativeConfig`. If `config` names no method, the checkpoint determines it.

    Raises:
        ValueError: see `SpeculativeConfig.of`.
        CheckpointError: the checkpoint's files do not indicate the method.
    """
    if isinstance(config, Mapping) and config.get("method") is None:
        model = config.get("model")
        if isinstance(model, str | Path):
            config = {**config, "method": find_method(model, target)}
    return SpeculativeConfig.of(config)


def _method_of(text: str, option: str, target: str | Path | None) -> str:
    try:
        return find_method(text, target)
    except CheckpointError as error:
        hint = did_you_mean(text, METHODS)
        raise CheckpointError(f"{option} {text}: {error}{hint}") from error


def find_method(model: str | Path, target: str | Path | None = None) -> str:
    """Return the method of a drafter's checkpoint, from its config and tensor names.

    If the checkpoint is not a drafting head but a complete model, the method is "draft_model". The
    target's own checkpoint has the method "mtp".

    Raises:
        CheckpointError: there is no such checkpoint, or its files do not indicate the method.
    """
    folder = resolve(model)
    if find_first_file(folder) is not None:
        return "medusa"
    hf = read_config(folder)
    names = open_checkpoint(folder).names() if has_weights(folder) else ()
    if (method := _published_method(hf) or _head_method(hf, names)) is not None:
        return method
    if hf.get("model_type", None) not in MODELS:
        raise CheckpointError(
            f"{hf.origin} does not indicate its drafting method; name it, as in eagle3={model}"
        )
    is_own = target is not None and str(target) and resolve(target).samefile(folder)
    return "mtp" if is_own else "draft_model"


def _published_method(hf: HFConfig) -> str | None:
    """Return the method that a config names, or None if it names none."""
    kind = hf.get("speculators_model_type", None)
    if kind in _SPECULATORS:
        return _SPECULATORS[kind]
    if hf.get("model_type", None) == OF_TRANSFORMERS or "dflash_config" in hf.fields:
        return "dflash"
    listed = " ".join(map(str, hf.get("architectures", [])))
    found = [method for part, method in _ARCHITECTURES.items() if part in listed]
    if not found and hf.get("model_type", None) == "medusa":
        return "medusa"
    return found[0] if found else None


def _head_method(hf: HFConfig, names: Any) -> str | None:
    """Return the method of an EAGLE head; None if the checkpoint is not an EAGLE head.

    Configs do not name these methods consistently, so the method is mainly found from `names`, the
    names of the checkpoint's tensors.
    """
    ends = {name.removeprefix("model.") for name in names}
    listed = " ".join(map(str, hf.get("architectures", [])))
    has_mask = any(hf.get(key, None) is not None for key in MASK_KEYS)
    if "mask_hidden" in ends or (not names and has_mask and "Eagle3" in listed):
        return "p_eagle"
    has_hidden_norm = any(name.endswith("hidden_norm.weight") for name in ends)
    if has_hidden_norm or "Eagle3" in listed or "draft_vocab_size" in hf.fields:
        return "eagle3"
    # Published configs of EAGLE-1 heads are Llama configs with a flag for the bias.
    if "fc.weight" in ends or "Eagle" in listed or (not names and "bias" in hf.fields):
        return "eagle"
    return None
