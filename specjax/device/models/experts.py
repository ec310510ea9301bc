"""Reads mixtures of experts from Hugging Face configs."""

from collections.abc import Mapping
from typing import NamedTuple

from specjax.checkpoint.errors import CheckpointError
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.layers.moe import Experts
from specjax.device.models.layers.router import SigmoidRouter, SoftmaxRouter


class _Defaults(NamedTuple):
    """Default values of the fields that describe experts in a config."""

    num_experts: int
    num_chosen: int
    intermediate_size: int
    shared_intermediate_size: int | None  # None: there is no shared expert
    norm_topk_prob: bool | None  # None: true regardless of the field


_DEFAULTS: Mapping[str, _Defaults] = {
    "qwen3_moe": _Defaults(128, 8, 768, None, False),
    "qwen3_next": _Defaults(512, 10, 512, 512, True),
    "qwen3_5_moe_text": _Defaults(256, 8, 512, 512, None),
}


def read_experts(hf: HFConfig, kind: str) -> Experts | None:
    """Return the mixture that a config of model type `kind` describes; None if it has no experts.

    Raises:
        CheckpointError: the number of experts per token exceeds the number of experts.
    """
    default = _DEFAULTS.get(kind)
    # Later versions of transformers call this field `num_local_experts` in some types.
    name = "num_local_experts" if "num_local_experts" in hf.fields else "num_experts"
    if default is None or hf.get(name, default.num_experts) == 0:
        return None
    normalises, shared = default.norm_topk_prob, default.shared_intermediate_size
    found = Experts(
        num_experts=hf.integer(name, default.num_experts),
        num_chosen=hf.integer("num_experts_per_tok", default.num_chosen),
        intermediate_size=hf.integer("moe_intermediate_size", default.intermediate_size),
        shared_intermediate_size=hf.integer("shared_expert_intermediate_size", shared)
        if shared
        else 0,
        has_shared_gate=shared is not None,
        router=SoftmaxRouter(normalises is None or hf.flag("norm_topk_prob", normalises)),
    )
    if found.num_chosen > found.num_experts:
        raise CheckpointError(
            f"{hf.origin}: num_experts_per_tok={found.num_chosen} exceeds "
            f"{name}={found.num_experts}"
        )
    return found


def read_dense_layers(hf: HFConfig, num_layers: int) -> tuple[int, ...]:
    """Return the indices of the layers that have no experts, for a model with experts.

    Raises:
        CheckpointError: `mlp_only_layers` is not a list of integers.
    """
    step, dense = hf.integer("decoder_sparse_step", 1), hf.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise CheckpointError(f"{hf.origin}: mlp_only_layers={dense!r} must be a list of layers")
    return tuple(i for i in range(num_layers) if i in dense or (i + 1) % step)


# The routers' default settings, by model type.
_SIGMOID: Mapping[str, SigmoidRouter] = {
    "deepseek_v3": SigmoidRouter(scaling=2.5, num_groups=8, num_chosen_groups=4),
    "glm4_moe_lite": SigmoidRouter(scaling=1.8),
    "glm4_moe": SigmoidRouter(),
}


def read_sigmoid_experts(hf: HFConfig) -> Experts:
    """Return the mixture that a config of the DeepSeek-V3 or GLM-4 family describes.

    Raises:
        CheckpointError: the experts cannot be divided into groups as the config requires.
    """
    default = _SIGMOID[hf.get("model_type", "deepseek_v3")]
    inner = hf.integer("moe_intermediate_size")
    router = SigmoidRouter(
        normalises=hf.flag("norm_topk_prob", True),
        scaling=hf.number("routed_scaling_factor", default.scaling),
        num_groups=hf.integer("n_group", default.num_groups),
        num_chosen_groups=hf.integer("topk_group", default.num_chosen_groups),
    )
    experts = Experts(
        num_experts=hf.integer("n_routed_experts"),
        num_chosen=hf.integer("num_experts_per_tok"),
        intermediate_size=inner,
        shared_intermediate_size=inner * hf.integer("n_shared_experts", 1),
        router=router,
        shared_name="shared_experts",
    )
    per_group, rest = divmod(experts.num_experts, router.num_groups)
    if rest or router.num_groups > 1 and per_group < 2:
        raise CheckpointError(
            f"{hf.origin}: n_group={router.num_groups} must divide n_routed_experts="
            f"{experts.num_experts} into groups of two or more"
        )
    if router.num_chosen_groups > router.num_groups:
        raise CheckpointError(
            f"{hf.origin}: topk_group={router.num_chosen_groups} exceeds "
            f"n_group={router.num_groups}"
        )
    if experts.num_chosen > per_group * router.num_chosen_groups:
        raise CheckpointError(
            f"{hf.origin}: num_experts_per_tok={experts.num_chosen} exceeds the "
            f"{per_group * router.num_chosen_groups} experts of topk_group groups"
        )
    return experts


def read_first_dense(hf: HFConfig, num_layers: int, default: int) -> tuple[int, ...]:
    """Return the indices of the first layers, which have no experts.

    `default` is the number of these layers if the config does not give it.
    """
    return tuple(range(min(num_layers, hf.count("first_k_dense_replace", default))))
