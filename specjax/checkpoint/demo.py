"""Locations of the demo checkpoints.

The wheel contains the demo target `TARGET` and its EAGLE-3 head. A source checkout has all demo
checkpoints in the folder `checkpoints`. Users of the wheel get the same folder with the package
specjax-demos.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TARGET = "demo-llama"
# Drafter checkpoints of each demo target, by method; an MTP module is in its target's folder.
DRAFTERS = {
    TARGET: {
        "eagle": "demo-llama-eagle1",
        "eagle3": "demo-llama-eagle3",
        "dflash": "demo-llama-dflash",
    },
    "demo-qwen3.5": {"mtp": "demo-qwen3.5"},
}

NAMES = tuple(
    dict.fromkeys(name for target in DRAFTERS for name in (target, *DRAFTERS[target].values()))
)
MORE = "specjax_demos"  # the package of demos that the wheel lacks

_PACKAGE = Path(__file__).resolve().parents[1]
_ROOTS = (_PACKAGE / "checkpoints", _PACKAGE.parent / "checkpoints")


def demo_folders() -> dict[str, Path]:
    """Return the folders of the available demo checkpoints, by name."""
    more = find_spec(MORE)
    roots = [Path(one) for one in (more.submodule_search_locations or () if more else ())]
    return {
        config.parent.name: config.parent
        for root in (*roots, *_ROOTS)
        for config in sorted(root.glob("*/config.json"))
    }


def demo_folder(name: str) -> Path:
    """Return the folder of the demo `name`. Raises KeyError if this demo is not available."""
    return demo_folders()[name]


def with_demo_drafter(config: Mapping[str, Any], target: str | None) -> dict[str, Any]:
    """Return a copy of a speculative config, with a demo drafter as its default "model".

    The "model" is added only if `config` has none (or None), and `target`, the name of the target
    model, is a demo with a separate drafter for the config's "method".
    """
    found = DRAFTERS.get(target or "", {}).get(config.get("method") or "")
    if found in (None, target) or config.get("model") is not None:
        return dict(config)
    return {**config, "model": found}
