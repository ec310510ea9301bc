"""Reading the MTP modules of a target's checkpoint."""

from typing import Any

import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import open_file
from specjax.config import SpeculativeConfig
from specjax.device.drafters.checkpoint import DrafterFiles
from specjax.device.drafters.drafter import Drafter
from specjax.device.drafters.mtp import NAMES, MTPHead
from specjax.device.drafters.mtp_modules import ModulesHead
from specjax.device.loading import load_params
from specjax.device.models.model import Model


def drafter(head: MTPHead | ModulesHead, is_greedy: bool = False) -> Drafter:
    """Return the drafter of one module, or of several."""
    return head.drafter(is_greedy)


def load(
    files: DrafterFiles, config: SpeculativeConfig, target: Model, dtype: np.dtype
) -> tuple[MTPHead | ModulesHead, Any]:
    """Load the modules from the target's files, or from mtp.safetensors in the same folder."""
    kind = files.hf.get("model_type", None)
    head = of_own_shape(target, f"{files.hf.origin} (model_type={kind!r})")
    tensors = files.tensors
    beside = tensors.folder / "mtp.safetensors"
    prefix = head.prefix_in_target
    if not any(name.startswith(prefix) for name in tensors.names()) and beside.exists():
        tensors = open_file(beside)
    fc = f"{prefix}{NAMES[type(target)].fc}.weight"
    if fc not in tensors.names():
        raise CheckpointError(
            f"{tensors.folder} has no tensor {fc}, so method 'mtp' has nothing to draft with; add "
            f"the {prefix}* tensors of the original checkpoint, which exports leave out, as "
            "mtp.safetensors, or use another method"
        )
    specs = head.specs(tensors.names())
    params = load_params(tensors, specs, dtype, placement=files.placement, ignore=head.is_unused)
    return head, params


def of_own_shape(target: Model, origin: str) -> MTPHead | ModulesHead:
    """Return the module for this target's shape, or several, without weights.

    Raises:
        CheckpointError: the target has no such module, or one of several layers.
    """
    if type(target) not in NAMES:
        raise CheckpointError(
            f"{origin}: method 'mtp' needs a model with a module of its own (qwen3_next, qwen3_5, "
            "qwen3_5_moe, deepseek_v3, glm4_moe, glm4_moe_lite); name a drafter and its method "
            "instead"
        )
    first = MTPHead(target)
    count = first.shape.num_mtp_layers
    if count <= 1:
        return first
    if not first.names.has_several:
        raise CheckpointError(
            f"{origin}: {first.names.num_field}={count} is not supported; modules of one layer are"
        )
    return ModulesHead(tuple(MTPHead(target, number) for number in range(count)))
