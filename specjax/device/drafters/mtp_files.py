"""Reads the MTP modules in a target's checkpoint."""

from dataclasses import replace
from typing import Any

import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import TensorFiles, open_file
from specjax.config import SpeculativeConfig
from specjax.device.drafters.checkpoint import DrafterFiles
from specjax.device.drafters.drafter import Drafter
from specjax.device.drafters.mtp import NAMES, MTPHead
from specjax.device.drafters.mtp_modules import ModulesHead
from specjax.device.loading import load_params
from specjax.device.models.model import Model
from specjax.device.models.registry import find_scales, named_specs
from specjax.device.models.tensor_names import EMBEDDING, TensorNames, is_within


def drafter(head: MTPHead | ModulesHead, is_greedy: bool = False) -> Drafter:
    """Return the drafter that runs the module or modules of `head`."""
    return head.drafter(is_greedy)


def load(
    files: DrafterFiles, config: SpeculativeConfig, target: Model, dtype: np.dtype
) -> tuple[MTPHead | ModulesHead, Any]:
    """Load the modules from the target's files, or from mtp.safetensors in the same folder.

    The second file is read only if the target's other files have no tensors of the modules.

    Raises:
        CheckpointError: the modules are missing, damaged, or not supported (see `of_own_shape`).
    """
    kind = files.hf.get("model_type", None)
    head = of_own_shape(target, f"{files.hf.origin} (model_type={kind!r})")
    tensors, prefix = files.tensors, head.prefix_in_target
    beside = tensors.folder / "mtp.safetensors"
    if not any(is_within(name, (prefix,)) for name in tensors.names()) and beside.exists():
        tensors = find_scales(open_file(beside), files.hf, dtype)
    names = TensorNames.of(tensors.names())
    fc = names.stored(f"{prefix}{NAMES[type(target)].fc}.weight")
    if fc not in tensors.names():
        raise CheckpointError(
            f"{tensors.folder} has no tensor {fc}, so method 'mtp' has no module to run; add "
            f"the {prefix}* tensors of the original checkpoint, which exports leave out, as "
            "mtp.safetensors, or use another method"
        )
    params = load_params(
        tensors,
        named_specs(head, tensors.shapes()),
        dtype,
        placement=files.placement,
        ignore=lambda name: head.is_unused(names.canonical(name)),
    )
    _compare_copies(files, tensors, head)
    return head, params


def _compare_copies(files: DrafterFiles, tensors: TensorFiles, head: MTPHead | ModulesHead) -> None:
    """Log each module tensor that should be a copy of a target tensor but differs from it."""
    names, own = TensorNames.of(tensors.names()), TensorNames.of(files.tensors.names())
    both = replace(files.tensors, tensors={**tensors.tensors, **files.tensors.tensors})
    for copy, original in head.copies.items():
        stored = names.stored(copy)
        theirs = own.stored(original)
        if theirs not in both.names():  # tied embeddings
            theirs = own.stored(EMBEDDING)
        if {stored, theirs} <= both.names() and not both.equal(stored, theirs):
            files.log(
                f"{tensors.folder}: {stored} differs from {theirs}, which is used for both; if "
                "few drafts are accepted, this may be why"
            )


def of_own_shape(target: Model, origin: str) -> MTPHead | ModulesHead:
    """Return the `MTPHead` or the `ModulesHead` that describes the target's MTP modules.

    `origin` names the target in error messages.

    Raises:
        CheckpointError: the target has no MTP module, or its module has several layers.
    """
    if type(target) not in NAMES:
        raise CheckpointError(
            f"{origin}: method 'mtp' needs a model with an MTP module (qwen3_next, qwen3_5, "
            "qwen3_5_moe, deepseek_v3, glm4_moe, glm4_moe_lite); name a drafter and its method "
            "instead"
        )
    first = MTPHead(target)
    count = first.shape.num_mtp_layers
    if count <= 1:
        return first
    if not first.names.has_several:
        raise CheckpointError(
            f"{origin}: {first.names.num_field}={count} is not supported; only one layer is"
        )
    return ModulesHead(tuple(MTPHead(target, number) for number in range(count)))
