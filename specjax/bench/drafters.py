"""Reads and names the drafters of commands that measure several Ks (numbers of drafts).

Such a command gets a drafter as a speculative config without K, and sets K itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.checkpoint.demo import with_demo_drafter
from specjax.checks import read_object
from specjax.config import SpeculativeConfig

_SET_BY_K = (
    *("num_speculative_tokens", "num_speculative_tokens_per_batch_size"),
    *("adaptive", "dynamic_config_path"),
)


def read_config(text: str, target: str) -> dict[str, Any]:
    """Parse the JSON of --speculative-config, for a command that gets K by the option --k.

    `target` is the model to draft for. If it is a demo model, the config may leave out the
    drafter's checkpoint.

    Raises:
        ValueError: the JSON is not an object with a "method", it sets K, or a value is wrong.
    """
    option = "--speculative-config"
    config = read_object(option, text)
    if given := [name for name in _SET_BY_K if name in config]:
        raise ValueError(f"{option} sets {given[0]}, but this command sets K with --k")
    config = with_demo_drafter(config, target)
    SpeculativeConfig.of(config | {"num_speculative_tokens": 1})
    return config


def label(config: Mapping[str, Any]) -> str:
    """Return the name of a speculative config in tables, like "eagle3" or "eagle3+suffix"."""
    sources: Sequence[str] = config.get("with", config.get("sources", ()))
    return "+".join([config["method"], *sources])
