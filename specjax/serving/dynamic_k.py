"""Builds the policy that chooses K for a speculative_config, and checks and saves profiles."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checkpoint.writing import check_writable, write_whole
from specjax.checks import warn
from specjax.config import SpeculativeConfig
from specjax.device.drafters.drafter import Drafter, Params
from specjax.device.models.model import Model
from specjax.device.placement import default_device
from specjax.engine.engine import Engine
from specjax.host.speculation.methods import adaptive_policy, profile_policy, resumed_policy
from specjax.host.speculation.policy import Policy, StaticPolicy, TablePolicy
from specjax.host.speculation.profile import Profile, mean_profile

# Maximum number of elements of a vector that a fingerprint covers. Norms and biases have fewer, and
# training changes them.
_LARGEST_LEAF = 2**16


def read_profile(config: SpeculativeConfig) -> tuple[SpeculativeConfig, Profile | None]:
    """Return the config, and the profile that the config names (None if it names none).

    If the config lacks num_speculative_tokens, it gets the profile's maximum K.

    Raises:
        ValueError: the profile is malformed, or its maximum K is below num_speculative_tokens.
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


def policy_of(
    config: SpeculativeConfig | None, profile: Profile | None, batches: Sequence[int]
) -> Policy:
    """Return the policy that chooses K according to a speculative_config.

    `profile` is the profile that the config names, or None. `batches` are the batch sizes to which
    rounds are padded.
    """
    if config is None:
        return StaticPolicy(0)
    max_k, max_slowdown = config.num_speculative_tokens, config.max_slowdown
    if config.adaptive and profile is not None:
        return resumed_policy(profile, batches, max_k, max_slowdown)
    if config.adaptive:
        return adaptive_policy(max_k, max_slowdown=max_slowdown)
    if profile is not None:
        return profile_policy(profile, batches, max_k, max_slowdown)
    if (table := config.num_speculative_tokens_per_batch_size) is not None:
        return TablePolicy(tuple(table))
    return StaticPolicy(config.num_speculative_tokens)


def fingerprint(target: Model, drafter: Drafter, params: Params) -> str:
    """Return a digest, 16 hex digits, that identifies a target and its drafter.

    The digest covers their architectures, including the number of devices. It also covers those
    weights, such as norms, that have one axis and at most 65,536 elements.
    """
    digest = hashlib.sha256(repr((target, drafter)).encode())
    for leaf in jax.tree.leaves(params):
        if leaf.ndim == 1 and leaf.size <= _LARGEST_LEAF:
            digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]


def check_profile(profile: Profile, model: str, config: SpeculativeConfig) -> None:
    """Refuse a profile of another model. `model` is the `fingerprint` of the model in use.

    Warn if the profile was measured on another kind of device. With `dynamic_config_force`, neither
    refuse nor warn.

    Raises:
        ValueError: the profile was measured with another model, drafter or number of devices.
    """
    if config.dynamic_config_force:
        return
    measured: Any = profile.measured or {}
    where = f"speculative_config.dynamic_config_path={str(config.dynamic_config_path)!r}"
    if measured.get("model", model) != model:
        raise ValueError(
            f"{where} was measured on another model, drafter or number of devices (measured.model="
            f"{measured['model']!r}, this is {model!r}); measure this one, by `specjax profile` or "
            "LLM.save_dynamic_config, or set dynamic_config_force=True"
        )
    device = device_kind()
    if measured.get("device", device) != device:
        warn(
            f"{where} was measured on {measured['device']!r}, and this is {device!r}: times of "
            "other Ks may be best here; measure this one, by `specjax profile` or "
            "LLM.save_dynamic_config, or set dynamic_config_force=True",
        )


def save_profile(engine: Engine, path: str | PathLike[str]) -> None:
    """Write a profile of the times and rates that an engine's policy has learned.

    The profile has times of rounds and acceptance rates. Both are means over replicas, weighted by
    the replicas' numbers of rounds.

    Raises:
        ValueError: the policy does not learn times; or the engine has the option `exact`, with
            which rounds of every K take the same time; or a learned value is out of a profile's
            range; or `path` is not a path in an existing folder.
    """
    check_writable("path", path)
    replicas = engine.engines
    profiles = [one.scheduler.policy.learned() for one in replicas]
    learned = [profile for profile in profiles if profile is not None]
    # Exact steps take the same time for every K.
    if len(learned) < len(replicas) or engine.config.exact:
        raise ValueError(
            "there are no learned times to save: K is not adaptive, or exact=True; set "
            'speculative_config={"adaptive": True, ...} without exact'
        )
    model = fingerprint(replicas[0].target, engine.drafter, engine.params)
    profile = mean_profile(learned, [one.metrics().num_decode_steps for one in replicas])
    measured = {"model": model, "device": device_kind(), **(profile.measured or {})}
    content = replace(profile, measured=measured).as_json()
    Profile.of(content, "what was learned")  # raises an error if the file could not be read later
    write_whole(Path(path).expanduser(), json.dumps(content, indent=1) + "\n")


def device_kind() -> str:
    """Return the kind of the device in use, e.g. "NVIDIA H100 80GB HBM3"."""
    return default_device().device_kind
