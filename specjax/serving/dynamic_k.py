"""The policy of a speculative_config, and a check that its profile fits the model."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from specjax.config import SpeculativeConfig
from specjax.device.drafters.drafter import Drafter, Params
from specjax.device.models.model import Model
from specjax.host.speculation.methods import adaptive_policy, profile_policy
from specjax.host.speculation.policy import Policy, StaticPolicy, TablePolicy
from specjax.host.speculation.profile import Profile

_LARGEST_LEAF = 2**16  # values; norms and biases are smaller, and every training changes them


def read_profile(config: SpeculativeConfig) -> tuple[SpeculativeConfig, Profile | None]:
    """The profile that a config names, and the config with the K that follows from it.

    Raises:
        ValueError: a malformed profile, or one that does not reach num_speculative_tokens.
    """
    if config.dynamic_config_path is None:
        return config, None
    profile = Profile.read(config.dynamic_config_path)
    max_k = config.num_speculative_tokens
    if max_k is None:
        return replace(config, num_speculative_tokens=profile.max_drafts), profile
    if max_k > profile.max_drafts:
        raise ValueError(
            f"speculative_config.num_speculative_tokens={max_k} exceeds "
            f"max_num_speculative_tokens={profile.max_drafts} of {config.dynamic_config_path}; "
            "lower it, or profile more drafts"
        )
    return config, profile


def make_policy(
    config: SpeculativeConfig | None, profile: Profile | None, batches: Sequence[int]
) -> Policy:
    """The policy of a config; `batches` are the sizes to which rounds are padded."""
    if config is None:
        return StaticPolicy(0)
    if config.adaptive:
        return adaptive_policy(config.num_speculative_tokens)
    if profile is not None:
        return profile_policy(profile, batches, config.num_speculative_tokens)
    if (table := config.num_speculative_tokens_per_batch_size) is not None:
        return TablePolicy(tuple(table))
    return StaticPolicy(config.num_speculative_tokens)


def fingerprint(target: Model, drafter: Drafter, params: Params) -> str:
    """A digest of a model and its drafter: their architectures, and weights of small arrays."""
    digest = hashlib.sha256(repr((target, drafter)).encode())
    for leaf in jax.tree.leaves(params):
        if leaf.ndim == 1 and leaf.size <= _LARGEST_LEAF:
            digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]


def check_profile(profile: Profile, model: str, config: SpeculativeConfig) -> None:
    """Refuse a profile that says it is of another model than the fingerprint `model`.

    Raises:
        ValueError: it is, and dynamic_config_force is not set.
    """
    measured: Any = profile.measured or {}
    if measured.get("model", model) != model and not config.dynamic_config_force:
        raise ValueError(
            f"speculative_config.dynamic_config_path={str(config.dynamic_config_path)!r} was "
            f"measured on another model or drafter (measured.model={measured['model']!r}, this is "
            f"{model!r}); run `specjax profile` on this one, or set dynamic_config_force=True"
        )
